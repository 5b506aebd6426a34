"""Configs, files and parameters that do not fit are refused by name, and nothing is written."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import streammerge as sm
from streammerge.errors import SourceError, StreammergeError, UnsafeError, UnsupportedError
from tests.megatron.conftest import Model
from tests.support.megatron_writer import Grid, core_of, write_legacy, write_torch_dist
from tests.support.raw import read_folder

_TP2 = Grid(2, layers=((4,),))
_TP2_PP2 = Grid(2, 2, layers=((2, 2),))


def _config(model: Model, folder: Path, **changed: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**model[2], **changed}
    for name in [name for name, value in changed.items() if value == "absent"]:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _refused(source: Path, tmp_path: Path, config: Path, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        sm.merge(source, tmp_path / "out", hf_config=config, check=False, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"num_attention_heads": 4}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"head_dim": 16}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"num_hidden_layers": 5}),
        ("llama", {"vocab_size": 200}),
        ("llama", {"intermediate_size": 80}),
        ("llama", {"hidden_size": 32}),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3_moe", {"num_experts": 8}),
        ("qwen3_moe", {"num_experts": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 40}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 40}),
        ("deepseek_v3", {"kv_lora_rank": 32}),
        ("deepseek_v3", {"q_lora_rank": 16}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("deepseek_v3", {"v_head_dim": 16}),
        ("qwen2_tied", {"tie_word_embeddings": False}),
    ],
)
def test_wrong_configs(
    layout: str, family: str, changed: dict[str, Any], hf_model: Callable[[str], Model], tmp_path: Path
) -> None:
    """The message names the field."""
    model = hf_model(family)
    (name, value) = next(iter(changed.items()))
    if name == "num_experts" and "num_local_experts" in model[2]:
        name = "num_local_experts"
    core = core_of(model[1], model[2])
    if layout == "legacy":
        source = write_legacy(tmp_path / "ckpt", core, _TP2)
    else:
        form = "layers" if family == "deepseek_v3" else "stacked"
        source = write_torch_dist(tmp_path / "ckpt", core, form)
    config = _config(model, tmp_path / "hf", **{name: value})
    _refused(source, tmp_path, config, StreammergeError, name)


def test_recorded_heads_differ_where_no_shape_tells(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    """Twice the heads of half the size give the same shapes everywhere."""
    model = hf_model("llama")
    source = write_torch_dist(tmp_path / "ckpt", core_of(model[1], model[2]))
    common = source / "iter_0000100" / "common.pt"
    torch.save({"args": argparse.Namespace(num_attention_heads=8, num_query_groups=2, kv_channels=8)}, common)
    config = _config(model, tmp_path / "hf", num_attention_heads=16, num_key_value_heads=4, head_dim=4)
    _refused(source, tmp_path, config, SourceError, "num_attention_heads = 16.*num_query_groups = 2.*kv_channels = 8")


@pytest.mark.parametrize("setting", ["apply_layernorm_1p", "layernorm_zero_centered_gamma", "rotary_interleaved"])
def test_recorded_meanings_that_no_shape_tells(setting: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model("llama")
    source = write_torch_dist(tmp_path / "ckpt", core_of(model[1], model[2]))
    torch.save({"args": argparse.Namespace(**{setting: True})}, source / "iter_0000100" / "common.pt")
    _refused(source, tmp_path, model[0], UnsupportedError, r"was trained with (apply_layernorm_1p|rotary_interleaved)")


def test_an_option_gives_what_the_config_lacks(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model("llama")
    source = write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), _TP2)
    config = _config(model, tmp_path / "hf", num_attention_heads="absent", head_dim="absent")
    _refused(source, tmp_path, config, SourceError, "--num-attention-heads|--head-dim")
    options = {"model_fields": {"num_attention_heads": 8}, "dtype": "keep"}
    sm.merge(source, tmp_path / "out", hf_config=config, check=False, **options)
    assert read_folder(tmp_path / "out") == read_folder(model[0])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_attention_heads"] == 8


def _edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content["model"])
    torch.save(content, path)


def _rank(source: Path, name: str) -> Path:
    return source / "iter_0000100" / name / "model_optim_rng.pt"


@pytest.fixture
def ranks(hf_model: Callable[[str], Model], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of llama over two tensor parallel ranks and two stages, and its config."""
    model = hf_model("llama")
    return write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), _TP2_PP2), model[0]


