"""The benchmark generator: its rank files are exact slices of the global tensors it names."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("click")

import torch
from click.testing import CliRunner
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoTokenizer

from benchmarks.make_checkpoint import (
    DTYPES,
    Written,
    disk_bytes,
    global_tensor,
    main,
    make_checkpoint,
    rank_file,
)
from benchmarks.shapes import PRESETS, TensorSpec, model_shape, preset_config
from benchmarks.sharding import MeshKind, chunk, fake_rank
from benchmarks.values import BLOCK_ELEMENTS, fill_range

SEED = 5
CASES: list[tuple[str, MeshKind, int, str]] = [
    ("tiny", "fsdp", 1, "fp32"),
    ("tiny", "fsdp", 3, "bf16"),
    ("tiny", "fsdp", 8, "fp32"),
    ("tiny", "hsdp", 6, "fp32"),
    ("tiny", "hsdp", 8, "bf16"),
    ("tiny", "fsdp-tp", 6, "fp32"),
    ("tiny", "fsdp-tp", 8, "bf16"),
    ("tiny-moe", "fsdp", 8, "bf16"),
    ("tiny-moe", "fsdp-tp", 6, "fp32"),
]


def _make(out: Path, preset: str, mesh: MeshKind, world: int, dtype: str, sparse: bool = False) -> Written:
    config = preset_config(preset)
    return make_checkpoint(out, config, world_size=world, dtype=DTYPES[dtype], mesh=mesh, seed=SEED, sparse=sparse)


def _load(actor: Path, world: int, rank: int) -> OrderedDict[str, Any]:
    with fake_rank(rank, world):
        state: OrderedDict[str, Any] = torch.load(rank_file(actor, world, rank), weights_only=False)
    return state


def _specs(preset: str, dtype: str) -> tuple[TensorSpec, ...]:
    return model_shape(preset_config(preset), DTYPES[dtype]).specs


def _split(tensors: list[torch.Tensor], parts: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive groups of `parts` tensors."""
    for start in range(0, len(tensors), parts):
        yield tensors[start : start + parts]


