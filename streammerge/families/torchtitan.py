"""torchtitan's own parameter names -> Hugging Face names, as tables.

From the ``to_hf`` of torchtitan's state dict adapters (main, 2025-08 to 2026-08). A value is the Hugging Face name,
or that and a layout rule; ``{L}`` is a layer, ``{E}`` an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.families.config import ModelConfig
from streammerge.tensors.virtual import Tensor, concat, permute, select, strided

__all__ = ["from_torchtitan", "is_torchtitan"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Where a tensor goes: a Hugging Face name, and what happens to its layout."""

    name: str
    layout: str = "same"


_Table = Mapping[str, "str | _Rule"]


def _both_spellings(table: _Table) -> dict[str, _Rule]:
    """Since 2026 q/k/v sit below ``qkv_linear`` and the head is called ``lm_head``."""
    rules = {name: rule if isinstance(rule, _Rule) else _Rule(rule) for name, rule in table.items()}
    for name, rule in list(rules.items()):
        if re.search(r"attention\.w[qkv]\.", name):
            rules[name.replace("attention.", "attention.qkv_linear.")] = rule
        if name == "output.weight":
            rules["lm_head.weight"] = rule
    return rules


_NAMES: _Table = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layers.{L}.attention_norm.weight": "model.layers.{L}.input_layernorm.weight",
    "layers.{L}.ffn_norm.weight": "model.layers.{L}.post_attention_layernorm.weight",
    "layers.{L}.attention.wo.weight": "model.layers.{L}.self_attn.o_proj.weight",
    "layers.{L}.feed_forward.w1.weight": "model.layers.{L}.mlp.gate_proj.weight",
    "layers.{L}.feed_forward.w3.weight": "model.layers.{L}.mlp.up_proj.weight",
    "layers.{L}.feed_forward.w2.weight": "model.layers.{L}.mlp.down_proj.weight",
}
_QKV: _Table = {
    "layers.{L}.attention.wq.weight": "model.layers.{L}.self_attn.q_proj.weight",
    "layers.{L}.attention.wk.weight": "model.layers.{L}.self_attn.k_proj.weight",
    "layers.{L}.attention.wv.weight": "model.layers.{L}.self_attn.v_proj.weight",
}
_EXPERTS: _Table = {
    "layers.{L}.moe.experts.w1": _Rule("model.layers.{L}.mlp.experts.{E}.gate_proj.weight", "experts"),
    "layers.{L}.moe.experts.w3": _Rule("model.layers.{L}.mlp.experts.{E}.up_proj.weight", "experts"),
    "layers.{L}.moe.experts.w2": _Rule("model.layers.{L}.mlp.experts.{E}.down_proj.weight", "experts"),
    "layers.{L}.moe.router.gate.weight": "model.layers.{L}.mlp.gate.weight",
}

