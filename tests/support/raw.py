"""Tensors as (dtype name, shape, bytes), from safetensors files, torch tensors and streammerge's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from streammerge.dtypes import safetensors_dtype
from streammerge.tensors.virtual import Tensor

__all__ = ["Raw", "materialise", "of_torch", "read_folder", "read_safetensors"]


@dataclass(frozen=True)
class Raw:
    """A tensor's dtype (torch's name), shape and row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        return f"Raw({self.dtype}, {list(self.shape)}, {len(self.data)} bytes {self.data[:8].hex()}...)"


def read_safetensors(path: Path) -> dict[str, Raw]:
    """All tensors of a safetensors file, parsed here so that no library's opinion is asked."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        dtype = safetensors_dtype(entry["dtype"])
        assert dtype is not None
        data = content[start + first : start + last]
        assert len(data) == math.prod(entry["shape"]) * dtype.itemsize, name
        found[name] = Raw(dtype.name, tuple(entry["shape"]), data)
    return found


def read_folder(folder: Path) -> dict[str, Raw]:
    """The tensors of all safetensors files of a folder."""
    found: dict[str, Raw] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = read_safetensors(path)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
    return found


def of_torch(tensor: torch.Tensor) -> Raw:
    """A torch tensor's values."""
    plain = tensor.detach().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Raw(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def materialise(tensor: Tensor, paths: Sequence[Path]) -> Raw:
    """Read a virtual tensor by its fragments, which must cover it exactly once.

    numpy itself checks that no fragment leaves its file.
    """
    item = tensor.dtype.itemsize
    out = np.zeros(tensor.shape, dtype=f"V{item}")
    covered = np.zeros(tensor.shape, dtype=np.uint8)
    for fragment in tensor.fragments_in((0,) * len(tensor.shape), tensor.shape):
        content = np.fromfile(paths[fragment.file], dtype=np.uint8)
        view = np.ndarray(fragment.shape, out.dtype, content, fragment.offset, fragment.strides)
        place = tuple(slice(s, s + n) for s, n in zip(fragment.start, fragment.shape, strict=True))
        out[place] = view
        covered[place] += 1
    assert covered.min(initial=1) == covered.max(initial=1) == 1
    return Raw(tensor.dtype.name, tuple(tensor.shape), out.tobytes())
