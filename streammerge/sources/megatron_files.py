"""The files of Megatron's ``torch`` format: one folder per model parallel rank.

``mp_rank_TT[_PPP][_EEE]``: tensor, pipeline and expert parallel rank; the second number is there when the model is
spread over pipeline stages, the third when over expert parallel ranks (Megatron-core 0.8 to 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streammerge.errors import SourceError, UnsupportedError

__all__ = ["Grid", "RankPath", "has_model_parallel_ranks", "place_ranks", "rank_paths", "refuse_empty_folders"]

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
# Written by Megatron-LM, by very old versions of it (weights and optimizer apart), and by verl in spring 2025.
_CONTENT = ("model_optim_rng.pt", "model_rng.pt", "model.pt")
# verl's LoRA runs (2025): files, not folders.
_ADAPTER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?_adapter\.pt")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class RankPath:
    """A rank's file, and the numbers in its folder's name."""

    path: Path
    label: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the parallel dims, and the (tensor, pipeline, expert) parallel rank of each file."""

    tensor: int
    pipeline: int
    expert: int
    places: Mapping[tuple[int, int, int], RankPath]


def has_model_parallel_ranks(folder: Path) -> bool:
    """Whether the folder itself is a save in the ``torch`` format, or one of adapters."""
    return bool(rank_paths(folder))


def rank_paths(folder: Path) -> list[RankPath]:
    """The rank files in a folder, by name; optimizer, rng and other files are passed over."""
    found = []
    for path in sorted(folder.glob("mp_rank_*")):
        inside = _FOLDER.fullmatch(path.name)
        if inside:
            content = next((path / name for name in _CONTENT if (path / name).is_file()), None)
            if content is not None:
                found.append(RankPath(content, path.name, _numbers(inside)))
        adapter = _ADAPTER.fullmatch(path.name)
        if adapter and path.is_file():
            found.append(RankPath(path, path.name, _numbers(adapter)))
    return found


def refuse_empty_folders(folder: Path, paths: Sequence[RankPath]) -> None:
    """Refuse a save in which a rank's folder has no model in it.

    Raises:
        SourceError: naming such folders.
    """
    used = {one.label for one in paths}
    empty = sorted(
        path.name for path in folder.glob("mp_rank_*") if _FOLDER.fullmatch(path.name) and path.name not in used
    )
    folders = [one for one in paths if one.path.parent != folder]
    if empty and folders:
        shown = ", ".join(empty[:8]) + (", ..." if len(empty) > 8 else "")
        raise SourceError(
            f"{folder}: no {folders[0].path.name} in {shown}; the save was interrupted, or the files were not copied"
        )


def _numbers(found: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(text) for text in found.groups() if text is not None)