_LLAMA3: _Table = {
    **_NAMES,
    **_QKV,
    # torchtitan rotates neighbouring pairs, Hugging Face the two halves of a head.
    "layers.{L}.attention.wq.weight": _Rule("model.layers.{L}.self_attn.q_proj.weight", "rope_q"),
    "layers.{L}.attention.wk.weight": _Rule("model.layers.{L}.self_attn.k_proj.weight", "rope_k"),
}
_QWEN3: _Table = {
    **_NAMES,
    **_QKV,
    **_EXPERTS,
    "layers.{L}.attention.q_norm.weight": "model.layers.{L}.self_attn.q_norm.weight",
    "layers.{L}.attention.k_norm.weight": "model.layers.{L}.self_attn.k_norm.weight",
    "layers.{L}.moe.expert_bias": _Rule("", "drop"),
    "layers.{L}.moe.expert_bias_E": _Rule("", "drop"),
}
_DEEPSEEK: _Table = {
    **_NAMES,
    **_EXPERTS,
    "layers.{L}.attention.wq.weight": "model.layers.{L}.self_attn.q_proj.weight",
    "layers.{L}.attention.wq_a.weight": "model.layers.{L}.self_attn.q_a_proj.weight",
    "layers.{L}.attention.q_norm.weight": "model.layers.{L}.self_attn.q_a_layernorm.weight",
    "layers.{L}.attention.wq_b.weight": "model.layers.{L}.self_attn.q_b_proj.weight",
    "layers.{L}.attention.wkv_a.weight": "model.layers.{L}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{L}.attention.kv_norm.weight": "model.layers.{L}.self_attn.kv_a_layernorm.weight",
    "layers.{L}.attention.wkv_b.weight": "model.layers.{L}.self_attn.kv_b_proj.weight",
    "layers.{L}.moe.shared_experts.w1.weight": "model.layers.{L}.mlp.shared_experts.gate_proj.weight",
    "layers.{L}.moe.shared_experts.w3.weight": "model.layers.{L}.mlp.shared_experts.up_proj.weight",
    "layers.{L}.moe.shared_experts.w2.weight": "model.layers.{L}.mlp.shared_experts.down_proj.weight",
    "layers.{L}.moe.expert_bias": "model.layers.{L}.mlp.gate.e_score_correction_bias",
    "layers.{L}.moe.expert_bias_E": "model.layers.{L}.mlp.gate.e_score_correction_bias",
}
_LLAMA4_LAYER = "language_model.model.layers.{L}."
_LLAMA4: _Table = {
    "tok_embeddings.weight": "language_model.model.embed_tokens.weight",
    "norm.weight": "language_model.model.norm.weight",
    "output.weight": "language_model.lm_head.weight",
    "layers.{L}.attention.wq.weight": _LLAMA4_LAYER + "self_attn.q_proj.weight",
    "layers.{L}.attention.wk.weight": _LLAMA4_LAYER + "self_attn.k_proj.weight",
    "layers.{L}.attention.wv.weight": _LLAMA4_LAYER + "self_attn.v_proj.weight",
    "layers.{L}.attention.wo.weight": _LLAMA4_LAYER + "self_attn.o_proj.weight",
    "layers.{L}.attention_norm.weight": _LLAMA4_LAYER + "input_layernorm.weight",
    "layers.{L}.ffn_norm.weight": _LLAMA4_LAYER + "post_attention_layernorm.weight",
    "layers.{L}.moe.router.gate.weight": _LLAMA4_LAYER + "feed_forward.router.weight",
    "layers.{L}.moe.experts.w1": _Rule(_LLAMA4_LAYER + "feed_forward.experts.gate_up_proj", "gate_of_stack"),
    "layers.{L}.moe.experts.w3": _Rule(_LLAMA4_LAYER + "feed_forward.experts.gate_up_proj", "up_of_stack"),
    "layers.{L}.moe.experts.w2": _Rule(_LLAMA4_LAYER + "feed_forward.experts.down_proj", "transposed"),
    "layers.{L}.moe.shared_experts.w1.weight": _LLAMA4_LAYER + "feed_forward.shared_expert.gate_proj.weight",
    "layers.{L}.moe.shared_experts.w3.weight": _LLAMA4_LAYER + "feed_forward.shared_expert.up_proj.weight",
    "layers.{L}.moe.shared_experts.w2.weight": _LLAMA4_LAYER + "feed_forward.shared_expert.down_proj.weight",
    "layers.{L}.moe.expert_bias": _Rule("", "drop"),
    "layers.{L}.moe.expert_bias_E": _Rule("", "drop"),
}

_TABLES = {
    "llama": _both_spellings(_LLAMA3),
    "qwen3": _both_spellings(_QWEN3),
    "qwen3_moe": _both_spellings(_QWEN3),
    "deepseek_v3": _both_spellings(_DEEPSEEK),
    "llama4": _both_spellings(_LLAMA4),
    "llama4_text": {
        name: _Rule(rule.name.removeprefix("language_model."), rule.layout)
        for name, rule in _both_spellings(_LLAMA4).items()
    },
}
_LAYER = re.compile(r"^layers\.(\d+)\.")


