"""Kill -9 at random moments of a merge of some size, resumes included: the result is the same to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.reliability.harness import FULL, process, start
from tests.reliability.runner import Steps

pytestmark = pytest.mark.timeout(7200 if FULL else 300)

KILLS = int(os.environ.get("STREAMMERGE_KILLS", "100" if FULL else "20"))
STEPS = Steps(1 << 20, 4 << 20, inline=False)

# (mesh, world size, options): the second is read as stored, the third by the page cache.
SHAPES = [("fsdp", 4, ["--max-shard-size", "15MB"])]
if FULL:
    SHAPES += [
        ("hsdp", 4, ["--dtype", "keep", "--max-shard-size", "40MB", "--workers", "4"]),
        ("fsdp", 7, ["--io", "pread", "--checksums", "--scan"]),
    ]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[str]]]:
    """Rank files of about 90 MB, float32 (twice that with replicas), and options for them; removed afterwards."""
    import torch

    from benchmarks.make_checkpoint import make_checkpoint
    from benchmarks.shapes import _qwen25

    mesh, world, options = request.param
    folder = tmp_path_factory.mktemp("large")
    config = _qwen25(512, 1400, 4, 8, 2, 12003, tied=False)
    config.dtype = torch.bfloat16
    made = make_checkpoint(folder / "run", config, world_size=world, mesh=mesh)
    yield made.actor, ["--no-check", *options]
    shutil.rmtree(folder)


def digests(folder: Path) -> dict[str, str]:
    """Relative name -> hash of the content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def seconds_of(run: subprocess.Popen[str]) -> float:
    """Wait until weights are written, then to the end; returns the seconds between."""
    wait_for_merging(run)
    began = time.monotonic()
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    return time.monotonic() - began


def wait_for_merging(run: subprocess.Popen[str]) -> None:
    """Read the messages up to the one that announces the weights."""
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("merging"):
            return


@dataclass
class Killer:
    """Starts the same merge again and again and kills it at random moments."""

    line: list[object]
    target: Path
    expected: dict[str, str]
    seconds: float
    rng: random.Random
    kills: int = 0
    kept: list[int] = field(default_factory=list)

    def kill_once(self) -> None:
        """Start, kill, and look at the destination."""
        run = start(*self.line, steps=STEPS)
        if self.rng.random() < 0.1:
            time.sleep(self.rng.uniform(0, 0.5))
        else:
            wait_for_merging(run)
            time.sleep(self.rng.uniform(0, 0.7 * self.seconds))
        run.kill()
        run.communicate()
        self.kills += run.returncode == -9
        if self.target.exists():
            assert digests(self.target) == self.expected

    def finish(self) -> None:
        """Let it run to the end, and compare."""
        done = process(*self.line, "--json", steps=STEPS)
        if done.returncode == 0:
            self.kept.append(json.loads(done.stdout)["bytes_kept"])
        else:
            assert done.returncode == 9, done.stderr  # the killed one was complete already
        assert digests(self.target) == self.expected
        assert [path.name for path in self.target.parent.iterdir()] == ["merged"]
        shutil.rmtree(self.target)


def test_random_kills(checkpoint: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Two to four kills in a row, then the end; and some of what the killed ones did is kept."""
    source, options = checkpoint
    seconds = seconds_of(start(source, tmp_path / "expected" / "merged", *options, steps=STEPS))
    expected = digests(tmp_path / "expected" / "merged")
    shutil.rmtree(tmp_path / "expected")
    target = tmp_path / "killed" / "merged"
    killer = Killer([source, target, *options], target, expected, seconds, random.Random(len(options)))
    rounds = 0
    while killer.kills < KILLS:
        rounds += 1
        for _ in range(killer.rng.randint(2, 4)):
            killer.kill_once()
        killer.finish()
    print(f"{killer.kills} kills in {rounds} rounds, {seconds:.2f} s undisturbed, {sum(killer.kept)} bytes kept in all")
    assert any(killer.kept), "a resumed merge never kept anything"
