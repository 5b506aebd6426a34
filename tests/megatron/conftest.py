"""Tiny Hugging Face models, one per family, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

Model = tuple[Path, dict[str, torch.Tensor], dict[str, Any]]

_BASE = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 8, "num_nextn_predict_layers": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{k: v for k, v in _LATENT.items() if "head_dim" not in k and "lora" not in k},
            "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 32}),
    "deepseek_v3_plain_q": ("DeepseekV3", {**_LATENT, "q_lora_rank": None}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16}),
}  # fmt: skip


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Family -> folder, tensors in its files, and config."""
    made: dict[str, Model] = {}

    def make(family: str) -> Model:
        if family not in made:
            name, more = FAMILIES[family]
            torch.manual_seed(7)
            config = getattr(transformers, f"{name}Config")(**{**_BASE, **more})
            model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
            for parameter in model.parameters():  # norms and biases begin as ones and zeros, which tell nothing
                torch.nn.init.normal_(parameter, std=0.3)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            made[family] = (
                folder,
                load_file(folder / "model.safetensors"),
                json.loads((folder / "config.json").read_text()),
            )
        return made[family]

    return make