def is_torchtitan(names: Mapping[str, Tensor]) -> bool:
    """Whether these are torchtitan's names: an embedding of its own name, and layers at the root."""
    return "tok_embeddings.weight" in names and any(_LAYER.match(name) for name in names)


def from_torchtitan(
    tensors: Mapping[str, Tensor], config: ModelConfig | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename and re-index a torchtitan state dict.

    Returns:
        Hugging Face name -> tensor, and the names left out -> why.

    Raises:
        UsageError: without a config the number of heads is unknown.
        UnsupportedError: a model type or parameter without a rule.
        SourceError: sizes contradict the config.
    """
    if config is None:
        raise UsageError("these are torchtitan's parameter names; name the Hugging Face config with --hf-config")
    table = _TABLES.get(config.model_type or "")
    if table is None:
        raise UnsupportedError(
            f"torchtitan names for model type {config.model_type!r} are not known (only {', '.join(_TABLES)})"
        )
    made: dict[str, Tensor] = {}
    dropped: dict[str, str] = {}
    stacks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name == "freqs_cis":
            dropped[name] = "a rotary table, computed from the config"
            continue
        layer = _LAYER.match(name)
        number = layer[1] if layer else ""
        rule = table.get(_LAYER.sub("layers.{L}.", name))
        if rule is None:
            raise UnsupportedError(
                f"torchtitan parameter {name} of a {config.model_type} has no known Hugging Face name"
            )
        target = rule.name.replace("{L}", number)
        if rule.layout == "drop":
            dropped[name] = "a load balancing bias that the Hugging Face model does not have"
        elif rule.layout == "experts":
            if len(tensor.shape) != 3 or config.experts not in (None, tensor.shape[0]):
                raise SourceError(
                    f"{name} has shape {list(tensor.shape)}, but the config says {config.experts} experts"
                )
            made |= {target.replace("{E}", str(e)): select(tensor, 0, e) for e in range(tensor.shape[0])}
        elif rule.layout in ("gate_of_stack", "up_of_stack"):
            stacks.setdefault(target, {})[rule.layout] = _swapped(tensor)
        elif target in made:
            raise SourceError(f"{name} occurs twice, in an older and a newer spelling")
        else:
            made[target] = _LAYOUTS[rule.layout](tensor, config, name)
    for target, parts in stacks.items():
        if len(parts) != 2:
            raise SourceError(f"{target}: one of its two halves is missing")
        made[target] = concat([parts["gate_of_stack"], parts["up_of_stack"]], 2)
    return made, dropped


def _same(tensor: Tensor, config: ModelConfig, name: str) -> Tensor:
    return tensor


def _swapped(tensor: Tensor) -> Tensor:
    return permute(tensor, (*range(len(tensor.shape) - 2), len(tensor.shape) - 1, len(tensor.shape) - 2))


def _halves(heads_field: str) -> Callable[[Tensor, ModelConfig, str], Tensor]:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves: all first of a pair, then all second."""

    def layout(tensor: Tensor, config: ModelConfig, name: str) -> Tensor:
        heads = config.raw.get(heads_field) or config.raw.get("num_attention_heads")
        rows = tensor.shape[0] if tensor.shape else 1
        if not isinstance(heads, int) or heads <= 0 or rows % (2 * heads):
            raise SourceError(f"{name} has {rows} rows, which is not a whole number of pairs for {heads} heads")
        size = rows // heads
        return concat(
            [strided(tensor, 0, head * size + first, 2, size // 2) for head in range(heads) for first in (0, 1)], 0
        )

    return layout


_LAYOUTS: dict[str, Callable[[Tensor, ModelConfig, str], Tensor]] = {
    "same": _same,
    "transposed": lambda tensor, config, name: _swapped(tensor),
    "rope_q": _halves("num_attention_heads"),
    "rope_k": _halves("num_key_value_heads"),
}
