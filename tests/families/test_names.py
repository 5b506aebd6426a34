"""Names that must not be taken for a Hugging Face model's."""

from __future__ import annotations

import pytest

from streammerge.families.megatron_names import canonical_name, is_megatron
from streammerge.families.names import model_name, without_common_prefix


@pytest.mark.parametrize(
    "name",
    [
        "model.module.embedding.word_embeddings.weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "module.decoder.layers.0.self_attention.linear_proj.weight",
    ],
)
def test_megatron_names_are_known(name: str) -> None:
    assert is_megatron(["model.norm.weight", name])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("module.module.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("language_model.decoder.layers.3.mlp.linear_fc2.weight", "decoder.layers.3.mlp.linear_fc2.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.input_layernorm.weight"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_bias", "decoder.layers.3.pre_mlp_layernorm.bias"),
        ("decoder.layers.3.self_attention.linear_qkv.bias", "decoder.layers.3.self_attention.linear_qkv.bias"),
        (
            "decoder.layers.3.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.3.self_attention.q_layernorm.weight",
        ),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight12", "decoder.layers.3.mlp.experts.12.linear_fc1.weight"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight12_w", "decoder.layers.3.mlp.experts.12.linear_fc1.weight_w"),
        (
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.bias",
            "decoder.layers.3.mlp.experts.7.linear_fc2.bias",
        ),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.layers.mlp.experts.linear_fc1.weight"),
        (
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        ),
        ("mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight", "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"),
        (
            "language_model.encoder.layers.3.attention.query_key_value.bias",
            "decoder.layers.3.self_attention.linear_qkv.bias",
        ),
        ("language_model.transformer.layers.3.input_norm.weight", "decoder.layers.3.input_layernorm.weight"),
        ("language_model.encoder.layers.3.post_attention_norm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("language_model.encoder.layers.3.mlp.dense_h_to_4h.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
        ("language_model.encoder.final_norm.weight", "decoder.final_layernorm.weight"),
        ("language_model.output_layer.weight", "output_layer.weight"),
        (
            "decoder.layers.3.self_attention.linear_qkv.to_wrap.weight",
            "decoder.layers.3.self_attention.linear_qkv.weight",
        ),
    ],
)
def test_one_spelling_of_megatron_s_names(key: str, name: str) -> None:
    assert canonical_name(key) == name
    assert canonical_name(name) == name


def test_hugging_face_names_are_not() -> None:
    names = [
        "model.layers.0.mlp.down_proj.weight",
        "transformer.word_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
    ]
    assert not is_megatron(names)


def test_wrappers_go_wherever_they_are() -> None:
    key = "_orig_mod.module.model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert model_name(key) == "model.layers.0.mlp.up_proj.weight"


def test_a_trainer_s_own_attribute_goes_and_the_model_s_stays() -> None:
    names = ["model.model.layers.0.weight", "model.lm_head.weight"]
    assert list(without_common_prefix(names, "model").values()) == ["model.layers.0.weight", "lm_head.weight"]
    assert list(without_common_prefix(["model.layers.0.weight"], "model").values()) == ["model.layers.0.weight"]
