"""How long layouts take that move elements about, against a plain copy of as many bytes.

    python -m benchmarks.layouts WORK

Runs the executor itself on virtual tensors over one file of random bytes, cold cache, and prints seconds
per layout (the median of several alternating rounds) and its ratio to the plain copy.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click

from benchmarks.measure import drop_caches
from streammerge.dtypes import dtype_named
from streammerge.execute.engine import Routes, run
from streammerge.execute.journal import Journal
from streammerge.execute.memory import divide
from streammerge.execute.routes import read_route, write_route
from streammerge.families.fields import Fields
from streammerge.families.layouts import LAYOUTS
from streammerge.plan.plan import make_plan
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides
from streammerge.tensors.reshape import stack_in_order
from streammerge.tensors.virtual import Stored, Tensor, concat, nbytes, permute, unbind

_BF16 = dtype_named("bfloat16")
_HIDDEN, _INNER = 4096, 3072  # of one expert's [2F, H]
_QWEN = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}

Made = dict[str, Tensor]
Case = Callable[[int], Made]  # elements there are -> tensors


def _stored(shape: tuple[int, ...], first: int) -> Stored:
    """A contiguous tensor at element ``first`` of the file."""
    zeros = (0,) * len(shape)
    return Stored(_BF16, shape, (Fragment(0, 2 * first, zeros, shape, contiguous_strides(shape, 2)),))


def _many(elements: int, shape: tuple[int, ...], layout: Callable[[int], list[Tensor]]) -> Made:
    size = math.prod(shape)
    made = {}
    for number in range(elements // size):
        for part, tensor in enumerate(layout(number * size)):
            made[f"{number:05}.{part}"] = tensor
    return made


def _plain(elements: int) -> Made:
    return _many(elements, (_INNER, _HIDDEN), lambda first: [_stored((_INNER, _HIDDEN), first)])


def _qkv(elements: int) -> Made:
    shape = ((64 + 2 * 8) * 128, _HIDDEN)
    return _many(elements, shape, lambda first: LAYOUTS["grouped_qkv"]([_stored(shape, first)], Fields(_QWEN, {}), []))


def _columns(elements: int) -> Made:
    """A row parallel weight of 8 tensor parallel ranks: columns side by side."""
    part = (_HIDDEN, _INNER // 8)

    def layout(first: int) -> list[Tensor]:
        size = part[0] * part[1]
        return [concat([_stored(part, first + rank * size) for rank in range(8)], 1)]

    return _many(elements, (_HIDDEN, _INNER), layout)


def _grouped_mlp(elements: int) -> Made:
    """Experts of a legacy GroupedMLP: each one transposed."""
    shape = (4, _HIDDEN, _INNER)
    return _many(elements, shape, lambda first: unbind(permute(_stored(shape, first), (0, 2, 1))))


def _gpt_oss(elements: int) -> Made:
    """Gate and up interleaved and transposed, and the experts stacked."""
    shape = (4, _INNER, _HIDDEN)
    half = _INNER // 2

    def layout(first: int) -> list[Tensor]:
        experts = unbind(_stored(shape, first))
        return [stack_in_order([LAYOUTS["interleave"]([one], Fields({}, {}), [half, half])[0] for one in experts])]

    return _many(elements, shape, layout)


_CASES: dict[str, Case] = {
    "plain copy": _plain,
    "grouped QKV": _qkv,
    "columns of 8 ranks": _columns,
    "transposed experts": _grouped_mlp,
    "interleaved, transposed experts": _gpt_oss,
}


def _seconds(tensors: Made, source: SourceFile, work: Path, max_ram: int) -> tuple[float, int]:
    """Time to write the tensors, and the bytes read for it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    plan = make_plan(tensors, (source,), lambda name, dtype: dtype, 1 << 60)
    buffers = divide(max_ram, 4, torch_needed=False)
    routes = Routes(read_route("auto", plan.sources), write_route("auto", work))
    drop_caches()
    began = time.perf_counter()
    progress = run(plan, work, buffers, routes, Journal(work / "journal", plan.fingerprint()))
    taken = time.perf_counter() - began
    shutil.rmtree(work)
    return taken, progress.read


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--gigabytes", type=float, default=2.0, show_default=True, help="Of input.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--only", multiple=True, help="Layouts to measure besides the plain copy.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes.")
def main(work: Path, gigabytes: float, rounds: int, only: tuple[str, ...], output: Path | None) -> None:
    """Measure in the folder WORK, on the disk to be measured."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "source"
    size = int(gigabytes * 1e9) // (1 << 20) * (1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    status = path.stat()
    source = SourceFile(path, status.st_size, status.st_mtime_ns, "random")
    cases = {name: case(size // 2) for name, case in _CASES.items() if name == "plain copy" or not only or name in only}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    read: dict[str, float] = {}
    for _ in range(rounds):
        for name, tensors in cases.items():
            seconds, count = _seconds(tensors, source, work / "out", 1 << 30)
            written = sum(map(nbytes, tensors.values()))
            taken[name].append(round(seconds / written * 1e9, 3))
            read[name] = round(count / written, 2)
    path.unlink()
    rows = {
        name: {
            "seconds_per_gb": values,
            "median": median(values),
            "ratio": round(median(values) / median(taken["plain copy"]), 2),
            "read_per_written": read[name],
        }
        for name, values in taken.items()
    }
    for name, row in rows.items():
        click.echo(
            f"{name:<34} {row['median']:6.2f} s/GB  {row['ratio']:5.2f}x  reads {row['read_per_written']} B per B"
        )
    if output is not None:
        output.write_text(json.dumps({"gigabytes": gigabytes, "layouts": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
