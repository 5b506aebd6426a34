"""How fast ``streammerge compare`` reads, against reading the same files from end to end.

    python -m benchmarks.compare_speed A B

A and B are equal checkpoints of some gigabytes. Both are read past the page cache by one stream (what the disk gives
to a sequential reader), then compared, in turn; prints seconds, bytes per second and the ratio of the medians.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import click

from benchmarks.measure import drop_caches

_BLOCK = 8 << 20


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".pt", ".safetensors", ".distcp", ".bin"})


def _sequential(paths: list[Path]) -> float:
    buffer = mmap.mmap(-1, _BLOCK)
    began = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while os.readv(fd, [buffer]) == _BLOCK:
            pass
        os.close(fd)
    return time.perf_counter() - began


def _compared(first: Path, second: Path, max_ram: str) -> tuple[float, int]:
    command = [sys.executable, "-m", "streammerge", "compare", str(first), str(second), "--max-ram", max_ram, "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began, int(json.loads(done.stdout)["peak_rss"])


@click.command()
@click.argument("first", type=click.Path(exists=True, path_type=Path))
@click.argument("second", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--max-ram", default="1G", show_default=True)
def main(first: Path, second: Path, rounds: int, max_ram: str) -> None:
    """Compare FIRST with SECOND."""
    paths = _weights(first) + _weights(second)
    size = sum(path.stat().st_size for path in paths)
    reading, comparing, rss = [], [], 0
    for _ in range(rounds):
        drop_caches()
        reading.append(_sequential(paths))
        drop_caches()
        seconds, rss = _compared(first, second, max_ram)
        comparing.append(seconds)
    for name, values in (("sequential read", reading), ("compare", comparing)):
        listed = " ".join(f"{value:.1f}" for value in values)
        click.echo(f"{name:<16} {median(values):6.2f} s  {size / median(values) / 1e9:5.2f} GB/s  ({listed})")
    ratio = median(reading) / median(comparing)
    click.echo(f"{size / 1e9:.2f} GB; {ratio:.2f} times the sequential rate; {rss >> 20} MiB")


if __name__ == "__main__":
    main()
