"""The system calls of a merge that change files, as places to kill it or to make a call fail."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.harness import MUTATORS, Case, process, strace

__all__ = ["Point", "Stage", "sample"]

_CALL = re.compile(r"^\d+ +(\w+)\(")
_QUOTED = re.compile(r'"([^"]*)"|<([^<>]*)>')


@dataclass(frozen=True, order=True)
class Point:
    """A system call: its place in the trace, its name, how often that name came (from 1), and what it names."""

    place: int
    name: str
    count: int
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.count} ({self.what})"


def sample(points: Iterable[Point], *, last_only: bool = False) -> list[Point]:
    """The first, the middle and the last of each kind of call, or the last only."""
    kinds: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        kinds[point.name].append(point)
    return sorted(
        {
            some
            for found in kinds.values()
            for some in (found[-1:] if last_only else (found[0], found[len(found) // 2], found[-1]))
        }
    )


class Stage:
    """A folder in which one case is run again and again, from the same beginning.

    strace counts only calls that touch the folder, so the numbers do not depend on what Python imports.
    """

    def __init__(
        self, case: Case, folder: Path, calls: tuple[str, ...] = MUTATORS, watched: Path | None = None
    ) -> None:
        """Calls are counted on what is below ``watched``, by default the folder."""
        self.case, self.calls = case, calls
        self.folder = folder / "stage"
        self.target = self.folder / "merged"
        self._watched = str(watched or self.target)
        self._log = folder / "trace"
        self._start = folder / "start"
        case.prepare(self._start / "merged")
        self._start.mkdir(exist_ok=True)
        self._paths: list[str] = []
        self._paths = sorted(self._named())

    def _named(self) -> set[str]:
        """Everything below the folder that a merge names."""
        self.reset()
        self.run()
        text = self._log.read_text(errors="replace")
        names = {one or other for one, other in _QUOTED.findall(text)}
        below = {name for name in names if name.startswith(self._watched)}
        return below | {str(self.folder)}

    def reset(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._start, self.folder, symlinks=True)

    def run(self, *options: str, wait: float = 60) -> subprocess.CompletedProcess[str]:
        """Run the command under strace."""
        paths = [word for path in self._paths for word in ("-P", path)]
        prefix = strace(self._log, *paths, *options, calls=self.calls)
        return process(*self.case.line(self.target), steps=self.case.steps, prefix=prefix, wait=wait)

    def kill(self, point: Point) -> None:
        """Run from the beginning, and kill the process when it enters a call."""
        self.reset()
        done = self.run("-e", f"inject={point.name}:signal=KILL:when={point.count}")
        assert done.returncode == -9, f"not killed at {point}: {done.returncode} {done.stderr}"

    def fail(self, point: Point, how: str) -> subprocess.CompletedProcess[str]:
        """Run from the beginning, and inject something into a call."""
        self.reset()
        return self.run("-e", f"inject={point.name}:{how}:when={point.count}")

    def points(self, *, reads: bool = False) -> list[Point]:
        """All calls that can change something, or all calls, in order."""
        self.reset()
        done = self.run()
        assert done.returncode == 0, done.stderr
        counts: Counter[str] = Counter()
        found = []
        for place, line in enumerate(self._log.read_text(errors="replace").splitlines()):
            call = _CALL.match(line)
            if call is None or call[1] not in self.calls:
                continue
            counts[call[1]] += 1
            if not reads and ") = -1 " in line:
                continue  # it changes nothing
            if reads or call[1] != "openat" or "O_CREAT" in line:
                named = [one or other for one, other in _QUOTED.findall(line) if (one or other).startswith("/")]
                what = Path(named[-1]).name if named else ""
                found.append(Point(place, call[1], counts[call[1]], what))
        return found
