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
    inflater = zstandard.ZstdDecompressor().decompressobj()
    written = 0
    with io_errors("write the temporary file", target), target.open("wb") as out:
        for at in range(offset, offset + length, _STEP):
            raw = os.pread(fd, min(_STEP, offset + length - at), at)
            try:
                part = inflater.decompress(raw)
            except zstandard.ZstdError as fault:
                raise SourceError(f"{where}: its item is not a zstd stream: {fault}") from fault
            written += len(part)
            if written > limit:
                raise UnsafeError(f"{where}: its item inflates to more than {limit} bytes")
            out.write(part)
    if not inflater.eof:
        raise SourceError(f"{where}: its item is a cut zstd stream")
