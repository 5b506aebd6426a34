"""Files, index and config equal what ``save_pretrained`` of the same model writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import streammerge as sm

Weights = Callable[[Path], dict[str, Any]]


def saved_again(merged: Path, saved: Path, limit: int) -> Path:
    """What ``save_pretrained`` writes for a fresh model with the merged weights, as a trainer has it."""
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(merged), dtype=loaded.dtype)
    fresh.load_state_dict(loaded.state_dict())
    for name, buffer in fresh.named_buffers():  # a dtype for the whole model also casts what stays float32
        buffer.data = loaded.get_buffer(name).data
    fresh.save_pretrained(saved, max_shard_size=limit)
    return saved


def without_count(index: Path) -> str:
    """The text of an index file, apart from the number of parameters."""
    return "".join(line for line in index.read_text().splitlines(True) if "total_parameters" not in line)


def test_number_of_parameters(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    sm.merge(make_tiny("tiny"), merged, max_shard_size=150_000, check=False)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    index = json.loads((merged / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_parameters"] == model.num_parameters()


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("limit", [150_000, 600_000, 10**9])
def test_same_files(preset: str, limit: int, make_tiny: Callable[..., Path], tmp_path: Path, weights: Weights) -> None:
    merged = tmp_path / "merged"
    sm.merge(make_tiny(preset), merged, max_shard_size=limit, check=False)
    saved = saved_again(merged, tmp_path / "saved", limit)
    assert {path.name for path in merged.glob("*.safetensors*")} == {path.name for path in saved.glob("*.safetensors*")}
    for path in saved.glob("*.index.json"):
        assert without_count(merged / path.name) == without_count(path)
    ours, theirs = weights(merged), weights(saved)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


def test_index_has_a_shard_of_its_own_for_a_large_tensor(tiny: Path, tmp_path: Path) -> None:
    sm.merge(tiny, tmp_path / "merged", max_shard_size=300_000, check=False)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_bytes())
    alone = index["weight_map"]["model.embed_tokens.weight"]
    assert [name for name, file in index["weight_map"].items() if file == alone] == ["model.embed_tokens.weight"]
    assert index["metadata"]["total_parameters"] == 865_190
    assert index["metadata"]["total_size"] == 2 * 865_190
