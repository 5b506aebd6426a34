"""The merges that are disturbed, and what an undisturbed one of each gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streammerge.errors import DestinationError, StreammergeError
from tests.reliability.harness import Case, Tree, process, tree
from tests.reliability.runner import Steps

__all__ = ["CASES", "Golden", "golden_of", "problem_after_going_on", "problem_with"]

CASES = (
    Case("one-file", steps=Steps(1 << 20, 1 << 28)),
    Case("shards-of-many-tiles", {"max_shard_size": "60KB", "scan": True}, steps=Steps(1 << 14, 1 << 15)),
    Case("buffered-with-checksums", {"io": "pread", "checksums": True, "max_shard_size": "100KB"}),
    Case("over-an-earlier-one", {"overwrite": True}, {"max_shard_size": "50KB"}),
    Case("over-an-earlier-one-with-shards", {"overwrite": True, "max_shard_size": "90KB", "checksums": True}, {}),
)


@dataclass(frozen=True)
class Golden:
    """What is at the destination before a merge, and after one that nothing disturbs."""

    before: Tree | None
    after: Tree


def golden_of(case: Case, folder: Path) -> Golden:
    """Run the case undisturbed in an empty folder."""
    folder.mkdir()
    target = folder / "merged"
    case.prepare(target)
    before = tree(target)
    done = process(*case.line(target), steps=case.steps)
    assert done.returncode == 0, done.stderr
    after = tree(target)
    assert after is not None
    return Golden(before, after)


def problem_with(found: Tree | None, golden: Golden, *, finished: bool = False) -> str | None:
    """What is wrong with a destination that must be exact, or as it was unless ``finished``."""
    if found == golden.after or (found == golden.before and not finished):
        return None
    if found is None:
        return "absent"
    best = golden.after if finished or golden.before is None else golden.before
    differ = sorted(name for name in {*found, *best} if found.get(name, 0) != best.get(name, 0))
    return f"neither whole nor as it was, differs in {differ}"


def problem_after_going_on(case: Case, target: Path, golden: Golden) -> str | None:
    """Run the same command again; what is wrong then.

    When the killed merge had nothing left to do, the second one may say that the destination exists.
    """
    refused = ""
    try:
        case.run(target)
    except StreammergeError as fault:
        if not isinstance(fault, DestinationError):
            return f"{type(fault).__name__}: {fault}"
        refused = " and refused to go on"
    left = sorted(path.name for path in target.parent.iterdir())
    if left != ["merged"]:
        return f"left {left}{refused}"
    return problem_with(tree(target), golden, finished=True)