@pytest.mark.parametrize("name", ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_01_001"])
def test_missing_rank_files_are_named(name: str, ranks: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.rmtree(ranks[0] / "iter_0000100" / name)
    _refused(ranks[0], tmp_path, ranks[1], SourceError, name)


def test_a_missing_stage_is_named(ranks: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        shutil.rmtree(ranks[0] / "iter_0000100" / name)
    _refused(ranks[0], tmp_path, ranks[1], SourceError, "mp_rank_00_001, mp_rank_01_001")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda m: m.pop("decoder.layers.1.mlp.linear_fc2.weight"), SourceError, r"layers.1.mlp.linear_fc2.weight"),
        (
            lambda m: m.update({"decoder.layers.0.mlp.extra.weight": torch.ones(2)}),
            UnsupportedError,
            "mlp.extra.weight",
        ),
        (
            lambda m: m.update({"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.ones(64)}),
            SourceError,
            "two spellings",
        ),
        (
            lambda m: m.update({"decoder.layers.0.input_layernorm.weight": torch.ones(32)}),
            SourceError,
            "input_layernorm",
        ),
        (
            lambda m: m.update({"embedding.word_embeddings.weight": torch.ones(4096, 64).bfloat16()}),
            SourceError,
            "word_embeddings",
        ),
    ],
)
def test_parameters_that_do_not_fit(
    change: Callable[[dict[str, Any]], None],
    error: type[Exception],
    match: str,
    ranks: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    _edited(_rank(ranks[0], "mp_rank_01_000"), change)
    _refused(ranks[0], tmp_path, ranks[1], error, match)


def test_a_replicated_norm_that_differs(ranks: tuple[Path, Path], tmp_path: Path) -> None:
    name = "decoder.layers.0.input_layernorm.weight"
    _edited(_rank(ranks[0], "mp_rank_01_000"), lambda m: m.update({name: m[name] + 1}))
    _refused(ranks[0], tmp_path, ranks[1], SourceError, "--allow-replica-mismatch")
    options: Mapping[str, Any] = {"allow_replica_mismatch": True, "dtype": "keep", "check": False}
    sm.merge(ranks[0], tmp_path / "out", hf_config=ranks[1], **options)
    assert read_folder(tmp_path / "out") == read_folder(ranks[1])


def test_a_missing_expert(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model("qwen3_moe")
    source = write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), Grid(1, 1, 2, layers=((4,),)))
    name = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight"
    _edited(_rank(source, "mp_rank_00_001"), lambda m: m.pop(name))
    _refused(source, tmp_path, model[0], SourceError, r"layers.2.mlp.experts.3.linear_fc2.weight")


def test_a_truncated_file(ranks: tuple[Path, Path], tmp_path: Path) -> None:
    path = _rank(ranks[0], "mp_rank_00_001")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    _refused(ranks[0], tmp_path, ranks[1], SourceError, re.escape(str(path)))


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch HOSTILE",)


def test_hostile_pickles(hf_model: Callable[[str], Model], ranks: tuple[Path, Path], tmp_path: Path) -> None:
    _edited(_rank(ranks[0], "mp_rank_00_000"), lambda m: m.update({"x": _Hostile()}))
    _refused(ranks[0], tmp_path, ranks[1], UnsafeError, "system")
    model = hf_model("llama")
    source = write_torch_dist(tmp_path / "dist", core_of(model[1], model[2]))
    torch.save({"args": _Hostile()}, source / "iter_0000100" / "common.pt")
    _refused(source, tmp_path, model[0], UnsafeError, "system")
    assert not Path("HOSTILE").exists()


@pytest.mark.parametrize("lost", ["metadata.json", ".metadata"])
def test_an_interrupted_save(lost: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model("llama")
    source = write_torch_dist(tmp_path / "ckpt", core_of(model[1], model[2]))
    (source / "iter_0000100" / lost).unlink()
    _refused(source, tmp_path, model[0], SourceError, f"no {re.escape(lost)}.*interrupted")


def test_a_folder_with_the_optimizer_alone(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    """verl's default: the weights are in the Hugging Face folder beside it."""
    model = hf_model("llama")
    core = core_of(model[1], model[2])
    actor = tmp_path / "actor"
    write_torch_dist(actor, core)
    (actor / "iter_0000100").rename(actor / "dist_ckpt")
    (actor / "latest_checkpointed_iteration.txt").unlink()
    import torch.distributed.checkpoint as dcp

    for path in (*(actor / "dist_ckpt").glob("*.distcp"), actor / "dist_ckpt" / ".metadata"):
        path.unlink()
    dcp.save({"optimizer.state.exp_avg.x": torch.ones(3)}, checkpoint_id=actor / "dist_ckpt", no_dist=True)
    shutil.copytree(model[0], actor / "huggingface")
    _refused(actor, tmp_path, model[0], SourceError, "the weights are in .*huggingface already")


def test_backend_only_checks(ranks: tuple[Path, Path], tmp_path: Path) -> None:
    _refused(ranks[0], tmp_path, ranks[1], StreammergeError, "--backend fsdp", backend="fsdp")
    sm.merge(ranks[0], tmp_path / "out", hf_config=ranks[1], backend="megatron", check=False)


def test_layers_that_megatron_lacks_are_taken_from_a_base(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    """Layers for multi token prediction: said when they lack, and written from where they are."""
    model = hf_model("deepseek_v3")
    source = write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), _TP2)
    config = _config(model, tmp_path / "hf", num_nextn_predict_layers=1)
    options: dict[str, Any] = {"hf_config": config, "dtype": "keep", "check": False}
    report = sm.merge(source, tmp_path / "out", **options)
    assert any("num_nextn_predict_layers = 1" in warning for warning in report.warnings)
    base = {**model[1], "model.layers.4.eh_proj.weight": torch.randn(64, 128), "lm_head.weight": torch.zeros(131, 64)}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    report = sm.merge(source, tmp_path / "filled", fill_from=tmp_path / "base", **options)
    expected = read_folder(model[0])
    expected["model.layers.4.eh_proj.weight"] = read_folder(tmp_path / "base")["model.layers.4.eh_proj.weight"]
    assert read_folder(tmp_path / "filled") == expected
    assert any("model.layers.4.eh_proj.weight" in warning for warning in report.warnings)
    with pytest.raises(StreammergeError, match="--fill-from"):
        sm.merge(source, tmp_path / "no", fill_from=tmp_path / "nowhere", **options)
