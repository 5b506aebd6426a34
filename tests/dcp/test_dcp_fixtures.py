"""Real DCP folders of several torch versions merge to exactly what `save_pretrained` wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.dcp.dcp_support import logits
from tests.support.data import DATA
from tests.support.raw import read_folder

FOLDERS = sorted(path.name for path in DATA.iterdir() if "dcp_" in path.name)
# In a process of its own, where no torch has filled the memory yet.
_MERGE_ALL = """
import json, sys, streammerge
for source, config, target in json.load(sys.stdin):
    report = streammerge.merge(source, target, hf_config=config, max_ram="256M", dtype="keep", check=False)
    print(json.dumps([report.peak_rss, list(report.warnings)]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """All of them, merged under a budget of 256 MiB."""
    root = tmp_path_factory.mktemp("merged")
    jobs = [(str(DATA / name / "ckpt"), str(DATA / name / "expected"), str(root / name)) for name in FOLDERS]
    command = [sys.executable, "-c", _MERGE_ALL]
    done = subprocess.run(command, input=json.dumps(jobs), cwd=DATA.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        peak, warnings = json.loads(line)
        assert peak < 256 << 20
        assert warnings == []
    return {name: root / name for name in FOLDERS}


def test_there_are_folders() -> None:
    assert len(FOLDERS) >= 3


@pytest.mark.parametrize("name", FOLDERS)
def test_tensors_are_exact(name: str, results: Mapping[str, Path]) -> None:
    assert read_folder(results[name]) == read_folder(DATA / name / "expected")


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_computes_the_same(name: str, results: Mapping[str, Path]) -> None:
    assert torch.equal(logits(results[name]), logits(DATA / name / "expected"))
