"""Inflate a compressed item into a temporary file, in bounded memory.

A compressed tensor cannot be read at an offset, so it is inflated once while indexing; the
temporary files take as much disk (``TMPDIR``) as the compressed tensors do when inflated.
"""

from __future__ import annotations

import os
from pathlib import Path

import zstandard

from streammerge.errors import SourceError, UnsafeError
from streammerge.files import io_errors

__all__ = ["inflate"]

_STEP = 1 << 20
_READ = 128 << 10
_MAX_WINDOW = 1 << 27


def inflate(fd: int, offset: int, length: int, target: Path, limit: int, where: str) -> None:
    """Inflate ``length`` bytes at ``offset`` of an open file into ``target``.

    Args:
        limit: most bytes that an honest item inflates to.
        where: for messages.

    Raises:
        SourceError: not a zstd stream, or cut short.
        UnsafeError: it inflates to more than ``limit`` bytes.
        StorageError: the temporary file cannot be written.
    """
    source = _Range(fd, offset, length)
    # A reader gives out what is asked for; a decompressobj all that a piece of input inflates to, gigabytes of a bomb.
    inflater = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(
        source,  # type: ignore[arg-type]  # only its read() is used
        read_size=_READ,
    )
    written = 0
    with io_errors("write the temporary file", target), target.open("wb") as out:
        while True:
            try:
                part = inflater.read(_STEP)
            except zstandard.ZstdError as fault:
                raise SourceError(f"{where}: its item is not a zstd stream: {fault}") from fault
            if not part:
                break
            written += len(part)
            if written > limit:
                raise UnsafeError(f"{where}: its item inflates to more than {limit} bytes")
            out.write(part)


class _Range:
    """A range of a file, to be read from front to back."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset + length

    def read(self, size: int) -> bytes:
        raw = os.pread(self._fd, min(size, self._end - self._at), self._at)
        self._at += len(raw)
        return raw
