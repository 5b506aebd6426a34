"""An ordinary Hugging Face safetensors folder as a source: to compare with, or to cast and re-shard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from streammerge.errors import SourceError, UnsafeError
from streammerge.sources.safetensors_file import SafetensorsHeader, read_safetensors_header
from streammerge.tensors.catalogue import Catalogue, Entry, SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides
from streammerge.tensors.virtual import Stored

__all__ = ["has_hf_weights", "open_hf_folder"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def has_hf_weights(folder: Path) -> bool:
    """Whether the folder itself holds a model as ``save_pretrained`` writes it."""
    return (folder / _SINGLE).is_file() or (folder / _INDEX).is_file()


def open_hf_folder(folder: Path) -> Catalogue:
    """Index a folder.

    Loaders take ``model.safetensors`` before an index, so a folder with both is refused: which of the
    two is meant cannot be known.

    Raises:
        SourceError: a shard is missing or damaged, the index contradicts the shards, no tensors.
        UnsafeError: the index names files outside of the folder.
        UnsupportedError: a dtype that cannot be moved.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file() and index.is_file():
        raise SourceError(f"{folder} holds both {_SINGLE} and {_INDEX}; remove the one that is stale")
    weight_map = _weight_map(index) if index.is_file() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else [_SINGLE]
    files: list[SourceFile] = []
    entries: dict[str, Entry] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise SourceError(f"{path} is missing, but the index names it")
        header = read_safetensors_header(path)
        if weight_map is not None:
            _check_index(path, header, {key for key, file in weight_map.items() if file == name})
        for key, item in header.items.items():
            if key in entries:
                raise SourceError(f"{key} is in two files, {files[-1].path.name} or an earlier one and {name}")
            start = (0,) * len(item.shape)
            fragment = Fragment(
                len(files), item.offset, start, item.shape, contiguous_strides(item.shape, item.dtype.itemsize)
            )
            entries[key] = Entry(Stored(item.dtype, item.shape, (fragment,)))
        status = path.stat()
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns, xxhash.xxh3_128_hexdigest(header.raw)))
    if not entries:
        raise SourceError(f"{folder} holds no tensors")
    facts = {"weight files": str(len(files))}
    has_config = (folder / "config.json").is_file()
    return Catalogue(
        "huggingface", folder, tuple(files), entries, facts=facts, hf_folder=folder if has_config else None
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise SourceError(f"{index} is damaged: {fault}") from fault
    if not isinstance(found, dict) or not found:
        raise SourceError(f"{index} maps no tensor to a file")
    for key, name in found.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise UnsafeError(f"{index} maps {key} to {name!r}, which is no file of the folder")
    return found


def _check_index(path: Path, header: SafetensorsHeader, expected: set[str]) -> None:
    absent = sorted(expected - header.items.keys())
    if absent:
        raise SourceError(f"{path} lacks {absent[0]}, which the index says is in it ({len(absent)} in all)")
    ghosts = sorted(header.items.keys() - expected)
    if ghosts:
        raise SourceError(f"{path} holds {ghosts[0]}, which the index does not name ({len(ghosts)} in all)")
