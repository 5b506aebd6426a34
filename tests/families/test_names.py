"""Names that must not be taken for a Hugging Face model's."""

from __future__ import annotations

import pytest

from streammerge.errors import UnsupportedError
from streammerge.families.names import model_name, refuse_lora, refuse_megatron, without_common_prefix


@pytest.mark.parametrize(
    "name",
    [
        "model.module.embedding.word_embeddings.weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "module.decoder.layers.0.self_attention.linear_proj.weight",
    ],
)
def test_megatron_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Megatron"):
        refuse_megatron(["model.norm.weight", name])


def test_hugging_face_names_are_not() -> None:
    names = [
        "model.layers.0.mlp.down_proj.weight",
        "transformer.word_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
    ]
    refuse_megatron(names)
    refuse_lora(names)


def test_wrappers_go_wherever_they_are() -> None:
    key = "_orig_mod.module.model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert model_name(key) == "model.layers.0.mlp.up_proj.weight"


def test_a_trainer_s_own_attribute_goes_and_the_model_s_stays() -> None:
    names = ["model.model.layers.0.weight", "model.lm_head.weight"]
    assert list(without_common_prefix(names, "model").values()) == ["model.layers.0.weight", "lm_head.weight"]
    assert list(without_common_prefix(["model.layers.0.weight"], "model").values()) == ["model.layers.0.weight"]
