"""Model shapes for benchmark checkpoints: presets, and the state dict entries they lead to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config


@dataclass(frozen=True)
class TensorSpec:
    """One entry of `model.state_dict()`.

    `shape` counts elements. `source` is the name whose values the entry holds: its own, or for a tied
    parameter that of the first name of the pair. Buffers stay plain tensors under FSDP.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    is_buffer: bool


@dataclass(frozen=True)
class ModelShape:
    """A model without data: its config, its entries in state dict order, and the empty state dict.

    `template` is what `state_dict()` returned on the meta device; it carries the `_metadata` attribute
    that torch pickles together with the real thing.
    """

    config: PretrainedConfig
    specs: tuple[TensorSpec, ...]
    template: OrderedDict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model, tied parameters counted once."""
        own = (s for s in self.specs if s.source == s.name)
        return sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in own)


def _qwen25(hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )


def _llama_70b() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def _tiny_moe() -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=70,
        intermediate_size=101,
        moe_intermediate_size=33,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        vocab_size=1001,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


# Shapes are those of the published config.json files. The two tiny ones have dims that divide by no usual
# world size, some so small (10 rows, 6 experts) that the last of 8 ranks hold nothing. The config class's
# own defaults are the 671B model; its multi-token-prediction layer is not part of the transformers model.
PRESETS: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny": lambda: _qwen25(130, 347, 2, 13, 1, 2003, tied=False),
    "tiny-moe": _tiny_moe,
    "qwen2.5-0.5b": lambda: _qwen25(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": lambda: _qwen25(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-7b": lambda: _qwen25(3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen2.5-32b": lambda: _qwen25(5120, 27648, 64, 40, 8, 152064, tied=False),
    "llama-70b": _llama_70b,
    "deepseek-671b": DeepseekV3Config,
}


def preset_config(preset: str) -> PretrainedConfig:
    """The HF config of `preset`; its `dtype` is bfloat16 whatever the dtype of the shards.

    The two differ in practice: trainers keep fp32 master weights beside a bf16 config.
    """
    config = PRESETS[preset]()
    config.dtype = torch.bfloat16
    return config


def model_shape(config: PretrainedConfig, dtype: torch.dtype) -> ModelShape:
    """The state dict entries of `config` with parameters in `dtype`, from a model on the meta device.

    Names and shapes are those transformers holds in memory, so experts are fused from version 5 on.
    Float buffers keep the dtype the model gives them, as FSDP casts parameters only.
    """
    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=torch.float32)
    template: OrderedDict[str, torch.Tensor] = model.state_dict()
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    return ModelShape(config, tuple(_specs(model, template, dtype)), template)


def _specs(model: torch.nn.Module, template: dict[str, torch.Tensor], dtype: torch.dtype) -> list[TensorSpec]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_name: dict[int, str] = {}
    specs = []
    for name, tensor in template.items():
        parameter = parameters.get(name)
        source = name if parameter is None else first_name.setdefault(id(parameter), name)
        own_dtype = tensor.dtype if parameter is None else dtype
        specs.append(TensorSpec(name, tuple(tensor.shape), own_dtype, source, parameter is None))
    return specs
