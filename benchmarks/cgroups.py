"""A memory cgroup of one's own for one run: its peak counts the page cache too, and it can be limited."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hierarchy", "MemoryGroup", "find_hierarchy", "fresh_group"]

_REMOVE_TRIES = 50


@dataclass(frozen=True)
class Hierarchy:
    """Where memory cgroups are made, and the file names of its version (1 or 2)."""

    root: Path
    version: int

    @property
    def peak_name(self) -> str:
        """File with the most bytes ever charged."""
        return "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"

    @property
    def limit_name(self) -> str:
        """File with the limit in bytes."""
        return "memory.max" if self.version == 2 else "memory.limit_in_bytes"


@dataclass(frozen=True)
class MemoryGroup:
    """One cgroup, or the reason why there is none."""

    folder: Path | None
    hierarchy: Hierarchy | None
    reason: str | None = None

    def wrapped(self, command: Sequence[str]) -> list[str]:
        """The command as one that joins the group first; itself when there is no group."""
        if self.folder is None:
            return list(command)
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def peak(self) -> int | None:
        """Most bytes charged so far, page cache included; None where the kernel does not say."""
        if self.folder is None or self.hierarchy is None:
            return None
        try:
            return int((self.folder / self.hierarchy.peak_name).read_text())
        except (OSError, ValueError):
            return None


def find_hierarchy(mount: Path = Path("/sys/fs/cgroup")) -> Hierarchy | None:
    """The hierarchy that has the memory controller: version 1 beside others, or version 2; None without one."""
    if (mount / "memory" / "memory.limit_in_bytes").exists():
        return Hierarchy(mount / "memory", 1)
    for root in (mount, mount / "unified"):
        try:
            controllers = (root / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if "memory" in controllers:
            return Hierarchy(root, 2)
    return None


@contextmanager
def fresh_group(limit: int | None = None, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[MemoryGroup]:
    """A new memory cgroup, limited to ``limit`` bytes if given, removed at the end.

    Where none can be made, the group yielded has no folder and says why.
    """
    hierarchy = find_hierarchy(mount)
    if hierarchy is None:
        yield MemoryGroup(None, None, "no memory cgroup hierarchy")
        return
    folder = hierarchy.root / f"streammerge-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as fault:
        yield MemoryGroup(None, None, f"cannot make a memory cgroup: {fault.strerror}")
        return
    try:
        if limit is not None:
            (folder / hierarchy.limit_name).write_text(str(limit))
        yield MemoryGroup(folder, hierarchy)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(_REMOVE_TRIES):  # busy until the kernel has taken note of the last exit
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
