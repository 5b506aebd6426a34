"""The header of a safetensors file, validated in full (format of safetensors 0.8)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from streammerge.dtypes import DType, safetensors_dtype
from streammerge.errors import SourceError, UnsafeError, UnsupportedError
from streammerge.tensors.fragment import Index

__all__ = ["SafetensorsHeader", "StoredItem", "read_safetensors_header"]

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A tensor of the file: dtype, shape in elements, and absolute byte offset."""

    dtype: DType
    shape: Index
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A validated header.

    Attributes:
        items: name -> tensor.
        metadata: the ``__metadata__`` strings.
        raw: its bytes, for hashing.
    """

    items: Mapping[str, StoredItem]
    metadata: Mapping[str, str]
    raw: bytes


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read and check the header: the tensors must tile the rest of the file, as the format demands.

    Raises:
        SourceError: truncated or malformed.
        UnsafeError: a header or offsets that no writer makes; duplicate names.
        UnsupportedError: a dtype that cannot be moved.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise SourceError(f"{path}: truncated, or not a safetensors file")
        if length > _MAX_HEADER_BYTES:
            raise UnsafeError(f"{path}: a header of {length} bytes")
        raw = file.read(length)
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as fault:
        raise SourceError(f"{path}: the header is damaged: {fault}") from fault
    if not isinstance(entries, dict):
        raise SourceError(f"{path}: the header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    items = {name: _item(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_tiling(path, items, 8 + length, size)
    return SafetensorsHeader(items, metadata if isinstance(metadata, dict) else {}, raw)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The format forbids duplicate names, but its own reader does not notice them."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _item(path: Path, name: str, entry: object, base: int) -> StoredItem:
    state = entry if isinstance(entry, dict) else {}
    shape, offsets = state.get("shape"), state.get("data_offsets")
    dtype = safetensors_dtype(str(state.get("dtype")))
    if dtype is None:
        raise UnsupportedError(f"{path}: {name} has dtype {state.get('dtype')!r}, which is not supported")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise SourceError(f"{path}: {name} is described wrongly")
    item = StoredItem(dtype, tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != item.nbytes:
        raise SourceError(f"{path}: {name} of shape {shape} takes {item.nbytes} bytes, not {offsets[1] - offsets[0]}")
    return item


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and 0 <= n < 2**62 for n in value)


def _check_tiling(path: Path, items: Mapping[str, StoredItem], base: int, size: int) -> None:
    at = base
    for item in sorted((one for one in items.values() if one.nbytes), key=lambda one: one.offset):
        if item.offset != at:
            raise UnsafeError(f"{path}: tensors overlap or leave holes at byte {at}")
        at += item.nbytes
    if at != size:
        raise SourceError(f"{path}: {at} bytes expected, {size} found; the file is truncated or damaged")
