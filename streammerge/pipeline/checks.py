"""What is checked before the first byte is written: replicas, ties, the model class, disk space."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from streammerge import files
from streammerge.errors import SourceError, StorageError
from streammerge.execute.casts import needs_torch
from streammerge.execute.compare import same_place, unequal
from streammerge.execute.compute import compute_scratch, formula_casts
from streammerge.execute.memory import divide, rss
from streammerge.execute.routes import read_route
from streammerge.folder.class_check import CHECK_BYTES, check_against_class, raise_for_report
from streammerge.pipeline.prepare import Prepared
from streammerge.plan.plan import Plan
from streammerge.sizes import format_size
from streammerge.tensors.catalogue import EqualityCheck
from streammerge.tensors.virtual import nbytes

__all__ = ["check_class", "check_space", "compare_replicas"]


def compare_replicas(prepared: Prepared) -> set[str]:
    """Read what must be equal; returns the tied names that turned out to differ.

    Raises:
        SourceError: replicas differ.
    """
    model, options = prepared.model, prepared.options
    checks = [check for check in (*model.checks, *model.ties) if not same_place(check.first, check.second)]
    if not checks:
        return set()
    prepared.observer.phase("comparing replicas", 2 * sum(nbytes(check.first) for check in checks))
    route = read_route(options.io, prepared.catalogue.files)
    scratch = partial(compute_scratch, model.formulas)
    buffers = divide(prepared.max_ram, 1, torch_needed=needs_torch(formula_casts(model.formulas)), scratch=scratch)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        prepared.observer.advance(done)

    untied = set()
    for check in unequal(checks, prepared.catalogue.files, buffers, route, count, model.formulas):
        if check in model.ties:
            untied.add(check.name)
            prepared.warn(
                f"{check.name} has other values than its twin, although {check.reason}: "
                "both are written, and tie_word_embeddings becomes false"
            )
        else:
            _mismatch(prepared, check)
    return untied


def _mismatch(prepared: Prepared, check: EqualityCheck) -> None:
    if not check.tolerated:
        raise SourceError(f"{check.name}: {check.reason}, but they differ")
    if not prepared.options.allow_replica_mismatch:
        raise SourceError(f"{check.name}: {check.reason}; --allow-replica-mismatch takes the first")
    prepared.warn(f"{check.name}: {check.reason}; the first is taken")


def check_class(prepared: Prepared, made: Plan) -> str:
    """Compare names and shapes with the model class; returns what to tell the user.

    Raises:
        SourceError: weights are missing or have a wrong shape.
    """
    wanted, config = prepared.options.check, prepared.sidecars.config
    if wanted is False:
        return "not checked (--no-check)"
    if config is None or prepared.config is None:
        return "not checked (no config.json)"
    if wanted is None and prepared.max_ram < rss() + CHECK_BYTES:
        return f"not checked (it needs a budget of {format_size(rss() + CHECK_BYTES)}; --check does it all the same)"
    prepared.observer.phase("checking against the model class", 0)
    shapes = {tensor.name: tensor.tensor.shape for file in made.weights for tensor in file.tensors}
    report = check_against_class(config, shapes, prepared.config.added)
    if report.note:
        return f"not checked ({report.note})"
    report, absent = report.without_missing(prepared.model.absent)
    raise_for_report(report, prepared.config.architecture)
    for name in absent:
        prepared.warn(f"{name} has no counterpart in the training framework: {prepared.model.absent[name]}")
    if report.extra:
        listed = ", ".join(report.extra[:5]) + (f" and {len(report.extra) - 5} more" if len(report.extra) > 5 else "")
        prepared.warn(f"{prepared.config.architecture} does not know {listed}; written all the same")
    return f"every weight of {prepared.config.architecture} is there, in the right shape"


def check_space(prepared: Prepared, made: Plan, target: Path, there: int) -> None:
    """Refuse when the file system has too little space for what is not ``there`` yet (bytes).

    Raises:
        StorageError: says how much is free and how much is needed.
    """
    existing = next(parent for parent in target.absolute().parents if parent.exists())
    need = made.write_size + prepared.sidecars.size - there
    free = files.free_space(existing)
    if prepared.options.space_check and free < need:
        raise StorageError(
            f"{existing} has {format_size(free)} free, but the merged model needs {format_size(need)}; "
            "free some space, choose another destination, or use --no-space-check"
        )
