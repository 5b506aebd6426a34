"""Read hostile checkpoints where they can do no harm: each in a forked process that reports what happened.

    python -m tests.support.canary FOLDER...

An audit hook records everything that a pickle could set off; limits on time and memory end what would never end.
"""

from __future__ import annotations

import codecs
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import streammerge
from streammerge.errors import StreammergeError

__all__ = ["ROOT", "Outcome", "read_safely"]

ROOT = Path(__file__).parents[2]
_CPU_SECONDS = 3
_WALL_SECONDS = 30
_MEMORY_BYTES = 4 << 30
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.remove", "os.rename", "os.rmdir", "os.mkdir",
    "os.chmod", "os.putenv", "subprocess.", "shutil.", "socket.", "ctypes.", "pickle.", "marshal.", "exec", "compile",
    "import", "builtins.input", "pty.", "webbrowser.", "urllib.", "code.", "cpython.run_", "tempfile.",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        error: class of the exception, ``killed by SIGNAL``, or empty when it was accepted.
        expected: whether it was accepted or refused with a `StreammergeError`.
        text: the message, or the warnings when it was accepted.
        seconds: processor time.
        events: what was set off, from the audit hook.
    """

    error: str
    expected: bool
    text: str
    seconds: float
    events: tuple[str, ...] = ()


def read_safely(folders: Mapping[str, Path]) -> dict[str, Outcome]:
    """Read each folder's checkpoint in a process of its own."""
    command = [sys.executable, "-m", "tests.support.canary", *map(str, folders.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: Outcome(**{**line, "events": tuple(line["events"])}) for name, line in zip(folders, lines, strict=True)
    }


def _watch(events: list[str]) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if writing or event.startswith(_FORBIDDEN):
            events.append(f"{event} {str(args[:1])[:200]}")

    sys.addaudithook(hook)


def _read(folder: str, events: list[str]) -> Outcome:
    started = time.process_time()
    error, expected, text = "", True, ""
    try:
        report = streammerge.plan(folder, "never-written", dtype="keep", max_ram="8G")
        text = "; ".join(report.warnings)
    except Exception as fault:
        error, expected, text = type(fault).__name__, isinstance(fault, StreammergeError), str(fault)
    return Outcome(error, expected, text[:2000], time.process_time() - started, tuple(events))


def _child(folder: str, pipe: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.alarm(_WALL_SECONDS)
    events: list[str] = []
    _watch(events)
    os.write(pipe, json.dumps(asdict(_read(folder, events))).encode())


def _in_fork(folder: str) -> Outcome:
    source, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _child(folder, pipe)
        finally:
            os._exit(0)
    os.close(pipe)
    with os.fdopen(source, "rb") as reader:
        said = reader.read()
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        return Outcome(f"killed by {signal.Signals(os.WTERMSIG(status)).name}", False, "", seconds)
    return Outcome(**json.loads(said)) if said else Outcome("vanished", False, "", seconds)


def _main(folders: Sequence[str]) -> None:
    events: list[str] = []
    _read(folders[0], events)  # imports what is imported on first use
    codecs.lookup("raw_unicode_escape")
    for folder in folders:
        print(json.dumps(asdict(_in_fork(folder))))


if __name__ == "__main__":
    _main(sys.argv[1:])
