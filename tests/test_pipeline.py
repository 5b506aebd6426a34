"""From rank files to a folder: real checkpoints, ties, dropped and refused tensors, the class check, the reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import streammerge as sm
from streammerge.errors import SourceError, UnsupportedError
from streammerge.execute.memory import rss

WriteCheckpoint = Callable[..., Path]
Weights = Callable[[Path], dict[str, Any]]
State = dict[str, torch.Tensor]
Config = dict[str, Any]

DATA = Path(__file__).parent / "data"
PARTIAL = "fsdp2_w2_partial"
REAL = sorted(
    path.parent.name
    for path in DATA.glob("*/ckpt")
    if any(path.glob("model_world_size_*.pt")) and path.parent.name != PARTIAL
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def assert_same(ours: State, theirs: State) -> None:
    """Same names, dtypes and bits."""
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints(name: str, tmp_path: Path, weights: Weights) -> None:
    """Written by real training jobs; expected is what transformers saves for the same weights."""
    sm.merge(DATA / name / "ckpt", tmp_path / "merged", check=False)
    assert_same(weights(tmp_path / "merged"), weights(DATA / name / "expected"))


@pytest.fixture
def tied(qwen2_config: Config) -> Config:
    """The config with tied embeddings."""
    return qwen2_config | {"tie_word_embeddings": True}


def test_alias_is_dropped(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, tied: Config, tmp_path: Path, weights: Weights
) -> None:
    state = qwen2_state | {HEAD: qwen2_state[EMBEDDING]}
    report = sm.merge(write_checkpoint(state, tied), tmp_path / "merged", check=False)
    assert report.tied == (HEAD,)
    assert report.warnings == ()
    assert HEAD not in weights(tmp_path / "merged")
    assert torch.equal(weights(tmp_path / "merged")[EMBEDDING], qwen2_state[EMBEDDING])


def test_equal_values_of_their_own_are_dropped(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, tied: Config, tmp_path: Path, weights: Weights
) -> None:
    state = qwen2_state | {HEAD: qwen2_state[EMBEDDING].clone()}
    report = sm.merge(write_checkpoint(state, tied), tmp_path / "merged", check=False)
    assert report.tied == (HEAD,)
    assert HEAD not in weights(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_bytes())["tie_word_embeddings"] is True


@pytest.mark.parametrize("where", [0, -1])
def test_different_values_are_both_kept(
    where: int, write_checkpoint: WriteCheckpoint, qwen2_state: State, tied: Config, tmp_path: Path, weights: Weights
) -> None:
    """A single bit is enough, and the model loads with both."""
    from transformers import AutoModelForCausalLM

    head = qwen2_state[EMBEDDING].clone()
    head.view(torch.int32).view(-1)[where] ^= 1
    report = sm.merge(write_checkpoint(qwen2_state | {HEAD: head}, tied), tmp_path / "merged", check=False)
    assert report.tied == ()
    assert any(HEAD in warning and "tie_word_embeddings" in warning for warning in report.warnings)
    found = weights(tmp_path / "merged")
    assert torch.equal(found[HEAD].view(torch.int32), head.view(torch.int32))
    assert torch.equal(found[EMBEDDING], qwen2_state[EMBEDDING])
    config = json.loads((tmp_path / "merged" / "config.json").read_bytes())
    assert config == tied | {"tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(model.lm_head.weight.view(torch.int32), head.view(torch.int32))


def test_untied_by_the_config(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path, weights: Weights
) -> None:
    """Equal values are written twice when the config does not tie them."""
    state = qwen2_state | {HEAD: qwen2_state[EMBEDDING]}
    sm.merge(write_checkpoint(state, qwen2_config), tmp_path / "merged", check=False)
    assert torch.equal(weights(tmp_path / "merged")[HEAD], qwen2_state[EMBEDDING])
    report = sm.merge(tmp_path / "source", tmp_path / "tied", tie_word_embeddings=True, check=False)
    assert report.tied == (HEAD,)


def test_rotary_buffers_are_not_saved(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path, weights: Weights
) -> None:
    buffers = {
        "model.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(4, 2),
    }
    report = sm.merge(write_checkpoint(qwen2_state | buffers, qwen2_config), tmp_path / "merged", check=False)
    assert set(report.dropped) == set(buffers)
    assert_same(weights(tmp_path / "merged"), qwen2_state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module._checkpoint_wrapped_module."])
def test_wrappers_are_removed(
    prefix: str,
    write_checkpoint: WriteCheckpoint,
    qwen2_state: State,
    qwen2_config: Config,
    tmp_path: Path,
    weights: Weights,
) -> None:
    wrapped = {prefix + name: value for name, value in qwen2_state.items()}
    sm.merge(write_checkpoint(wrapped, qwen2_config), tmp_path / "merged", check=False)
    assert_same(weights(tmp_path / "merged"), qwen2_state)


def test_integers_bools_and_odd_shapes(write_checkpoint: WriteCheckpoint, tmp_path: Path, weights: Weights) -> None:
    """Only floats are cast, and nothing gets lost that has no elements or no dims."""
    state = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
        "ids": torch.arange(5),
        "scaled": torch.arange(6, dtype=torch.float32).to(torch.float8_e4m3fn),
        "matrix": torch.randn(7, 5).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
    }
    sm.merge(write_checkpoint(state), tmp_path / "merged", dtype="bfloat16", check=False)
    cast = {name: value.to(torch.bfloat16) if value.dtype == torch.float32 else value for name, value in state.items()}
    found = weights(tmp_path / "merged")
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in cast.items()
    }
    assert all(found[name].float().equal(cast[name].float()) for name in cast)


def test_dtype_that_cannot_be_written(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    source = write_checkpoint({"weight": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(UnsupportedError, match=r"weight.*complex128"):
        sm.merge(source, tmp_path / "merged", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "model.layers.0.self_attn.q_proj.lora_A"),
        ("base_model.model.model.norm.weight", "base_model.model.model.norm.weight"),
    ],
)
def test_half_an_adapter_is_refused(
    hidden: str, shown: str, write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path
) -> None:
    source = write_checkpoint(qwen2_state | {hidden: torch.zeros(2, 2)}, qwen2_config)
    with pytest.raises(SourceError) as caught:
        sm.merge(source, tmp_path / "merged", check=False)
    assert shown in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_value_head_is_kept(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path, weights: Weights
) -> None:
    """verl's critic is a token classifier; its head makes the model."""
    from transformers import AutoModelForTokenClassification

    head = {"score.weight": torch.randn(1, 8), "score.bias": torch.randn(1)}
    state = {name: value for name, value in qwen2_state.items() if name != HEAD} | head
    config = qwen2_config | {"architectures": ["Qwen2ForTokenClassification"], "num_labels": 1}
    report = sm.merge(write_checkpoint(state, config), tmp_path / "merged", check=True)
    assert report.check.startswith("every weight of Qwen2ForTokenClassification")
    assert_same(weights(tmp_path / "merged"), state)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", num_labels=1)
    assert torch.equal(model.score.weight, head["score.weight"])