def place_ranks(
    paths: Sequence[RankPath], settings: Mapping[str, object], second_is_expert: bool | None, where: str
) -> Grid:
    """Find every file's place, and name the files that are missing.

    Args:
        settings: what the files' ``args`` recorded; empty without.
        second_is_expert: what the contents say of a second number, where there are only two: expert
            parallel rank or pipeline stage. None when they do not tell. It counts when ``args`` say nothing.

    Raises:
        SourceError: files are missing, or the names contradict each other.
        UnsupportedError: nothing tells what the second number is.
    """
    lengths = {len(one.numbers) for one in paths}
    if len(lengths) != 1:
        raise SourceError(f"{where}: folder names of two kinds ({paths[0].label} and others); were two saves mixed?")
    sizes = [_size(settings, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
    if len(paths[0].numbers) != 2:
        second_is_expert = False
    elif (sizes[1] or 1) > 1 or (sizes[2] or 1) > 1:
        second_is_expert = (sizes[1] or 1) == 1
    elif second_is_expert is None:
        raise UnsupportedError(
            f"{where}: nothing tells whether the second number of {paths[-1].label} is a pipeline stage or an expert "
            "parallel rank; put the training's transformer_config.json or the model's huggingface/config.json beside it"
        )
    places: dict[tuple[int, int, int], RankPath] = {}
    for one in paths:
        other = places.setdefault(_place(one.numbers, second_is_expert), one)
        if other is not one:
            raise SourceError(f"{where}: {other.label} and {one.label} are of the same rank; move one of them away")
    found = [1 + max(place[dim] for place in places) for dim in range(3)]
    if max(found) > _MOST_RANKS:
        raise SourceError(f"{where}: no job has that many ranks")
    for size, seen, kind in zip(sizes, found, ("tensor", "pipeline", "expert"), strict=True):
        if size is not None and seen > size:
            raise SourceError(f"{where}: {kind} parallel rank {seen - 1}, but the job had {size} of them")
    tensor, pipeline, expert = (size or seen for size, seen in zip(sizes, found, strict=True))
    grid = Grid(tensor, pipeline, expert, places)
    _check_complete(grid, next(iter(lengths)), second_is_expert, where)
    _check_pairs(grid, settings, next(iter(lengths)), second_is_expert, where)
    return grid


def _place(numbers: tuple[int, ...], second_is_expert: bool) -> tuple[int, int, int]:
    tensor, *rest = numbers
    if len(rest) == 1:
        return (tensor, 0, rest[0]) if second_is_expert else (tensor, rest[0], 0)
    return (tensor, rest[0], rest[1]) if rest else (tensor, 0, 0)


def _size(settings: Mapping[str, object], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _check_complete(grid: Grid, numbers: int, second_is_expert: bool, where: str) -> None:
    """Each stage needs a file of every tensor parallel rank, and one of every expert parallel rank.

    Not every pair has to exist: the dense and the expert grid share their ranks.
    """
    missing: list[str] = []
    for stage in range(grid.pipeline):
        tensors = {tensor for tensor, pipeline, _ in grid.places if pipeline == stage}
        experts = {expert for _, pipeline, expert in grid.places if pipeline == stage} or set(range(grid.expert))
        lost = [(f"{tensor:02}", "???") for tensor in range(grid.tensor) if tensor not in tensors]
        lost += [("??", f"{expert:03}") for expert in range(grid.expert) if expert not in experts]
        missing += [_label(tensor, f"{stage:03}", expert, numbers, second_is_expert) for tensor, expert in lost]
    _refuse_missing(grid, missing, where)


def _check_pairs(grid: Grid, settings: Mapping[str, object], numbers: int, second_is_expert: bool, where: str) -> None:
    """Where the expert tensor parallel size is known, the pairs of ranks that hold the experts are as well.

    In Megatron's order of ranks (``tp-cp-ep-dp-pp``, core 0.8 to 0.20) the expert grid lies over the dense
    one from the stage's first rank on: its rank i is tensor parallel rank i % TP.
    """
    inner = _size(settings, "expert_tensor_parallel_size")
    if inner is None or grid.expert == 1:
        return
    wanted = [(rank % grid.tensor, rank // inner) for rank in range(inner * grid.expert)]
    missing = [
        _label(f"{tensor:02}", f"{stage:03}", f"{expert:03}", numbers, second_is_expert)
        for stage in range(grid.pipeline)
        for tensor, expert in wanted
        if (tensor, stage, expert) not in grid.places
    ]
    _refuse_missing(grid, missing, where)


def _refuse_missing(grid: Grid, missing: Sequence[str], where: str) -> None:
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise SourceError(
            f"{where}: rank files are missing: {shown}. The job had tensor x pipeline x expert parallel sizes "
            f"{grid.tensor} x {grid.pipeline} x {grid.expert}; if they are on another node's disk, copy them here"
        )


def _label(tensor: str, pipeline: str, expert: str, numbers: int, second_is_expert: bool) -> str:
    if numbers == 1:
        # A name with one number belongs to a job without stages and expert parallelism, of which it is the first.
        return f"mp_rank_{tensor}" + (f"_{pipeline}" if pipeline != "000" else "")
    if numbers == 2:
        return f"mp_rank_{tensor}_{expert if second_is_expert else pipeline}"
    return f"mp_rank_{tensor}_{pipeline}_{expert}"
