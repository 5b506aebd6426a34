"""The pipeline: inspect, plan and merge, from a source to a finished folder."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from streammerge import files, hub
from streammerge.errors import SourceError, StorageError
from streammerge.execute.casts import needs_torch
from streammerge.execute.checksums import CHECKSUMS_NAME, Checksums
from streammerge.execute.compare import same_place, unequal
from streammerge.execute.engine import Progress, Routes, Watcher, run
from streammerge.execute.journal import Journal, journal_fingerprint
from streammerge.execute.memory import Buffers, default_budget, divide, peak_rss, rss
from streammerge.execute.routes import read_route, write_route
from streammerge.execute.scan import ValueScan
from streammerge.families.config import ModelConfig, edited_config, read_config
from streammerge.families.model import Model, describe_model, keeps_float32, output_tensors
from streammerge.folder.class_check import CHECK_BYTES, check_against_class, raise_for_report
from streammerge.folder.sidecars import Sidecars, find_sidecars
from streammerge.folder.staging import Staging, check_destination, commit, finished_plan, manifest_of, staged
from streammerge.options import MergeOptions
from streammerge.plan.dtypes import dtype_rule
from streammerge.plan.plan import INDEX_NAME, Plan, make_plan
from streammerge.reports import InspectReport, MergeReport, PlanReport
from streammerge.sizes import format_size, parse_size
from streammerge.sources.open import open_source
from streammerge.tensors.catalogue import Catalogue, EqualityCheck
from streammerge.tensors.virtual import nbytes, numel
from streammerge.version import __version__

__all__ = ["Observer", "inspect", "merge", "plan"]

PathLike = str | Path


class Observer:
    """Told what a merge is doing. Override what you want to show."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins; ``total`` bytes will be moved in it (0 when that is not known)."""

    def advance(self, done: int) -> None:
        """``done`` bytes of the phase are moved; called about ten times a second."""

    def warn(self, message: str) -> None:
        """Something the user should know, also listed in the report."""


@dataclass
class _Prepared:
    """A source that has been read as far as planning needs."""

    catalogue: Catalogue
    sidecars: Sidecars
    config: ModelConfig | None
    model: Model
    max_ram: int
    options: MergeOptions
    observer: Observer
    warnings: list[str] = field(default_factory=list)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self.observer.warn(message)

    def plan(self, untied: set[str]) -> Plan:
        config_dtype = self.config.dtype if self.config else None
        rule = dtype_rule(self.options.dtype, config_dtype, keeps_float32(self.model))
        tensors = output_tensors(self.model, self.config, untied)
        return make_plan(tensors, self.catalogue.files, rule, self.options.shard_bytes)


def _paths(source: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(source)] if isinstance(source, str | Path) else [Path(one) for one in source]


def inspect(
    source: PathLike | Sequence[PathLike], *, mesh_order: str = "auto", subtree: str | None = None
) -> InspectReport:
    """Say what a checkpoint is: format, ranks, meshes, tensors, and what is missing.

    Raises:
        StreammergeError: it cannot be read; see ``streammerge.errors``.
    """
    options = MergeOptions(mesh_order=mesh_order, subtree=subtree)  # type: ignore[arg-type]
    catalogue = open_source(_paths(source), mesh_order=options.mesh_order, subtree=subtree)
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


def _prepare(source: PathLike | Sequence[PathLike], options: MergeOptions, observer: Observer) -> _Prepared:
    observer.phase("reading metadata", 0)
    catalogue = open_source(_paths(source), mesh_order=options.mesh_order, subtree=options.subtree)
    folder = hub.local_folder(options.hf_config) if options.hf_config is not None else catalogue.hf_folder
    sidecars = find_sidecars(folder)
    config = read_config(sidecars.config) if sidecars.config else None
    model = describe_model(catalogue, config, tie=options.tie_word_embeddings)
    limit = default_budget()
    max_ram = limit if options.max_ram is None else parse_size(options.max_ram, percent_of=limit * 2)
    prepared = _Prepared(catalogue, sidecars, config, model, max_ram, options, observer)
    for warning in catalogue.warnings:
        prepared.warn(warning)
    return prepared


