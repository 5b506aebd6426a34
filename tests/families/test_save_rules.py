"""The interpreter of the save rules against transformers' own ``save_pretrained``: names, shapes, bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammerge.dtypes import dtype_named, safetensors_dtype
from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.conversion import natural_key, to_file_tensors
from streammerge.families.save_rules import SaveRules, save_rules, table_version
from streammerge.tensors.fragment import Fragment, contiguous_strides
from streammerge.tensors.virtual import Stored, Tensor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_save_rules.py"
BF16 = dtype_named("bfloat16")

TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = TEXT | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL = TEXT | {"num_local_experts": 3, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
ROUTED = MOE | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "depth": 1, "num_heads": 2, "out_hidden_size": 16,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "num_position_embeddings": 4,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "shared_expert_intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}


def _parts(text: str, vision: str, text_extra: Mapping[str, Any] = TEXT) -> dict[str, Any]:
    return {
        "text_config": {"model_type": text, **text_extra},
        "vision_config": {"model_type": vision, **VISION},
    }


# architecture -> (model type, config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", TEXT),
    "LlamaForTokenClassification": ("llama", TEXT | {"num_labels": 1}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 8}),
    "Qwen2MoeForTokenClassification": ("qwen2_moe", MOE | {"num_labels": 1}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", MOE),
    "Qwen3MoeForTokenClassification": ("qwen3_moe", MOE | {"num_labels": 1}),
    "Qwen3NextForCausalLM": ("qwen3_next", MOE | LINEAR),
    "MixtralForCausalLM": ("mixtral", LOCAL),
    "MixtralForTokenClassification": ("mixtral", LOCAL),
    "MiniMaxM2ForCausalLM": ("minimax_m2", LOCAL),
    "PhimoeForCausalLM": ("phimoe", LOCAL),
    "DeepseekV3ForCausalLM": ("deepseek_v3", ROUTED | MLA | {"n_shared_experts": 1}),
    "Glm4MoeForCausalLM": ("glm4_moe", ROUTED | {"n_shared_experts": 1}),
    "GraniteMoeForCausalLM": ("granitemoe", LOCAL),
    "GptOssForCausalLM": ("gpt_oss", LOCAL),
    "OlmoeForCausalLM": ("olmoe", MOE),
    "GPTNeoXForCausalLM": ("gpt_neox", TEXT),
    "GPTNeoXForTokenClassification": ("gpt_neox", TEXT),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl", _parts("qwen2_5_vl_text", "qwen2_5_vl", TEXT | ROPE),
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe", _parts("qwen3_vl_moe_text", "qwen3_vl_moe", MOE | ROPE),
    ),
    "Gemma3ForConditionalGeneration": ("gemma3", _parts("gemma3_text", "siglip_vision_model")),
    "LlavaForConditionalGeneration": ("llava", _parts("llama", "clip_vision_model")),
    "InternVLForConditionalGeneration": (
        "internvl",
        _parts("qwen3_moe", "internvl_vision", MOE) | {"downsample_ratio": 0.5},
    ),
}  # fmt: skip


def _model(architecture: str) -> Any:
    model_type, values = FAMILIES[architecture]
    if architecture == "InternVLForConditionalGeneration":
        values = values | {"vision_config": values["vision_config"] | {"image_size": [8, 8], "patch_size": [4, 4]}}
    config = transformers.CONFIG_MAPPING[model_type](**values)
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def _stored(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Write the tensors back to back; each becomes one fragment."""
    tensors: dict[str, Tensor] = {}
    with path.open("wb") as file:
        for name, value in state.items():
            dtype = dtype_named(str(value.dtype))
            shape = tuple(value.shape)
            strides = contiguous_strides(shape, dtype.itemsize)
            fragment = Fragment(0, file.tell(), (0,) * len(shape), shape, strides)
            tensors[name] = Stored(dtype, shape, (fragment,))
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return tensors


def _bytes(tensor: Tensor, raw: np.ndarray) -> bytes:
    """Gather a virtual tensor from the raw file."""
    kind = tensor.dtype.numpy
    result = np.empty(tensor.shape, kind)
    filled = 0
    for f in tensor.fragments_in((0,) * len(tensor.shape), tensor.shape):
        part = np.ndarray(f.shape, kind, raw.data, f.offset, f.strides)
        result[tuple(slice(s, s + n) for s, n in zip(f.start, f.shape, strict=True))] = part
        filled += f.numel
    assert filled == result.size
    return result.tobytes()


