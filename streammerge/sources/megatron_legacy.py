"""Checkpoints in Megatron's ``torch`` format: ``mp_rank_*/model_optim_rng.pt``.

Also verl's older layout (``mp_rank_*/model.pt``, spring 2025) and its adapter files. How tensor parallel ranks'
tensors go together is not in the files: every file's tensor becomes a claim, for the family to join.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError, UnsupportedError
from streammerge.sources.locate import config_beside
from streammerge.sources.megatron_files import Grid, RankPath, place_ranks, rank_paths, refuse_empty_folders
from streammerge.sources.megatron_layers import (
    count_layers,
    global_expert,
    layer_offsets,
    local_experts,
    with_layer_offset,
)
from streammerge.sources.megatron_settings import settings_beside, settings_of
from streammerge.sources.torch_file import open_torch_file
from streammerge.sources.torch_values import TensorRef, TypedRef, UnreadableRef
from streammerge.tensors.catalogue import Catalogue, Claim, Entry, EqualityCheck, SourceFile
from streammerge.tensors.virtual import Stored

__all__ = ["open_megatron"]

_MOST_DEPTH = 16
_EXTRA_STATE = re.compile(r"_extra_state\d*$")  # grouped layers of Transformer Engine number theirs


@dataclass
class _RankFile:
    """What one rank's file holds: the tensors of each of its virtual pipeline chunks, by local name."""

    chunks: list[dict[str, Stored]]
    settings: dict[str, object]
    version: object
    iteration: object = None
    skipped: dict[str, str] = field(default_factory=dict)


def open_megatron(folder: Path) -> Catalogue:
    """Index a save in the ``torch`` format.

    Raises:
        SourceError: files are missing, truncated or contradict each other.
        UnsupportedError: a tensor class or an old version that cannot be merged.
        UnsafeError: hostile content.
    """
    paths = rank_paths(folder)
    refuse_empty_folders(folder, paths)
    sources: list[SourceFile] = []
    contents: dict[str, _RankFile] = {}
    for one in paths:
        contents[one.label] = _read(one, sources)
    first = contents[paths[0].label]
    settings = first.settings or settings_beside(folder)
    hf_folder = config_beside(folder)
    grid = place_ranks(paths, settings, _second_is_expert(paths, contents, hf_folder), str(folder))
    _check_same_save(contents, str(folder))
    chunks = _chunk_count(grid, contents, settings, str(folder))
    _refuse_old(contents.values(), str(folder))
    _check_same_experts(grid, contents, str(folder))
    entries, checks = _entries(grid, contents, str(folder))
    if not entries:
        raise SourceError(f"{folder}: the rank files hold no tensors")
    return Catalogue(
        format="megatron",
        root=folder,
        files=tuple(sources),
        entries=entries,
        checks=tuple(checks),
        skipped={name: why for one in contents.values() for name, why in one.skipped.items()},
        facts={
            "tensor parallel": str(grid.tensor),
            "pipeline parallel": f"{grid.pipeline}" + (f", {chunks} virtual chunks each" if chunks > 1 else ""),
            "expert parallel": str(grid.expert),
            "rank files": str(len(paths)),
        },
        hf_folder=hf_folder,
        settings=settings,
    )


def _read(one: RankPath, sources: list[SourceFile]) -> _RankFile:
    status = one.path.stat()
    number = len(sources)
    with open_torch_file(one.path) as file:
        sources.append(SourceFile(one.path, status.st_size, status.st_mtime_ns, file.digest))
        root = file.root
        made = _RankFile([], {}, None)
        if isinstance(root, dict):
            made.settings, made.version = settings_of(root.get("args")), root.get("checkpoint_version")
            made.iteration = root.get("iteration")
        for chunk in _models(root, one):
            tensors: dict[str, Stored] = {}
            for name, value in _flattened(chunk, "", 0, one):
                if isinstance(value, TensorRef) and not _EXTRA_STATE.search(name):
                    place = file.fragment(value, number, (0,) * len(value.size))
                    tensors[name] = Stored(value.dtype, value.size, (place,))
                else:
                    made.skipped[name] = _why_skipped(name, value, one)
            made.chunks.append(tensors)
    return made