def plan(source: PathLike | Sequence[PathLike], destination: PathLike, **options: object) -> PlanReport:
    """Say what ``merge`` would write, without reading a weight.

    Args:
        source: the checkpoint, or the folders that its ranks are spread over.
        destination: the folder to be written.
        options: see ``MergeOptions``.

    Raises:
        StreammergeError: it cannot be merged; see ``streammerge.errors``.
    """
    prepared = _prepare(source, MergeOptions(**options), Observer())  # type: ignore[arg-type]
    made = prepared.plan(set())
    buffers = divide(prepared.max_ram, prepared.options.workers, torch_needed=needs_torch(made.casts))
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
    prepared = _prepare(source, MergeOptions(**options), observer or Observer())  # type: ignore[arg-type]
    target = Path(destination)
    if finished_plan(target) is None:
        check_destination(target, overwrite=prepared.options.overwrite)
    untied = _compare(prepared)
    made = prepared.plan(untied)
    checked = _check_class(prepared, made)
    buffers = divide(prepared.max_ram, prepared.options.workers, torch_needed=needs_torch(made.casts))
    _check_space(prepared, made, target)
    work = _Work(prepared, made, target, buffers, bool(untied), stop or threading.Event())
    with staged(target) as staging:
        written = work.write(staging)
    seconds = time.monotonic() - started
    uploaded = hub.upload(target, push_to_hub, private=private) if push_to_hub else None
    return _report(work, written, checked, seconds, uploaded)


def _compare(prepared: _Prepared) -> set[str]:
    """Read what must be equal; returns the tied names that turned out to differ."""
    model, options = prepared.model, prepared.options
    checks = [check for check in (*model.checks, *model.ties) if not same_place(check.first, check.second)]
    if not checks:
        return set()
    prepared.observer.phase("comparing replicas", 2 * sum(nbytes(check.first) for check in checks))
    route = read_route(options.io, prepared.catalogue.files)
    buffers = divide(prepared.max_ram, 1, torch_needed=False)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        prepared.observer.advance(done)

    untied = set()
    for check in unequal(checks, prepared.catalogue.files, buffers, route, count):
        if check in model.ties:
            untied.add(check.name)
            prepared.warn(
                f"{check.name} has other values than its twin, although {check.reason}: "
                "both are written, and tie_word_embeddings becomes false"
            )
        else:
            _mismatch(prepared, check)
    return untied


def _mismatch(prepared: _Prepared, check: EqualityCheck) -> None:
    if not check.tolerated:
        raise SourceError(f"{check.name}: {check.reason}, but they differ")
    if not prepared.options.allow_replica_mismatch:
        raise SourceError(f"{check.name}: {check.reason}; --allow-replica-mismatch takes the first")
    prepared.warn(f"{check.name}: {check.reason}; the first is taken")


def _check_class(prepared: _Prepared, made: Plan) -> str:
    """Compare names and shapes with the model class; returns what to tell the user."""
    wanted, config = prepared.options.check, prepared.sidecars.config
    if wanted is False:
        return "not checked (--no-check)"
    if config is None or prepared.config is None:
        return "not checked (no config.json)"
    if wanted is None and prepared.max_ram < rss() + CHECK_BYTES:
        return f"not checked (it needs a budget of {format_size(rss() + CHECK_BYTES)}; --check does it all the same)"
    prepared.observer.phase("checking against the model class", 0)
    shapes = {tensor.name: tensor.tensor.shape for file in made.files for tensor in file.tensors}
    report = check_against_class(config, shapes)
    if report.note:
        return f"not checked ({report.note})"
    raise_for_report(report, prepared.config.architecture)
    if report.extra:
        listed = ", ".join(report.extra[:5]) + (f" and {len(report.extra) - 5} more" if len(report.extra) > 5 else "")
        prepared.warn(f"{prepared.config.architecture} does not know {listed}; written all the same")
    return f"every weight of {prepared.config.architecture} is there, in the right shape"


