"""Merge damaged and hostile checkpoints by the thousand, and report whatever is not handled.

Each input is a small real checkpoint with one to three changes. A merge of it must end with a
StreammergeError or with the right folder, within a time limit and a memory limit. Which folder is right:

* after *silent* damage, as disks and copies cause it (flips, zeros, truncation, files missing), the
  folder of the intact checkpoint; but bytes of weights carry no checksum, so damage to them may show in weights;
* after *crafted* changes (pickles and directories made anew, files swapped, other configs), any folder.

    python tools/fuzz.py --inputs 20000 --seed 2
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.reliability.mutations import CRAFTED, SILENT, Checkpoint, Mutation

DATA = Path(__file__).parents[1] / "tests" / "data"
_RESULT = "merged"


@dataclass(frozen=True)
class Limits:
    """What one input may cost: seconds, and bytes of address space beyond what the worker has."""

    seconds: float = 20.0
    memory: int = 1 << 30


@dataclass
class Tally:
    """What came of the inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0

    def add(self, other: Tally) -> None:
        """Count what another has."""
        self.outcomes += other.outcomes
        self.kinds += other.kinds
        self.problems += other.problems
        self.slowest = max(self.slowest, other.slowest)
        self.largest = max(self.largest, other.largest)


class TookTooLong(BaseException):
    """Raised by the alarm; no handler for errors catches it."""


def checkpoints() -> list[Path]:
    """Small real checkpoints that can be merged."""
    found = sorted(path.parent for path in DATA.glob("*/ckpt/*rank*0*"))
    return [path for path in found if "partial" not in str(path)]


def contents(folder: Path) -> dict[str, str]:
    """Relative name -> hash, without what names the source."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".streammerge.json"
    }


def headers(folder: Path) -> list[bytes]:
    """The headers of the weight files: names, dtypes, shapes, places."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(file.read(int.from_bytes(file.read(8), "little")))
    return found


def merge(source: Path, target: Path) -> None:
    """Plan and merge in this process, as stored and without the check against the model class."""
    import streammerge as sm

    sm.plan(source, target, dtype="keep")
    sm.merge(source, target, dtype="keep", check=False, workers=1)