def test_weights_that_do_not_fit_the_class(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path
) -> None:
    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    state = {name: value for name, value in qwen2_state.items() if name != norm} | {bias: torch.zeros(3)}
    source = write_checkpoint(state, qwen2_config)
    with pytest.raises(SourceError) as caught:
        sm.merge(source, tmp_path / "merged", check=True)
    for part in (f"missing: {norm}", f"wrong shape: {bias} is [3], expected [8]", "Qwen2ForCausalLM", "--no-check"):
        assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert sm.merge(source, tmp_path / "merged", check=False).check == "not checked (--no-check)"


def test_tensor_that_the_class_does_not_know(
    write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path, weights: Weights
) -> None:
    source = write_checkpoint(qwen2_state | {"extra.weight": torch.ones(3)}, qwen2_config)
    report = sm.merge(source, tmp_path / "merged")
    assert any("extra.weight" in warning for warning in report.warnings)
    assert torch.equal(weights(tmp_path / "merged")["extra.weight"], torch.ones(3))


@pytest.mark.parametrize("change", [{"architectures": ["NobodyForCausalLM"]}, {"model_type": "nobody"}])
def test_class_that_nobody_knows(
    change: Config, write_checkpoint: WriteCheckpoint, qwen2_state: State, qwen2_config: Config, tmp_path: Path
) -> None:
    report = sm.merge(write_checkpoint(qwen2_state, qwen2_config | change), tmp_path / "merged", check=True)
    assert report.check.startswith("not checked (transformers cannot build")


def test_check_needs_room(tiny: Path, tmp_path: Path) -> None:
    small = rss() + (64 << 20)
    assert "it needs a budget of" in sm.merge(tiny, tmp_path / "one", max_ram=small).check
    assert sm.merge(tiny, tmp_path / "two", max_ram=small, check=True).check.startswith("every weight")


def test_reports_are_plain_data(tiny: Path, tmp_path: Path) -> None:
    inspected = sm.inspect(tiny)
    planned = sm.plan(str(tiny), str(tmp_path / "merged"), max_ram="1G")
    merged = sm.merge([tiny], tmp_path / "merged", check=False)
    for report in (inspected, planned, merged):
        plain = json.loads(json.dumps(report.to_dict()))
        assert set(plain) == {field.name for field in fields(report)}
        assert str(report) == repr(report)
        assert len(repr(report).splitlines()) > 5
    assert (inspected.format, inspected.parameters, inspected.bytes) == ("fsdp", 865_190, 4 * 865_190)
    assert inspected.tensors[EMBEDDING] == {
        "dtype": "float32",
        "shape": [2003, 130],
        "bytes": 4 * 2003 * 130,
        "fragments": 3,
    }
    assert "865,190" in repr(inspected)
    assert "float32 -> bfloat16" in repr(planned)
    assert (planned.max_ram, planned.plan["parameters"]) == (1 << 30, 865_190)
    assert planned.plan["files"][0]["size"] == (tmp_path / "merged" / "model.safetensors").stat().st_size
    assert (merged.tensors, merged.written_dtypes) == (27, {"bfloat16": 27})
    assert str(tmp_path / "merged") in repr(merged)


def test_plan_foretells_the_merge(tiny: Path, tmp_path: Path) -> None:
    planned = sm.plan(tiny, tmp_path / "merged", max_shard_size=300_000)
    merged = sm.merge(tiny, tmp_path / "merged", max_shard_size=300_000, check=False)
    sizes = {file["name"]: file["size"] for file in planned.plan["files"]}
    assert {name: (tmp_path / "merged" / name).stat().st_size for name in sizes} == sizes
    assert set(sizes) | set(planned.copied) | {"model.safetensors.index.json"} == set(merged.files)
    assert merged.bytes_written == planned.plan["write_size"]
    assert merged.bytes_read >= planned.plan["read_size"]


class Recorder(sm.Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done: list[int] = []

    def phase(self, name: str, total: int) -> None:
        """A phase begins."""
        self.phases.append((name, total))

    def advance(self, done: int) -> None:
        """Bytes are moved."""
        self.done.append(done)


def test_observer(tiny: Path, tmp_path: Path) -> None:
    seen = Recorder()
    report = sm.merge(tiny, tmp_path / "merged", observer=seen, check=False)
    assert seen.phases == [("reading metadata", 0), ("merging", report.bytes_written)]
    assert seen.done == sorted(seen.done)
    assert seen.done[-1] == report.bytes_written
