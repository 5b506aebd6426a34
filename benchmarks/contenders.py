"""Who takes part in the comparison, and with which command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer import peer_command
from streammerge.options import MergeOptions

__all__ = [
    "BUDGET",
    "RATIOS",
    "Contender",
    "contenders",
    "dcp_contenders",
    "dcp_files",
    "merge_command",
    "rank_files",
]

BUDGET = 1 << 30

# (first, second): how many times longer the first takes than the second.
RATIOS = (
    ("streammerge-keep", "direct-keep"),
    ("streammerge-bf16", "direct-bf16"),
    ("cp", "streammerge-keep"),
    ("verl", "streammerge-bf16"),
    ("dcp-to-torch", "streammerge-dcp"),
    ("accelerate", "streammerge-dcp"),
)

_DCP_TO_TORCH = (
    "import sys, pathlib; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert; "
    "pathlib.Path(sys.argv[2]).mkdir(); convert(sys.argv[1], sys.argv[2] + '/model.pt')"
)


@dataclass(frozen=True)
class Contender:
    """One tool with its settings.

    Attributes:
        name: in results.
        title: for people.
        command: makes it, from the folder of the rank files and the folder to write.
        memory_limit: of its cgroup, in bytes.
        digests: which of ``file`` and ``tensor`` its output is checked by.
    """

    name: str
    title: str
    command: Callable[[Path, Path], list[str]]
    memory_limit: int | None = None
    digests: tuple[str, ...] = ()


def rank_files(source: Path) -> list[Path]:
    """The rank files of a checkpoint, which lie in one folder at or below ``source``.

    Raises:
        FileNotFoundError: there are none.
    """
    found = sorted(source.rglob("model_world_size_*_rank_*.pt"))
    if not found:
        raise FileNotFoundError(f"no rank files (model_world_size_*_rank_*.pt) under {source}")
    return found


def merge_command(source: Path, target: Path, dtype: str, *more: str) -> list[str]:
    """The streammerge command, within ``BUDGET`` and without the check against the model class."""
    command = [sys.executable, "-m", "streammerge", "merge", str(source), str(target)]
    return [*command, "--dtype", dtype, "--max-ram", str(BUDGET), "--no-check", "--quiet", "--json", *more]


def _copy_command(actor: Path, target: Path) -> list[str]:
    script = 'mkdir -p "$1" && cp --reflink=never "$0"/model_world_size_*.pt "$1" && sync "$1"/*'
    return ["sh", "-c", script, str(actor), str(target)]


def _direct_command(actor: Path, target: Path, written: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.direct_copy", *map(str, rank_files(actor)), str(target)]
    return [*command, "--workers", str(MergeOptions().workers), "--written", str(written)]


def contenders(written_share: float, peer_python: Path | None) -> list[Contender]:
    """All that take part; verl only with the interpreter of its environment.

    Args:
        written_share: bytes of the cast output by bytes of the input.
        peer_python: see ``peer.peer_environment``.
    """
    found = [
        Contender(
            "streammerge-keep",
            "streammerge, stored dtype",
            lambda actor, target: merge_command(actor, target, "keep"),
            digests=("file",),
        ),
        Contender(
            "streammerge-bf16",
            "streammerge, cast to bfloat16",
            lambda actor, target: merge_command(actor, target, "bfloat16"),
            digests=("file", "tensor"),
        ),
        Contender(
            "streammerge-cgroup",
            "streammerge, stored dtype, cgroup limit 1 GiB",
            lambda actor, target: merge_command(actor, target, "keep"),
            memory_limit=BUDGET,
            digests=("file",),
        ),
        Contender("cp", "cp of the rank files, and sync", _copy_command),
        Contender(
            "direct-keep", "direct copy of as many bytes", lambda actor, target: _direct_command(actor, target, 1.0)
        ),
        Contender(
            "direct-bf16",
            "direct copy, half written",
            lambda actor, target: _direct_command(actor, target, written_share),
        ),
    ]
    if peer_python is not None:
        python = peer_python
        title = "verl's merger (always bfloat16)"
        command = lambda actor, target: peer_command(python, actor, target)  # noqa: E731
        found.append(Contender("verl", title, command, digests=("tensor",)))
    return found


def dcp_files(source: Path) -> list[Path]:
    """The data files of a DCP folder at or below ``source``; empty when there is none."""
    return sorted(source.rglob("__*_*.distcp"))


def dcp_contenders() -> list[Contender]:
    """Those that take part when the checkpoint is a DCP folder."""
    return [
        Contender(
            "streammerge-dcp",
            "streammerge, stored dtype",
            lambda folder, target: merge_command(folder, target, "keep"),
            digests=("file",),
        ),
        Contender(
            "dcp-to-torch",
            "torch's dcp_to_torch_save",
            lambda folder, target: [sys.executable, "-c", _DCP_TO_TORCH, str(folder), str(target)],
        ),
        Contender(
            "accelerate",
            "accelerate merge-weights",
            lambda folder, target: ["accelerate", "merge-weights", str(folder), str(target)],
        ),
    ]
