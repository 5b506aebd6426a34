"""Compare two checkpoints, or a merge that would be written with a reference, streamed under the budget."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streammerge.dtypes import DType
from streammerge.errors import BudgetError, DifferenceError, StoppedError, UnsupportedError, UsageError
from streammerge.execute.casts import kernel, needs_torch
from streammerge.execute.compute import compute_scratch, formula_casts
from streammerge.execute.difference import Comparer, Difference, Side, Tolerance
from streammerge.execute.memory import Buffers, divide, peak_rss
from streammerge.execute.routes import read_route
from streammerge.families.config import ModelConfig, read_config
from streammerge.families.model import Model, describe_model, output_tensors, usual_ties
from streammerge.folder.logits_check import LOADING_BYTES, compare_logits
from streammerge.folder.sidecars import find_sidecars
from streammerge.options import MergeOptions
from streammerge.pipeline.checks import compare_replicas
from streammerge.pipeline.prepare import Observer, PathLike, budget_of, prepare
from streammerge.reports import CompareReport, TensorReport
from streammerge.sizes import format_size
from streammerge.sources.open import open_reference
from streammerge.tensors.catalogue import Catalogue
from streammerge.tensors.formula import Formulas
from streammerge.tensors.virtual import Tensor, nbytes

__all__ = ["compare", "test"]

# Widened copies and masks of one step, see execute/difference.py.
_TEMPORARY_BYTES = 12 << 20


@dataclass(frozen=True)
class _Model:
    """One side: output name -> tensor and the dtype it is seen in; and what its config ties."""

    label: str
    catalogue: Catalogue
    tensors: Mapping[str, tuple[Tensor, DType]]
    ties: Mapping[str, str]
    formulas: Formulas

    def find(self, name: str) -> tuple[Tensor, DType] | None:
        """The tensor of a name; for a tied name that is not stored, the one it is tied to by its own config."""
        names = (name, self.ties.get(name, name))
        return next((self.tensors[known] for known in names if known in self.tensors), None)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to compare.

    Attributes:
        rtol, atol: see ``Tolerance``; 0 for exact.
        dtype_aware: the second side is cast to the first side's dtype before comparing.
        max_ram, workers, io: as in ``MergeOptions``.
        logits: token ids or text to run through both models; both must be Hugging Face folders.
    """

    rtol: float = 0.0
    atol: float = 0.0
    dtype_aware: bool = False
    max_ram: int | str | None = None
    workers: int = 4
    io: str = "auto"
    logits: str | None = None

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol >= 0):  # NaN is refused, too
            raise UsageError("tolerances must be numbers that are not negative")


def compare(
    first: PathLike,
    second: PathLike,
    *,
    observer: Observer | None = None,
    subtree: str | None = None,
    **options: object,
) -> CompareReport:
    """Compare two checkpoints of any formats.

    Args:
        subtree: which set of tensors to take where a checkpoint holds several.
        options: see ``CompareOptions``.

    Raises:
        DifferenceError: they have no tensor in common.
        StreammergeError: one of them cannot be read; see ``streammerge.errors``.
    """
    chosen = CompareOptions(**options)  # type: ignore[arg-type]
    watcher = observer or Observer()
    watcher.phase("reading metadata", 0)
    catalogues = [open_reference(Path(path), subtree=subtree) for path in (first, second)]
    configs = [_config(catalogue) for catalogue in catalogues]
    models = [
        _as_stored(str(path), catalogue, own or other)
        for path, catalogue, own, other in zip((first, second), catalogues, configs, reversed(configs), strict=True)
    ]
    report = _compare(models[0], models[1], chosen, watcher)
    return report if chosen.logits is None else replace(report, logits=_logits(models, chosen, watcher))


def _logits(models: Sequence[_Model], options: CompareOptions, observer: Observer) -> Mapping[str, Any]:
    """Compare logits, when both sides are folders that transformers loads and the budget allows it."""
    for model in models:
        if model.catalogue.format != "huggingface":
            raise UsageError(
                f"--logits loads both sides with transformers, but {model.label} is no Hugging Face folder"
            )
    need = LOADING_BYTES + max(sum(nbytes(t) for t, _ in model.tensors.values()) for model in models)
    if need > budget_of(options.max_ram):
        raise BudgetError(f"--logits has to load a whole model, which takes {format_size(need)}", need)
    observer.phase(f"comparing logits (takes {format_size(need)} of RAM)", 0)
    assert options.logits is not None
    return compare_logits(models[0].catalogue.root, models[1].catalogue.root, options.logits)


def test(
    source: PathLike | Sequence[PathLike],
    against: PathLike,
    *,
    observer: Observer | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    dtype_aware: bool = False,
    **options: object,
) -> CompareReport:
    """Compare the merge that would be written with a reference; nothing is written.

    Args:
        source: the checkpoint.
        against: the reference, mostly a Hugging Face folder.
        options: see ``MergeOptions``.

    Raises:
        DifferenceError: they have no tensor in common.
        StreammergeError: one of them cannot be read; see ``streammerge.errors``.
    """
    watcher = observer or Observer()
    reference = open_reference(Path(against))
    prepared = prepare(source, MergeOptions(**options), watcher, other_config=reference.hf_folder)  # type: ignore[arg-type]
    made = prepared.plan(compare_replicas(prepared))
    tensors = {t.name: (t.tensor, t.dtype) for file in made.weights for t in file.tensors}
    ties = _ties(prepared.model, tensors, prepared.config)
    planned = _Model(str(prepared.catalogue.root), prepared.catalogue, tensors, ties, prepared.model.formulas)
    chosen = CompareOptions(rtol, atol, dtype_aware, prepared.max_ram, prepared.options.workers, prepared.options.io)
    return _compare(
        planned, _as_stored(str(against), reference, _config(reference) or prepared.config), chosen, watcher
    )


