"""Routes for reading the source: a window onto a range of a file, as memory that can be viewed."""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from streammerge.errors import SourceError
from streammerge.execute.kernel_copy import copy_from
from streammerge.execute.page_cache import is_cached
from streammerge.files import io_errors
from streammerge.tensors.catalogue import SourceFile

__all__ = ["READERS", "Reader", "make_reader"]

_PAGE = 4096
_SHARED_BYTES = 256 << 20  # read, not kept: a range that was read six times counts six times
_MAX_OPEN = 64  # a soft limit of 1024 descriptors is common, and there are several workers
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0x08)
_MADV_POPULATE_READ = 22  # Linux 5.14; not in Python's mmap module
_RWF_DONTCACHE = 0x80  # Linux 6.14: buffered reads and writes that leave nothing in the page cache


class Reader(Protocol):
    """One worker's way into the source. Not shared between threads."""

    def window(self, file: int, offset: int, size: int) -> memoryview:
        """``size`` bytes of a file, valid until the next call. ``size`` is at most the window's."""
        ...

    def shared_window(self, file: int, offset: int, size: int) -> memoryview:
        """As ``window``, for a range that the next tiles will want too: the page cache keeps it for a while."""
        ...

    def close(self) -> None:
        """Give the descriptors back."""
        ...


class _OpenFiles:
    """Descriptors of recently used files, least recently used closed first."""

    def __init__(self, sources: Sequence[SourceFile], flags: int) -> None:
        self._sources = sources
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._open: OrderedDict[int, int] = OrderedDict()

    def fd(self, file: int) -> int:
        found = self._open.get(file)
        if found is not None:
            self._open.move_to_end(file)
            return found
        source = self._sources[file]
        with io_errors("open", source.path):
            fd = os.open(source.path, self._flags)
        status = os.fstat(fd)
        if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            os.close(fd)
            raise SourceError(f"{source.path} has changed since it was indexed; is the training job still running?")
        self._open[file] = fd
        if len(self._open) > _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def path(self, file: int) -> str:
        return str(self._sources[file].path)

    def shrunk(self, file: int) -> SourceError:
        return SourceError(f"{self.path(file)} became shorter while it was read; is something still writing it?")

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


class _SharedReads:
    """``preadv`` through the page cache, of which the last ranges read are left there.

    A transposed matrix is read again and again, with a few more of its columns wanted each time.
    """

    def __init__(self, files: _OpenFiles, view: memoryview) -> None:
        self._files, self._view = files, view
        self._kept: deque[tuple[int, int, int]] = deque()
        self._bytes = 0

    def window(self, file: int, offset: int, size: int) -> memoryview:
        fd = self._files.fd(file)
        view = self._view[:size]
        done = 0
        with io_errors("read", self._files.path(file)):
            while done < size:
                got = os.preadv(fd, [view[done:]], offset + done)
                if got == 0:
                    raise self._files.shrunk(file)
                done += got
        self._kept.append((file, offset, size))
        self._bytes += size
        while self._bytes > _SHARED_BYTES:
            self._drop()
        return view

    def _drop(self) -> None:
        file, offset, size = self._kept.popleft()
        self._bytes -= size
        os.posix_fadvise(self._files.fd(file), offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self._kept:
            self._drop()


class _BufferedReader:
    """``preadv`` through the page cache, leaving nothing behind in it where the kernel can do that."""

    def __init__(self, sources: Sequence[SourceFile], size: int) -> None:
        self._files = _OpenFiles(sources, 0)
        self._view = memoryview(mmap.mmap(-1, size))
        self._flags = _RWF_DONTCACHE
        self._shared = _SharedReads(self._files, self._view)
        self.shared_window = self._shared.window

    def window(self, file: int, offset: int, size: int) -> memoryview:
        fd = self._files.fd(file)
        view = self._view[:size]
        done = 0
        with io_errors("read", self._files.path(file)):
            while done < size:
                got = self._read(fd, view[done:], offset + done)
                if got == 0:
                    raise self._files.shrunk(file)
                done += got
            if not self._flags:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        return view

    def _read(self, fd: int, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(fd, [view], offset, self._flags)
        except OSError as fault:
            if not self._flags or fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._flags = 0  # an older kernel, or a file system that cannot
            return os.preadv(fd, [view], offset)

    def close(self) -> None:
        self._shared.close()
        self._files.close()


class _DirectReader:
    """Reads past the page cache: whole pages around the range, in one call.

    What the cache already holds (a checkpoint that was just written) is taken from it instead.
    """

    def __init__(self, sources: Sequence[SourceFile], size: int) -> None:
        self._direct = _OpenFiles(sources, os.O_DIRECT)
        self._cached = _OpenFiles(sources, 0)
        self._view = memoryview(mmap.mmap(-1, size + 2 * _PAGE))  # page aligned, as direct reads need
        self._shared = _SharedReads(self._cached, self._view)
        self.shared_window = self._shared.window

    def window(self, file: int, offset: int, size: int) -> memoryview:
        with io_errors("read", self._direct.path(file)):
            if self._from_cache(file, offset, size):
                return self._view[:size]
            start = offset - offset % _PAGE
            end = offset + size
            length = end - start + -(end - start) % _PAGE
            fd = self._direct.fd(file)
            done = 0
            while done < end - start:
                got = os.preadv(fd, [self._view[done:length]], start + done)
                if got == 0 or (done + got < end - start and got % _PAGE):
                    raise self._direct.shrunk(file)
                done += got
        return self._view[offset - start : end - start]

    def _from_cache(self, file: int, offset: int, size: int) -> bool:
        fd = self._cached.fd(file)
        if not is_cached(fd, offset, size):
            return False
        try:  # what was evicted in the meantime is read directly
            return os.preadv(fd, [self._view[:size]], offset, _RWF_NOWAIT) == size
        except OSError as fault:
            if fault.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise

    def close(self) -> None:
        self._shared.close()
        self._direct.close()
        self._cached.close()


class _MmapReader:
    """A private mapping per window, populated at once and copied out of.

    Touching a mapping of a file that has shrunk kills the process (SIGBUS). Populating it reports that
    as an error instead, and so does having the kernel copy from it.
    """

    def __init__(self, sources: Sequence[SourceFile], size: int) -> None:
        self._files = _OpenFiles(sources, 0)
        self._view = memoryview(mmap.mmap(-1, size))

    def window(self, file: int, offset: int, size: int) -> memoryview:
        fd = self._files.fd(file)
        if os.fstat(fd).st_size < offset + size:
            raise self._files.shrunk(file)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        view = self._view[:size]
        with io_errors("map", self._files.path(file)):
            mapping = mmap.mmap(fd, offset + size - start, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start)
            try:
                mapping.madvise(_MADV_POPULATE_READ)
            except OSError as fault:
                if fault.errno == errno.EFAULT:
                    raise self._files.shrunk(file) from fault
                if fault.errno != errno.EINVAL:  # Linux < 5.14
                    raise
            if not copy_from(mapping, offset - start, view):
                raise self._files.shrunk(file)
        return view

    def shared_window(self, file: int, offset: int, size: int) -> memoryview:
        return self.window(file, offset, size)  # what is mapped stays in the page cache anyway

    def close(self) -> None:
        self._files.close()


READERS: dict[str, Callable[[Sequence[SourceFile], int], Reader]] = {
    "direct": _DirectReader,
    "pread": _BufferedReader,
    "mmap": _MmapReader,
}


def make_reader(route: str, sources: Sequence[SourceFile], size: int) -> Reader:
    """A reader whose windows hold up to ``size`` bytes, by the route's name in ``READERS``."""
    return READERS[route](sources, size)
