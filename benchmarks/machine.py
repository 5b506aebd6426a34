"""What a measurement ran on: hardware, kernel, file system and versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "mount_of", "today", "versions", "versions_in"]

_PACKAGES = ("streammerge", "numpy", "safetensors", "torch", "transformers")


def today() -> str:
    """The date and time in UTC, ISO 8601, to the minute."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")


def describe_machine(work: Path) -> dict[str, Any]:
    """CPU, cores, RAM in bytes, kernel, and the file system and disk that ``work`` lies on."""
    device, kind = mount_of(work, Path("/proc/mounts").read_text())
    return {
        "cpu": _cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "ram": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "file_system": kind,
        "disk": _disk(Path(device).name),
    }


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Device and type of the file system that holds ``path``, from the text of /proc/mounts."""
    best = ("", "unknown", "")
    for line in mounts.splitlines():
        device, point, kind = line.split()[:3]
        if path.absolute().is_relative_to(point) and len(point) >= len(best[2]):
            best = (device, kind, point)
    return best[0], best[1]


def _disk(device: str) -> str:
    """The disk's model, or the device's name where it has none (a virtual disk)."""
    try:
        model = (Path("/sys/class/block") / device / "device" / "model").read_text().strip()
    except OSError:
        model = ""
    return model or device or "unknown"


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def versions_in(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The same for another environment, by its interpreter."""
    code = (
        "import json, platform, sys\nfrom importlib import metadata\n"
        "found = {name: metadata.version(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    done = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True, check=True)
    result: dict[str, str] = json.loads(done.stdout)
    return result