def _models(root: Any, one: RankPath) -> list[Any]:
    """The state dict of each virtual pipeline chunk."""
    if isinstance(root, list) and root and all(isinstance(chunk, dict) for chunk in root):
        return root  # verl: a list without any frame
    if isinstance(root, dict):
        if "adapter_state_dict" in root:
            return [root["adapter_state_dict"]]
        if "model" in root:
            return [root["model"]]
        numbered = [f"model{number}" for number in range(len(root))]
        chunks = [root[name] for name in numbered if name in root]
        if chunks and all(name in root for name in numbered[: len(chunks)]):
            return chunks
    raise SourceError(f"{one.path}: holds no model (looked for the keys model, model0 and adapter_state_dict)")


def _flattened(value: Any, before: str, depth: int, one: RankPath) -> Iterator[tuple[str, Any]]:
    """Names and values; the dicts in dicts that old versions have are names with dots."""
    if not isinstance(value, dict) or depth > _MOST_DEPTH:
        raise SourceError(f"{one.path}: {before or 'the model'} is no state dict")
    for key, inner in value.items():
        if not isinstance(key, str):
            raise SourceError(f"{one.path}: {before or 'the model'} has a key that is no text")
        name = f"{before}.{key}" if before else key
        if isinstance(inner, dict):
            yield from _flattened(inner, name, depth + 1, one)
        else:
            yield _without_wrappers(name), inner


def _without_wrappers(name: str) -> str:
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def _why_skipped(name: str, value: Any, one: RankPath) -> str:
    if _EXTRA_STATE.search(name):
        return "extra state of a module, not a weight"
    if value is None or isinstance(value, bool | int | float | str | bytes | list | tuple):
        return f"a {type(value).__name__}, not a tensor"
    if isinstance(value, UnreadableRef):
        raise UnsupportedError(f"{name} in {one.path}: {value.why}")
    kind = value.type if isinstance(value, TypedRef) else getattr(value, "callee", type(value).__name__)
    raise UnsupportedError(f"{name} in {one.path}: a {kind} stands where a tensor is expected; this is not supported")


def _has_embedding(content: _RankFile) -> bool:
    return any("word_embeddings.weight" in name for chunk in content.chunks for name in chunk)


def _chunk_count(grid: Grid, contents: Mapping[str, _RankFile], settings: Mapping[str, object], where: str) -> int:
    counts = {len(content.chunks) for content in contents.values()}
    if len(counts) != 1:
        raise SourceError(
            f"{where}: the rank files have different numbers of virtual pipeline chunks: {sorted(counts)}"
        )
    adapters = any(one.path.name.endswith("_adapter.pt") for one in grid.places.values())
    virtual = settings.get("virtual_pipeline_model_parallel_size")
    if adapters and isinstance(virtual, int) and virtual > 1:
        raise SourceError(
            f"{where}: verl saves the adapters of the first virtual pipeline chunk only, and this job had {virtual}; "
            "the others are lost"
        )
    return counts.pop()


def _refuse_old(contents: Iterable[_RankFile], where: str) -> None:
    for content in contents:
        names = [name for chunk in content.chunks for name in chunk]
        own = next((name for name in names if ".qkv_proj." in name), None)
        if own is not None:
            raise UnsupportedError(
                f"{where}: {own} is a name of verl's own Megatron models (before April 2025), which cut q, k and v "
                "per rank; they are not supported"
            )
        # Megatron-LM takes a file without a version for version 0 (checkpointing.py, 0.8 to 0.20).
        version = content.version if content.version is not None else 0
        if any("query_key_value" in name for name in names) and not (isinstance(version, int | float) and version >= 2):
            raise UnsupportedError(
                f"{where}: checkpoint_version {version} orders q, k and v in another way; load it with a Megatron-LM "
                "that knows it and save it again"
            )


def _second_is_expert(
    paths: Sequence[RankPath], contents: Mapping[str, _RankFile], hf_folder: Path | None
) -> bool | None:
    """What the contents say of the second number of folder names with two: an expert parallel rank?

    Only the first pipeline stage holds the embedding, but every expert parallel rank does. Adapters have
    none; there the number of layers in the model's config tells.
    """
    holders = {one.numbers[1] for one in paths if len(one.numbers) == 2 and _has_embedding(contents[one.label])}
    numbers = {one.numbers[1] for one in paths if len(one.numbers) == 2}
    if len(numbers) < 2:
        return False  # all are number 0 of whichever dim
    if holders:
        return holders == numbers
    layers = _layers_of_config(hf_folder)
    counts = {one.numbers: _count_layers(contents[one.label]) for one in paths if len(one.numbers) == 2}
    stages = sum(next(count for of, count in counts.items() if of[1] == number) for number in numbers)
    if layers is None:
        return None
    if stages == layers and max(counts.values()) < layers:
        return False
    return True if set(counts.values()) == {layers} else None


