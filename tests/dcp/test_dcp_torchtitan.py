"""torchtitan's own names and layouts, made from a transformers model by the inverse of its `to_hf`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import streammerge
from streammerge.errors import SourceError, UnsupportedError, UsageError
from tests.dcp.dcp_support import State, logits, merged, rows_of_rank, save, save_ranks
from tests.dcp.dcp_titan_names import SIZES, titan_name
from tests.support.raw import read_folder

_MOE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_WHICH = {"gate": "w1", "down": "w2", "up": "w3"}


def pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from halves, as Hugging Face rotates, to neighbouring pairs."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def to_titan(weights: State, config: Any) -> State:
    """The torchtitan state dict of a Hugging Face one."""
    made: State = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            experts.setdefault(f"layers.{expert[1]}.moe.experts.{_WHICH[expert[3]]}", []).append(tensor)
            continue
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = pairs(tensor, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        made[titan_name(name)] = tensor
    return made | {name: torch.stack(parts) for name, parts in experts.items()}


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **more}))


def _qwen3(**more: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 2, "head_dim": 8, **more}))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SIZES, **_MOE, num_key_value_heads=2, head_dim=8, num_experts=4)
    return Qwen3MoeForCausalLM(config)


def _deepseek(**more: Any) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{
            **SIZES,
            **_MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 6,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            **more,
        }
    )
    return DeepseekV3ForCausalLM(config)


_MODELS: dict[str, Callable[[], Any]] = {
    "llama, GQA": _llama,
    "llama, one key head": lambda: _llama(num_key_value_heads=1),
    "llama, tied": lambda: _llama(tie_word_embeddings=True),
    "llama, large heads": lambda: _llama(head_dim=6),
    "qwen3": _qwen3,
    "qwen3, tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
    "deepseek_v3, no q_lora": lambda: _deepseek(q_lora_rank=None),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, State]]:
    """Name -> the folder of `save_pretrained`, the config, and torchtitan's state dict."""
    made: dict[str, tuple[Path, Any, State]] = {}

    def get(name: str) -> tuple[Path, Any, State]:
        from safetensors.torch import load_file

        if name not in made:
            torch.manual_seed(5)
            model = _MODELS[name]()
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.normal_(std=0.3)  # also norms and biases, so that no two tensors are alike
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            weights = load_file(folder / "model.safetensors")
            made[name] = (folder, model.config, to_titan(weights, model.config))
        return made[name]

    return get


Models = Callable[[str], tuple[Path, Any, State]]


@pytest.mark.parametrize("name", _MODELS)
def test_same_as_save_pretrained(name: str, models: Models, tmp_path: Path) -> None:
    folder, _, state = models(name)
    others = {"optimizer": {"state.norm.weight.exp_avg": torch.ones(3), "param_groups.norm.weight.lr": 0.1}}
    others["train_state"] = {"step": torch.tensor(4)}
    save({**state, **others}, tmp_path / "step-4")
    assert merged(tmp_path / "step-4", tmp_path / "out", hf_config=folder) == read_folder(folder)
    assert torch.equal(logits(tmp_path / "out"), logits(folder))


@pytest.mark.parametrize("name", ["llama, GQA", "qwen3_moe", "deepseek_v3"])
def test_over_ranks(name: str, models: Models, tmp_path: Path) -> None:
    """Cut where neither heads nor experts end."""
    folder, _, state = models(name)
    source = tmp_path / "step-4"
    save_ranks(source, 3, rows_of_rank(state, 3), lambda: dcp.FileSystemWriter(source))
    assert merged(source, tmp_path / "out", hf_config=folder) == read_folder(folder)


@pytest.mark.parametrize("name", ["llama, GQA", "qwen3"])
def test_spelling_since_2026(name: str, models: Models, tmp_path: Path) -> None:
    folder, _, state = models(name)
    renamed = {re.sub(r"attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", n): t for n, t in state.items()}
    renamed["lm_head.weight"] = renamed.pop("output.weight")
    assert merged(save(renamed, tmp_path / "ckpt"), tmp_path / "out", hf_config=folder) == read_folder(folder)


