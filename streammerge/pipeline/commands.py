"""The commands: inspect, plan, merge."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from streammerge import hub
from streammerge.execute.memory import peak_rss
from streammerge.families.config import read_config
from streammerge.folder.sidecars import find_sidecars
from streammerge.folder.staging import check_destination, finished_plan, staged
from streammerge.options import MergeOptions
from streammerge.pipeline.checks import check_class, check_space, compare_replicas
from streammerge.pipeline.prepare import Observer, PathLike, buffers_for, open_checked, prepare
from streammerge.pipeline.work import Work
from streammerge.reports import InspectReport, MergeReport, PlanReport
from streammerge.tensors.virtual import nbytes, numel

__all__ = ["inspect", "merge", "plan"]


def inspect(
    source: PathLike | Sequence[PathLike],
    *,
    mesh_order: str = "auto",
    subtree: str | None = None,
    backend: str | None = None,
) -> InspectReport:
    """Say what a checkpoint is: format, ranks, meshes, tensors, and what is missing.

    Raises:
        StreammergeError: it cannot be read; see ``streammerge.errors``.
    """
    options = MergeOptions(mesh_order=mesh_order, subtree=subtree, backend=backend)  # type: ignore[arg-type]
    catalogue = open_checked(source, options)
    sidecars = find_sidecars(catalogue.hf_folder)
    config = read_config(sidecars.config) if sidecars.config else None
    tensors = {name: entry.tensor for name, entry in catalogue.entries.items()}
    return InspectReport(
        format=catalogue.format,
        path=str(catalogue.root),
        facts=dict(catalogue.facts),
        tensors={
            name: {
                "dtype": tensor.dtype.name,
                "shape": list(tensor.shape),
                "bytes": nbytes(tensor),
                "fragments": len(tensor.fragments),
            }
            for name, tensor in tensors.items()
        },
        parameters=sum(map(numel, tensors.values())),
        bytes=sum(map(nbytes, tensors.values())),
        skipped=dict(catalogue.skipped),
        architecture=config.architecture if config else None,
        missing=sidecars.missing,
        warnings=catalogue.warnings,
    )


def plan(source: PathLike | Sequence[PathLike], destination: PathLike, **options: object) -> PlanReport:
    """Say what ``merge`` would write, without reading a weight.

    Args:
        source: the checkpoint, or the folders that its ranks are spread over.
        destination: the folder to be written.
        options: see ``MergeOptions``.

    Raises:
        StreammergeError: it cannot be merged; see ``streammerge.errors``.
    """
    prepared = prepare(source, MergeOptions(**options), Observer())  # type: ignore[arg-type]
    made = prepared.plan(set())
    buffers = buffers_for(made, prepared.max_ram, prepared.options.workers)
    return PlanReport(
        destination=str(destination),
        plan=made.to_dict(),
        copied=tuple(map(str, prepared.sidecars.files)),
        tied=tuple(tie.name for tie in prepared.model.ties),
        dropped=dict(prepared.model.dropped),
        max_ram=prepared.max_ram,
        estimated_ram=buffers.estimate,
        disk=made.write_size + prepared.sidecars.size,
        estimated_seconds=(made.read_size + made.write_size) / 1e9,
        missing=prepared.sidecars.missing,
        warnings=tuple(prepared.warnings),
    )


def merge(
    source: PathLike | Sequence[PathLike],
    destination: PathLike,
    *,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
    **options: object,
) -> MergeReport:
    """Merge a checkpoint into a Hugging Face folder.

    Args:
        source: the checkpoint, or the folders that its ranks are spread over.
        destination: the folder to be written; it appears when it is complete.
        observer: told about progress and warnings.
        stop: set it to stop the merge; nothing is left behind.
        push_to_hub: repository to upload the finished folder to.
        private: whether that repository is made private.
        options: see ``MergeOptions``.

    Raises:
        StreammergeError: it cannot be merged; see ``streammerge.errors``.
    """
    started = time.monotonic()
    prepared = prepare(source, MergeOptions(**options), observer or Observer())  # type: ignore[arg-type]
    # A name of its own, also for "." and "x/.."; a link stays what it is, and is refused below.
    target = Path(os.path.abspath(destination))  # noqa: PTH100
    finished = finished_plan(target)
    if finished is None:
        check_destination(target, overwrite=prepared.options.overwrite)
    # Refuse a budget that is too small for the whole before a replica is read.
    buffers_for(prepared.plan(set()), prepared.max_ram, prepared.options.workers)
    untied = compare_replicas(prepared)
    made = prepared.plan(untied)
    checked = check_class(prepared, made)
    buffers = buffers_for(made, prepared.max_ram, prepared.options.workers)
    work = Work(prepared, made, target, buffers, bool(untied), stop)
    check_space(prepared, made, target, work.bytes_there())
    with staged(target) as staging:
        written = work.write(staging, finished)
    seconds = time.monotonic() - started
    uploaded = hub.upload(target, push_to_hub, private=private) if push_to_hub else None
    return _report(work, written, checked, seconds, uploaded)


def _report(work: Work, written: list[str], checked: str, seconds: float, uploaded: str | None) -> MergeReport:
    prepared = work.prepared
    outputs = [tensor for file in work.made.weights for tensor in file.tensors]
    names = {tensor.name for tensor in outputs}
    return MergeReport(
        destination=str(work.target),
        files=tuple(sorted(written)),
        tensors=len(outputs),
        parameters=work.made.parameters,
        tied=tuple(tie.name for tie in prepared.model.ties if tie.name not in names),
        dropped=dict(prepared.model.dropped),
        skipped=dict(prepared.catalogue.skipped),
        stored_dtypes=dict(Counter(tensor.tensor.dtype.name for tensor in outputs)),
        written_dtypes=dict(Counter(tensor.dtype.name for tensor in outputs)),
        bytes_read=work.progress.read,
        bytes_written=work.progress.written,
        bytes_kept=work.progress.kept,
        seconds=seconds,
        peak_rss=peak_rss(),
        max_ram=prepared.max_ram,
        missing=prepared.sidecars.missing,
        check=checked,
        uploaded=uploaded,
        lora=prepared.lora,
        warnings=tuple(prepared.warnings),
    )
