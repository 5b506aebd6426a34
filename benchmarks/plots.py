"""Pictures of results: memory over time, throughput, and memory and time over the size of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.results import load

__all__ = ["median_run", "memory_figure", "save", "scale_figure", "throughput_figure"]

Result = Mapping[str, Any]

# Okabe and Ito's palette: told apart with any colour vision.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
_COLOURS = {
    "streammerge-keep": _BLUE,
    "streammerge-bf16": _GREEN,
    "streammerge-cgroup": _BLUE,
    "cp": _ORANGE,
    "verl": _RED,
    "direct-keep": _GREY,
    "direct-bf16": _GREY,
}
_SHORT = {
    "streammerge-keep": "streammerge",
    "streammerge-bf16": "streammerge, to bfloat16",
    "streammerge-cgroup": "streammerge, 1 GiB cgroup",
    "cp": "cp",
    "verl": "verl's merger (to bfloat16)",
    "direct-keep": "direct copy",
    "direct-bf16": "direct copy, half written",
}
_TIMELINES = ("streammerge-keep", "streammerge-bf16", "verl")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "svg.hashsalt": "streammerge",
    "figure.facecolor": "white",
}


def median_run(contender: Result) -> Result | None:
    """The run whose wall time is the (lower) median of those that succeeded."""
    good = sorted((run for run in contender["runs"] if run["exit_code"] == 0), key=lambda run: float(run["seconds"]))
    return good[(len(good) - 1) // 2] if good else None


def _bytes_label(value: float, _: object = None) -> str:
    """``value`` MB as MB or GB."""
    return f"{value / 1000:g} GB" if value >= 1000 else f"{value:g} MB"


def _plain(value: float, _: object = None) -> str:
    return f"{value:g}"


def memory_figure(result: Result) -> Figure:
    """Memory of the process tree over time, one line per tool, against the budget."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.subplots()
    chosen = [one for one in result["contenders"] if one["name"] in _TIMELINES]
    for contender in chosen:
        run = median_run(contender)
        if run is not None:
            _timeline(axes, contender["name"], run)
    budget = result["max_ram"] / 1e6
    axes.axhline(budget, color="black", linewidth=1, linestyle="--")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.annotate(
        "streammerge's budget", (0.01, budget), (0, 5), ("axes fraction", "data"), "offset points", fontsize=9, bbox=box
    )
    axes.set_yscale("log")
    axes.set_ylim(20, None)
    axes.set_xlim(0, None)
    axes.yaxis.set_major_formatter(FuncFormatter(_bytes_label))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds")
    axes.set_title(f"Memory (RSS) while merging {result['input']['bytes'] / 1e9:.1f} GB of rank files")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=len(chosen), frameon=False)
    return figure


def _timeline(axes: Axes, name: str, run: Result) -> None:
    seconds, sizes = run["timeline"]["seconds"], run["timeline"]["rss_mb"]
    axes.plot(seconds, sizes, color=_COLOURS[name], linewidth=1.8, label=_SHORT[name])
    if seconds:
        axes.plot(seconds[-1], sizes[-1], color=_COLOURS[name], marker="o", markersize=5)


def throughput_figure(result: Result) -> Figure:
    """Bars of input bytes per second until durable, with the share of what a direct copy of as many bytes reaches."""
    size = result["input"]["bytes"]
    found = {one["name"]: one["medians"]["durable_seconds"] for one in result["contenders"]}
    rates = {name: size / seconds / 1e9 for name, seconds in found.items() if seconds}
    names = sorted(rates, key=rates.__getitem__)
    figure = Figure(figsize=(7.5, 0.8 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh([_SHORT[name] for name in names], [rates[name] for name in names], color=[_COLOURS[n] for n in names])
    for row, name in enumerate(names):
        axes.annotate(_bar_label(name, rates), (rates[name], row), (5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(rates.values(), default=1) * 1.55)
    axes.set_xlabel("GB of rank files per second, until durable on disk")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Speed, {size / 1e9:.1f} GB of rank files, cold cache")
    return figure


def _bar_label(name: str, rates: Mapping[str, float]) -> str:
    limit = "direct-bf16" if name in ("streammerge-bf16", "verl") else "direct-keep"
    label = f"{rates[name]:.2f} GB/s"
    if name.startswith("direct") or limit not in rates:
        return label
    return f"{label} ({rates[name] / rates[limit]:.0%} of direct copy)"


def scale_figure(result: Result) -> Figure:
    """Two panels over the bytes read: peak memory, and wall time, by dtype."""
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    # The two lie on one another where memory is flat: a ring around a dot shows both.
    for dtype, colour, size in (("keep", _BLUE, 10), ("bfloat16", _GREEN, 5)):
        rows = [row for row in result["merges"] if row["dtype"] == dtype and row["bytes_read"]]
        sizes = [row["bytes_read"] / 1e9 for row in rows]
        label = "stored dtype" if dtype == "keep" else "cast to bfloat16"
        style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": size, "linewidth": 1.5, "label": label}
        style |= {"markerfacecolor": "none"} if dtype == "keep" else {}
        memory.plot(sizes, [row["medians"]["peak_rss"] / 1e6 for row in rows], **style)
        time.plot(sizes, [row["medians"]["seconds"] for row in rows], **style)
    _scale_axes(memory, time, result["max_ram"] / 1e6)
    _name_models(memory, [row for row in result["merges"] if row["dtype"] == "keep" and row["bytes_read"]])
    return figure


def _scale_axes(memory: Axes, time: Axes, budget: float) -> None:
    memory.set_ylim(0, budget * 1.12)
    memory.axhline(budget, color="black", linewidth=1, linestyle="--")
    memory.annotate("budget", (1, budget), (0, 3), ("axes fraction", "data"), "offset points", ha="right", fontsize=9)
    memory.set_title("Peak memory (RSS), MB")
    time.set_yscale("log")
    _plain_ticks(time.yaxis)
    time.set_title("Time, seconds")
    for axes in (memory, time):
        axes.set_xscale("log")
        axes.margins(x=0.08)
        _plain_ticks(axes.xaxis)
        axes.set_xlabel("GB read")
    time.legend(frameon=False, loc="upper left")


def _plain_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_locator(NullLocator())


def _name_models(axes: Axes, rows: Sequence[Result]) -> None:
    for row in rows:
        at = (row["bytes_read"] / 1e9, row["medians"]["peak_rss"] / 1e6)
        axes.annotate(
            row["model"].split("-")[-1].upper(), at, (0, 9), textcoords="offset points", ha="center", fontsize=9
        )


def save(figure: Figure, stem: Path, png: bool) -> None:
    """Write ``stem``.svg, and .png if asked for."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    if png:
        figure.savefig(stem.with_suffix(".png"), dpi=130)


FIGURES: dict[str, dict[str, Callable[[Result], Figure]]] = {
    "peers": {"memory": memory_figure, "throughput": throughput_figure},
    "scale": {"scale": scale_figure},
}


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
@click.option("--png", is_flag=True, help="Write PNG files too.")
def main(results: tuple[Path, ...], folder: Path, png: bool) -> None:
    """Draw the pictures of RESULTS as SVG into the folder."""
    with mpl.rc_context(_STYLE):
        for path in results:
            result = load(path)
            for name, draw in FIGURES[result["kind"]].items():
                save(draw(result), folder / name, png)


if __name__ == "__main__":
    main()
