"""Copy out of a mapping by the kernel, which reports a page that is gone instead of killing the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

__all__ = ["copy_from"]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_from(mapping: mmap.mmap, offset: int, target: memoryview) -> bool:
    """Fill ``target`` from ``offset`` bytes into a mapping; False when part of it is gone.

    Where the kernel does not allow ``process_vm_readv`` (a sandbox) the bytes are copied directly.
    """
    source = np.frombuffer(mapping, np.uint8, len(target), offset)
    into = np.frombuffer(target, np.uint8)
    local, remote = _Iovec(into.ctypes.data, len(target)), _Iovec(source.ctypes.data, len(target))
    copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
    copy.restype = ctypes.c_ssize_t
    done = copy(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        into[:] = source
        return True
    return bool(done == len(target))
