"""Megatron checkpoints of every family and layout become exactly the model that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import streammerge as sm
from tests.megatron.conftest import FAMILIES, Model
from tests.support.megatron_writer import Grid, core_of, write_legacy, write_torch_dist
from tests.support.raw import read_folder

_EVEN, _STAGES, _UNEVEN, _VIRTUAL = ((4,),), ((2, 2),), ((3, 1),), ((1, 1), (1, 1))
_EMPTY = ((0, 4, 0),)  # stages for embedding and loss alone
_GRIDS = {
    "tp1": Grid(layers=_EVEN),
    "tp2 pp2": Grid(2, 2, layers=_STAGES),
    "tp2 pp2 uneven": Grid(2, 2, layers=_UNEVEN),
    "pp2 vpp2": Grid(1, 2, layers=_VIRTUAL),
    "tp4": Grid(4, layers=_EVEN),  # more ranks than key heads
    "pp3 with empty stages": Grid(2, 3, layers=_EMPTY),
    "ep2": Grid(1, 1, 2, layers=_EVEN),
    "tp2 pp2 ep2": Grid(2, 2, 2, layers=_STAGES),
    "tp2 ep2 etp1": Grid(2, 1, 2, 1, layers=_EVEN),
    "tp4 ep2 etp2": Grid(4, 1, 2, 2, layers=_EVEN),
}
_MOE = {"qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "deepseek_v3_plain_q", "gpt_oss"}


def _legacy_cases() -> list[tuple[str, str, str]]:
    """Every family meets every spelling, and every grid several families."""
    cases = []
    for number, family in enumerate(FAMILIES):
        grids = [grid for grid in _GRIDS if family in _MOE or "ep" not in grid]
        for step in range(5):
            spellings = ["local", "te", *(["grouped"] if family in _MOE - {"gpt_oss"} else [])]
            cases.append((family, grids[(number + 2 * step) % len(grids)], spellings[(number + step) % len(spellings)]))
    return sorted(set(cases))


def _check(source: Path, target: Path, model: Model) -> None:
    sm.merge(source, target, max_ram="2G", dtype="keep", hf_config=model[0], check=False)
    assert read_folder(target) == read_folder(model[0])


@pytest.mark.parametrize(("family", "grid", "spelling"), _legacy_cases())
def test_rank_files(family: str, grid: str, spelling: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model(family)
    source = write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), _GRIDS[grid], spelling)
    _check(source, tmp_path / "out", model)


@pytest.mark.parametrize("form", ["stacked", "layers", "singleton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_dist(family: str, form: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    if form == "stacked" and family in ("deepseek_v3", "deepseek_v3_plain_q", "glm4_moe"):
        form = "layers"  # layers of two kinds are never stacked
    model = hf_model(family)
    _check(write_torch_dist(tmp_path / "ckpt", core_of(model[1], model[2]), form), tmp_path / "out", model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_without_arguments_in_the_files(family: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    """A second number in a folder's name is a stage, or an expert parallel rank: the content tells."""
    model = hf_model(family)
    grid = _GRIDS["ep2" if family in _MOE else "pp2 vpp2"]
    _check(write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), grid, args=False), tmp_path / "out", model)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_logits(family: str, hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    model = hf_model(family)
    source = write_legacy(tmp_path / "ckpt", core_of(model[1], model[2]), _GRIDS["tp2 pp2"], "te")
    sm.merge(source, tmp_path / "out", hf_config=model[0])
    tokens = torch.arange(9)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (model[0], tmp_path / "out")
    ]
    assert torch.equal(*logits)


def test_compared_with_the_model_it_was_made_of(hf_model: Callable[[str], Model], tmp_path: Path) -> None:
    """Rank files and torch_dist against the Hugging Face folder, and against one another."""
    model = hf_model("qwen3_moe")
    core = core_of(model[1], model[2])
    ranks = write_legacy(tmp_path / "ranks", core, _GRIDS["tp2 pp2 ep2"], "te")
    dist = write_torch_dist(tmp_path / "dist", core)
    assert sm.compare(ranks, model[0]).equal
    assert sm.compare(model[0], dist).equal
    assert sm.test(dist, model[0], dtype="keep").equal
    path = ranks / "iter_0000100" / "mp_rank_01_001_000" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    weight = content["model"]["decoder.layers.1.self_attention.linear_qkv.weight"]
    weight[:16] = weight[:16].flip(0)  # rows of one query head
    torch.save(content, path)
    report = sm.test(ranks, model[0], dtype="keep")
    assert [one.name for one in report.tensors] == ["model.layers.3.self_attn.q_proj.weight"]
