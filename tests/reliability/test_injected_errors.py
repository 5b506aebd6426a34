"""Calls that fail: one clear message, the documented exit code, nothing under the final name, and a way to go on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.reliability.cases import CASES, Golden, golden_of, problem_after_going_on, problem_with
from tests.reliability.harness import FULL, Case, needs_strace, tree
from tests.reliability.points import Point, Stage, sample
from tests.reliability.runner import Steps

pytestmark = [needs_strace, pytest.mark.timeout(3600 if FULL else 300)]

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EACCES")
READS = ("pread64", "preadv", "preadv2", "openat")
ADVICE = {"ENOSPC": "no space", "EDQUOT": "quota", "EIO": "i/o error|input/output", "EACCES": "permission denied"}
CASE = Case("shards", {"max_shard_size": "60KB", "io": "pread"}, steps=Steps(1 << 14, 1 << 14))


def problem_with_message(done_code: int, errors: str, error: str) -> str | None:
    """What is wrong with how a failed command ends."""
    lines = [line for line in errors.splitlines() if not line.startswith("warning")]
    if done_code != 6:
        return f"exit code {done_code}: {errors}"
    if len(lines) != 1 or not lines[0].startswith("error: cannot ") or not re.search(ADVICE[error], lines[0].lower()):
        return f"message {errors!r}"
    return None


def may_be_harmless(point: Point) -> bool:
    """Whether a merge need not fail with this call: a probe, or one for which there is another way."""
    return point.what == ".direct-io-probe" or point.name in ("renameat2", "sendfile", "copy_file_range")


def problems_of(stage: Stage, point: Point, error: str, golden: Golden) -> list[str]:
    """Make one call fail, look, and go on."""
    done = stage.fail(point, f"error={error}")
    found = [
        None
        if done.returncode == 0 and may_be_harmless(point)
        else problem_with_message(done.returncode, done.stderr, error),
        problem_with(tree(stage.target), golden, finished=done.returncode == 0),
    ]
    if done.returncode != 0:
        found.append(problem_after_going_on(stage.case, stage.target, golden))
    return [f"{error} in {point}: {problem}" for problem in found if problem]


@pytest.mark.parametrize("case", [CASE, CASES[-1]], ids=lambda case: case.name)
def test_every_kind_of_write_that_fails(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_of(case, tmp_path / "golden")
    stage = Stage(case, tmp_path)
    case.steps.apply(monkeypatch.setattr)
    points = stage.points()
    chosen = points if FULL else sample(points, last_only=case is CASE)
    errors = itertools.cycle(ERRORS)
    pairs = [(point, error) for point in chosen for error in (ERRORS if FULL else (next(errors),))]
    problems = [problem for point, error in pairs for problem in problems_of(stage, point, error, golden)]
    print(f"{case.name}: {len(pairs)} failures")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems)


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
def test_every_kind_of_read_that_fails(io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("reads", {"io": io, "max_shard_size": "60KB"}, steps=Steps(1 << 14, 1 << 14))
    golden = golden_of(case, tmp_path / "golden")
    stage = Stage(case, tmp_path, READS, watched=case.source)
    case.steps.apply(monkeypatch.setattr)
    chosen = sample(stage.points(reads=True), last_only=io == "mmap" and not FULL)
    assert chosen
    problems = [problem for point in chosen for problem in problems_of(stage, point, "EIO", golden)]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems)


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_read_error_names_the_file(io: str, tmp_path: Path) -> None:
    case = Case("reads", {"io": io}, steps=Steps(1 << 14, 1 << 14))
    stage = Stage(case, tmp_path, READS, watched=case.source)
    for point in sample(stage.points(reads=True)):
        assert point.what in stage.fail(point, "error=EIO").stderr


@pytest.mark.parametrize("call", ["write", "pwritev2", "pwrite64"])
def test_writes_that_write_nothing(call: str, tmp_path: Path) -> None:
    """A full disk may also say 0. It must not be asked for ever."""
    golden = golden_of(CASE, tmp_path / "golden")
    stage = Stage(CASE, tmp_path)
    point = next(point for point in stage.points() if point.name == call)
    stage.reset()
    done = stage.run("-e", f"inject={call}:retval=0:when={point.count}+", wait=20)
    assert problem_with_message(done.returncode, done.stderr, "ENOSPC") is None, done.stderr
    assert problem_with(tree(stage.target), golden) is None


@pytest.mark.parametrize("call", ["write", "pwritev2", "fsync", "openat"])
def test_interrupted_calls_are_repeated(call: str, tmp_path: Path) -> None:
    golden = golden_of(CASE, tmp_path / "golden")
    stage = Stage(CASE, tmp_path)
    points = [point for point in stage.points() if point.name == call]
    done = stage.fail(points[len(points) // 2], "error=EINTR")
    assert done.returncode == 0, done.stderr
    assert problem_with(tree(stage.target), golden, finished=True) is None
