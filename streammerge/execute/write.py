"""Routes for writing an output file: large aligned tiles, past the page cache where possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from streammerge import files

__all__ = ["WRITERS", "Writer", "make_writer"]

_PAGE = 4096
_RWF_DONTCACHE = 0x80  # see execute/read.py
_MAX_DIRTY = 64 << 20


class Writer(Protocol):
    """One output file. ``write`` may be called from several threads, for disjoint tiles."""

    def write(self, tile: memoryview, offset: int) -> None:
        """Write a tile at a multiple of 4096 bytes; only the last may be of another size."""
        ...

    def read(self, tile: memoryview, offset: int) -> bool:
        """Read a tile back, from the same offset; False when the file does not hold all of it."""
        ...

    def sync(self) -> None:
        """Make what was written durable."""
        ...

    def finish(self) -> None:
        """Cut the file to its size and make it durable."""
        ...

    def close(self) -> None:
        """Give the descriptor back, durable or not."""
        ...


class _DirectWriter:
    """Writes past the page cache. The last tile is written as whole pages and cut off at the end."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._fd = files.create(path, direct=True)
        files.truncate(self._fd, size)

    def write(self, tile: memoryview, offset: int) -> None:
        with files.io_errors("write", self._path):
            files.pwrite_all(self._fd, _whole_pages(tile), offset)

    def read(self, tile: memoryview, offset: int) -> bool:
        with files.io_errors("read", self._path):
            return os.preadv(self._fd, [_whole_pages(tile)], offset) >= len(tile)

    def sync(self) -> None:
        with files.io_errors("sync", self._path):
            files.sync(self._fd)

    def finish(self) -> None:
        with files.io_errors("sync", self._path):
            files.truncate(self._fd, self._size)
            files.sync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _BufferedWriter:
    """Writes through the page cache, and has it written back and dropped before it grows."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._fd = files.create(path, direct=False)
        files.truncate(self._fd, size)
        self._flags = _RWF_DONTCACHE
        self._dirty = 0

    def write(self, tile: memoryview, offset: int) -> None:
        with files.io_errors("write", self._path):
            try:
                files.pwrite_all(self._fd, tile, offset, self._flags)
            except OSError as fault:
                if not self._flags or fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._flags = 0
                files.pwrite_all(self._fd, tile, offset)
            self._dirty += len(tile)
            if not self._flags and self._dirty >= _MAX_DIRTY:
                self._dirty = 0
                files.sync_data(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, tile: memoryview, offset: int) -> bool:
        with files.io_errors("read", self._path):
            return os.preadv(self._fd, [tile], offset) == len(tile)

    def sync(self) -> None:
        with files.io_errors("sync", self._path):
            files.sync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        self.sync()

    def close(self) -> None:
        os.close(self._fd)


def _whole_pages(tile: memoryview) -> memoryview:
    """The tile up to a whole page; the buffer behind a tile reaches that far."""
    return memoryview(tile.obj)[: len(tile) + -len(tile) % _PAGE]


WRITERS: dict[str, Callable[[Path, int], Writer]] = {
    "direct": _DirectWriter,
    "buffered": _BufferedWriter,
}


def make_writer(route: str, path: Path, size: int) -> Writer:
    """Open an output file of ``size`` bytes by the route's name in ``WRITERS``."""
    return WRITERS[route](path, size)
