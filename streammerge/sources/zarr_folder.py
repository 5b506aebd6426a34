"""Tensors in the layout of zarr version 2, as Megatron's old ``zarr`` strategy wrote them (core 0.5 to 0.11).

A folder per tensor: ``.zarray`` (JSON) and one file per chunk, named by its place in the grid (``0.3.1``), with raw
elements. Chunks at the edge have full size in the file. Megatron never compresses them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from streammerge.dtypes import DType, dtype_named
from streammerge.errors import SourceError, UnsupportedError
from streammerge.tensors.catalogue import Entry, SourceFile
from streammerge.tensors.fragment import Fragment, Index, contiguous_strides
from streammerge.tensors.virtual import Stored

__all__ = ["is_zarr_tensor", "read_zarr_tensors"]

# zarr's names; bfloat16 is Megatron's own addition.
_DTYPES = {
    "bfloat16": "bfloat16", "<f2": "float16", "<f4": "float32", "<f8": "float64", "|i1": "int8", "<i2": "int16",
    "<i4": "int32", "<i8": "int64", "|u1": "uint8", "|b1": "bool",
}  # fmt: skip
_MOST_BYTES = 1 << 20
_MOST_CHUNKS = 1 << 22


@dataclass(frozen=True, slots=True)
class _Array:
    """What ``.zarray`` says: sizes in elements."""

    shape: Index
    chunks: Index
    dtype: DType
    separator: str


def is_zarr_tensor(folder: Path) -> bool:
    """Whether a folder is a tensor."""
    return (folder / ".zarray").is_file()


def read_zarr_tensors(folder: Path, keys: Iterable[str]) -> tuple[dict[str, Entry], tuple[SourceFile, ...]]:
    """Index the tensors in ``folder`` by the names of theirs.

    Returns:
        The entries, and the chunk files.

    Raises:
        SourceError: metadata is wrong, or a chunk is missing or of a wrong size.
        UnsupportedError: compressed, or laid out in another way.
    """
    files: list[SourceFile] = []
    entries = {}
    for key in keys:
        array, digest = _array(folder / key)
        entries[key] = Entry(Stored(array.dtype, array.shape, _fragments(folder / key, array, digest, files)))
    return entries, tuple(files)


def _array(folder: Path) -> tuple[_Array, str]:
    path = folder / ".zarray"
    if path.stat().st_size > _MOST_BYTES:
        raise SourceError(f"{path} is larger than any real one")
    content = path.read_bytes()
    try:
        said = json.loads(content)
        shape, chunks = (tuple(said[name]) for name in ("shape", "chunks"))
        version, dtype = said["zarr_format"], said["dtype"]
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise SourceError(f"{path} cannot be read: {fault!r}") from fault
    sizes = [*shape, *chunks]
    if not all(type(n) is int and 0 <= n < 2**62 for n in sizes) or len(shape) != len(chunks) or 0 in chunks:
        raise SourceError(f"{path}: impossible sizes")
    for name, wanted in (("compressor", None), ("filters", None), ("order", "C")):
        if said.get(name) not in (wanted, [] if wanted is None else wanted):
            raise UnsupportedError(f"{path}: {name} is {said.get(name)!r}, which is not supported")
    if version != 2 or not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UnsupportedError(f"{path}: zarr format {version!r} with dtype {dtype!r} is not supported")
    made = _Array(shape, chunks, dtype_named(_DTYPES[dtype]), str(said.get("dimension_separator", ".")))
    if made.separator not in (".", "/"):
        raise SourceError(f"{path}: an impossible separator")
    return made, xxhash.xxh3_128_hexdigest(content)


def _fragments(folder: Path, array: _Array, digest: str, files: list[SourceFile]) -> tuple[Fragment, ...]:
    grid = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    count = 1
    for size in grid:
        count *= size
    if count > _MOST_CHUNKS:
        raise SourceError(f"{folder}: {count} chunks are more than any real tensor has")
    strides = contiguous_strides(array.chunks, array.dtype.itemsize)
    size = strides[0] * array.chunks[0] if strides else array.dtype.itemsize
    found = []
    for place in itertools.product(*map(range, grid)):
        path = folder / (array.separator.join(map(str, place)) or "0")
        if not path.is_file():
            # zarr would take fill_value; Megatron writes every chunk, so one is lost.
            raise SourceError(f"{path} is missing; that part of the tensor is lost (or on another node's disk)")
        status = path.stat()
        if status.st_size != size:
            raise SourceError(f"{path} has {status.st_size} bytes where {size} are expected; it is damaged")
        start = tuple(index * chunk for index, chunk in zip(place, array.chunks, strict=True))
        shape = tuple(min(c, s - at) for c, s, at in zip(array.chunks, array.shape, start, strict=True))
        found.append(Fragment(len(files), 0, start, shape, strides))
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns, digest))
    return tuple(found)
