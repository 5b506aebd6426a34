"""Two merges into one destination: the second is refused, and the lock dies with its holder."""

from __future__ import annotations

from pathlib import Path

from tests.reliability.cases import golden_of
from tests.reliability.harness import Case, process, start, tree
from tests.reliability.runner import Steps
from tests.reliability.test_random_kills import wait_for_merging

CASE = Case("two", {"max_shard_size": "60KB"}, steps=Steps(1 << 14, 1 << 14, inline=False))
SLOW = Steps(1 << 14, 1 << 14, inline=False, pause=0.5)


def test_second_merge_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    golden = golden_of(CASE, tmp_path / "golden")
    target = tmp_path / "merged"
    line = [word for word in CASE.line(target) if word != "-q"]
    first = start(*line, steps=SLOW)
    try:
        wait_for_merging(first)
        second = process(*line)
        assert second.returncode == 9, second.stderr
        assert "another merge is writing" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert not target.exists()
    again = process(*line)
    assert again.returncode == 0, again.stderr
    assert tree(target) == golden.after


def test_refused_merge_leaves_the_first_alone(tmp_path: Path) -> None:
    golden = golden_of(CASE, tmp_path / "golden")
    target = tmp_path / "merged"
    line = [word for word in CASE.line(target) if word != "-q"]
    first = start(*line, steps=Steps(1 << 14, 1 << 14, inline=False, pause=0.1))
    wait_for_merging(first)
    for _ in range(2):
        assert process(*line).returncode == 9
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert tree(target) == golden.after
