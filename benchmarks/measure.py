"""Run a command and measure it from outside: time, CPU, memory of the process tree, bytes moved."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.cgroups import MemoryGroup, fresh_group
from benchmarks.memory_samples import Sampler, thinned

__all__ = ["Measurement", "drop_caches", "first_byte_seconds", "measure", "parse_io"]

_TAIL_CHARACTERS = 1500
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Measurement:
    """One run of one command.

    Attributes:
        seconds: wall time from start to exit.
        sync_seconds: wall time to make what it left behind durable, after its exit.
        user_seconds, system_seconds: CPU time of the process tree.
        peak_rss: bytes, see ``memory_samples.tree_memory``.
        cgroup_peak: most bytes charged to the run's cgroup, page cache included; None without a cgroup.
        cgroup_note: why there was no cgroup.
        read_bytes, write_bytes: moved from and to the disk, by /proc/PID/io of the tree.
        exit_code: of the command; negative for a signal.
        stdout: all of it.
        stderr_tail: its last characters.
        timeline: (seconds, bytes of memory), at most 200 samples.
    """

    seconds: float
    sync_seconds: float
    user_seconds: float
    system_seconds: float
    peak_rss: int
    cgroup_peak: int | None
    cgroup_note: str | None
    read_bytes: int
    write_bytes: int
    exit_code: int
    stdout: str
    stderr_tail: str
    timeline: list[tuple[float, int]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; stdout is left out, and stderr of a run that succeeded."""
        data = {key: value for key, value in vars(self).items() if key not in ("stdout", "stderr_tail", "timeline")}
        for key in [key for key in data if key.endswith("seconds")]:
            data[key] = round(data[key], 3)
        if self.exit_code:
            data["stderr_tail"] = self.stderr_tail
        data["timeline"] = {
            "seconds": [round(at, 2) for at, _ in self.timeline],
            "rss_mb": [round(size / 1e6, 1) for _, size in self.timeline],
        }
        return data


def parse_io(text: str) -> tuple[int, int]:
    """(read_bytes, write_bytes) of a /proc/PID/io."""
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return int(fields.get("read_bytes", 0)), int(fields.get("write_bytes", 0))


def drop_caches() -> bool:
    """Write dirty pages back and empty the page cache; False where that is not allowed."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


def measure(command: Sequence[str], target: Path, *, limit: int | None = None, timeout: float = 3600.0) -> Measurement:
    """Run a command to its end, in a memory cgroup of its own where possible.

    Args:
        command: program and arguments.
        target: folder it writes to; synced afterwards.
        limit: of the cgroup, in bytes; without a cgroup it cannot be set, and that is an error.
        timeout: seconds after which the command is killed.
    """
    with fresh_group(limit) as group, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if limit is not None and group.folder is None:
            raise OSError(f"no memory limit can be set: {group.reason}")
        return _run(group, command, target, timeout, out, err)


def _run(
    group: MemoryGroup, command: Sequence[str], target: Path, timeout: float, out: IO[bytes], err: IO[bytes]
) -> Measurement:
    started = time.monotonic()
    process = subprocess.Popen(group.wrapped(command), stdout=out, stderr=err, start_new_session=True)
    sampler = Sampler(process.pid, started)
    sampler.start()
    try:
        with _killed_after(process.pid, timeout):
            # The exit status stays until wait4: /proc/PID/io holds the sums of the whole tree until then.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - started
        read, written = _io(process.pid)
        usage = _reap(process)
    finally:
        sampler.stop()
        _kill(process)
    cgroup_peak = group.peak()
    return Measurement(
        seconds=seconds,
        sync_seconds=_sync(target),
        user_seconds=usage.ru_utime,
        system_seconds=usage.ru_stime,
        peak_rss=sampler.peak,
        cgroup_peak=cgroup_peak,
        cgroup_note=group.reason,
        read_bytes=read,
        write_bytes=written,
        exit_code=process.returncode,
        stdout=_text(out),
        stderr_tail=_text(err)[-_TAIL_CHARACTERS:],
        timeline=thinned(sampler.timeline),
    )


@contextmanager
def _killed_after(pid: int, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, os.killpg, (pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _io(pid: int) -> tuple[int, int]:
    try:
        return parse_io(Path(f"/proc/{pid}/io").read_text())
    except OSError:
        return 0, 0


def _reap(process: subprocess.Popen[bytes]) -> resource.struct_rusage:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process, when we were interrupted."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sync(target: Path) -> float:
    started = time.monotonic()
    for path in [path for path in target.rglob("*") if path.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.monotonic() - started


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def first_byte_seconds(command: Sequence[str], folders: Sequence[Path], timeout: float = 60.0) -> float:
    """Wall time from the start of a command until a ``*.safetensors`` in one of the folders has a disk block.

    Raises:
        RuntimeError: it ended without writing one.
    """
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while time.monotonic() - started < timeout:
            ended = process.poll() is not None
            if any(map(_has_block, folders)):
                return time.monotonic() - started
            if ended:
                break
            time.sleep(0.0005)
        raise RuntimeError(f"no byte was written; exit code {process.returncode}")
    finally:
        _finish(process)


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        _kill(process)


def _has_block(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(e.name.endswith(".safetensors") and e.stat().st_blocks > 0 for e in entries)
    except OSError:
        return False
