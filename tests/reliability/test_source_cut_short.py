"""A source that is cut while it is read: a clear end on every route, never a death without a word."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.reliability.harness import SMALL, needs_strace, start, strace
from tests.reliability.runner import Steps
from tests.reliability.test_random_kills import wait_for_merging

RANKS = [f"model_world_size_4_rank_{rank}.pt" for rank in range(4)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy that may be cut."""
    return Path(shutil.copytree(SMALL, tmp_path / "source"))


def cut(source: Path) -> None:
    """Leave some bytes of every rank file, and its time."""
    for name in RANKS:
        status = (source / name).stat()
        os.truncate(source / name, 4096)
        os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns))


def check_end(code: int, errors: str, tmp_path: Path) -> None:
    """A message, the exit code for a bad source, and no destination."""
    assert code == 3, f"exit code {code}: {errors}"
    assert "model_world_size_4_rank_" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("after", [0.1, 0.7])
def test_source_cut_between_reads(io: str, after: float, source: Path, tmp_path: Path) -> None:
    """Writing takes half a second here, so the cut falls between two reads."""
    line = [source, tmp_path / "merged", "--no-check", "--io", io]
    run = start(*line, steps=Steps(1 << 14, 1 << 14, inline=False, pause=0.5))
    wait_for_merging(run)
    time.sleep(after)
    cut(source)
    _, errors = run.communicate(timeout=60)
    check_end(run.returncode, errors, tmp_path)


@needs_strace
@pytest.mark.parametrize(("io", "call"), [("pread", "preadv2"), ("direct", "preadv2"), ("mmap", "madvise")])
def test_source_cut_within_a_read(io: str, call: str, source: Path, tmp_path: Path) -> None:
    """The call that reads (or maps) takes long, and the file is cut before it returns."""
    names = [word for name in RANKS for word in ("-P", str(source / name))] if call != "madvise" else []
    slow = strace(tmp_path / "trace", *names, "-e", f"inject={call}:delay_exit=150000", calls=(call,))
    line = [source, tmp_path / "merged", "--no-check", "--io", io]
    run = start(*line, steps=Steps(1 << 14, 1 << 14, inline=False), prefix=slow)
    wait_for_merging(run)
    time.sleep(0.4)
    assert run.poll() is None
    cut(source)
    _, errors = run.communicate(timeout=60)
    check_end(run.returncode, errors, tmp_path)
