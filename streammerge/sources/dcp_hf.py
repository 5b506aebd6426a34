"""DCP's Hugging Face storage: safetensors shards per rank that say where their tensors start.

``HuggingFaceStorageWriter(save_distributed=True)`` (torch 2.8 to 2.14) writes
``shard-RRRRR-model-IIIII-of-NNNNN.safetensors`` files, whose ``__metadata__`` has ``DCP_SHARDING_INFO``:
a JSON string name -> {"saved_offsets": [...]}. The global shape is written nowhere: it is where the
last shard ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from streammerge.dtypes import DType
from streammerge.errors import SourceError
from streammerge.sources.chunks import join_chunks
from streammerge.sources.locate import config_beside
from streammerge.sources.safetensors_file import SafetensorsHeader, read_safetensors_header
from streammerge.tensors.catalogue import Catalogue, Entry, EqualityCheck, SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides

__all__ = ["has_hf_shards", "open_hf_shards"]

_PATTERN = "shard-*-model-*-of-*.safetensors"


def has_hf_shards(folder: Path) -> bool:
    """Whether the folder itself holds such shards."""
    return any(folder.glob(_PATTERN))


def open_hf_shards(folder: Path) -> Catalogue:
    """Index a folder of shards.

    Raises:
        SourceError: truncated, contradicting, or not covering a tensor.
        UnsupportedError: a dtype that cannot be moved.
        UnsafeError: hostile headers.
    """
    files: list[SourceFile] = []
    found: dict[str, list[tuple[Fragment, DType]]] = {}
    paths = sorted(folder.glob(_PATTERN))
    _check_names(folder, {path.name for path in paths})
    for path in paths:
        header = read_safetensors_header(path)
        offsets = _saved_offsets(path, header)
        for name, item in header.items.items():
            start = offsets.get(name)
            if start is None or len(start) != len(item.shape):
                raise SourceError(f"{path}: {name} has no saved offset, so its place is unknown")
            strides = contiguous_strides(item.shape, item.dtype.itemsize)
            fragment = Fragment(len(files), item.offset, start, item.shape, strides)
            found.setdefault(name, []).append((fragment, item.dtype))
        status = path.stat()
        digest = xxhash.xxh3_128_hexdigest(header.raw)
        files.append(SourceFile(path, status.st_size, status.st_mtime_ns, digest))
    return _catalogue(folder, files, found)


def _check_names(folder: Path, names: set[str]) -> None:
    """A file that another one's name speaks of exists for some rank at least."""
    parts = {name.partition("-model-")[2] for name in names}
    for part in sorted(parts):
        number = part.removesuffix(".safetensors").partition("-of-")[2]
        if number.isdigit() and int(number) < 100_000:
            for i in range(1, int(number) + 1):
                wanted = f"{i:05}-of-{number}.safetensors"
                if wanted not in parts:
                    raise SourceError(f"{folder}: no shard-*-model-{wanted} is there")


def _catalogue(folder: Path, files: list[SourceFile], found: Mapping[str, list[tuple[Fragment, DType]]]) -> Catalogue:
    entries: dict[str, Entry] = {}
    checks: list[EqualityCheck] = []
    for name, parts in found.items():
        fragments = [fragment for fragment, _ in parts]
        if len({(dtype, len(fragment.shape)) for fragment, dtype in parts}) > 1:
            raise SourceError(f"{name}: its shards have different dtypes or numbers of dims")
        # A missing last shard cannot be noticed here; the check against the model class does.
        ends = [[start + n for start, n in zip(f.start, f.shape, strict=True)] for f in fragments]
        size = tuple(max(dim) for dim in zip(*ends, strict=True))
        tensor, more = join_chunks(name, parts[0][1], size, fragments, files)
        entries[name] = Entry(tensor)
        checks += more
    return Catalogue(
        format="dcp-safetensors",
        root=folder,
        files=tuple(files),
        entries=entries,
        checks=tuple(checks),
        facts={"data files": str(len(files))},
        warnings=(
            "shards of this format do not say how large a tensor is as a whole: "
            "only the check against the model class notices a missing last shard",
        ),
        hf_folder=config_beside(folder),
    )


def _saved_offsets(path: Path, header: SafetensorsHeader) -> Mapping[str, tuple[int, ...]]:
    try:
        info = json.loads(header.metadata["DCP_SHARDING_INFO"])
        offsets = {name: tuple(one["saved_offsets"]) for name, one in info.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as fault:
        raise SourceError(f"{path}: its DCP_SHARDING_INFO is missing or damaged") from fault
    if not all(isinstance(n, int) and 0 <= n < 2**62 for start in offsets.values() for n in start):
        raise SourceError(f"{path}: an impossible saved offset")
    return offsets
