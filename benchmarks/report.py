"""Write the tables of docs/benchmarks.md from result files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.results import load

__all__ = ["insert", "markdown_table", "peers_section", "scale_section"]

Result = Mapping[str, Any]


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left and all others right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value / scale:,.{digits}f}"


def _setting(result: Result) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    ram = f"{machine['ram'] / 2**30:.0f} GiB RAM"
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, {ram}, "
        f"Linux {machine['kernel']}, {machine['file_system']} on {machine['disk']}; "
        f"{packages}. Command: `{result['command']}`."
    )


def _peer_row(contender: Result, size: int) -> list[str]:
    found = contender["medians"]
    seconds = found["durable_seconds"]
    times = [run["seconds"] + run["sync_seconds"] for run in contender["runs"] if run["exit_code"] == 0]
    rate = None if not seconds else size / seconds
    return [
        contender["title"],
        _number(seconds),
        f"{min(times):.1f} to {max(times):.1f}" if times else "failed",
        _number(rate, 1e9, 2),
        _number(found["cpu_seconds"]),
        _number(found["peak_rss"], 1e6, 0),
        _number(found["cgroup_peak"], 1e6, 0),
        _number(found["read_bytes"], 1e9, 2),
        _number(found["write_bytes"], 1e9, 2),
    ]


def peers_section(result: Result) -> str:
    """The comparison as Markdown: setting, table, ratios, checks, failures."""
    size, contenders = result["input"]["bytes"], result["contenders"]
    heads = ["", "seconds", "range", "GB/s", "CPU s", "RSS MB", "cgroup MB", "read GB", "written GB"]
    titles = {one["name"]: one["title"] for one in contenders}
    parts = [
        _setting(result),
        _input(result),
        markdown_table(heads, [_peer_row(one, size) for one in contenders]),
        "\n".join(_ratio_line(one, titles) for one in result["ratios"]),
        "\n".join(f"* {check}: {'yes' if held else '**no**'}" for check, held in result["checks"].items()),
        _first_byte(result),
    ]
    return "\n\n".join(filter(None, [*parts, _failures(contenders)]))


def _first_byte(result: Result) -> str:
    if result["first_byte"] is None:
        return ""
    return f"First byte of a small checkpoint after {result['first_byte']['median']:.2f} s (median; programs cached)."


def _input(result: Result) -> str:
    given, rounds = result["input"], len(result["contenders"][0]["runs"])
    cache = "cold" if result["cold_cache"] else "warm"
    return (
        f"Input: {given['files']} files, {given['bytes'] / 1e9:.2f} GB. Runs of each: {rounds}; "
        f"the table has their medians; {cache} page cache; {_peer_versions(result['peer'])}."
    )


def _peer_versions(peer: Result) -> str:
    if "versions" not in peer:
        return f"verl did not take part ({peer['failure'].splitlines()[-1]})"
    return "verl's environment: " + ", ".join(f"{name} {version}" for name, version in peer["versions"].items())


def _ratio_line(one: Result, titles: Mapping[str, str]) -> str:
    return f"* {titles[one['first']]}: {_number(one['ratio'], 1, 2)} times the time of: {titles[one['second']]}"


def _failures(contenders: Sequence[Result]) -> str:
    lines = []
    for one in contenders:
        failed = [run for run in one["runs"] if run["exit_code"]]
        if failed:
            reason = (failed[0]["stderr_tail"].strip().splitlines() or ["no message"])[-1]
            often = f"failed in {len(failed)} of {len(one['runs'])} runs, exit code {failed[0]['exit_code']}"
            lines.append(f"* {one['title']} {often}: `{reason}`")
    return "\n".join(lines)


def _merge_cells(row: Result) -> list[str]:
    found = row["medians"]
    return [
        f"{row['model']} x {row['ranks']}",
        row["dtype"],
        _number(row["bytes_read"], 1e9),
        _number(row["bytes_written"], 1e9),
        _number(found["seconds"]),
        _number(row["bytes_per_second"], 1e9, 2),
        _number(found["peak_rss"], 1e6, 0),
        _number(found["cgroup_peak"], 1e6, 0),
    ]


def _plan_cells(row: Result) -> list[str]:
    found = row["medians"]
    name = f"{row['model']} x {row['ranks']}"
    return [name, _number(row["bytes"], 1e9, 0), _number(found["seconds"]), _number(found["peak_rss"], 1e6, 0)]


def scale_section(result: Result) -> str:
    """The sizes as Markdown: setting, merges, how flat and linear they are, plans."""
    heads = ["model x ranks", "dtype", "read GB", "written GB", "seconds", "GB/s", "RSS MB", "cgroup MB"]
    parts = [_setting(result), markdown_table(heads, [_merge_cells(row) for row in result["merges"]])]
    for dtype, found in result["checks"].items():
        parts.append(
            f"`{dtype}`: from the smallest to the largest model memory varies by a factor of "
            f"{_number(found['rss_spread'], 1, 2)}, speed by {_number(found['rate_spread'], 1, 2)}."
        )
    if result["plans"]:
        plans = [_plan_cells(row) for row in result["plans"]]
        parts.append(markdown_table(["planning only", "checkpoint GB", "seconds", "RSS MB"], plans))
    return "\n\n".join(parts)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "peers": peers_section,
    "peers-dcp": peers_section,
    "scale": scale_section,
}


def insert(page: str, kind: str, section: str) -> str:
    """The page with what is between the markers of ``kind`` replaced.

    Raises:
        ValueError: the page lacks the markers.
    """
    begin, end = f"<!-- begin {kind} -->", f"<!-- end {kind} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks {begin} ... {end}")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--page", type=click.Path(path_type=Path), default=Path("docs/benchmarks.md"), show_default=True)
def main(results: tuple[Path, ...], page: Path) -> None:
    """Put the tables of RESULTS between the markers of the page."""
    text = page.read_text()
    for path in results:
        result = load(path)
        text = insert(text, result["kind"], SECTIONS[result["kind"]](result))
    page.write_text(text)


if __name__ == "__main__":
    main()
