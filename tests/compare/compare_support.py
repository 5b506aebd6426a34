"""Shared by the tests of comparing: folders of any tensors, damaged files, a comparer with small buffers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from streammerge.execute.difference import Comparer, Difference, Side, Tolerance
from streammerge.execute.memory import Buffers
from streammerge.sources.hf_folder import open_hf_folder

__all__ = ["QWEN2_TIED", "Ran", "Run", "compare_tiled", "header_of", "index_of", "raw_file", "write_folder"]

QWEN2_TIED = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """A model folder with one file of weights, and a config if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def raw_file(path: Path, header: object, content: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file whose header says anything: an object, or JSON text; ``length`` may lie."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)
    return path


def header_of(*ranges: tuple[int, int]) -> dict[str, object]:
    """A header of uint8 tensors a, b, c ... at these byte ranges."""
    return {
        name: {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]}
        for name, (first, last) in zip("abcdefgh", ranges, strict=False)
    }


def index_of(folder: Path, weight_map: object) -> Path:
    """Write the index of a folder."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def compare_tiled(
    first: Path, second: Path, tile: int, tolerance: Tolerance | None = None, name: str = "a"
) -> Difference:
    """Compare the tensor of a name in two folders with tiles of so many bytes."""
    catalogues = [open_hf_folder(folder) for folder in (first, second)]
    sides = [Side(catalogue.files, "pread") for catalogue in catalogues]
    tensors = [catalogue.entries[name].tensor for catalogue in catalogues]
    comparer = Comparer(sides[0], sides[1], Buffers(1, tile, tile, 0))
    try:
        dtypes = (tensors[0].dtype, tensors[1].dtype)
        return comparer.compare(tensors[0], tensors[1], dtypes, tolerance or Tolerance())
    finally:
        comparer.close()
