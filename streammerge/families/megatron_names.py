"""Megatron's parameter names, of all versions and layer specs, in one spelling.

The spelling is that of Megatron-core's local spec, with numbers for layers and for experts:
``decoder.layers.3.input_layernorm.weight``, ``decoder.layers.3.mlp.experts.5.linear_fc1.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["EXPERT_STACK", "GROUPED", "LAYER_STACK", "canonical_name", "is_megatron"]

# Whichever way a layer is built, one of these is in it (Megatron-core 0.8 to 0.20, and what came before it).
_MARK = re.compile(
    r"(^|\.)(embedding\.word_embeddings\.weight$|layers\.(\d+\.)?(self_attention|attention|mlp)\."
    r"(linear_|query_key_value|dense_h_to_4h))"
)
_ADAPTER = re.compile(r"\.adapter\.((adapter_\w+)\.)?linear_(in|out)\.weight$")

_TO_CORE = (  # megatron.model / megatron.legacy, until 2024
    (r"^language_model\.(encoder|transformer)\.layers\.", "decoder.layers."),
    (r"^language_model\.(encoder|transformer)\.final_(layer)?norm\.", "decoder.final_layernorm."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"(?<=\d\.)(self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"(?<=\d\.)(self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"(?<=\d\.)mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"(?<=\d\.)mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    (r"(?<=\d\.)input_norm\.", "input_layernorm."),
    (r"(?<=\d\.)post_attention_(layer)?norm\.", "pre_mlp_layernorm."),
)
_TO_LOCAL_SPEC = (  # Transformer Engine fuses a norm into the linear behind it; torch_dist always says so
    (r"self_attention\.(linear_qkv|in_proj)\.layer_norm_(?=weight|bias)", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_(?=weight|bias)", "pre_mlp_layernorm."),
    (r"linear_q_up_proj\.layer_norm_(?=weight|bias)", "q_layernorm."),
    (r"linear_kv_up_proj\.layer_norm_(?=weight|bias)", "kv_layernorm."),
)
_EXPERTS = (
    (r"mlp\.experts\.(local_)?experts\.", "mlp.experts."),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)", r"mlp.experts.\3.\1.\2"),
)
_OTHERS = (
    (r"^(module\.)+", ""),
    (r"^language_model\.(?=embedding\.|decoder\.|output_layer\.|mtp\.)", ""),
    (r"\.to_wrap\.", "."),  # the wrapper of an adapted layer, in Megatron-Bridge
    (r"\.mtp_model_layer\.", ".transformer_layer."),
)
_RENAMES = [(re.compile(old), new) for old, new in (*_OTHERS, *_TO_CORE, *_TO_LOCAL_SPEC, *_EXPERTS)]

# torch_dist stores the tensors of all layers, and those of all experts, as one (section 3.5, 3.6 of Megatron's
# sharded state dict since 0.5): the name then has no number.
LAYER_STACK = re.compile(r"^(?P<before>(?:.*\.)?layers)\.(?!\d+\.)(?P<after>.+)$")
EXPERT_STACK = re.compile(r"^(?P<before>.*\.mlp\.experts)\.(?P<after>linear_fc[12]\..+)$")
# GroupedMLP (Megatron-core < 0.17) holds the experts of a rank in two matrices of its own layout.
GROUPED = re.compile(r"^(?P<before>.*\.mlp\.experts)\.weight(?P<which>[12])$")


def is_megatron(names: Iterable[str]) -> bool:
    """Whether a state dict is Megatron's, adapters alone included."""
    return any(_MARK.search(name) or _ADAPTER.search(name) for name in names)


def canonical_name(key: str) -> str:
    """A parameter's name in the one spelling; names that it does not know stay as they are."""
    for pattern, new in _RENAMES:
        key = pattern.sub(new, key)
    return key
