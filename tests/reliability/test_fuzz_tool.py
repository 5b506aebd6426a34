"""The fuzzer, for a short while: no crash, no hang, no wrong folder after silent damage."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.reliability.mutations import CRAFTED, SILENT, Checkpoint
from tools.fuzz import Fuzzer, Limits, checkpoints, fuzz

INPUTS = int(os.environ.get("STREAMMERGE_FUZZ_INPUTS", "600"))


@pytest.mark.timeout(600)
def test_damaged_and_hostile_checkpoints() -> None:
    total = fuzz(INPUTS, 7, 2, Limits(seconds=20))
    print(f"{dict(total.outcomes)}, slowest {total.slowest:.2f} s")
    assert sum(total.outcomes.values()) == INPUTS
    assert not total.problems, f"{len(total.problems)} problems:\n" + "\n".join(total.problems[:30])
    assert len([name for name, count in total.outcomes.items() if count]) >= 3, "the damage does nothing"


@pytest.mark.parametrize("mutation", [*SILENT, *dict.fromkeys(CRAFTED)])
def test_mutations_change_something(mutation: object) -> None:
    intact = Checkpoint.read(checkpoints()[0])
    changed = 0
    for seed in range(30):
        damaged = intact.copy()
        mutation(damaged, random.Random(seed))  # type: ignore[operator]
        changed += damaged.files != intact.files
    assert changed >= 10


def test_mutations_of_what_is_damaged_already() -> None:
    intact = Checkpoint.read(checkpoints()[0])
    for seed in range(400):
        rng, damaged = random.Random(seed), intact.copy()
        for _ in range(4):
            rng.choice([*SILENT, *CRAFTED])(damaged, rng)


def test_fuzzer_sees_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import fuzz as module

    fuzzer = Fuzzer(checkpoints()[0], tmp_path, Limits())
    monkeypatch.setattr(module, "merge", lambda source, target: 1 // 0)
    assert "ZeroDivisionError" in fuzzer.run(1).problems[0]


def test_fuzzer_sees_a_hang_and_a_glutton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import fuzz as module

    fuzzer = Fuzzer(checkpoints()[0], tmp_path, Limits(seconds=0.2, memory=64 << 20))

    def hang(source: Path, target: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(module, "merge", hang)
    assert "took more" in fuzzer.run(1).problems[0]
    monkeypatch.setattr(module, "merge", lambda source, target: bytearray(1 << 30))
    assert "MemoryError" in fuzzer.run(1).problems[0]
