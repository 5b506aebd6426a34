"""PEFT adapter folders, and what trainers record of an adapter beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from streammerge.errors import SourceError, UnsupportedError
from streammerge.sources.safetensors_file import read_safetensors_header
from streammerge.tensors.catalogue import Catalogue, Entry, PeftAdapter, SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides
from streammerge.tensors.virtual import Stored

__all__ = ["is_peft_folder", "recorded_settings", "with_peft_folders"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_VERL = "lora_train_meta.json"  # verl 2026: r, lora_alpha, task_type; an alpha of 0 means that it was not known
_MOST_BYTES = 16 << 20


def is_peft_folder(path: Path) -> bool:
    """Whether a path is an adapter as PEFT saves it."""
    return (path / _CONFIG).is_file()


def with_peft_folders(catalogue: Catalogue, folders: list[Path]) -> Catalogue:
    """The catalogue of a base with adapters for it.

    Raises:
        SourceError: an adapter is damaged or incomplete.
        UnsupportedError: it is saved as a pickle.
    """
    files = list(catalogue.files)
    adapters = []
    for folder in folders:
        path = folder / _WEIGHTS
        if not path.is_file():
            if (folder / "adapter_model.bin").is_file():
                raise UnsupportedError(f"{folder} has adapter_model.bin, a pickle; save the adapter as safetensors")
            raise SourceError(f"{path} is missing")
        header = read_safetensors_header(path)
        entries = {}
        for key, item in header.items.items():
            strides = contiguous_strides(item.shape, item.dtype.itemsize)
            place = Fragment(len(files), item.offset, (0,) * len(item.shape), item.shape, strides)
            entries[key] = Entry(Stored(item.dtype, item.shape, (place,)))
        status = path.stat()
        content = (folder / _CONFIG).read_bytes()
        digest = xxhash.xxh3_128_hexdigest(header.raw + content)
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns, digest))
        adapters.append(PeftAdapter(str(folder), entries, _parsed(folder / _CONFIG)))
    return catalogue.with_adapters(tuple(files), tuple(adapters))


def recorded_settings(folder: Path) -> Mapping[str, Any]:
    """What is known of the adapters in a checkpoint, under the names of adapter_config.json; mostly nothing."""
    for place in (folder, folder.parent):
        for name in (_CONFIG, f"lora_adapter/{_CONFIG}", f"huggingface/{_CONFIG}", _VERL):
            if (place / name).is_file():
                return _parsed(place / name)
    return {}


def _parsed(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > _MOST_BYTES:
        raise SourceError(f"{path} is larger than any real one")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as fault:
        raise SourceError(f"{path} cannot be read: {fault}") from fault
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object")
    return content
