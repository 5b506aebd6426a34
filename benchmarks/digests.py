"""Digests of merged folders: of the weight files, and of the tensors whatever file they are in."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["file_digest", "safetensors_header", "tensor_digest"]

_BLOCK = 8 << 20


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def file_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the ``*.safetensors`` of a folder."""
    total = hashlib.sha256()
    for path in _weight_files(folder):
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        total.update(f"{path.name} {digest.hexdigest()}\n".encode())
    return total.hexdigest()


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the data begins in bytes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
    header, data = safetensors_header(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            with memoryview(mapped)[data + start : data + end] as content:
                digest = hashlib.sha256(content).hexdigest()
            yield name, f"{name} {entry['dtype']} {entry['shape']} {digest}\n"


def tensor_digest(folder: Path) -> str:
    """SHA-256 over names, dtypes, shapes and values of all tensors of a folder, however split into files."""
    lines = dict(line for path in _weight_files(folder) for line in _tensors(path))
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()
