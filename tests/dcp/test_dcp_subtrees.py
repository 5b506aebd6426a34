"""Which of the tensors are the model: containers, several candidates, wrapper prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import streammerge
from streammerge.errors import SourceError, StreammergeError, UsageError
from tests.dcp.dcp_support import State, merged, module_of, raws, save, stepped

_WRAPPED = ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module.", "_orig_mod.module."]


@pytest.mark.parametrize("prefix", _WRAPPED)
def test_wrappers_in_front(prefix: str, small: State, tmp_path: Path) -> None:
    states = {prefix + name: tensor for name, tensor in small.items()}
    assert merged(save({"model": states}, tmp_path / "ckpt"), tmp_path / "out") == raws(small)


@pytest.mark.parametrize("wrapper", ["_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"])
def test_wrappers_inside(wrapper: str, small: State, tmp_path: Path) -> None:
    states = {name.replace(".layers.0.", f".layers.0.{wrapper}."): tensor for name, tensor in small.items()}
    assert merged(save(states, tmp_path / "ckpt"), tmp_path / "out") == raws(small)


def test_two_keys_of_one_parameter(small: State, tmp_path: Path) -> None:
    states = {**small, "module.model.norm.weight": small["model.norm.weight"] + 1}
    with pytest.raises(SourceError, match=r"model\.norm\.weight occurs twice"):
        merged(save(states, tmp_path / "ckpt"), tmp_path / "out")


def test_several_sets_are_listed_and_one_is_chosen(small: State, tmp_path: Path) -> None:
    ema = {name: tensor + 1 for name, tensor in small.items()}
    folder = save({"model": small, "ema": {"shadow": ema}}, tmp_path / "ckpt")
    with pytest.raises(SourceError, match=r"'model', 'ema\.shadow'.*--subtree"):
        streammerge.merge(folder, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert merged(folder, tmp_path / "model", subtree="model") == raws(small)
    assert merged(folder, tmp_path / "ema", subtree="ema.shadow") == raws(ema)
    with pytest.raises(UsageError, match=r"'emma'.*'model', 'ema\.shadow'"):
        streammerge.merge(folder, tmp_path / "wrong", subtree="emma")


def test_the_top_can_be_chosen_as_it_is_listed(small: State, tmp_path: Path) -> None:
    folder = save({**small, "ema": {name: tensor + 1 for name, tensor in small.items()}}, tmp_path / "ckpt")
    with pytest.raises(SourceError, match=r"\(top\)"):
        streammerge.merge(folder, tmp_path / "none")
    assert merged(folder, tmp_path / "out", subtree="(top)") == raws(small)


def test_top_beside_an_optimizer(small: State, tmp_path: Path) -> None:
    optim = stepped(module_of(small)).state_dict()
    for name in ("optimizer", "optim", "anything"):
        folder = save({**small, name: optim}, tmp_path / name)
        assert merged(folder, tmp_path / f"{name}-out") == raws(small)


def test_parameter_names_with_state_in_them(tmp_path: Path) -> None:
    """An optimizer is known by its structure, not by a word."""
    states = {
        "model.embed_tokens.weight": torch.randn(3, 2),
        "state.weight": torch.randn(2),
        "param_groups_of_heads": torch.randn(3),
        "optimizer.weight": torch.randn(4),
    }
    assert merged(save({"model": states}, tmp_path / "ckpt"), tmp_path / "out") == raws(states)


@pytest.mark.parametrize(
    "others",
    [
        {"step": 7, "note": "text"},
        {"trainer": {"epoch": torch.tensor(1), "best": torch.tensor(0.5)}},
        {"step": torch.tensor(7)},
        {"scheduler": {"last_lr": [0.1, 0.2], "lambdas": [None]}},
    ],
    ids=["scalars", "a container of 0-dim tensors", "a 0-dim tensor", "lists"],
)
def test_trainer_state_is_left_out(others: dict[str, Any], small: State, tmp_path: Path) -> None:
    assert merged(save({"model": small, **others}, tmp_path / "ckpt"), tmp_path / "out") == raws(small)


def test_extra_state_is_left_out(small: State, tmp_path: Path) -> None:
    states = {**small, "model.layers.0._extra_state": {"scale": 1}, "model.layers.0.note": "text"}
    assert merged(save({"model": states}, tmp_path / "ckpt"), tmp_path / "out") == raws(small)


def test_no_model(tmp_path: Path, small: State) -> None:
    folder = save({"step": 3, "note": "text"}, tmp_path / "ckpt")
    with pytest.raises(SourceError, match="no model"):
        streammerge.merge(folder, tmp_path / "out")
    folder = save({"optimizer": stepped(module_of(small)).state_dict()}, tmp_path / "optim")
    with pytest.raises(StreammergeError, match="no "):
        streammerge.merge(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["base_model.model.model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_B.default.weight"],
)
def test_half_an_adapter_is_refused(name: str, small: State, tmp_path: Path) -> None:
    folder = save({"model": {**small, name: torch.ones(2, 4)}}, tmp_path / "ckpt")
    with pytest.raises(SourceError, match="lora_"):
        streammerge.merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