def _config(catalogue: Catalogue) -> ModelConfig | None:
    sidecars = find_sidecars(catalogue.hf_folder)
    return read_config(sidecars.config) if sidecars.config else None


def _as_stored(label: str, catalogue: Catalogue, config: ModelConfig | None) -> _Model:
    model = describe_model(catalogue, config)
    if model.adapters:
        raise UnsupportedError(
            f"{label} holds a LoRA adapter: whether it is to be fused is not said. Merge it first, or use "
            "streammerge test with --lora"
        )
    tensors = output_tensors(model, config, [tie.name for tie in model.ties])
    ties = _ties(model, tensors, config)
    return _Model(label, catalogue, {name: (t, t.dtype) for name, t in tensors.items()}, ties, model.formulas)


# Names that a folder leaves out when they are tied; without them the rules could not tell.
_TIED = ("lm_head.weight",)


def _ties(model: Model, names: Iterable[str], config: ModelConfig | None) -> Mapping[str, str]:
    """Name -> the name that the config ties it to, whether or not the first is stored."""
    if config is None:
        return {}
    if model.rules is not None:
        return model.rules.tied_names(dict.fromkeys([*names, *_TIED]), config.raw)
    return usual_ties(config.raw)


def _compare(first: _Model, second: _Model, options: CompareOptions, observer: Observer) -> CompareReport:
    pairs: dict[str, tuple[Tensor, DType, Tensor, DType]] = {}
    missing: list[str] = []
    extra: list[str] = []
    for name in dict.fromkeys([*first.tensors, *second.tensors]):
        a, b = first.find(name), second.find(name)
        if a is None or b is None:
            (missing if a is None else extra).append(name)
        else:
            pairs[name] = (*a, *b)
    if not pairs:
        raise DifferenceError(f"{first.label} and {second.label} have no tensor in common; nothing was compared")
    shapes = {name: pair for name, pair in pairs.items() if pair[0].shape != pair[2].shape}
    results = _run({name: pair for name, pair in pairs.items() if name not in shapes}, first, second, options, observer)
    tensors = [
        TensorReport.of(
            name, pairs[name][0].shape, (pairs[name][1].name, pairs[name][3].name), found, options.dtype_aware
        )
        for name, found in results.items()
    ]
    return CompareReport(
        first=first.label,
        second=second.label,
        compared=len(results),
        elements=sum(found.elements for found in results.values()),
        missing=tuple(missing),
        extra=tuple(extra),
        shapes={name: (list(pair[0].shape), list(pair[2].shape)) for name, pair in shapes.items()},
        tensors=tuple(sorted((t for t in tensors if not t.equal), key=_badness)),
        nan_both=sum(found.nan_both for found in results.values()),
        rtol=options.rtol,
        atol=options.atol,
        peak_rss=peak_rss(),
    )


def _badness(tensor: TensorReport) -> tuple[object, ...]:
    """NaN on one side only is worse than any distance."""
    return (not tensor.nan_one, -tensor.max_abs, -tensor.differing, tensor.name)


def _run(
    pairs: Mapping[str, tuple[Tensor, DType, Tensor, DType]],
    first: _Model,
    second: _Model,
    options: CompareOptions,
    observer: Observer,
) -> dict[str, Difference]:
    """Compare all pairs with several workers; the results in the order of ``pairs``."""
    casts = {
        cast
        for a, seen_a, b, seen_b in pairs.values()
        for cast in ((a.dtype, seen_a), (b.dtype, seen_a if options.dtype_aware else seen_b))
        if cast[0] != cast[1]
    }
    buffers = divide(
        budget_of(options.max_ram),
        options.workers,
        torch_needed=needs_torch(casts | formula_casts(first.formulas) | formula_casts(second.formulas)),
        sides=2,
        temporary=_TEMPORARY_BYTES,
        scratch=lambda window: sum(compute_scratch(model.formulas, window) for model in (first, second)),
    )
    for stored, seen in casts | formula_casts(first.formulas) | formula_casts(second.formulas):
        kernel(stored, seen)  # import what it needs before the threads start
    sides = [
        Side(model.catalogue.files, read_route(options.io, model.catalogue.files), model.formulas)
        for model in (first, second)
    ]
    observer.phase("comparing", sum(nbytes(a) + nbytes(b) for a, _, b, _ in pairs.values()))
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in pairs:
        todo.put(name)
    results: dict[str, Difference] = {}
    failures: list[BaseException] = []
    counter = _Counter()
    tolerance = Tolerance(options.rtol, options.atol)

    def work() -> None:
        try:
            comparer = Comparer(sides[0], sides[1], Buffers(1, buffers.tile, buffers.window, 0))
            for name in _drain(todo, failures):
                a, seen_a, b, seen_b = pairs[name]
                dtypes = (seen_a, seen_a if options.dtype_aware else seen_b)
                results[name] = comparer.compare(a, b, dtypes, tolerance, counter.add)
            comparer.close()
        except BaseException as failure:  # handed to the calling thread below
            failures.append(failure)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(buffers.workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                observer.advance(counter.total)
    except BaseException:
        failures.append(StoppedError("stopped on request"))
        raise
    if failures:
        raise failures[0]
    return {name: results[name] for name in pairs}


class _Counter:
    """Bytes read by all workers."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.total += size


def _drain(todo: queue.SimpleQueue[str], failures: Sequence[BaseException]) -> Iterator[str]:
    while not failures:
        try:
            yield todo.get_nowait()
        except queue.Empty:
            return
