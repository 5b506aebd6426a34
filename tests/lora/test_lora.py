"""LoRA: fused weights against PEFT's own, extracted adapters loaded by PEFT, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

import streammerge as sm
from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.execute import memory
from tests.support.raw import read_folder

_SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12}
_GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Case = tuple[str, dict[str, Any], dict[str, Any]]
_CASES: dict[str, Case] = {
    "plain": ("Llama", {}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all linear": ("Qwen2", {}, {"target_modules": "all-linear", "r": 3}),
    "rslora": ("Llama", {}, {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        "Llama",
        {},
        {
            "target_modules": ["q_proj", "o_proj"],
            "rank_pattern": {"o_proj": 6, "layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 5},
        },
    ),
    "embedding and head": ("Llama", {}, {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "dora": ("Llama", {}, {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
    "dora of an embedding": ("Llama", {}, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "bias": ("Qwen2", {}, {"target_modules": ["q_proj"], "bias": "all"}),
    "modules_to_save": ("Llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied, both saved": (
        "Llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "conv1d": ("GPT2", _GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": ("Qwen3Moe", _MOE, {"target_modules": ["q_proj"], "target_parameters": _BOTH}),
    "one expert parameter": ("Qwen3Moe", _MOE, {"target_modules": ["q_proj"], "target_parameters": _BOTH[1:]}),
    "transposed experts": (
        "GptOss",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 12},
        {"target_modules": ["q_proj"], "target_parameters": _BOTH},
    ),
}  # fmt: skip


def _model(case: str, dtype: torch.dtype) -> Any:
    name, sizes, _ = _CASES[case]
    torch.manual_seed(3)
    known = sizes if name == "GPT2" else {**_SIZES, **sizes}
    config = getattr(transformers, f"{name}Config")(**known)
    ending = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{ending}")(config).to(dtype)


def _adapted(case: str, dtype: torch.dtype) -> Any:
    """A model with an adapter whose values are as after training."""
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **_CASES[case][2]}
    made = peft.get_peft_model(_model(case, dtype), peft.LoraConfig(**options))
    torch.manual_seed(4)
    for name, parameter in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
            parameter.data += torch.randn_like(parameter) * 0.1
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", _CASES)
def test_fused_as_peft_does(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit with PEFT's rounding; with ours within one rounding of it."""
    _model(case, dtype).save_pretrained(tmp_path / "base")
    _adapted(case, dtype).save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "expected")
    options: dict[str, Any] = {"adapter": [tmp_path / "adapter"], "dtype": "keep", "check": False}
    sm.merge(tmp_path / "base", tmp_path / "exact", peft_rounding=True, **options)
    assert read_folder(tmp_path / "exact") == read_folder(tmp_path / "expected")
    report = sm.merge(tmp_path / "base", tmp_path / "own", **options)
    assert "fused" in report.lora
    found, expected = (load_file(tmp_path / one / "model.safetensors") for one in ("own", "expected"))
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # PEFT rounds some products before it adds them.
        product = (expected[name].float() - before.get(name, expected[name]).float()).abs()
        step = torch.finfo(dtype).eps * (expected[name].float().abs() + product) + 1e-6
        assert bool(((tensor.float() - expected[name].float()).abs() <= step).all()), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in found.items() if name in before)


def _checkpoint(folder: Path, case: str = "plain", *, alpha: object = 8, **more: torch.Tensor) -> tuple[Path, Any]:
    """A DCP save of a training model with an adapter in it."""
    adapted = _adapted(case, torch.float32)
    dcp.save({**adapted.state_dict(), **more}, checkpoint_id=folder / "ckpt", no_dist=True)
    config = adapted.base_model.model.config
    config.architectures = [type(adapted.base_model.model).__name__]
    config.save_pretrained(folder / "hf")
    if alpha is not None:
        meta = {"r": 4, "lora_alpha": alpha, "task_type": "CAUSAL_LM"}
        (folder / "ckpt" / "lora_train_meta.json").write_text(json.dumps(meta))
    return folder / "ckpt", adapted


