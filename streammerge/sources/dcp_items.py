"""Where the bytes of a DCP chunk lie inside its ``.distcp`` file.

Each tensor item is a complete little ``torch.save`` archive in a range of the file. With
``SerializationFormat.SAFETENSORS`` (torch >= 2.8) the whole file is a safetensors file instead, and the
offsets in the metadata are all 0: items are found by name then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from streammerge.dtypes import DType
from streammerge.errors import SourceError, UnsupportedError
from streammerge.files import io_errors
from streammerge.sources.dcp_metadata import Chunk
from streammerge.sources.safetensors_file import read_safetensors_header
from streammerge.sources.torch_file import read_torch_archive
from streammerge.sources.torch_values import TensorRef, TypedRef
from streammerge.sources.zstd_spool import inflate
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides

__all__ = ["ItemFiles"]

_ZSTD = "stream.zstd/1"
_AHEAD = 32  # items; there may be 100 000 in all, and each costs a seek when it is waited for
_END_BYTES = 2048  # an archive's records add 1.2 to 1.7 kB (torch 2.4 to 2.14)


class ItemFiles:
    """The ``.distcp`` files of a folder, opened once each, and the source files that fragments point into."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Look into ``folder``; ``digest`` (of the metadata) goes into every source file."""
        self.sources: list[SourceFile] = []
        self.scratch: TemporaryDirectory[str] | None = None
        self._folder, self._digest = folder, digest
        self._numbers: dict[Path, int] = {}

    def fragments(self, file: str, chunks: Sequence[tuple[str, str, DType, Chunk]]) -> list[tuple[str, Fragment]]:
        """Locate chunks of one file.

        Args:
            file: its name.
            chunks: (name to return, flat key, dtype, chunk), in any order.

        Raises:
            SourceError: truncated, or an item that is not what the metadata says.
            UnsupportedError: an unknown transform.
        """
        path = self._folder / file
        with io_errors("read", path):
            return self._by_name(path, chunks) if _is_safetensors(path) else self._by_place(path, chunks)

    def _by_place(self, path: Path, chunks: Sequence[tuple[str, str, DType, Chunk]]) -> list[tuple[str, Fragment]]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            size = os.fstat(fd).st_size
            ordered = sorted(chunks, key=lambda one: one[3].offset)
            found = []
            for number, (key, name, dtype, chunk) in enumerate(ordered):
                if number % _AHEAD == 0:
                    _read_ahead(fd, size, [one[3] for one in ordered[number : number + 2 * _AHEAD]])
                found.append((key, self._in_archive(fd, path, size, name, dtype, chunk)))
            return found
        finally:
            os.close(fd)

    def _number(self, path: Path, origin: str = "") -> int:
        if path not in self._numbers:
            status = path.stat()
            self._numbers[path] = len(self.sources)
            self.sources.append(SourceFile(path, status.st_size, status.st_mtime_ns, self._digest, origin))
        return self._numbers[path]

    def _in_archive(self, fd: int, path: Path, size: int, name: str, dtype: DType, chunk: Chunk) -> Fragment:
        where = f"{name} in {path}"
        if chunk.offset + chunk.length > size:
            raise SourceError(f"{where}: its item ends at byte {chunk.offset + chunk.length}, but the file has {size}")
        if not chunk.transforms:
            return _archive_fragment(fd, where, chunk.offset, chunk.length, self._number(path), dtype, chunk)
        if chunk.transforms != (_ZSTD,):
            raise UnsupportedError(f"{where}: stored with {', '.join(chunk.transforms)}, which is not supported")
        self.scratch = self.scratch or TemporaryDirectory(prefix="streammerge-")
        spool = Path(self.scratch.name, f"{len(self.sources)}.item")
        # An archive adds about 1.5 kB to the tensor itself; more than a page is no honest item.
        limit = chunk.box.numel * dtype.itemsize + (64 << 10)
        inflate(fd, chunk.offset, chunk.length, spool, limit, where)
        inflated = os.open(spool, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = os.fstat(inflated).st_size
            stored = os.fstat(fd)
            os.utime(spool, ns=(stored.st_mtime_ns, stored.st_mtime_ns))
            origin = f"{path.absolute()}@{chunk.offset}"
            return _archive_fragment(inflated, where, 0, length, self._number(spool, origin), dtype, chunk)
        finally:
            os.close(inflated)

    def _by_name(self, path: Path, chunks: Sequence[tuple[str, str, DType, Chunk]]) -> list[tuple[str, Fragment]]:
        items = read_safetensors_header(path).items
        found = []
        for key, name, dtype, chunk in chunks:
            item = items.get(name)
            if item is None or (item.dtype, item.shape) != (dtype, chunk.box.shape):
                raise SourceError(f"{path}: {name} is not in it as {dtype} {list(chunk.box.shape)}")
            strides = contiguous_strides(item.shape, dtype.itemsize)
            found.append((key, Fragment(self._number(path), item.offset, chunk.box.start, item.shape, strides)))
        return found


def _read_ahead(fd: int, size: int, chunks: Sequence[Chunk]) -> None:
    """Have the kernel fetch both ends of the next items, where all but the weights is, while others are looked at."""
    for chunk in chunks:
        if chunk.offset + chunk.length <= size:
            os.posix_fadvise(fd, chunk.offset, _END_BYTES, os.POSIX_FADV_WILLNEED)
            os.posix_fadvise(fd, max(0, chunk.offset + chunk.length - _END_BYTES), _END_BYTES, os.POSIX_FADV_WILLNEED)


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(9)
    return not head.startswith(b"PK\x03\x04") and head[8:9] == b"{"


def _archive_fragment(
    fd: int, where: str, offset: int, length: int, number: int, dtype: DType, chunk: Chunk
) -> Fragment:
    archive = read_torch_archive(fd, where, offset, length)
    value = archive.root.inner if isinstance(archive.root, TypedRef) else archive.root
    if not isinstance(value, TensorRef):
        raise SourceError(f"{where}: its item holds no tensor")
    if (value.dtype, value.size) != (dtype, chunk.box.shape):
        raise SourceError(
            f"{where}: its item holds {value.dtype} {list(value.size)}, but the metadata says "
            f"{dtype} {list(chunk.box.shape)}"
        )
    return archive.fragment(value, number, chunk.box.start)
