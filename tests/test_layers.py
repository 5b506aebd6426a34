"""The import contracts of pyproject.toml hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_contracts() -> None:
    beside = Path(sys.executable).with_name("lint-imports")
    tool = str(beside) if beside.exists() else shutil.which("lint-imports")
    if tool is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
    assert "3 kept" in done.stdout
