"""Result files: medians and ratios of runs, and JSON that people can read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["dump", "load", "medians", "own_command", "place_names", "ratio", "scrubbed", "spread"]

_MEASURES = (
    "seconds",
    "durable_seconds",
    "cpu_seconds",
    "peak_rss",
    "cgroup_peak",
    "read_bytes",
    "write_bytes",
)
_NUMBERS = re.compile(r"\[\s+((?:-?[\d.e+-]+,?\s+)+)\]")


def _value(run: Mapping[str, Any], name: str) -> float | None:
    if name == "durable_seconds":
        return float(run["seconds"] + run["sync_seconds"])
    if name == "cpu_seconds":
        return float(run["user_seconds"] + run["system_seconds"])
    value = run.get(name)
    return None if value is None else float(value)


def medians(runs: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Medians over the runs that succeeded: seconds and bytes by name; None where nothing was measured.

    ``durable_seconds`` adds the time of the sync after the exit, ``cpu_seconds`` is user plus system.
    """
    good = [run for run in runs if run["exit_code"] == 0]
    found: dict[str, float | None] = {}
    for name in _MEASURES:
        values = [value for run in good if (value := _value(run, name)) is not None]
        found[name] = round(median(values), 3) if values else None
    return found


def ratio(first: float | None, second: float | None) -> float | None:
    """``first / second``, or None when one of them is unknown or the second is zero."""
    return None if first is None or not second else round(first / second, 3)


def spread(values: Sequence[float]) -> float | None:
    """Largest by smallest; 1.0 is perfectly flat. None without positive values."""
    return ratio(max(values), min(values)) if values else None


def scrubbed(text: str, names: Mapping[str, str]) -> str:
    """The text with each path replaced by the name it goes by, longest first."""
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return text


def place_names(**places: Path | None) -> dict[str, str]:
    """Names for the given places, this interpreter and the working folder, by path, for ``scrubbed``."""
    names = {str(Path.cwd()): "REPO", str(Path.home()): "HOME", sys.prefix: "VENV", sys.executable: "python"}
    for name, place in places.items():
        if place is not None:
            names |= {str(place): name, str(place.absolute()): name}
    return names


def own_command(module: str, names: Mapping[str, str]) -> str:
    """The command line that this process was started with, paths replaced by their names."""
    return scrubbed(" ".join(["python", "-m", module, *sys.argv[1:]]), names)


def dump(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, lists of numbers on one line each."""
    text = json.dumps(result, indent=1)
    text = _NUMBERS.sub(lambda match: "[" + " ".join(match.group(1).split()) + "]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read a result file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content
