"""Kill -9 at every system call that changes a file: the destination is absent, as it was, or exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.reliability.cases import CASES, golden_of, problem_after_going_on, problem_with
from tests.reliability.harness import FULL, Case, needs_strace, tree
from tests.reliability.points import Stage, sample

pytestmark = [needs_strace, pytest.mark.timeout(3600 if FULL else 300)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kill_at_every_call(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_of(case, tmp_path / "golden")
    stage = Stage(case, tmp_path)
    points = stage.points()
    chosen = points if FULL else sample(points, last_only=case is not CASES[-1])
    case.steps.apply(monkeypatch.setattr)
    problems = []
    for point in chosen:
        stage.kill(point)
        found = [
            ("after the kill", problem_with(tree(stage.target), golden)),
            ("after going on", problem_after_going_on(case, stage.target, golden)),
        ]
        problems += [f"killed at {point}, {when}: {problem}" for when, problem in found if problem]
    kinds = Counter(point.name for point in chosen)
    print(f"{case.name}: killed at {len(chosen)} of {len(points)} points: {dict(kinds)}")
    assert not problems, "\n".join(problems)