def _reassemble(shards: list[DTensor]) -> list[torch.Tensor]:
    """All copies of the global tensor in the ranks' shards, put together from the placements alone."""
    placements = shards[0].placements
    locals_ = [shard._local_tensor for shard in shards]
    if placements == (Replicate(), Shard(0)):
        return [torch.cat(group) for group in _split(locals_, len(locals_) // 2)]
    if placements == (_StridedShard(0, split_factor=2), Shard(0)):
        return [torch.cat(locals_[0::2] + locals_[1::2])]
    if placements == (Shard(0), Shard(1)):
        return [torch.cat([torch.cat(pair, dim=1) for pair in _split(locals_, 2)])]
    assert placements == (Shard(0),)
    if shards[0].device_mesh.size() == len(shards):
        return [torch.cat(locals_)]
    return [torch.cat(locals_[0::2]), torch.cat(locals_[1::2])]


@pytest.mark.parametrize(("preset", "mesh", "world", "dtype"), CASES)
def test_rank_files_rebuild_the_global_tensors(
    tmp_path: Path, preset: str, mesh: MeshKind, world: int, dtype: str
) -> None:
    written = _make(tmp_path, preset, mesh, world, dtype)
    states = [_load(written.actor, world, rank) for rank in range(world)]
    specs = _specs(preset, dtype)
    assert [list(state) for state in states] == [[spec.name for spec in specs]] * world
    for spec in specs:
        expected = global_tensor(spec.source, spec.shape, spec.dtype, SEED)
        entries = [state[spec.name] for state in states]
        assert all(isinstance(entry, DTensor) is not spec.is_buffer for entry in entries)
        copies = entries if spec.is_buffer else _reassemble(entries)
        assert all(entry.shape == spec.shape for entry in entries)
        assert all(torch.equal(copy, expected) and copy.dtype == spec.dtype for copy in copies), spec.name


def test_tensor_parallel_placements(tmp_path: Path) -> None:
    state = _load(_make(tmp_path, "tiny", "fsdp-tp", 4, "bf16").actor, 4, 1)
    layer = "model.layers.0."
    column = (_StridedShard(0, split_factor=2), Shard(0))
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight"):
        assert state[layer + name].placements == column
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert state[layer + name].placements == (Shard(0), Shard(1))
    assert state["lm_head.weight"].placements == state["model.embed_tokens.weight"].placements == column
    norm = state[layer + "input_layernorm.weight"]
    assert (norm.placements, norm.device_mesh.mesh_dim_names) == ((Shard(0),), ("fsdp",))


def test_short_and_empty_shards_lie_on_padded_storages(tmp_path: Path) -> None:
    actor = _make(tmp_path, "tiny", "fsdp", 8, "fp32").actor
    name = "model.layers.0.self_attn.k_proj.weight"  # 10 rows of 130
    shards = [_load(actor, 8, rank)[name]._local_tensor for rank in range(8)]
    assert [len(shard) for shard in shards] == [2, 2, 2, 2, 2, 0, 0, 0]
    assert {shard.untyped_storage().nbytes() for shard in shards} == {2 * 130 * 4}
    assert not any(shards[5].untyped_storage())


def test_tied_parameters_share_a_storage_and_metadata_is_kept(tmp_path: Path) -> None:
    state = _load(_make(tmp_path, "tiny-moe", "fsdp", 2, "fp32").actor, 2, 0)
    head, embedding = (state[name]._local_tensor for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head.data_ptr() == embedding.data_ptr()
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    assert state._metadata["model.embed_tokens"] == {"version": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "fsdp-tp"])
def test_sparse_files_have_holes_and_equal_layout(tmp_path: Path, mesh: MeshKind) -> None:
    full = _make(tmp_path / "full", "tiny", mesh, 2, "fp32")
    sparse = _make(tmp_path / "sparse", "tiny", mesh, 2, "fp32", sparse=True)
    assert sparse.disk_bytes < sparse.file_bytes / 4
    for rank in range(2):
        path = rank_file(sparse.actor, 2, rank)
        assert path.stat().st_size == rank_file(full.actor, 2, rank).stat().st_size
        assert disk_bytes(path) < path.stat().st_size / 4
        for name, entry in _load(sparse.actor, 2, rank).items():
            assert not entry._local_tensor.any(), name


def test_companion_files(tmp_path: Path) -> None:
    actor = _make(tmp_path, "tiny", "fsdp", 3, "bf16").actor
    assert actor == tmp_path / "global_step_1" / "actor"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert json.loads((actor / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 3}
    config = AutoConfig.from_pretrained(actor / "huggingface")
    assert (config.architectures, config.dtype) == (["Qwen2ForCausalLM"], torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(actor / "huggingface")
    assert tokenizer.decode(tokenizer("héllo world")["input_ids"]) == "héllo world"


def test_fill_range_is_a_slice_of_the_global_tensor() -> None:
    shape = (3, BLOCK_ELEMENTS // 2)
    whole = global_tensor("a", shape, torch.bfloat16, 1).view(-1)
    start = BLOCK_ELEMENTS // 3
    part = torch.empty(BLOCK_ELEMENTS + 9, dtype=torch.bfloat16)
    fill_range(part, "a", start, 1)
    assert torch.equal(part, whole[start : start + len(part)])
    assert torch.equal(whole, global_tensor("a", shape, torch.float32, 1).view(-1).bfloat16())
    assert not torch.equal(whole, global_tensor("b", shape, torch.bfloat16, 1).view(-1))
    assert not torch.equal(whole, global_tensor("a", shape, torch.bfloat16, 2).view(-1))


@pytest.mark.parametrize("size", [1, 2, 7, 10, 16, 131])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_chunk_follows_torch(size: int, parts: int) -> None:
    chunks = [len(piece) for piece in torch.chunk(torch.empty(size), parts)]
    ranges = [chunk(size, parts, index) for index in range(parts)]
    assert [len(piece) for piece in ranges] == chunks + [0] * (parts - len(chunks))
    assert [row for piece in ranges for row in piece] == list(range(size))


# Billions of parameters, from the model cards; ties counted once.
@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-32b", 32.764),
        ("llama-70b", 70.554),
        ("deepseek-671b", 671.026),
    ],
)
def test_preset_sizes(preset: str, billions: float) -> None:
    nbytes = model_shape(preset_config(preset), torch.bfloat16).nbytes
    assert nbytes / 2e9 == pytest.approx(billions, abs=6e-4)


def test_command_line(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "x"), "--preset", "tiny", "--world-size", "3", "--dtype", "bf16"]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    assert "disk 0.00" in first.output
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "exists" in again.output
    odd = CliRunner().invoke(main, [str(tmp_path / "y"), *arguments[1:], "--mesh", "hsdp"])
    assert odd.exit_code == 1
    assert not (tmp_path / "y").exists()
    assert "tiny" in PRESETS
