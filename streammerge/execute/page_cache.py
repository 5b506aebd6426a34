"""Ask the kernel which part of a file is in the page cache, without touching it."""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["is_cached"]

_PAGE = 4096
_SYS_CACHESTAT = 451  # Linux 6.5, the same number on every architecture


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@cache
def _syscall() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL(None, use_errno=True).syscall


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Whether every page of the range is in the page cache; False where the kernel cannot tell.

    A read with RWF_NOWAIT would answer as well, but starts reading the range ahead (Linux 6.18).
    """
    first, last = offset // _PAGE, (offset + size - 1) // _PAGE
    asked, found = _Range(offset, size), _Stat()
    failed = _syscall()(_SYS_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0)
    return bool(failed == 0 and found.cached >= last - first + 1)