def test_extracted_adapters_are_loaded_by_peft(tmp_path: Path) -> None:
    source, adapted = _checkpoint(tmp_path)
    report = sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf")
    assert report.lora.startswith("NOT fused")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter")
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded.eval()(tokens).logits, adapted.eval()(tokens).logits)
    config = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]


def test_target_modules_name_no_others(tmp_path: Path) -> None:
    """One layer adapted of two: the last part of the name would fit the other as well."""
    adapted = peft.get_peft_model(
        _model("plain", torch.float32),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["model.layers.1.self_attn.q_proj", "lm_head"]),
    )
    for parameter in adapted.parameters():
        parameter.data += 0.01
    dcp.save(adapted.state_dict(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    adapted.base_model.model.config.save_pretrained(tmp_path / "hf")
    sm.merge(tmp_path / "ckpt", tmp_path / "out", hf_config=tmp_path / "hf", lora_alpha=8)
    config = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "model.layers.1.self_attn.q_proj"]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter")
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded.eval()(tokens).logits, adapted.eval()(tokens).logits)


def test_ranks_that_differ_become_a_pattern(tmp_path: Path) -> None:
    source, adapted = _checkpoint(tmp_path, "patterns", alpha=None)
    options = {"r": 4, "lora_alpha": 8, **_CASES["patterns"][2], "peft_type": "LORA"}
    (source / "adapter_config.json").write_text(json.dumps(options))
    sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "lora_adapter")
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded.eval()(tokens).logits, adapted.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("mode", "fused", "beside"), [("fuse", True, False), ("fuse,extract", True, True), ("base", False, False)]
)
def test_modes(mode: str, fused: bool, beside: bool, tmp_path: Path) -> None:
    source, adapted = _checkpoint(tmp_path)
    report = sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf", lora=mode, peft_rounding=True)
    assert (tmp_path / "out" / "lora_adapter").is_dir() == beside
    assert report.lora
    model = adapted.merge_and_unload() if fused else adapted.unload()
    model.save_pretrained(tmp_path / "expected")
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "expected")


@pytest.mark.parametrize("io", ["direct", "pread", "mmap"])
def test_the_same_bytes_whatever_the_windows(io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**_SIZES, "hidden_size": 320, "intermediate_size": 700, "vocab_size": 4001})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=16, lora_alpha=8, target_modules=["embed_tokens", "gate_proj", "down_proj", "q_proj"]),
    )
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    made.save_pretrained(tmp_path / "adapter")
    results = []
    for size in (1 << 22, 1 << 18):
        monkeypatch.setattr(memory, "_TILE_SIZES", (size,))
        target = tmp_path / str(size)
        sm.merge(tmp_path / "base", target, adapter=[tmp_path / "adapter"], workers=2, io=io, check=False)
        results.append(read_folder(target))
    assert results[0] == results[1]


def test_several_adapters_one_after_another(tmp_path: Path) -> None:
    _model("plain", torch.float32).save_pretrained(tmp_path / "base")
    for name in ("plain", "rslora"):
        _adapted(name, torch.float32).save_pretrained(tmp_path / name)
    sm.merge(tmp_path / "base", tmp_path / "one", adapter=[tmp_path / "plain"], check=False)
    sm.merge(tmp_path / "one", tmp_path / "two", adapter=[tmp_path / "rslora"], check=False)
    both = [tmp_path / "plain", tmp_path / "rslora"]
    sm.merge(tmp_path / "base", tmp_path / "both", adapter=both, check=False)
    assert read_folder(tmp_path / "both") == read_folder(tmp_path / "two")


def _refuse(source: Path, tmp_path: Path, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf", check=False, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alpha", [None, 0])
@pytest.mark.parametrize("mode", ["auto", "fuse"])
def test_alpha_is_never_guessed(alpha: object, mode: str, tmp_path: Path) -> None:
    source, _ = _checkpoint(tmp_path, alpha=alpha)
    _refuse(source, tmp_path, UsageError, "--lora-alpha", lora=mode)
    sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf", lora=mode, lora_alpha=8, check=False)


