"""Meshes whose rows do not ascend: FSDP2 cuts by process group rank, other paths by coordinate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch

from streammerge.errors import SourceError, UnsupportedError
from tests.support.ranks import Cut, Mesh, junk, rank_path, write_ranks
from tests.support.raw import of_torch
from tests.support.results import read_all

PERMUTED = Mesh((4,), (2, 0, 3, 1))
EVEN = {"even.weight": junk((8, 3), torch.float32, 1)}
UNEVEN = {"uneven.weight": junk((7, 3), torch.float32, 2)}

By = Literal["group", "coordinate"]


def _write(folder: Path, tensors: dict[str, torch.Tensor], by: By, mesh: Mesh = PERMUTED) -> Path:
    return write_ranks(folder, tensors, mesh, dict.fromkeys(tensors, Cut({0: (0,)})), by=by)


def _wanted(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: of_torch(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("by", ["group", "coordinate"])
@pytest.mark.parametrize("mesh_order", ["auto", "same"])
def test_uneven_sizes_settle_it_for_all_tensors(by: By, mesh_order: str, tmp_path: Path) -> None:
    folder = _write(tmp_path, {**EVEN, **UNEVEN}, by)
    order = by if mesh_order == "same" else "auto"
    assert read_all(folder, mesh_order=order) == _wanted({**EVEN, **UNEVEN})


@pytest.mark.parametrize(("by", "wrong"), [("group", "coordinate"), ("coordinate", "group")])
def test_a_choice_against_the_sizes_is_refused(by: By, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"--mesh-order {wrong} contradicts"):
        read_all(_write(tmp_path, {**EVEN, **UNEVEN}, by), mesh_order=wrong)


@pytest.mark.parametrize("by", ["group", "coordinate"])
def test_even_sizes_need_a_choice(by: By, tmp_path: Path) -> None:
    folder = _write(tmp_path, EVEN, by)
    with pytest.raises(UnsupportedError, match=r"even\.weight.*\[2, 0, 3, 1\].*--mesh-order group"):
        read_all(folder)
    assert read_all(folder, mesh_order=by) == _wanted(EVEN)
    other = "coordinate" if by == "group" else "group"
    assert read_all(folder, mesh_order=other) != _wanted(EVEN)


def test_sizes_that_point_both_ways(tmp_path: Path) -> None:
    by_group = _write(tmp_path / "group", UNEVEN, "group")
    by_coordinate = _write(tmp_path / "coordinate", UNEVEN, "coordinate")
    shutil.copyfile(rank_path(by_coordinate, 4, 1), rank_path(by_group, 4, 1))
    with pytest.raises(SourceError, match=r"uneven\.weight"):
        read_all(by_group)


@pytest.mark.parametrize("mesh_order", ["auto", "group", "coordinate"])
def test_a_permutation_with_ascending_rows_is_not_ambiguous(mesh_order: str, tmp_path: Path) -> None:
    """[[0, 2], [1, 3]]: a transposed mesh; every row and column ascends."""
    tensors = {"w": junk((8, 8), torch.float32, 5)}
    folder = write_ranks(tmp_path, tensors, Mesh((2, 2), (0, 2, 1, 3)), {"w": Cut({0: (0,), 1: (1,)})})
    assert read_all(folder, mesh_order=mesh_order) == _wanted(tensors)


@pytest.mark.parametrize("by", ["group", "coordinate"])
def test_only_dims_that_cut_matter(by: By, tmp_path: Path) -> None:
    """Replicas in any order are replicas."""
    tensors = {"w": junk((8, 8), torch.float32, 6)}
    folder = write_ranks(tmp_path, tensors, Mesh((2, 2), (2, 3, 0, 1)), {"w": Cut({0: (1,)})}, by=by)
    assert read_all(folder) == _wanted(tensors)


@pytest.mark.parametrize("by", ["group", "coordinate"])
def test_two_dims_out_of_order(by: By, tmp_path: Path) -> None:
    tensors = {"w": junk((7, 5), torch.float32, 7)}
    mesh = Mesh((2, 3), (5, 4, 3, 2, 1, 0))
    folder = write_ranks(tmp_path, tensors, mesh, {"w": Cut({0: (0,), 1: (1,)})}, by=by)
    assert read_all(folder) == _wanted(tensors)