def _check_space(prepared: _Prepared, made: Plan, target: Path) -> None:
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    need = made.write_size + prepared.sidecars.size
    free = files.free_space(existing)
    if prepared.options.space_check and free < need:
        raise StorageError(
            f"{existing} has {format_size(free)} free, but the merged model needs {format_size(need)}; "
            "free some space, choose another destination, or use --no-space-check"
        )


@dataclass
class _Work:
    """A plan being carried out."""

    prepared: _Prepared
    made: Plan
    target: Path
    buffers: Buffers
    untie: bool
    stop: threading.Event
    progress: Progress = field(default_factory=Progress)

    def write(self, staging: Staging) -> list[str]:
        """Write everything into the staging folder and make it the destination; returns the names."""
        options, observer = self.prepared.options, self.prepared.observer
        fingerprint = self._fingerprint()
        if finished_plan(self.target) == fingerprint:
            self.progress.kept = self.made.write_size
            return [str(name) for name in manifest_of(self.target)["files"]]  # type: ignore[attr-defined]
        check_destination(self.target, overwrite=options.overwrite)
        found = journal_fingerprint(staging.journal)
        if found != fingerprint:
            if found is not None:
                self.prepared.warn(
                    "an unfinished merge of other sources or with other options was there: starting over"
                )
            staging.clear()
        files.make_folder(staging.folder)
        journal = Journal(staging.journal, fingerprint)
        routes = Routes(read_route(options.io, self.made.sources), write_route(options.io, staging.folder))
        scan, checksums = ValueScan(), Checksums(self.stop)
        watchers: list[Watcher] = [*([scan] if options.scan else []), *([checksums] if options.checksums else [])]
        observer.phase("merging", self.made.write_size)
        try:
            run(
                self.made,
                staging.folder,
                self.buffers,
                routes,
                journal,
                progress=self.progress,
                watchers=watchers,
                on_poll=lambda: observer.advance(self.progress.done),
                stop=self.stop,
            )
        finally:
            journal.close()
        observer.advance(self.made.write_size)
        for warning in scan.warnings():
            self.prepared.warn(warning)
        written = [file.name for file in self.made.files]
        written += self._write_sidecars(staging.folder, checksums.lines() if options.checksums else None)
        manifest = {"streammerge": __version__, "source": str(self.prepared.catalogue.root), "plan": fingerprint}
        commit(staging, self.target, written, manifest, overwrite=options.overwrite)
        return written

    def _fingerprint(self) -> str:
        """A hash of all that decides on the bytes written; a merge goes on only where it is the same."""
        options = self.prepared.options
        parts = [self.made.fingerprint(), __version__, metadata.version("ml_dtypes")]
        parts += [options.mesh_order, str(options.subtree), str(options.allow_replica_mismatch)]
        if needs_torch(self.made.casts):
            parts.append(metadata.version("torch"))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _write_sidecars(self, folder: Path, checksums: str | None) -> list[str]:
        """Everything beside the weights; returns the names written."""
        contents: dict[Path, bytes] = {}
        for name, path in self.prepared.sidecars.paths().items():
            with files.io_errors("read", path):
                contents[name] = path.read_bytes()
        if self.prepared.config is not None:
            edited = edited_config(self.prepared.config.raw, dtype=_main_dtype(self.made), untie=self.untie)
            if edited is not None:
                contents[Path("config.json")] = edited
        index = self.made.index_bytes()
        if index is not None:
            contents[Path(INDEX_NAME)] = index
        if checksums is not None:
            contents[Path(CHECKSUMS_NAME)] = checksums.encode()
        for name, content in contents.items():
            files.make_folder((folder / name).parent)
            files.write_file(folder / name, content)
        return [str(name) for name in contents]


def _main_dtype(made: Plan) -> str | None:
    """The floating dtype that most bytes are written in, or None without any."""
    sizes: Counter[str] = Counter()
    for file in made.files:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else None


def _report(work: _Work, written: list[str], checked: str, seconds: float, uploaded: str | None) -> MergeReport:
    prepared = work.prepared
    outputs = [tensor for file in work.made.files for tensor in file.tensors]
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
        warnings=tuple(prepared.warnings),
    )
