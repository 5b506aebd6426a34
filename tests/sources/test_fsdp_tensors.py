"""What rank files may and may not say about a tensor: copies, duplicates, placements, shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

import streammerge
from benchmarks.sharding import fake_rank
from streammerge.errors import SourceError, StreammergeError, UnsupportedError
from tests.support.data import DATA, PARTIAL, copied
from tests.support.ranks import Cut, Mesh, junk, rank_path, sharded, write_plain, write_ranks
from tests.support.raw import of_torch, read_folder
from tests.support.results import catalogued, merge_tightly, read_all

WEIGHT = junk((8, 6), torch.float32, 1)
OTHER = junk((8, 6), torch.float32, 2)
SAVED = {"w": of_torch(WEIGHT)}

Make = Callable[[int, Any], DTensor]


def write_custom(folder: Path, mesh: Mesh, make: Make, ranks: tuple[int, ...] | None = None) -> Path:
    """Rank files whose tensor `w` is whatever `make` returns for a rank and the real mesh."""
    folder.mkdir(exist_ok=True)
    for rank in ranks or range(mesh.world):
        with fake_rank(rank, mesh.world):
            torch.save({"w": make(rank, mesh.build())}, rank_path(folder, mesh.world, rank))
    return folder


def test_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    """Column, row and norm weights as a real run has them: norms only know the fsdp submesh."""
    tensors = {name: junk((12, 10), torch.bfloat16, seed) for seed, name in enumerate(("q_proj", "o_proj"))}
    tensors["norm"] = junk((10,), torch.float32, 5)
    cuts = {"q_proj": Cut({0: (1, 0)}), "o_proj": Cut({0: (0,), 1: (1,)}), "norm": Cut({0: (0,)}, on=(0,))}
    folder = write_ranks(tmp_path / "ckpt", tensors, Mesh((2, 2)), cuts)
    wanted = {name: of_torch(tensor) for name, tensor in tensors.items()}
    assert read_all(folder) == wanted
    merge_tightly(folder, tmp_path / "out")
    assert read_folder(tmp_path / "out") == wanted


def test_plain_copies_that_differ(tmp_path: Path) -> None:
    changed = WEIGHT.clone()
    changed[7, 5] += 1
    folder = write_plain(tmp_path / "ckpt", {"w": WEIGHT}, {"w": WEIGHT}, {"w": changed})
    with pytest.raises(SourceError, match=r"w: .*rank_0\.pt and .*rank_2\.pt.*--allow-replica-mismatch"):
        merge_tightly(folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    report = merge_tightly(folder, tmp_path / "out", allow_replica_mismatch=True)
    assert any("w: " in warning and "rank_2.pt" in warning for warning in report.warnings)
    assert read_folder(tmp_path / "out") == SAVED


def test_plain_copies_of_other_shapes(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"w: .*\[8, 6\].*rank_0.*\[6, 8\].*rank_1"):
        read_all(write_plain(tmp_path, {"w": WEIGHT}, {"w": WEIGHT.t()}))


def _on_submesh(values: tuple[torch.Tensor, torch.Tensor]) -> Make:
    """Cut over the first dim only, so ranks that differ on the second hold copies nobody mentions."""
    mesh = Mesh((2, 2))
    return lambda rank, built: sharded(values[rank % 2], Cut({0: (0,)}, on=(0,)), mesh, built, rank)


def test_duplicates_that_no_placement_mentions(tmp_path: Path) -> None:
    folder = write_custom(tmp_path / "ckpt", Mesh((2, 2)), _on_submesh((WEIGHT, WEIGHT)))
    assert read_all(folder) == SAVED
    merge_tightly(folder, tmp_path / "out")
    assert read_folder(tmp_path / "out") == SAVED


@pytest.mark.parametrize("tolerate", [False, True])
def test_unequal_duplicates_are_never_tolerated(tolerate: bool, tmp_path: Path) -> None:
    changed = WEIGHT.clone()
    changed.view(torch.uint8)[7, 0] ^= 1
    folder = write_custom(tmp_path / "ckpt", Mesh((2, 2)), _on_submesh((WEIGHT, changed)))
    with pytest.raises(SourceError, match=r"w: .*without a Replicate"):
        merge_tightly(folder, tmp_path / "out", allow_replica_mismatch=tolerate)
    assert not list(tmp_path.glob("*out*"))


def test_partial_sums_are_refused_by_name(tmp_path: Path) -> None:
    def make(rank: int, built: Any) -> DTensor:
        return DTensor.from_local(WEIGHT, built, [Partial()], run_check=False)

    with pytest.raises(UnsupportedError, match=r"\bw in .*rank_0\.pt.*Partial.*partial sums"):
        read_all(write_custom(tmp_path, Mesh((2,)), make))


def test_a_real_partial_checkpoint() -> None:
    with pytest.raises(UnsupportedError, match="Partial"):
        catalogued(DATA / PARTIAL / "ckpt")


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    state = {"model.layers.0._flat_param": torch.zeros(9)}
    with pytest.raises(UnsupportedError, match=r"layers\.0\._flat_param.*SHARDED_STATE_DICT"):
        read_all(write_plain(tmp_path, state))


def _ordered(order: tuple[int, ...], size: int = 8) -> Make:
    """A tensor cut twice along dim 0 by plain shards, in an order that only `shard_order` tells."""
    mesh, weight = Mesh((2, 3)), junk((size, 2), torch.float32, 7)

    def make(rank: int, built: Any) -> DTensor:
        local = sharded(weight, Cut({0: order}), mesh, built, rank)._local_tensor
        meta = TensorMeta(weight.shape, weight.stride(), weight.dtype)
        entries = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
        spec = DTensorSpec(
            built, (Shard(0), Shard(0)), meta, shard_order=entries, use_strided_shard_as_shard_order=False
        )
        return DTensor(local, spec, requires_grad=False)

    return make


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("size", [12, 7])
def test_shard_order_is_honoured(order: tuple[int, ...], size: int, tmp_path: Path) -> None:
    folder = write_custom(tmp_path, Mesh((2, 3)), _ordered(order, size))
    assert read_all(folder) == {"w": of_torch(junk((size, 2), torch.float32, 7))}


@pytest.mark.parametrize(
    "entries", [((0, (0, 0)),), ((1, (0, 1)),), ((0, (0,)),), ((0, ("x", 1)),), (([0], (0, 1)),), 5]
)
def test_a_senseless_shard_order(entries: Any, tmp_path: Path) -> None:
    def make(rank: int, built: Any) -> DTensor:
        made = _ordered((0, 1))(rank, built)
        object.__setattr__(made._spec, "shard_order", entries)  # past torch's own check
        return made

    with pytest.raises(SourceError, match=r"w in .*shard_order|shard_order.*w in "):
        read_all(write_custom(tmp_path, Mesh((2, 3)), make))


@pytest.mark.parametrize("empty", [(0,), (0, 6)])
def test_ranks_outside_of_a_mesh_hold_nothing(empty: tuple[int, ...], tmp_path: Path) -> None:
    """torch gives them an empty tensor of one dim, whatever the weight has."""
    for rank in range(4):
        with fake_rank(rank, 4):
            meta = TensorMeta(WEIGHT.shape, WEIGHT.stride(), WEIGHT.dtype)
            spec = DTensorSpec(DeviceMesh("cpu", [0, 1]), (Shard(0),), meta)
            local = WEIGHT.chunk(2)[rank].clone() if rank < 2 else torch.empty(empty)
            part = DTensor(local, spec, requires_grad=False)
            torch.save({"w": part, "norm": OTHER}, rank_path(tmp_path, 4, rank))
    assert read_all(tmp_path) == {**SAVED, "norm": of_torch(OTHER)}


def _with_spec(**changes: Any) -> Make:
    """A sound shard whose spec is then changed."""

    def make(rank: int, built: Any) -> DTensor:
        made = sharded(WEIGHT, Cut({0: (0,)}, stored="exact"), Mesh((2,)), built, rank)
        for name, value in changes.items():
            object.__setattr__(made._spec, name, value)
        return made

    return make


@pytest.mark.parametrize(
    "placements",
    [(), (Shard(0), Shard(0)), (Shard(1),), (Shard(2),), (Shard(-3),), (Replicate(),), None, "Shard(0)", (None,)],
)
def test_placements_that_do_not_fit_are_refused(placements: Any, tmp_path: Path) -> None:
    with pytest.raises((SourceError, UnsupportedError), match=r"\bw(:| in )"):
        read_all(write_custom(tmp_path, Mesh((2,)), _with_spec(placements=placements)))


def test_negative_dims_count_from_the_end(tmp_path: Path) -> None:
    assert read_all(write_custom(tmp_path, Mesh((2,)), _with_spec(placements=(Shard(-2),)))) == SAVED


@pytest.mark.parametrize("mesh", [None, "a mesh", 3])
def test_a_spec_without_a_mesh_is_refused(mesh: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"rank_0\.pt"):
        read_all(write_custom(tmp_path, Mesh((2,)), _with_spec(mesh=mesh)))


@pytest.mark.parametrize("kept", [slice(0, 3), slice(0, 0)])
def test_local_parts_of_the_wrong_size(kept: slice, tmp_path: Path) -> None:
    def make(rank: int, built: Any) -> DTensor:
        made = sharded(WEIGHT, Cut({0: (0,)}), Mesh((2,)), built, rank)
        if rank == 1:
            made._local_tensor = made._local_tensor[kept]
        return made

    with pytest.raises(SourceError, match=r"w in .*rank_1\.pt.*\[4, 6\].*stores"):
        read_all(write_custom(tmp_path, Mesh((2,)), make))


class TestHiddenExpertParallelism:
    """Experts cut into plain parameters before FSDP saw them: the placements never mention it."""

    name = "fsdp2_moe_ep_hidden_2x2"

    def test_merges_exactly(self, tmp_path: Path) -> None:
        merge_tightly(DATA / self.name / "ckpt", tmp_path / "out")
        assert read_folder(tmp_path / "out") == read_folder(DATA / self.name / "expected")

    def test_needs_the_expert_count(self, tmp_path: Path) -> None:
        folder = copied(self.name, tmp_path / "ckpt")
        config = folder / "huggingface" / "config.json"
        config.write_text(config.read_text().replace('"num_local_experts"', '"x"').replace('"num_experts"', '"x"'))
        with pytest.raises(StreammergeError, match="experts"):
            merge_tightly(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("count", [3, 5, 12])
    def test_another_count_is_refused(self, count: int, tmp_path: Path) -> None:
        """3 would mean that both halves are the same stack, which their bytes deny."""
        folder = copied(self.name, tmp_path / "ckpt")
        config = folder / "huggingface" / "config.json"
        text = config.read_text()
        assert '_experts": 6' in text
        config.write_text(text.replace('_experts": 6', f'_experts": {count}'))
        with pytest.raises(StreammergeError, match="experts"):
            merge_tightly(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_missing_slice_is_refused(self, tmp_path: Path) -> None:
        folder = copied(self.name, tmp_path / "ckpt")
        rank_path(folder, 4, 1).unlink()
        with pytest.raises(SourceError, match="rank_1"):
            streammerge.plan(folder, tmp_path / "out", dtype="keep")
