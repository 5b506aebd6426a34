"""The only module that changes files. Everything durable goes through here."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streammerge.errors import StorageError

__all__ = [
    "append",
    "copy_file",
    "create",
    "exchange",
    "free_space",
    "io_errors",
    "make_folder",
    "open_journal",
    "pwrite_all",
    "remove_file",
    "remove_tree",
    "rename",
    "sync",
    "sync_data",
    "sync_folder",
    "truncate",
    "write_file",
]

_ADVICE = {
    errno.ENOSPC: "no space is left on the device; free some or choose another destination",
    errno.EDQUOT: "the disk quota is exceeded; free some space or choose another destination",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device reported an I/O error",
}


@contextmanager
def io_errors(action: str, path: Path | str) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``StorageError`` that says what was done to which file."""
    try:
        yield
    except OSError as fault:
        why = _ADVICE.get(fault.errno or 0, fault.strerror or str(fault))
        raise StorageError(f"cannot {action} {path}: {why}") from fault


def create(path: Path, *, direct: bool) -> int:
    """Create a file for writing, with the user's umask, and return its descriptor.

    With ``direct`` the page cache is bypassed; raises ``OSError`` (EINVAL) where the file system
    cannot do that.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    return os.open(path, flags, 0o666)


def pwrite_all(fd: int, data: memoryview, offset: int, flags: int = 0) -> None:
    """Write all of ``data`` at ``offset``; short writes (a nearly full disk) are continued."""
    while data:
        written = os.pwritev(fd, [data], offset, flags) if flags else os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[written:], offset + written


def open_journal(path: Path, *, goes_on: bool) -> int:
    """Open a file for appending, keeping its whole lines only, or none."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    content = path.read_bytes() if goes_on else b""
    os.ftruncate(fd, content.rfind(b"\n") + 1)
    return fd


def append(fd: int, data: bytes) -> None:
    """Add to the end of a file and make that durable."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
    sync_data(fd)


def truncate(fd: int, size: int) -> None:
    """Set a file's size in bytes."""
    os.ftruncate(fd, size)


def sync(fd: int) -> None:
    """Make a file's content durable. A failure is final: the content must be written anew."""
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """As ``sync``, without the times."""
    os.fdatasync(fd)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and make it durable."""
    with io_errors("write", path):
        fd = create(path, direct=False)
        try:
            truncate(fd, 0)
            pwrite_all(fd, memoryview(content), 0)
            sync(fd)
        finally:
            os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    with io_errors("create the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system can (some network ones cannot)."""
    with io_errors("sync the folder", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as fault:
            if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder."""
    with io_errors("rename", source):
        source.rename(target)


def exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step. False where the system cannot, and then nothing has happened."""
    at_cwd, flag_exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), flag_exchange) == 0)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its times and mode, and make the copy durable; a link stays a link."""
    with io_errors("copy", source):
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
        if source.is_symlink():
            return
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_file(path: Path) -> None:
    """Remove a file, if it exists."""
    with io_errors("remove", path):
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it, if it exists."""
    with io_errors("remove", path):
        if path.exists():
            shutil.rmtree(path)


def free_space(path: Path) -> int:
    """Bytes that an unprivileged user can still write on the file system of an existing path."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
