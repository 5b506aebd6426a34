"""Hugging Face names -> torchtitan's, and the sizes of the tiny models that are renamed."""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["SIZES", "titan_name"]

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 21,
    "tie_word_embeddings": False, "dtype": torch.float32, "max_position_embeddings": 32,
}  # fmt: skip

_NAMES = {
    r"model\.embed_tokens\.": "tok_embeddings.",
    r"model\.norm\.": "norm.",
    r"lm_head\.": "output.",
    r"model\.layers\.(\d+)\.": r"layers.\1.",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"self_attn\.([qkv])_proj\.": r"attention.w\1.",
    r"self_attn\.o_proj\.": "attention.wo.",
    r"self_attn\.([qk])_norm\.": r"attention.\1_norm.",
    r"self_attn\.q_a_proj\.": "attention.wq_a.",
    r"self_attn\.q_a_layernorm\.": "attention.q_norm.",
    r"self_attn\.q_b_proj\.": "attention.wq_b.",
    r"self_attn\.kv_a_proj_with_mqa\.": "attention.wkv_a.",
    r"self_attn\.kv_a_layernorm\.": "attention.kv_norm.",
    r"self_attn\.kv_b_proj\.": "attention.wkv_b.",
    r"(mlp|feed_forward)\.shared_experts?\.gate_proj\.": "moe.shared_experts.w1.",
    r"(mlp|feed_forward)\.shared_experts?\.up_proj\.": "moe.shared_experts.w3.",
    r"(mlp|feed_forward)\.shared_experts?\.down_proj\.": "moe.shared_experts.w2.",
    r"mlp\.gate_proj\.": "feed_forward.w1.",
    r"mlp\.up_proj\.": "feed_forward.w3.",
    r"mlp\.down_proj\.": "feed_forward.w2.",
    r"mlp\.gate\.weight": "moe.router.gate.weight",
    r"feed_forward\.router\.weight": "moe.router.gate.weight",
    r"mlp\.gate\.e_score_correction_bias": "moe.expert_bias",
}


def titan_name(name: str) -> str:
    """The name of a tensor that is not an expert's."""
    for pattern, new in _NAMES.items():
        name = re.sub(pattern, new, name)
    return name
