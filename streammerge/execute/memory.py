"""How much memory there is, how much we use, and how a budget is divided into buffers."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from streammerge.errors import BudgetError
from streammerge.sizes import format_size

__all__ = ["Buffers", "allowed_memory", "default_budget", "divide", "peak_rss", "rss"]

_MAX_DEFAULT = 16 << 30
# Importing torch 2.13 (CPU) adds about 200 MB; builds differ.
_TORCH_BYTES = 260 << 20
# The interpreter's own growth while it works: caches, thread stacks, the allocator's slack.
_SLACK_BYTES = 16 << 20
_TILE_SIZES = tuple(1 << power for power in range(22, 17, -1))  # 4 MiB down to 256 KiB
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class Buffers:
    """How the executor uses the budget.

    Attributes:
        workers: threads.
        tile: bytes of an output tile; each worker has one.
        window: bytes a worker reads at once; each has one.
        estimate: bytes of RSS at most, everything included.
    """

    workers: int
    tile: int
    window: int
    estimate: int


def divide(
    max_ram: int,
    workers: int,
    *,
    torch_needed: bool,
    sides: int = 1,
    temporary: int = 0,
    scratch: Callable[[int], int] = lambda window: 0,
) -> Buffers:
    """Size the buffers so that the process stays within ``max_ram`` bytes.

    Args:
        sides: how many tiles, with a window each, a worker has.
        temporary: what each worker needs besides.
        scratch: what it needs for computing, with a window of so many bytes.

    Raises:
        BudgetError: it cannot work within the budget; says the smallest that would do.
    """
    base = rss() + _SLACK_BYTES
    if torch_needed and "torch" not in sys.modules:
        base += _TORCH_BYTES
    for tile in _TILE_SIZES:
        for count in range(workers, 0, -1):
            # Spare room per window: alignment of direct reads.
            need = base + count * (sides * (2 * tile + (64 << 10)) + temporary + scratch(tile))
            if need <= max_ram and (count == workers or tile == _TILE_SIZES[-1]):
                return Buffers(count, tile, tile, need)
    # What is measured now varies from run to run by a few MB; the budget named has to work next time.
    least = base + sides * 2 * _TILE_SIZES[-1] + temporary + scratch(_TILE_SIZES[-1]) + (8 << 20)
    least += -least % (1 << 20)
    raise BudgetError(f"--max-ram {format_size(max_ram)} is too small; the least that works is {least >> 20}M", least)


def rss() -> int:
    """Resident memory of this process now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The most resident memory this process ever had, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def default_budget() -> int:
    """16 GiB, or half of what is allowed when that is less; in bytes."""
    return min(_MAX_DEFAULT, allowed_memory() // 2)


def allowed_memory() -> int:
    """What this process may use: the free memory of the machine or the tightest cgroup limit, in bytes."""
    return min([int(psutil.virtual_memory().available), *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits_up(Path("/sys/fs/cgroup"), path, ("memory.max", "memory.high"))
        elif "memory" in controllers.split(","):
            limits += _limits_up(Path("/sys/fs/cgroup/memory"), path, ("memory.limit_in_bytes",))
    return limits


def _limits_up(mount: Path, path: str, names: tuple[str, ...]) -> list[int]:
    """The limits of a cgroup and of all its parents. In a container its path may not exist: use the mount."""
    folder = mount / path.lstrip("/")
    if not folder.is_dir():
        folder = mount
    limits = []
    while True:
        for name in names:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append(int(text))
        if folder in (mount, folder.parent):
            return limits
        folder = folder.parent