def test_tied_embeddings_that_torchtitan_saves_twice(models: Models, tmp_path: Path) -> None:
    folder, _, state = models("qwen3, tied")
    twice = {**state, "output.weight": state["tok_embeddings.weight"]}
    assert merged(save(twice, tmp_path / "ckpt"), tmp_path / "out", hf_config=folder) == read_folder(folder)


def test_balancing_bias_of_qwen3_is_dropped(models: Models, tmp_path: Path) -> None:
    folder, _, state = models("qwen3_moe")
    more = {**state, "layers.0.moe.expert_bias": torch.ones(4), "layers.1.moe.expert_bias_E": torch.ones(4)}
    source = save(more, tmp_path / "ckpt")
    assert set(streammerge.plan(source, "never", hf_config=folder).dropped) == set(more) - set(state)
    assert merged(source, tmp_path / "out", hf_config=folder) == read_folder(folder)


def test_rotary_table_of_older_versions_is_dropped(models: Models, tmp_path: Path) -> None:
    """Until 2025 `freqs_cis` was a persistent buffer, so it is in every step's checkpoint of that time."""
    folder, _, state = models("llama, GQA")
    source = save({**state, "freqs_cis": torch.ones(32, 2, dtype=torch.complex64)}, tmp_path / "ckpt")
    assert merged(source, tmp_path / "out", hf_config=folder) == read_folder(folder)


def test_both_spellings_at_once(models: Models, tmp_path: Path) -> None:
    """One of the two would be lost."""
    folder, _, state = models("llama, GQA")
    for extra, known in (
        ("lm_head.weight", "output.weight"),
        ("layers.0.attention.qkv_linear.wq.weight", "layers.0.attention.wq.weight"),
    ):
        source = save({**state, extra: state[known] + 1}, tmp_path / extra)
        with pytest.raises(SourceError, match=re.escape(extra)):
            streammerge.plan(source, "never", hf_config=folder)


@pytest.mark.parametrize("name", ["layers.0.attention.sinks", "vision.weight", "layers.0.moe.experts.w4"])
def test_unknown_names_are_refused(name: str, models: Models, tmp_path: Path) -> None:
    folder, _, state = models("llama, GQA")
    with pytest.raises(UnsupportedError, match=re.escape(name)):
        streammerge.merge(save({**state, name: torch.ones(2)}, tmp_path / "ckpt"), tmp_path / "out", hf_config=folder)
    assert not (tmp_path / "out").exists()


def test_without_a_config(models: Models, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--hf-config"):
        streammerge.merge(save(models("llama, GQA")[2], tmp_path / "ckpt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_another_architecture(models: Models, tmp_path: Path, hf_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="'qwen2'"):
        streammerge.merge(save(models("llama, GQA")[2], tmp_path / "ckpt"), tmp_path / "out", hf_config=hf_folder)


_Q = "layers.0.attention.wq.weight"
_WRONG = {
    "odd heads": (_Q, torch.ones(12, 16)),
    "rows that heads do not divide": (_Q, torch.ones(17, 16)),
    "no dims": (_Q, torch.tensor(1.0)),
}


@pytest.mark.parametrize("case", _WRONG)
def test_sizes_that_contradict_the_config(case: str, models: Models, tmp_path: Path) -> None:
    folder, _, state = models("llama, GQA")
    name, tensor = _WRONG[case]
    with pytest.raises(SourceError, match=re.escape(name)):
        streammerge.plan(save({**state, name: tensor}, tmp_path / "ckpt"), "never", hf_config=folder)


@pytest.mark.parametrize("shape", [(), (3,), (3, 8, 16)])
def test_expert_stacks_of_another_shape(shape: tuple[int, ...], models: Models, tmp_path: Path) -> None:
    """As many experts as the config says, or none at all is merged."""
    folder, _, state = models("qwen3_moe")
    name = "layers.0.moe.experts.w1"
    with pytest.raises(SourceError, match=r"experts"):
        streammerge.plan(save({**state, name: torch.ones(shape)}, tmp_path / "ckpt"), "never", hf_config=folder)
