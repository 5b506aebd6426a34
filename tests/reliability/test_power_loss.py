"""Power cuts: from what a merge asked the system to do, everything that a disk may hold afterwards.

A trace of the real command is replayed into a model of a disk. After each operation the power is cut
in several ways; the destination must be absent, as it was, or exact, and the same command must be able
to go on from the ruins.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reliability.cases import CASES, Golden, golden_of, problem_after_going_on, problem_with
from tests.reliability.disk import Crash, Disk, everything, nothing, random_crash
from tests.reliability.harness import FULL, Case, Tree, needs_strace, process, strace, tree
from tests.reliability.oplog import Op, operations, trace_options

pytestmark = [needs_strace, pytest.mark.timeout(3600 if FULL else 300)]

RANDOM_CRASHES = 60 if FULL else 20
RESUMED = 400 if FULL else 12
THREADED = tuple(
    replace(case, name=f"{case.name}-threaded", steps=replace(case.steps, inline=False)) for case in CASES[1:4]
)


def record(case: Case, folder: Path) -> tuple[Tree, list[Op]]:
    """Run a case under strace; returns what was there before, and the operations."""
    work = folder / "work"
    case.prepare(work / "merged")
    work.mkdir(exist_ok=True)
    before = tree(work) or {}
    log = folder / "trace"
    done = process(*case.line(work / "merged"), steps=case.steps, prefix=strace(log, *trace_options()))
    assert done.returncode == 0, done.stderr
    ops = operations(log, work)
    log.unlink()
    disk = Disk(str(work), before)
    for op in ops:
        disk.apply(op)
    assert disk.now() == tree(work), "the model of the disk is wrong"
    shutil.rmtree(work)
    return before, ops


def crashes(seed: int) -> Iterator[tuple[str, Crash]]:
    """Ways to lose power, by name."""
    yield "nothing unsynced kept", nothing()
    yield "names kept, files empty", nothing(names=True)
    yield "names and sizes kept, files zero", nothing(names=True, sizes=True)
    yield "everything kept", everything()
    yield "all data kept, names lost", everything(names=False)
    for number in range(RANDOM_CRASHES):
        yield f"random {seed}/{number}", random_crash(seed * 1000 + number)


def destination(found: Tree) -> Tree | None:
    """The part of a tree that is the destination."""
    if "merged" not in found:
        return None
    return {name.removeprefix("merged/"): data for name, data in found.items() if name.startswith("merged/")}


def hashed(found: Tree) -> str:
    """Equal for equal trees."""
    digest = hashlib.sha256()
    for name, data in sorted(found.items()):
        digest.update(f"{name}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return digest.hexdigest()


def put(found: Tree, folder: Path) -> None:
    """Make a folder of a tree."""
    folder.mkdir()
    for name, data in sorted(found.items()):
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def all_states(case: Case, before: Tree, ops: list[Op], golden: Golden) -> tuple[dict[str, Tree], list[str]]:
    """The different states after a power cut at any moment, and what is wrong with some."""
    states: dict[str, Tree] = {}
    problems = []
    disk = Disk("/", before)
    for place in range(len(ops) + 1):
        for how, crash in crashes(place):
            found = disk.after(crash)
            key = hashed(found)
            finished = place == len(ops)
            if key in states and not finished:
                continue
            states[key] = found
            problem = problem_with(destination(found), golden, finished=finished)
            if problem:
                last = f"{ops[place - 1].kind} {Path(ops[place - 1].path).name}" if place else "the start"
                problems.append(f"after {last} (operation {place} of {len(ops)}), {how}: {problem}")
        if place < len(ops):
            disk.apply(ops[place])
    return states, problems


def relative(ops: list[Op], work: Path) -> list[Op]:
    """The same operations on a disk whose root is the folder."""
    return [replace(op, path=op.path.removeprefix(str(work)), other=op.other.removeprefix(str(work))) for op in ops]


@pytest.mark.parametrize("case", (*CASES, *THREADED), ids=lambda case: case.name)
def test_power_cut_at_every_moment(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_of(case, tmp_path / "golden")
    before, ops = record(case, tmp_path)
    states, problems = all_states(case, before, relative(ops, tmp_path / "work"), golden)
    case.steps.apply(monkeypatch.setattr)
    usable = sorted(key for key, found in states.items() if not problem_with(destination(found), golden))
    chosen = random.Random(1).sample(usable, min(RESUMED, len(usable)))
    for key in chosen:
        put(states[key], tmp_path / "resumed")
        problem = problem_after_going_on(case, tmp_path / "resumed" / "merged", golden)
        if problem:
            problems.append(f"going on from a state with {sorted(states[key])}: {problem}")
        shutil.rmtree(tmp_path / "resumed")
    print(f"{case.name}: {len(ops)} operations, {len(states)} states, {len(chosen)} resumed")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])
