"""``test``: the merge that would be written, compared with a reference; nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import streammerge as sm
from streammerge.errors import DifferenceError, SourceError
from tests.compare.compare_support import Run, write_folder
from tests.conftest import WriteCheckpoint
from tests.support.data import DATA, copied

Snapshot = Callable[[Path], dict[str, tuple[str, int]]]
NAME = "fsdp2_w4_bf16_tied"


@pytest.mark.parametrize("spelling", ["own", "verl"])
def test_both_spellings_and_nothing_is_written(
    spelling: str, run: Run, tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied(NAME, tmp_path / "ckpt")
    reference = Path(shutil.copytree(DATA / NAME / "expected", tmp_path / "reference"))
    other = Path(shutil.copytree(DATA / "fsdp1_w2_shardedtensor" / "expected", tmp_path / "other"))
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    before, listed = snapshot(tmp_path), sorted(tmp_path.rglob("*"))
    for folder, code in ((reference, 0), (other, 8)):
        line = {
            "own": ["test", source, "--against", folder],
            "verl": ["test", "--backend", "fsdp", "--local_dir", source, "--test_hf_dir", folder],
        }[spelling]
        ran = run(*line)
        assert ran.code == code, ran
        assert ("they are equal" if code == 0 else "they differ") in ran.out
    assert snapshot(tmp_path) == before
    assert sorted(tmp_path.rglob("*")) == listed


def test_json(run: Run) -> None:
    ran = run("test", DATA / NAME / "ckpt", "--against", DATA / NAME / "expected", "--json")
    assert json.loads(ran.out)["equal"] is True


def test_it_needs_a_reference(run: Run, tmp_path: Path) -> None:
    assert run("test", DATA / NAME / "ckpt").code == 2
    assert run("test", DATA / NAME / "ckpt", "--against", tmp_path / "nowhere").code == 2


def test_it_compares_what_a_merge_writes(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> None:
    """Cast to the dtype of the config, as a merge does by default."""
    source = write_checkpoint(qwen2_state, {**qwen2_config, "dtype": "bfloat16"})
    sm.merge(source, tmp_path / "merged", check=False)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(qwen2_state)
    assert sm.test(source, tmp_path / "merged").equal
    assert not sm.test(source, tmp_path / "merged", dtype="keep").equal
    assert not sm.compare(source, tmp_path / "merged").equal  # float32 in the rank files
    assert sm.compare(tmp_path / "merged", source, dtype_aware=True).equal


def test_the_checkpoint_s_own_config_decides(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> None:
    """A merge would write bfloat16; that the reference is float32 does not change it."""
    source = write_checkpoint(qwen2_state, {**qwen2_config, "dtype": "bfloat16"})
    reference = write_folder(tmp_path / "reference", qwen2_state, qwen2_config)
    report = sm.test(source, reference)
    assert not report.equal
    assert {tensor.dtypes for tensor in report.tensors} == {("bfloat16", "float32")}
    assert sm.test(source, reference, dtype_aware=True).equal


def test_the_reference_s_config_where_there_is_no_other(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(qwen2_state)
    rounded = {name: tensor.bfloat16() for name, tensor in qwen2_state.items()}
    reference = write_folder(tmp_path / "reference", rounded, {**qwen2_config, "dtype": "bfloat16"})
    assert sm.test(source, reference).equal
    assert not sm.test(source, reference, dtype="float32").equal


def test_other_values_names_and_shapes(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(qwen2_state, qwen2_config)
    changed = {name: tensor.clone() for name, tensor in qwen2_state.items()}
    q_proj, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    changed[q_proj] = changed[q_proj].view(2, 2, 2, 8).transpose(1, 2).reshape(8, 8)
    changed[norm] = torch.ones(9)
    del changed["lm_head.weight"]
    changed["score.weight"] = torch.ones(1)
    report = sm.test(source, write_folder(tmp_path / "reference", changed, qwen2_config))
    assert [tensor.name for tensor in report.tensors] == [q_proj]
    assert (report.missing, report.extra) == (("score.weight",), ("lm_head.weight",))
    assert report.shapes == {norm: ([8], [9])}


def test_a_tied_head_in_the_reference(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> None:
    tied = {**qwen2_config, "tie_word_embeddings": True}
    state = {**qwen2_state, "lm_head.weight": qwen2_state["model.embed_tokens.weight"]}
    less = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    full, short = write_checkpoint(state, tied, "full"), write_checkpoint(less, tied, "short")
    for number, stored in enumerate((state, less)):
        reference = write_folder(tmp_path / f"reference{number}", stored, tied)
        assert sm.test(full, reference).equal
        assert sm.test(short, reference).equal
    trained = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    assert not sm.test(full, write_folder(tmp_path / "trained", trained, tied)).equal
    assert not sm.test(write_checkpoint(trained, tied, "untied"), tmp_path / "reference1").equal


def test_nothing_in_common(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    source = write_checkpoint({"a": torch.ones(2)})
    with pytest.raises(DifferenceError):
        sm.test(source, write_folder(tmp_path / "reference", {"b": torch.ones(2)}))


def test_a_missing_rank(tmp_path: Path) -> None:
    source = copied(NAME, tmp_path / "ckpt")
    (source / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(SourceError, match="rank"):
        sm.test(source, DATA / NAME / "expected")