@pytest.mark.parametrize("lost", ["lora_A", "lora_B"])
def test_half_of_a_pair(lost: str, tmp_path: Path) -> None:
    _model("plain", torch.float32).save_pretrained(tmp_path / "hf")
    _adapted("plain", torch.float32).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    name = f"base_model.model.model.layers.1.self_attn.q_proj.{lost}.weight"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path)
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}[lost]
    match = rf"layers.1.self_attn.q_proj.{other} has no {lost}"
    _refuse(tmp_path / "hf", tmp_path, SourceError, match, adapter=[tmp_path / "adapter"])


def test_adapters_that_change_nothing(tmp_path: Path) -> None:
    """lora_B is zero before training: the fused model would be the base."""
    _model("plain", torch.float32).save_pretrained(tmp_path / "hf")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    peft.get_peft_model(_model("plain", torch.float32), config).save_pretrained(tmp_path / "adapter")
    _refuse(tmp_path / "hf", tmp_path, SourceError, "changes nothing", adapter=[tmp_path / "adapter"])


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "IA3"),
        ({"layer_replication": [[0, 1]]}, UnsupportedError, "layer_replication"),
        ({"use_qalora": True}, UnsupportedError, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, UnsupportedError, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, UnsupportedError, "trainable_token_indices"),
        ({"r": 8}, SourceError, "rank 4, but rank 8 is recorded"),
        ({"lora_alpha": 0}, UsageError, "--lora-alpha"),
        ({"alpha_pattern": {"(": 3}}, SourceError, "pattern"),
    ],
)
def test_settings_that_cannot_be_followed(
    changed: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    _model("plain", torch.float32).save_pretrained(tmp_path / "hf")
    _adapted("plain", torch.float32).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    _refuse(tmp_path / "hf", tmp_path, error, match, adapter=[tmp_path / "adapter"])


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": 1})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    _adapted("plain", torch.float32).save_pretrained(tmp_path / "adapter")
    _refuse(tmp_path / "hf", tmp_path, SourceError, "layers.1.*the same model", adapter=[tmp_path / "adapter"])


@pytest.mark.parametrize("name", ["token_adapter.trainable_tokens_delta.default", "x.lora_ga.default.weight"])
def test_other_kinds_of_adapters(name: str, tmp_path: Path) -> None:
    source, _ = _checkpoint(tmp_path, **{f"base_model.model.model.{name}": torch.ones(2)})
    _refuse(source, tmp_path, UnsupportedError, re.escape(name))


def test_several_adapters_in_a_checkpoint(tmp_path: Path) -> None:
    adapted = _adapted("plain", torch.float32)
    adapted.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False))
    dcp.save(adapted.state_dict(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    adapted.base_model.model.config.save_pretrained(tmp_path / "hf")
    _refuse(tmp_path / "ckpt", tmp_path, UsageError, "default, other", lora_alpha=8)
    _refuse(tmp_path / "ckpt", tmp_path, UsageError, "nobody", adapter=["nobody"], lora_alpha=8)
    sm.merge(tmp_path / "ckpt", tmp_path / "out", hf_config=tmp_path / "hf", adapter=["other"], lora_alpha=8)
    names = load_file(tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors")
    assert {name.rsplit(".", 3)[1] for name in names} == {"q_proj"}


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    source, _ = _checkpoint(tmp_path)
    _refuse(source, tmp_path, UsageError, "--lora both", lora="both")
    _refuse(source, tmp_path, UsageError, "adapter_config.json", adapter=[str(tmp_path)])
    plain = _model("plain", torch.float32)
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    _refuse(tmp_path / "plain", tmp_path, UsageError, "no LoRA adapter", lora="fuse")


def test_comparing_needs_to_know_what_is_meant(tmp_path: Path) -> None:
    source, adapted = _checkpoint(tmp_path)
    with pytest.raises(UnsupportedError, match="streammerge test with --lora"):
        sm.compare(source, source)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    options: dict[str, Any] = {"hf_config": tmp_path / "hf"}
    assert sm.test(source, tmp_path / "merged", lora="fuse", peft_rounding=True, **options).equal
    assert not sm.test(source, tmp_path / "merged", lora="base", **options).equal


def test_a_folder_with_an_adapter_in_it_is_whole(tmp_path: Path) -> None:
    source, _ = _checkpoint(tmp_path)
    sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf", checksums=True)
    assert sm.verify(tmp_path / "out").whole
