"""No command changes, creates or opens for writing anything in the source."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.harness import MUTATORS, SMALL, Case, needs_strace, process, strace
from tests.reliability.points import Stage
from tests.reliability.runner import Steps

_OTHER = ("open", "creat", "truncate", "fallocate", "chmod", "fchmod", "fchmodat", "utimensat", "setxattr", "link",
          "linkat", "symlink", "symlinkat")  # fmt: skip
_MERGE = ["{source}", "{target}", "--no-check", "--max-shard-size", "60KB"]
COMMANDS = {
    "inspect": ["inspect", "{source}"],
    "inspect-json": ["inspect", "{source}", "--json", "--tensors"],
    "plan": ["plan", "{source}", "{target}"],
    "plan-json": ["plan", "{source}", "{target}", "--json"],
    "merge": _MERGE,
    "merge-json": [*_MERGE, "--json", "--scan", "--checksums"],
    "merge-with-check": ["{source}", "{target}", "--check"],
    "merge-direct": [*_MERGE, "--io", "direct"],
    "merge-mmap": [*_MERGE, "--io", "mmap"],
    "refused": ["{source}", "{source}", "--no-check"],
    "too-little-memory": ["{source}", "{target}", "--max-ram", "1M"],
}

Snapshot = Callable[[Path], dict[str, tuple[str, int]]]


def opened_for_writing(log: Path, source: Path) -> list[str]:
    """Lines of a trace that do more to the source than read it."""
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if str(source) in line and "resumed>" not in line  # what was asked for stands where the call began
    ]
    return [line for line in lines if not re.search(r"openat\(.*O_RDONLY", line) or "O_CREAT" in line]


@needs_strace
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_only_read_the_source(name: str, tmp_path: Path, snapshot: Snapshot) -> None:
    source = tmp_path / "source"
    shutil.copytree(SMALL, source)
    before = snapshot(source)
    line = [word.format(source=source, target=tmp_path / "merged") for word in COMMANDS[name]]
    done = process(*line, prefix=strace(tmp_path / "trace", calls=(*MUTATORS, *_OTHER)))
    assert (done.returncode == 0) == (name not in ("refused", "too-little-memory")), done.stderr
    assert snapshot(source) == before
    traced = (tmp_path / "trace").read_text(errors="replace")
    assert str(source / "model_world_size_4_rank_0.pt") in traced, "the trace sees nothing"
    # Copies report where they come from.
    more = [line for line in opened_for_writing(tmp_path / "trace", source) if "sendfile" not in line]
    assert not more, more


@needs_strace
@pytest.mark.parametrize("how", ["error=ENOSPC", "signal=KILL"])
def test_failed_and_resumed_merges_only_read_the_source(how: str, tmp_path: Path, snapshot: Snapshot) -> None:
    shutil.copytree(SMALL, tmp_path / "source")
    before = snapshot(tmp_path / "source")
    case = Case("", {"max_shard_size": "60KB"}, steps=Steps(1 << 14, 1 << 14), source=tmp_path / "source")
    stage = Stage(case, tmp_path)
    writes = [point for point in stage.points() if point.name == "pwrite64"]
    assert stage.fail(writes[len(writes) // 2], how).returncode in (6, -9)
    assert snapshot(tmp_path / "source") == before
    done = process(*case.line(stage.target), steps=case.steps, prefix=strace(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "source") == before
    assert not opened_for_writing(tmp_path / "again", tmp_path / "source")
