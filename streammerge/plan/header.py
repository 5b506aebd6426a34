"""The safetensors header: 8 bytes of length, JSON, then the tensors without holes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from streammerge.dtypes import DType
from streammerge.errors import UnsupportedError

__all__ = ["aligned_order", "header_bytes"]

_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000  # safetensors 0.8 refuses longer ones


def aligned_order(sizes: Mapping[str, int]) -> list[str]:
    """Order tensors so that each starts as well aligned as the format allows.

    The format knows no holes, so a tensor whose size is no multiple of 64 bytes shifts all that
    follow: such tensors come last, the most even sizes first. The order is kept otherwise.
    """
    return sorted(sizes, key=lambda name: -_evenness(sizes[name]))


def _evenness(size: int) -> int:
    return min(_ALIGNMENT, size & -size) if size else _ALIGNMENT


def header_bytes(tensors: Sequence[tuple[str, DType, tuple[int, ...], int]]) -> bytes:
    """The header of a file that holds these (name, dtype, shape, bytes) in this order.

    Padded with spaces so that the data starts at a multiple of 64 bytes.

    Raises:
        UnsupportedError: a dtype that safetensors does not have, or more tensors than fit a header.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in tensors:
        if dtype.safetensors is None:
            raise UnsupportedError(f"{name}: safetensors has no {dtype}; it cannot be written")
        if name == "__metadata__" or not _encodable(name):
            raise UnsupportedError(f"{name!r} cannot be the name of a tensor in a safetensors file")
        entries[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(f"the header needs {len(text)} bytes; use a smaller --max-shard-size")
    return len(text).to_bytes(8, "little") + text


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
