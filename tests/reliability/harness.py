"""Run merges in subprocesses, under strace or not, and compare what they leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import streammerge as sm
from tests.reliability.runner import Steps
from tests.support.data import DATA

__all__ = [
    "FULL",
    "MUTATORS",
    "SMALL",
    "Case",
    "Tree",
    "arguments",
    "needs_strace",
    "process",
    "start",
    "strace",
    "tree",
]

# Everything at its true size, instead of the sample that continuous integration has time for.
FULL = bool(os.environ.get("STREAMMERGE_FULL"))

REPOSITORY = Path(__file__).parents[2]
SMALL = DATA / "fsdp2_w4_bf16_tied" / "ckpt"

# System calls that change files; openat among them creates some.
MUTATORS = (
    "openat", "write", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fsync", "fdatasync", "rename", "renameat",
    "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "sendfile", "copy_file_range",
)  # fmt: skip

_STEPS = Steps(1 << 16, 1 << 16)

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

# Relative path -> content, and None for a folder.
Tree = dict[str, bytes | None]


def tree(folder: Path) -> Tree | None:
    """Everything below a folder, or None when it does not exist."""
    if not folder.exists():
        return None
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = None if path.is_dir() else path.read_bytes()
    return found


def process(
    *line: object, steps: Steps | None = None, prefix: list[str] | None = None, wait: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run the command and wait for it."""
    command, environment = _command(line, steps, prefix)
    return subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=wait, check=False
    )


def start(*line: object, steps: Steps | None = None, prefix: list[str] | None = None) -> subprocess.Popen[str]:
    """Run the command and do not wait for it."""
    command, environment = _command(line, steps, prefix)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def _command(
    line: tuple[object, ...], steps: Steps | None, prefix: list[str] | None
) -> tuple[list[str], dict[str, str]]:
    module = "streammerge" if steps is None else "tests.reliability.runner"
    extra = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **extra, **(steps.environment() if steps else {})}
    return [*(prefix or []), sys.executable, "-m", module, *map(str, line)], environment


def strace(log: Path, *options: str, calls: tuple[str, ...] = MUTATORS) -> list[str]:
    """The start of a command line that traces or injects; file names stand beside descriptors in the log."""
    return ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={set_of(calls)}", *options]


def set_of(calls: tuple[str, ...]) -> str:
    """System calls as strace takes them; those that a machine does not have are left out."""
    return ",".join(f"?{call}" for call in calls)


def arguments(options: dict[str, Any]) -> list[str]:
    """Options of ``merge`` as the command spells them."""
    line = ["--no-check"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        line += [flag] if value is True else [flag, str(value)]
    return line


@dataclass(frozen=True)
class Case:
    """A merge to be disturbed.

    Attributes:
        name: for the test's id.
        options: of the merge.
        earlier: options of a merge whose result is at the destination already, or None.
        steps: how small the steps are.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] | None = None
    steps: Steps = _STEPS
    source: Path = SMALL

    def line(self, target: Path) -> list[object]:
        """The command line."""
        return [self.source, target, "-q", *arguments(self.options)]

    def prepare(self, target: Path) -> None:
        """Put there what is at the destination before the merge, others' files included."""
        if self.earlier is None:
            return
        sm.merge(self.source, target, check=False, **self.earlier)
        (target / "README.md").write_text("mine\n" * 3000)
        (target / "plots" / "deep").mkdir(parents=True)
        (target / "plots" / "deep" / "loss.png").write_bytes(b"\x89PNG" * 99)

    def run(self, target: Path) -> sm.MergeReport:
        """The same merge in this process; the caller has applied the steps."""
        return sm.merge(self.source, target, check=False, **self.options)
