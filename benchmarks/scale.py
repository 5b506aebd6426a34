"""Memory and time of streammerge over the size of the model, and of planning, on sparse checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.contenders import BUDGET, merge_command, rank_files
from benchmarks.holes import HolePuncher
from benchmarks.machine import describe_machine, today, versions
from benchmarks.measure import Measurement, drop_caches, measure
from benchmarks.results import dump, medians, own_command, place_names, ratio, scrubbed, spread

MERGED = ("qwen2.5-0.5b:8", "qwen2.5-1.5b:8", "qwen2.5-7b:8", "qwen2.5-32b:32", "llama-70b:64")
PLANNED = ("llama-70b:64", "deepseek-671b:256")
DTYPES = ("bfloat16", "keep")


@dataclass(frozen=True)
class Case:
    """A preset of ``shapes.PRESETS`` and a number of ranks, written ``preset:ranks``."""

    preset: str
    ranks: int

    @staticmethod
    def parse(text: str) -> Case:
        """Read ``preset:ranks``.

        Raises:
            ValueError: it is not of that form.
        """
        preset, _, ranks = text.rpartition(":")
        if not preset or not ranks.isdigit():
            raise ValueError(f"{text}: expected PRESET:RANKS")
        return Case(preset, int(ranks))


@contextmanager
def sparse_checkpoint(case: Case, work: Path) -> Iterator[Path]:
    """A float32 checkpoint whose data are holes, made by a child process and removed at the end."""
    source = work / f"{case.preset}-{case.ranks}"
    shutil.rmtree(source, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.make_checkpoint", str(source), "--preset", case.preset]
    made = measure([*command, "--world-size", str(case.ranks), "--sparse"], source)
    try:
        if made.exit_code:
            raise RuntimeError(f"making {case} failed: {made.stderr_tail}")
        yield source
    finally:
        shutil.rmtree(source, ignore_errors=True)


def merge_once(source: Path, work: Path, dtype: str) -> tuple[Measurement, dict[str, Any]]:
    """Merge, punching holes into what is finished; returns what was measured and streammerge's own report."""
    target = work / "out"
    staging = target.with_name(target.name + ".streammerge-partial")
    command = merge_command(source, target, dtype, "--max-shard-size", "2GB", "--no-space-check")
    drop_caches()
    try:
        with HolePuncher(staging / "model"):
            measured = measure(command, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(staging, ignore_errors=True)
    return measured, json.loads(measured.stdout) if measured.exit_code == 0 else {}


def merge_row(case: Case, source: Path, work: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Merge ``rounds`` times; one row of the result."""
    runs: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for _ in range(rounds):
        measured, report = merge_once(source, work, dtype)
        runs.append(_run_data(measured, work))
    found = medians(runs)
    read = report.get("bytes_read")
    rate = ratio(read, found["seconds"])
    click.echo(_line(case, dtype, read, found), err=True)
    return {
        "model": case.preset,
        "ranks": case.ranks,
        "dtype": dtype,
        "parameters": report.get("parameters"),
        "bytes_read": read,
        "bytes_written": report.get("bytes_written"),
        "bytes_per_second": rate,
        "medians": found,
        "runs": runs,
    }


def _line(case: Case, dtype: str, read: int | None, found: dict[str, float | None]) -> str:
    seconds, rss = found["seconds"], found["peak_rss"]
    if read is None or seconds is None or rss is None:
        return f"{case.preset:<16} {dtype:<9} failed"
    size = f"{read / 1e9:7.1f} GB {seconds:7.1f} s {read / seconds / 1e9:5.2f} GB/s"
    return f"{case.preset:<16} {dtype:<9} {size} {rss / 1e6:6.0f} MB"


def _run_data(measured: Measurement, work: Path) -> dict[str, Any]:
    data = measured.to_dict()
    if "stderr_tail" in data:
        data["stderr_tail"] = scrubbed(data["stderr_tail"], place_names(WORK=work))
    return data


def plan_row(case: Case, source: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Plan ``rounds`` times; one row of the result."""
    command = [sys.executable, "-m", "streammerge", "plan", str(source), str(work / "out"), "--json"]
    runs = []
    for _ in range(rounds):
        drop_caches()
        runs.append(_run_data(measure(command, work / "out"), work))
    found = medians(runs)
    size = sum(path.stat().st_size for path in rank_files(source))
    click.echo(f"{case.preset:<16} plan      {found['seconds']} s, {(found['peak_rss'] or 0) / 1e6:.0f} MB", err=True)
    return {"model": case.preset, "ranks": case.ranks, "bytes": size, "medians": found, "runs": runs}


def checks(merges: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Per dtype, largest by smallest of memory and of speed over all sizes: 1 is flat and linear."""
    found = {}
    for dtype in dict.fromkeys(row["dtype"] for row in merges):
        good = [row for row in merges if row["dtype"] == dtype and row["bytes_per_second"]]
        found[dtype] = {
            "rss_spread": spread([row["medians"]["peak_rss"] for row in good]),
            "rate_spread": spread([row["bytes_per_second"] for row in good]),
        }
    return found


def measure_scale(work: Path, merged: Sequence[Case], planned: Sequence[Case], rounds: int) -> dict[str, Any]:
    """Make each checkpoint, merge or plan it, remove it; returns the result as plain data."""
    merges, plans = [], []
    for case in dict.fromkeys((*merged, *planned)):
        with sparse_checkpoint(case, work) as source:
            if case in planned:
                plans.append(plan_row(case, source, work, max(rounds, 3)))
            if case in merged:
                merges += [merge_row(case, source, work, dtype, rounds) for dtype in DTYPES]
    return {
        "kind": "scale",
        "date": today(),
        "command": own_command("benchmarks.scale", place_names(WORK=work)),
        "machine": describe_machine(work),
        "versions": versions(),
        "max_ram": BUDGET,
        "checks": checks(merges),
        "merges": merges,
        "plans": plans,
    }


@click.command()
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--output", type=click.Path(path_type=Path), default=Path("benchmarks/results/scale.json"))
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Merges of each model.")
@click.option("--merge", "merged", multiple=True, default=MERGED, show_default=True, help="PRESET:RANKS to merge.")
@click.option("--plan", "planned", multiple=True, default=PLANNED, show_default=True, help="PRESET:RANKS to plan.")
@click.option("--no-plan", is_flag=True, help="Plan nothing.")
def main(
    work: Path, output: Path, rounds: int, merged: tuple[str, ...], planned: tuple[str, ...], no_plan: bool
) -> None:
    """Measure memory and time over the size of the model, in the folder WORK, and write a JSON file."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        cases = [Case.parse(text) for text in merged]
        plans = [] if no_plan else [Case.parse(text) for text in planned]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    result = measure_scale(work, cases, plans, rounds)
    result["command"] = scrubbed(result["command"], {str(output): output.name})
    dump(result, output)
    for dtype, found in result["checks"].items():
        click.echo(f"{dtype}: memory differs by a factor of {found['rss_spread']}, speed by {found['rate_spread']}")


if __name__ == "__main__":
    main()
