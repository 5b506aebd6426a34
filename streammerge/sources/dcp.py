"""PyTorch Distributed Checkpoint folders: ``.metadata`` and ``.distcp`` files, of any producer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from streammerge.dtypes import DType
from streammerge.errors import SourceError
from streammerge.sources.chunks import join_chunks
from streammerge.sources.dcp_items import ItemFiles
from streammerge.sources.dcp_metadata import Chunk, DcpMetadata, DcpTensor, dtype_of, metadata_files, read_metadata
from streammerge.sources.locate import config_beside
from streammerge.sources.state_dict import refuse_flat_parameter
from streammerge.sources.subtree import choose_subtree, holds_model
from streammerge.tensors.catalogue import Catalogue, Entry, EqualityCheck
from streammerge.tensors.fragment import Fragment

__all__ = ["has_model", "index_tensors", "open_dcp"]

_MEGATRON_OBJECT = re.compile(r"/shard_\d[\d.]*_\d[\d.]*$")


def has_model(folder: Path) -> bool:
    """Whether the folder itself is a DCP checkpoint; one of an optimizer alone does not count."""
    files = metadata_files(folder)
    if not files:
        return any(folder.glob("__*_*.distcp")) or any(folder.glob(".metadata.tmp"))
    metadata = read_metadata(files)
    return holds_model({path: not tensor.size for path, tensor in metadata.tensors.items()}, tuple(metadata.others))


def open_dcp(folder: Path, *, subtree: str | None = None) -> Catalogue:
    """Index a DCP folder.

    Args:
        subtree: dotted path of the container that holds the model, when there are several.

    Raises:
        SourceError: metadata or files are missing, truncated or contradict each other.
        UnsupportedError: a dtype or transform that cannot be read.
        UnsafeError: hostile content.
    """
    files = metadata_files(folder)
    if not files:
        raise SourceError(
            f"{folder}: no .metadata; the save was interrupted before it was complete"
            + (" (.metadata.tmp is left of it)" if (folder / ".metadata.tmp").exists() else "")
        )
    metadata = read_metadata(files)
    _refuse_unfinished(metadata, folder)
    model = _model(metadata, subtree, str(folder))
    for name in model:
        refuse_flat_parameter(name, str(folder))
    _check_ranks(folder, files)
    entries, checks, items = index_tensors(folder, metadata, model)
    return Catalogue(
        format="dcp",
        root=folder,
        files=tuple(items.sources),
        entries=entries,
        checks=tuple(checks),
        skipped={".".join(path): "not a tensor" for path in metadata.others if len(path) == 1},
        facts=_facts(metadata, items),
        hf_folder=config_beside(folder),
        scratch=items.scratch,
    )


def _refuse_unfinished(metadata: DcpMetadata, folder: Path) -> None:
    """Megatron's own saves (core 0.8 to 0.20) name their objects so, and end with another file."""
    found = next((path[0] for path in metadata.others if len(path) == 1 and _MEGATRON_OBJECT.search(path[0])), None)
    if found is not None:
        raise SourceError(
            f"{folder}: holds {found}, as Megatron's torch_dist saves do, but no metadata.json, which is written last; "
            "the save was interrupted before it was complete, or the file was not copied"
        )


def index_tensors(
    folder: Path, metadata: DcpMetadata, model: Mapping[str, DcpTensor]
) -> tuple[dict[str, Entry], list[EqualityCheck], ItemFiles]:
    """Locate the chunks of some of a folder's tensors, and put them together.

    Args:
        model: name -> tensor.

    Returns:
        The entries by name, the copies that must hold equal bytes, and the files.

    Raises:
        SourceError: files are missing or truncated, or chunks do not tile a tensor.
        UnsupportedError: a dtype or transform that cannot be read.
    """
    _check_files(folder, model)
    items = ItemFiles(folder, metadata.digest)
    placed = _locate(items, model)
    entries: dict[str, Entry] = {}
    checks: list[EqualityCheck] = []
    for name, tensor in model.items():
        dtype = dtype_of(tensor, name)
        stored, more = join_chunks(name, dtype, tensor.size, placed.get(name, []), items.sources)
        entries[name] = Entry(stored)
        checks += more
    return entries, checks, items


def _model(metadata: DcpMetadata, subtree: str | None, where: str) -> dict[str, DcpTensor]:
    counters = {path: tensor.size == () for path, tensor in metadata.tensors.items()}
    return choose_subtree(metadata.tensors, tuple(metadata.others), counters, subtree, where)


def _check_files(folder: Path, model: Mapping[str, DcpTensor]) -> None:
    needed = {chunk.file for tensor in model.values() for chunk in tensor.chunks if chunk.box.numel}
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise SourceError(f"{folder}: {len(missing)} of {len(needed)} files are missing: {shown}")


def _check_ranks(folder: Path, files: list[Path]) -> None:
    """Ranks that saved for themselves have a metadata file each."""
    if files[0].name == ".metadata":
        return
    known = {path.name.removesuffix(".metadata") for path in files}
    lost = sorted(path.name for path in folder.glob("__*_*.distcp") if path.name.rpartition("_")[0] not in known)
    if lost:
        raise SourceError(f"{folder}: {lost[0]} is there, but {lost[0].rpartition('_')[0]}.metadata is missing")


def _locate(items: ItemFiles, model: Mapping[str, DcpTensor]) -> dict[str, list[Fragment]]:
    by_file: dict[str, list[tuple[str, str, DType, Chunk]]] = {}
    for name, tensor in model.items():
        dtype = dtype_of(tensor, name)
        for chunk in tensor.chunks:
            if chunk.box.numel:
                by_file.setdefault(chunk.file, []).append((name, tensor.key, dtype, chunk))
    placed: dict[str, list[Fragment]] = {}
    for file, chunks in sorted(by_file.items()):
        for name, fragment in items.fragments(file, chunks):
            placed.setdefault(name, []).append(fragment)
    return placed


def _facts(metadata: DcpMetadata, items: ItemFiles) -> dict[str, str]:
    return {"tensors of all": str(len(metadata.tensors)), "data files": str(len(items.sources))}
