"""Fixtures of the DCP tests: a tiny model, its folder, and checkpoints saved by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dcp.dcp_real_ranks import run_ranks
from tests.dcp.dcp_support import State, save


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model with sizes that three ranks cannot share evenly, as `save_pretrained` writes it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, tie_word_embeddings=False, dtype=torch.float32,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen2")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def weights_of(hf_folder: Path) -> State:
    """The tensors of that model. Not to be changed."""
    from safetensors.torch import load_file

    return dict(load_file(hf_folder / "model.safetensors"))


@pytest.fixture(scope="session")
def small() -> State:
    """A few tensors of several dtypes and numbers of dims. Not to be changed."""
    torch.manual_seed(2)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4),
        "model.layers.0.mlp.gate_proj.weight": torch.randn(6, 4).bfloat16(),
        "model.norm.weight": torch.randn(4),
        "model.scale": torch.tensor(2.5),
        "lm_head.weight": torch.randn(7, 4).half(),
    }


@pytest.fixture
def saved_small(small: State, tmp_path: Path) -> Path:
    """The small state in a DCP folder that a test may damage."""
    return save(small, tmp_path / "ckpt")


@pytest.fixture(scope="session")
def real_ranks(hf_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders saved by three communicating processes; see `dcp_real_ranks`."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(hf_folder, out)
    return out


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> list[str] | None:
    """Name the differing tensors only."""
    if op == "==" and isinstance(left, dict) and isinstance(right, dict):
        return ["tensors differ:", *sorted(str(n) for n in left.keys() | right.keys() if left.get(n) != right.get(n))]
    return None