def _layers_of_config(hf_folder: Path | None) -> int | None:
    try:
        content = json.loads((hf_folder / "config.json").read_bytes()) if hf_folder else {}
        for part in (content, content.get("text_config") or {}):
            if isinstance(part.get("num_hidden_layers"), int):
                return int(part["num_hidden_layers"])
    except (OSError, ValueError, AttributeError, RecursionError):
        pass  # a config that cannot be read is refused where it is needed
    return None


def _count_layers(content: _RankFile) -> int:
    return sum(count_layers(chunk) for chunk in content.chunks)


def _check_same_save(contents: Mapping[str, _RankFile], where: str) -> None:
    """Files of two saves in one folder have the same names and shapes, and would make a model of both."""
    first, *others = contents
    for label in others:
        said, expected = contents[label].iteration, contents[first].iteration
        if said != expected:
            raise SourceError(
                f"{where}: {first} is of iteration {expected!r}, but {label} of {said!r}; files of two saves were mixed"
            )


def _check_same_experts(grid: Grid, contents: Mapping[str, _RankFile], where: str) -> None:
    """The number of experts per file is what makes their numbers global, so it has to be the same in all."""
    firsts: dict[int, tuple[RankPath, list[dict[str, int]]]] = {}
    for (_, stage, _), one in sorted(grid.places.items()):
        counts = [local_experts(chunk) for chunk in contents[one.label].chunks]
        first, expected = firsts.setdefault(stage, (one, counts))
        if counts != expected:
            raise SourceError(
                f"{where}: {first.label} and {one.label} hold different numbers of experts; were two saves mixed?"
            )


def _entries(grid: Grid, contents: Mapping[str, _RankFile], where: str) -> tuple[dict[str, Entry], list[EqualityCheck]]:
    names: dict[tuple[int, int], dict[str, None]] = {}
    for (_, stage, _), one in grid.places.items():
        for virtual, chunk in enumerate(contents[one.label].chunks):
            names.setdefault((virtual, stage), {}).update(dict.fromkeys(chunk))
    offsets = layer_offsets(names, where)
    held: dict[str, dict[tuple[int, int], list[tuple[Claim, Stored]]]] = {}
    for place, one in sorted(grid.places.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])):
        tensor, stage, expert = place
        for virtual, chunk in enumerate(contents[one.label].chunks):
            counts = local_experts(chunk)
            for name, stored in chunk.items():
                key = with_layer_offset(global_expert(name, counts, expert), (virtual, stage), offsets)
                claim = Claim(stored, (tensor, expert), (grid.tensor, grid.expert))
                held.setdefault(key, {}).setdefault((virtual, stage), []).append((claim, stored))
    entries: dict[str, Entry] = {}
    checks: list[EqualityCheck] = []
    for key, chunks in held.items():
        first, *others = (chunks[chunk] for chunk in sorted(chunks))
        entries[key] = Entry(first[0][1], tuple(claim for claim, _ in first))
        for copies in others:
            checks += _copies(key, first, copies)
    return entries, checks


def _copies(key: str, first: list[tuple[Claim, Stored]], others: list[tuple[Claim, Stored]]) -> Iterator[EqualityCheck]:
    """A later stage's copy of a parameter, as of the embedding where the output is tied to it."""
    by_rank = {claim.coordinate: claim for claim, _ in first}
    for claim, _ in others:
        same = by_rank.get(claim.coordinate)
        if same is None or (same.tensor.shape, same.tensor.dtype) != (claim.tensor.shape, claim.tensor.dtype):
            raise SourceError(f"{key} is in several pipeline stages, with different shapes")
        reason = f"two pipeline stages hold different copies on tensor parallel rank {claim.coordinate[0]}"
        yield EqualityCheck(key, same.tensor, claim.tensor, reason, tolerated=True)
