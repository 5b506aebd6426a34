"""Files written by ``torch.save``: the object they hold, and where each tensor's bytes lie."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from streammerge.errors import SourceError, UnsafeError, UnsupportedError
from streammerge.files import io_errors
from streammerge.sources.pickle_reader import read_pickle
from streammerge.sources.torch_values import FUNCTIONS, StorageRef, TensorRef, storage_ref
from streammerge.sources.zip_index import ZipIndex, read_zip_index
from streammerge.tensors.fragment import Fragment, Index

__all__ = ["TorchFile", "open_torch_file", "read_torch_archive"]

_MAX_PICKLE_BYTES = 512 << 20
_MAX_SMALL_BYTES = 16 << 20
# torch < 1.6, or _use_new_zipfile_serialization=False: pickles in a row that begin with this one.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An open ``torch.save`` file (or an archive inside of a larger file).

    Attributes:
        fd: open file descriptor.
        where: name for messages.
        root: the object that was saved, as inert values.
        inert: names of the classes and functions in it that nothing here understands.
        archive: the zip index, or None for the legacy form.
        legacy: storage key -> (absolute byte offset, bytes), for the legacy form.
        digest: hash of the pickle.
    """

    fd: int
    where: str
    root: Any
    inert: frozenset[str]
    archive: ZipIndex | None
    legacy: dict[str, tuple[int, int]]
    digest: str

    def fragment(self, tensor: TensorRef, file: int, start: Index) -> Fragment:
        """Where the tensor's bytes lie, as a fragment placed at ``start`` of a larger tensor.

        Raises:
            SourceError: the storage is not in the file, or shorter than it should be.
            UnsafeError: offset, size and stride reach out of the storage.
        """
        item = tensor.dtype.itemsize
        strides = tuple(step * item for step in tensor.stride)
        base, nbytes = self._storage(tensor.storage)
        fragment = Fragment(file, base + tensor.offset * item, start, tensor.size, strides)
        if fragment.numel and tensor.offset * item + fragment.extent(item) > nbytes:
            raise UnsafeError(
                f"{self.where}: a tensor of size {list(tensor.size)} and stride {list(tensor.stride)} reads past "
                f"its storage {tensor.storage.key!r} of {nbytes} bytes"
            )
        return fragment

    def _storage(self, storage: StorageRef) -> tuple[int, int]:
        """Absolute byte offset and size in bytes of a storage."""
        if self.archive is None:
            place = self.legacy.get(storage.key)
        else:
            name = f"data/{storage.key}"
            member = self.archive.members.get(name)
            place = (self.archive.payload_offset(name), member.size) if member else None
        if place is None:
            raise SourceError(f"{self.where}: storage {storage.key!r} is missing from the file")
        if place[1] != storage.nbytes:
            raise SourceError(
                f"{self.where}: storage {storage.key!r} has {place[1]} bytes where {storage.nbytes} are expected"
            )
        return place

    def read_ints(self, tensor: TensorRef) -> list[int]:
        """The values of a small integer tensor of metadata, such as a device mesh, in row-major order."""
        import numpy as np

        fragment = self.fragment(tensor, 0, (0,) * len(tensor.size))
        if fragment.numel > _MAX_SMALL_BYTES // 8 or tensor.dtype.kind != "int":
            raise SourceError(f"{self.where}: a device mesh is not a small integer tensor")
        raw = os.pread(self.fd, fragment.extent(tensor.dtype.itemsize), fragment.offset)
        values = np.lib.stride_tricks.as_strided(np.frombuffer(raw, tensor.dtype.numpy), tensor.size, fragment.strides)
        return [int(value) for value in values.ravel()]


@contextmanager
def open_torch_file(path: Path) -> Iterator[TorchFile]:
    """Open a file for reading and read its metadata. No weight byte is read.

    Raises:
        SourceError: truncated, damaged, not a torch.save file.
        UnsupportedError: big-endian.
        UnsafeError: hostile content.
        StorageError: the file cannot be opened or read.
    """
    with io_errors("read", path):
        # O_NONBLOCK: a pipe of that name must not be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{path} is not a regular file")
            if status.st_size == 0:
                raise SourceError(f"{path} is empty; the save was interrupted or the disk was full")
            # The reads below are small and far apart; reading ahead would drag the weights in.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            if os.pread(fd, len(_LEGACY_START), 0) == _LEGACY_START:
                yield _read_legacy(fd, str(path), status.st_size)
            else:
                yield read_torch_archive(fd, str(path), 0, status.st_size)
        finally:
            os.close(fd)


def read_torch_archive(fd: int, where: str, start: int, length: int) -> TorchFile:
    """Read the metadata of a ``torch.save`` archive at ``start .. start + length`` of an open file.

    Raises: as ``open_torch_file``.
    """
    archive = read_zip_index(fd, where, start, length)
    # Absent in files of torch < 2.1, which only ever were little-endian in practice.
    if "byteorder" in archive.members and archive.read("byteorder", 16) != b"little":
        raise UnsupportedError(f"{where}: saved on a big-endian machine; re-save it on a little-endian one")
    data = archive.read("data.pkl", _MAX_PICKLE_BYTES)
    root, _, inert = read_pickle(data, where, FUNCTIONS, storage_ref)
    return TorchFile(fd, where, root, frozenset(inert), archive, {}, xxhash.xxh3_128_hexdigest(data))


def _read_legacy(fd: int, where: str, size: int) -> TorchFile:
    """Five pickles in a row, then for each storage an int64 element count and the bytes."""
    head = os.pread(fd, min(size, _MAX_SMALL_BYTES), 0)
    position, inert = 0, set[str]()
    parts = []
    for _ in range(5):
        value, position, unknown = read_pickle(head, where, FUNCTIONS, storage_ref, position)
        parts.append(value)
        inert |= unknown
    magic, _, system, root, keys = parts
    if magic != _LEGACY_MAGIC or not isinstance(system, dict) or not isinstance(keys, list):
        raise SourceError(f"{where}: not a torch.save file")
    if not system.get("little_endian", True):
        raise UnsupportedError(f"{where}: saved on a big-endian machine; re-save it on a little-endian one")
    digest = xxhash.xxh3_128_hexdigest(head[:position])
    sizes = _storage_itemsizes(root)
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(os.pread(fd, 8, position), "little")
        if str(key) not in sizes:
            raise SourceError(f"{where}: storage {key!r} belongs to no tensor, so the ones after it cannot be found")
        nbytes = count * sizes[str(key)]
        places[str(key)] = (position + 8, nbytes)
        position += 8 + nbytes
        if position > size:
            raise SourceError(f"{where}: truncated: {position} bytes expected, {size} found")
    return TorchFile(fd, where, root, frozenset(inert), None, places, digest)


# Where records and tensor values keep other values.
_INNER = ("args", "state", "inner", "items", "elements", "children")


def _storage_itemsizes(root: Any) -> dict[str, int]:
    """Bytes per element of each storage, found by walking everything that holds a tensor."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, TensorRef):
            storage = value.storage
            sizes[storage.key] = storage.dtype.itemsize if storage.dtype else 1
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list | tuple | set):
            todo.extend(value)
        else:
            todo.extend(getattr(value, name, None) for name in _INNER)
    return sizes
