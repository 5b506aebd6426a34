"""Real checkpoints of several frameworks and torch versions merge to exactly what `save_pretrained` wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import streammerge
from streammerge.errors import UnsupportedError
from tests.support.data import DATA, MODELS, PARTIAL, config_folder
from tests.support.raw import read_folder

# In a process of its own, where no torch has filled the memory yet; the model class is checked below.
_MERGE_ALL = """
import json, sys, streammerge
for name, source, config, target in json.load(sys.stdin):
    report = streammerge.merge(source, target, hf_config=config, max_ram="256M", dtype="keep", check=False)
    print(json.dumps([name, report.peak_rss, list(report.warnings)]))
"""


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """All checkpoints, merged under a budget of 256 MiB."""
    root = tmp_path_factory.mktemp("merged")
    targets = {name: root / name for name in MODELS}
    jobs = [
        (name, str(DATA / name / "ckpt"), str(config_folder(name)), str(target)) for name, target in targets.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", _MERGE_ALL], input=json.dumps(jobs), cwd=DATA.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        name, peak, _ = json.loads(line)
        assert peak < 256 << 20, name
    return targets


def test_there_are_checkpoints() -> None:
    assert len(MODELS) >= 8


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_exact(name: str, merged: Mapping[str, Path]) -> None:
    assert read_folder(merged[name]) == read_folder(DATA / name / "expected")


@pytest.mark.parametrize("name", MODELS)
def test_other_files_are_copied_byte_for_byte(name: str, merged: Mapping[str, Path]) -> None:
    """Only the dtype of a config may change, where it is not that of the weights."""
    copied = [path for path in config_folder(name).iterdir() if path.suffix != ".safetensors"]
    assert copied
    for path in copied:
        found = (merged[name] / path.name).read_bytes()
        if path.name != "config.json" or found == path.read_bytes():
            assert found == path.read_bytes(), path.name
            continue
        before, after = json.loads(path.read_bytes()), json.loads(found)
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert changed <= {"dtype", "torch_dtype"}


def _logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokens = torch.arange(24).reshape(2, 12) * 5 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name: str, merged: Mapping[str, Path]) -> None:
    found, wanted = _logits(merged[name]), _logits(DATA / name / "expected")
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert found.isfinite().all()


def test_partial_sums_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Partial"):
        streammerge.merge(DATA / PARTIAL / "ckpt", tmp_path / "out", dtype="keep", check=False)
    assert not list(tmp_path.iterdir())