def _saved(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = safetensors_dtype(entry["dtype"])
        assert dtype is not None
        found[name] = (dtype.name, tuple(entry["shape"]), data[8 + size + begin : 8 + size + end])
    return found


def _rules(architecture: str) -> SaveRules:
    rules = save_rules(architecture, None)
    assert rules is not None
    assert rules.exact
    return rules


def _converted(architecture: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Save with transformers and convert the same state dict; the tensors and the saved config."""
    model = _model(architecture)
    state = dict(model.state_dict())
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rules = _rules(architecture)
    left_out = {*rules.tied_names(state, config), *rules.not_saved}
    kept = {name: value for name, value in state.items() if name not in left_out}
    tensors = _stored(kept, folder / "raw")
    return to_file_tensors(tensors, rules, config), config


@pytest.mark.parametrize("architecture", FAMILIES)
def test_equals_save_pretrained(architecture: str, tmp_path: Path) -> None:
    result, _ = _converted(architecture, tmp_path)
    raw = np.fromfile(tmp_path / "raw", np.uint8)
    expected = _saved(tmp_path)
    assert sorted(result) == sorted(expected)
    for name, tensor in result.items():
        assert (tensor.dtype.name, tensor.shape, _bytes(tensor, raw)) == expected[name], name


@pytest.mark.parametrize("architecture", FAMILIES)
def test_file_names_stay(architecture: str, tmp_path: Path) -> None:
    result, config = _converted(architecture, tmp_path)
    again = to_file_tensors(result, _rules(architecture), config)
    assert list(again) == sorted(result, key=natural_key) or list(again) == list(result)
    assert all(again[name].shape == result[name].shape for name in result)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "LlavaForConditionalGeneration"])
def test_order_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model = _model(architecture)
    expected = revert_weight_conversion(model, dict(model.state_dict()))
    tensors = _stored(model.state_dict(), tmp_path / "raw")
    config = json.loads(model.config.to_json_string())
    assert list(to_file_tensors(tensors, _rules(architecture), config)) == list(expected)


def test_order_is_by_number() -> None:
    tensors = {f"gpt_neox.layers.{i}.weight": _plain(4) for i in (10, 2, 9)}
    result = to_file_tensors(tensors, _rules("GPTNeoXForCausalLM"), {})
    assert list(result) == [f"gpt_neox.layers.{i}.weight" for i in (2, 9, 10)]


def test_group_of_renamings_begins_with_its_first() -> None:
    rules = _rules("Kimi_K25ForConditionalGeneration")
    memory, file = "model.vision_tower.layers.0.norm", "vision_tower.encoder.blocks.0.norm"
    both = to_file_tensors({f"{memory}{i}.weight": _plain(4) for i in (1, 2)}, rules, {})
    assert list(both) == [f"{file}0.weight", f"{file}1.weight"]
    # Alone, the second of them could as well be one that has its file name already.
    assert list(to_file_tensors({f"{memory}2.weight": _plain(4)}, rules, {})) == [f"{file}2.weight"]


def test_offset_of_an_index() -> None:
    name = "model.layers.3.attention_input.query"
    result = to_file_tensors({name: _plain(4)}, _rules("Inkling2LoopForCausalLM"), {})
    assert list(result) == ["model.llm.attn_res.attn_queries.2"]


def test_no_rule_keeps_the_order() -> None:
    tensors = {name: _plain(4) for name in ("model.norm.weight", "lm_head.weight", "a.10", "a.9")}
    assert list(to_file_tensors(tensors, _rules("LlamaForCausalLM"), {})) == list(tensors)


def test_natural_key_is_that_of_transformers() -> None:
    from transformers.core_model_loading import dot_natural_key

    names = ["a.10.b", "a.9.b", "a.b2", "a.b11", "a.b", "a.2.x", "b", "a"]
    assert sorted(names, key=natural_key) == sorted(names, key=dot_natural_key)
    assert sorted(names, key=natural_key) != sorted(names)


def test_table_is_that_of_the_installed_transformers() -> None:
    if transformers.__version__ != table_version():
        pytest.skip(f"the table is of transformers {table_version()}, {transformers.__version__} is installed")
    run = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_lookup_falls_back_to_the_model_type() -> None:
    stand_in = save_rules("MyOwnQwen3Moe", "qwen3_moe")
    assert stand_in is not None
    assert (stand_in.architecture, stand_in.exact) == ("Qwen3MoeForCausalLM", False)
    assert save_rules("MyOwnQwen3Moe", "my_type") is None
    assert save_rules(None, None) is None


def test_importing_stays_light() -> None:
    code = (
        "import sys; from streammerge.families.conversion import to_file_tensors\n"
        "from streammerge.families.save_rules import save_rules; save_rules('LlamaForCausalLM', None)\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=TOOL.parents[1], check=False).returncode == 0


def _plain(*shape: int) -> Stored:
    strides = contiguous_strides(shape, BF16.itemsize)
    return Stored(BF16, shape, (Fragment(0, 0, (0,) * len(shape), shape, strides),))


EXPERTS = "model.layers.0.mlp.experts"


def test_odd_fused_size_is_an_error() -> None:
    with pytest.raises(SourceError, match=rf"{EXPERTS}.gate_up_proj.*divide"):
        to_file_tensors({f"{EXPERTS}.gate_up_proj": _plain(3, 7, 4)}, _rules("Qwen3MoeForCausalLM"), {})


def test_missing_dim_is_an_error() -> None:
    with pytest.raises(SourceError, match=rf"{EXPERTS}.gate_up_proj.*dim 1"):
        to_file_tensors({f"{EXPERTS}.gate_up_proj": _plain(8)}, _rules("Qwen3MoeForCausalLM"), {})


def test_two_tensors_of_one_file_name_are_an_error() -> None:
    tensors: dict[str, Tensor] = {
        f"{EXPERTS}.down_proj": _plain(2, 4, 4),
        f"{EXPERTS}.1.down_proj.weight": _plain(4, 4),
    }
    with pytest.raises(SourceError, match=rf"{EXPERTS}.1.down_proj.weight"):
        to_file_tensors(tensors, _rules("Qwen3MoeForCausalLM"), {})


def test_two_renamings_to_one_name_are_an_error() -> None:
    tensors: dict[str, Tensor] = {"lm_head.weight": _plain(4), "embed_out.weight": _plain(4)}
    with pytest.raises(SourceError, match=r"lm_head\.weight"):
        to_file_tensors(tensors, _rules("GPTNeoXForCausalLM"), {})


def test_missing_member_of_a_fused_tensor_is_an_error() -> None:
    name = "nomic_bert.layers.0.self_attn.q_proj.weight"
    with pytest.raises(SourceError, match="k_proj"):
        to_file_tensors({name: _plain(4, 4)}, _rules("NomicBertForMaskedLM"), {})


def test_members_that_do_not_fit_are_an_error() -> None:
    layer = "nomic_bert.layers.0.self_attn"
    tensors = {f"{layer}.{n}_proj.weight": _plain(4, size) for n, size in (("q", 4), ("k", 4), ("v", 5))}
    with pytest.raises(SourceError, match=rf"{layer}.*join"):
        to_file_tensors(tensors, _rules("NomicBertForMaskedLM"), {})


def test_inexpressible_operation_is_refused_only_where_it_applies() -> None:
    rules = _rules("Kimi_K25ForConditionalGeneration")
    harmless = to_file_tensors({"lm_head.weight": _plain(4, 4)}, rules, {})
    assert list(harmless) == ["language_model.lm_head.weight"]
    name = "model.vision_tower.layers.0.attn.q_proj.weight"
    others = [name.replace("q_proj", other) for other in ("k_proj", "v_proj")]
    with pytest.raises(UnsupportedError, match=r"model.vision_tower.*PermuteForRope"):
        to_file_tensors({key: _plain(4, 4) for key in (name, *others)}, rules, {})


def test_inexpressible_renaming_is_refused_only_where_it_applies() -> None:
    rules = _rules("DoryForCausalLM")
    assert list(to_file_tensors({"model.layers.3.mlp.up_proj.weight": _plain(4)}, rules, {}))
    with pytest.raises(UnsupportedError, match=r"layers.1.mixer.up_proj.weight.*LayerPairCollapse"):
        to_file_tensors({"model.layers.1.mixer.up_proj.weight": _plain(4)}, rules, {})


def test_unknown_part_is_refused() -> None:
    config = {"text_config": {"model_type": "my_text"}}
    with pytest.raises(UnsupportedError, match="my_text"):
        to_file_tensors({"lm_head.weight": _plain(4)}, _rules("LlavaForConditionalGeneration"), config)


@pytest.mark.parametrize(
    ("architecture", "config", "tied"),
    [
        ("LlamaForCausalLM", {}, False),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, True),
        ("Gemma3ForConditionalGeneration", {}, True),
        ("Gemma3ForConditionalGeneration", {"tie_word_embeddings": False}, False),
        ("Qwen2_5_VLForConditionalGeneration", {"text_config": {"tie_word_embeddings": True}}, True),
        ("Mistral3ForConditionalGeneration", {"text_config": {"tie_word_embeddings": False}}, True),
    ],
)
def test_ties_follow_the_config(architecture: str, config: dict[str, Any], tied: bool) -> None:
    head, embedding = "lm_head.weight", "model.language_model.embed_tokens.weight"
    embedding = "model.embed_tokens.weight" if architecture == "LlamaForCausalLM" else embedding
    names = _rules(architecture).tied_names([head, embedding], config)
    assert names == ({head: embedding} if tied else {})


def test_tied_patterns_are_expanded() -> None:
    kept = "model.layers.2.shared_transf.self_attn.q_proj.weight"
    names = _rules("ZambaForCausalLM").tied_names([kept, kept.replace("2", "8")], {})
    assert names == {kept.replace("2", "8"): kept}


def test_strict_float32_parameters() -> None:
    assert set(_rules("DeepseekV3ForCausalLM").fp32_strict) == {"e_score_correction_bias", "gate.weight"}
