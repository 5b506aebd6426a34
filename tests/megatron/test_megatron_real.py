"""Checkpoints that Megatron-core 0.16 itself wrote, in a process without torch and under a budget of 256 MiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data import DATA
from tests.support.raw import read_folder

_MERGE = """
import sys, streammerge
source, config, target = sys.argv[1:]
report = streammerge.merge(source, target, hf_config=config, max_ram="256M", dtype="keep", check=False)
assert report.peak_rss < 256 << 20
"""


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("megatron_*")))
def test_tensors_are_exact(name: str, tmp_path: Path) -> None:
    """Gated delta nets and chunks of two tensor parallel ranks; Transformer Engine's names over stages."""
    folder = DATA / name
    command = [sys.executable, "-c", _MERGE, str(folder / "ckpt"), str(folder / "expected"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=DATA.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_folder(tmp_path / "out") == read_folder(folder / "expected")


def test_there_are_some() -> None:
    assert len(list(DATA.glob("megatron_*"))) >= 2
