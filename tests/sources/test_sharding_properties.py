"""Whatever mesh and placements cut a state dict, it comes back byte for byte."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.sharding import fake_rank
from streammerge.errors import UnsupportedError
from streammerge.sources import sharding
from streammerge.tensors.fragment import Box
from tests.support.ranks import Cut, Mesh, junk, local_part, placements_of, write_ranks
from tests.support.raw import of_torch, read_folder
from tests.support.results import merge_tightly, read_all
from tests.support.strategies import Checkpoint, checkpoints, cuts, mesh_sizes


def _ours(placement: Placement) -> sharding.Placement:
    if isinstance(placement, Replicate):
        return sharding.Replicate()
    if isinstance(placement, _StridedShard):
        return sharding.StridedShard(placement.dim, placement.split_factor)
    assert isinstance(placement, Shard)
    return sharding.Shard(placement.dim)


@settings(max_examples=80, deadline=None)
@given(checkpoint=checkpoints())
def test_any_checkpoint_comes_back(checkpoint: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_ranks(Path(folder), checkpoint.tensors, checkpoint.mesh, checkpoint.cuts)
        found = read_all(Path(folder))
    assert found == {name: of_torch(tensor) for name, tensor in checkpoint.tensors.items()}


@settings(max_examples=8, deadline=None)
@given(checkpoint=checkpoints(max_world=8))
def test_any_checkpoint_merges(checkpoint: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "ckpt"), Path(folder, "merged")
        write_ranks(source, checkpoint.tensors, checkpoint.mesh, checkpoint.cuts)
        merge_tightly(source, target)
        assert read_folder(target) == {name: of_torch(tensor) for name, tensor in checkpoint.tensors.items()}


@settings(deadline=None)
@given(data=st.data(), sizes=mesh_sizes(), shape=st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_boxes_follow_chunks_in_order(data: st.DataObject, sizes: tuple[int, ...], shape: list[int]) -> None:
    """Numbers of the elements tell where each rank's chunk lies; no pickle is involved, so many cases are."""
    mesh = Mesh(sizes)
    cut = data.draw(cuts(len(shape), mesh).filter(lambda cut: cut.on is None))
    order = sharding.shard_order([_ours(one) for one in placements_of(cut, mesh)], sizes)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for rank in range(mesh.world):
        at = mesh.indices(rank, "coordinate")
        part = local_part(whole, cut, mesh, at)
        box = sharding.local_box(tuple(shape), order, sizes, at)
        assert box.shape == tuple(part.shape)
        if part.numel():
            first = torch.unravel_index(part.reshape(-1)[0], shape)
            assert box.start == tuple(int(i) for i in first)


def _divisible(shape: tuple[int, ...], cut: Cut, mesh: Mesh) -> bool:
    return all(shape[dim] % math.prod(mesh.sizes[m] for m in dims) == 0 for dim, dims in cut.order.items())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), sizes=mesh_sizes(max_dims=2), shape=st.lists(st.integers(1, 48), min_size=1, max_size=2).map(tuple)
)
def test_boxes_agree_with_torch(data: st.DataObject, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """torch's own arithmetic is right for even cuts, and for uneven ones without strided shards."""
    mesh = Mesh(sizes)
    cut = data.draw(cuts(len(shape), mesh).filter(lambda cut: cut.on is None))
    placements = placements_of(cut, mesh)
    if any(isinstance(one, _StridedShard) for one in placements) and not _divisible(shape, cut, mesh):
        shape = tuple(n * mesh.world for n in shape)
    order = sharding.shard_order([_ours(one) for one in placements], sizes)
    for rank in range(mesh.world):
        with fake_rank(rank, mesh.world):
            local, offset = compute_local_shape_and_global_offset(shape, mesh.build(), placements)
        box = sharding.local_box(shape, order, sizes, mesh.indices(rank, "coordinate"))
        assert box.shape == tuple(local)
        if box.numel:
            assert box == Box(tuple(offset), tuple(local))


@pytest.mark.parametrize(("size", "fsdp", "tp"), [(7, 3, 2), (133, 3, 2), (5, 4, 3), (1, 2, 2), (6, 4, 4)])
def test_tensor_parallelism_cuts_before_fsdp(tmp_path: Path, size: int, fsdp: int, tp: int) -> None:
    """Sizes at which replaying `_StridedShard` left to right gives other rows (or shapes) than FSDP2 made."""
    weight = junk((size, 3), torch.float32, size)
    write_ranks(tmp_path, {"w": weight}, Mesh((fsdp, tp)), {"w": Cut({0: (1, 0)})})
    assert read_all(tmp_path) == {"w": of_torch(weight)}


def test_a_split_factor_that_fits_no_mesh_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="split_factor=3"):
        sharding.shard_order([sharding.StridedShard(0, 3), sharding.Shard(0)], (2, 2))
