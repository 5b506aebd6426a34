"""torchtitan's names for Llama 4: expert stacks are transposed, and the config says where the text model sits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dcp.dcp_support import State, logits, merged, save
from tests.dcp.dcp_titan_names import SIZES, titan_name
from tests.support.raw import read_folder


def _titan_llama4(weights: State) -> State:
    made = {}
    for name, tensor in weights.items():
        name = name.removeprefix("language_model.")
        layer = re.search(r"layers\.(\d+)\.", name)
        if name.endswith("experts.gate_up_proj"):
            for which, half in zip(("w1", "w3"), tensor.chunk(2, dim=-1), strict=True):
                made[f"layers.{layer[1]}.moe.experts.{which}"] = half.transpose(1, 2).contiguous()  # type: ignore[index]
        elif name.endswith("experts.down_proj"):
            made[f"layers.{layer[1]}.moe.experts.w2"] = tensor.transpose(1, 2).contiguous()  # type: ignore[index]
        else:
            made[titan_name(name)] = tensor
    return made


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text model of Llama 4, every layer with experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(6)
    config = Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=4, intermediate_size_mlp=12, num_local_experts=3,
        num_experts_per_tok=1, interleave_moe_layer_step=1,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("llama4")
    model.save_pretrained(folder)
    return folder


def test_llama4_text_model(llama4: Path, tmp_path: Path) -> None:
    """Merged under the names of the class in the config."""
    source = save(_titan_llama4(load_file(llama4 / "model.safetensors")), tmp_path / "ckpt")
    assert merged(source, tmp_path / "out", hf_config=llama4) == read_folder(llama4)
    assert torch.equal(logits(tmp_path / "out"), logits(llama4))


def test_llama4_names_of_the_multimodal_model(llama4: Path, tmp_path: Path) -> None:
    """Meta's config is `llama4`: the text part sits below `language_model`, as torchtitan's own export says."""
    weights = load_file(llama4 / "model.safetensors")
    config = {"model_type": "llama4", "text_config": json.loads((llama4 / "config.json").read_text())}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    source = save(_titan_llama4(weights), tmp_path / "ckpt")
    found = merged(source, tmp_path / "out", hf_config=tmp_path / "config")
    assert found == {f"language_model.{name}": raw for name, raw in read_folder(llama4).items()}
