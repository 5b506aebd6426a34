"""Memory of a process tree over time, from /proc/PID/status."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Sampler", "parse_status", "thinned", "tree_memory"]

_PERIOD_SECONDS = 0.05


def parse_status(text: str) -> dict[str, int]:
    """The sizes of a /proc/PID/status, in bytes by name (VmRSS, VmHWM, RssAnon, RssShmem, ...)."""
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) << 10
    return sizes


def _status(proc: Path, pid: int) -> dict[str, int]:
    try:
        return parse_status((proc / str(pid) / "status").read_text())
    except OSError:
        return {}


def _descendants(proc: Path, pid: int) -> Iterator[int]:
    for path in (proc / str(pid) / "task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(proc, child)


def tree_memory(pid: int, proc: Path = Path("/proc")) -> tuple[int, int]:
    """Memory of a process and its descendants now, and the root's high-water mark; both in bytes.

    The root counts with its RSS, each descendant with its RSS less file mappings, as those are shared.
    """
    root = _status(proc, pid)
    now = root.get("VmRSS", 0)
    for child in _descendants(proc, pid):
        status = _status(proc, child)
        now += status.get("RssAnon", 0) + status.get("RssShmem", 0)
    return now, root.get("VmHWM", 0)


class Sampler(threading.Thread):
    """Samples a process tree every 50 ms until stopped.

    Attributes:
        timeline: (seconds since ``started``, bytes) of each sample.
        peak: most bytes seen, the kernel's high-water mark of the root process included.
    """

    def __init__(self, pid: int, started: float) -> None:
        super().__init__(daemon=True)
        self.timeline: list[tuple[float, int]] = []
        self.peak = 0
        self._pid, self._began = pid, started
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample; called by ``start``."""
        while not self._stop_asked.is_set():
            now, high = tree_memory(self._pid)
            if now:
                self.timeline.append((time.monotonic() - self._began, now))
            self.peak = max(self.peak, now, high)
            self._stop_asked.wait(_PERIOD_SECONDS)

    def stop(self) -> None:
        """End sampling and wait for the thread."""
        self._stop_asked.set()
        self.join()


def thinned(timeline: Sequence[tuple[float, int]], most: int = 200) -> list[tuple[float, int]]:
    """At most ``most`` samples: of each run of neighbours, the one with the most memory."""
    if len(timeline) <= most:
        return list(timeline)
    step = -(-len(timeline) // most)
    return [max(timeline[i : i + step], key=lambda sample: sample[1]) for i in range(0, len(timeline), step)]