class Fuzzer:
    """Makes inputs out of one checkpoint, and judges what becomes of them."""

    def __init__(self, source: Path, work: Path, limits: Limits) -> None:
        self._source, self._work, self._limits = source, work, limits
        merge(source, work / "right")
        self._right, self._headers = contents(work / "right"), headers(work / "right")
        self._intact = Checkpoint.read(source)

    def run(self, seed: int) -> Tally:
        """Make the input of a seed and merge it."""
        rng = random.Random(seed)
        input_folder, target = self._work / "input", self._work / _RESULT
        damaged = self._intact.copy()
        made: list[Mutation] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutation = rng.choice([*SILENT, *CRAFTED])
            made.append(mutation)
            mutation(damaged, rng)
        damaged.write(input_folder)
        names = [mutation.__name__ for mutation in made]
        silent = all(mutation in SILENT for mutation in made)
        tally = Tally(kinds=Counter(names))
        began = time.monotonic()
        try:
            outcome, problem = self._judged(input_folder, target, silent, damaged.touched_weights)
        finally:
            shutil.rmtree(input_folder, ignore_errors=True)
            for left in self._work.glob(f"{_RESULT}*"):
                shutil.rmtree(left, ignore_errors=True)
        tally.slowest = time.monotonic() - began
        tally.largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        tally.outcomes[outcome] += 1
        if problem:
            tally.problems.append(f"{self._source.parent.name} seed {seed} ({', '.join(names)}): {problem}")
        return tally

    def _judged(self, source: Path, target: Path, silent: bool, weights: bool) -> tuple[str, str | None]:
        from streammerge.errors import StreammergeError

        try:
            with _Limited(self._limits):
                merge(source, target)
        except StreammergeError as fault:
            left = "an error, but the destination exists" if target.exists() else None
            return type(fault).__name__, left
        except TookTooLong:
            return "hang", f"took more than {self._limits.seconds} s"
        except BaseException as fault:
            where = traceback.extract_tb(fault.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return type(fault).__name__, f"{type(fault).__name__} at {place}: {fault}"[:300]
        if contents(target) == self._right:
            return "right folder", None
        if not silent:
            return "another folder", None
        if weights and headers(target) == self._headers:
            return "other weights", None
        return "wrong folder", "silent damage gave another folder"


class _Limited:
    """Time and address space while inside."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def __enter__(self) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self._limits.memory, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, _alarmed)
        signal.setitimer(signal.ITIMER_REAL, self._limits.seconds)

    def __exit__(self, *fault: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _alarmed(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


def _share(source: Path, seeds: range, limits: Limits) -> Tally:
    """All inputs of one checkpoint, in a process of its own."""
    faulthandler.enable()
    tally = Tally()
    with tempfile.TemporaryDirectory() as work:
        fuzzer = Fuzzer(source, Path(work), limits)
        for seed in seeds:
            tally.add(fuzzer.run(seed))
    return tally


def fuzz(inputs: int, seed: int, workers: int, limits: Limits, done: Callable[[int], object] = lambda n: None) -> Tally:
    """Run that many inputs, spread over the checkpoints and over worker processes."""
    jobs = list(_jobs(inputs, seed))
    total = Tally()
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, maxtasksperchild=8) as pool:
        results = [(job, pool.apply_async(_share, (*job, limits))) for job in jobs]
        for (source, seeds), result in results:
            try:
                total.add(result.get(timeout=60 + limits.seconds * len(seeds)))
            except multiprocessing.TimeoutError:
                total.problems.append(f"{source.parent.name} seeds {seeds}: the process died or hangs")
            except Exception as fault:  # of the fuzzer itself: the other inputs still count
                total.problems.append(f"{source.parent.name} seeds {seeds}: not run: {fault!r}")
            done(len(seeds))
    return total


def _jobs(inputs: int, seed: int) -> Iterator[tuple[Path, range]]:
    sources = checkpoints()
    size = max(10, min(250, inputs // (2 * len(sources))))
    for number, first in enumerate(range(0, inputs, size)):
        last = min(first + size, inputs)
        yield sources[number % len(sources)], range(seed * 10_000_000 + first, seed * 10_000_000 + last)


@click.command()
@click.option("--inputs", default=20_000, show_default=True, help="How many damaged checkpoints.")
@click.option("--seed", default=1, show_default=True, help="Another seed, other damage.")
@click.option("--workers", default=2, show_default=True, help="Processes.")
@click.option("--seconds", default=20.0, show_default=True, help="Time limit of one input.")
@click.option("--memory", default=1024, show_default=True, help="Memory limit of one input, MiB.")
@click.option("--only", type=int, help="Run the input of this seed alone, on every checkpoint.")
def main(inputs: int, seed: int, workers: int, seconds: float, memory: int, only: int | None) -> None:
    """Merge damaged and hostile checkpoints, and exit with 1 when one was not handled."""
    limits = Limits(seconds, memory << 20)
    began = time.monotonic()
    if only is not None:
        total = Tally()
        for source in checkpoints():
            total.add(_share(source, range(only, only + 1), limits))
    else:
        with click.progressbar(length=inputs, file=sys.stderr) as bar:
            total = fuzz(inputs, seed, workers, limits, bar.update)
    summary = {
        "inputs": sum(total.outcomes.values()),
        "seconds": round(time.monotonic() - began, 1),
        "slowest": round(total.slowest, 2),
        "largest_rss": total.largest,
        "outcomes": dict(total.outcomes.most_common()),
        "mutations": dict(total.kinds.most_common()),
        "problems": len(total.problems),
    }
    click.echo(json.dumps(summary, indent=2))
    for problem in total.problems[:50]:
        click.echo(problem)
    sys.exit(bool(total.problems))


if __name__ == "__main__":
    main()
