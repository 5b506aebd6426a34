"""Is a merged folder whole and sane? Looks at the folder alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from streammerge.errors import SourceError, UnsafeError, UnsupportedError, UsageError
from streammerge.execute.checksums import CHECKSUMS_NAME
from streammerge.execute.engine import read_through
from streammerge.execute.memory import divide, rss
from streammerge.execute.routes import read_route
from streammerge.execute.scan import ValueScan
from streammerge.families.config import read_config
from streammerge.folder.class_check import CHECK_BYTES, check_against_class
from streammerge.folder.sidecars import find_sidecars
from streammerge.folder.staging import manifest_of
from streammerge.pipeline.prepare import Observer, PathLike, budget_of
from streammerge.plan.plan import make_plan
from streammerge.reports import VerifyReport
from streammerge.sources.hf_folder import has_hf_weights, open_hf_folder
from streammerge.tensors.catalogue import Catalogue

__all__ = ["verify"]

_STEP = 8 << 20


def verify(
    folder: PathLike, *, max_ram: int | str | None = None, io: str = "auto", observer: Observer | None = None
) -> VerifyReport:
    """Check a folder: index and headers, listed files, model class, values, checksums if there are any.

    Raises:
        UsageError: not a folder with weights.
        StorageError: reading failed.
    """
    path, watcher, budget = Path(folder), observer or Observer(), budget_of(max_ram)
    if not path.is_dir() or not has_hf_weights(path):
        raise UsageError(f"{path} holds no model.safetensors and no index of one")
    try:
        catalogue = open_hf_folder(path)
    except (SourceError, UnsafeError, UnsupportedError) as fault:
        return VerifyReport(str(path), 0, 0, 0, ("index and headers",), (str(fault),), ())
    checked, problems, warnings = ["index and headers"], [], []
    problems += _listed_files(path, checked)
    class_problems, class_warnings = _model_class(catalogue, budget, checked, watcher)
    warnings += class_warnings
    problems += class_problems
    warnings += _values(catalogue, budget, io, checked, watcher)
    problems += _checksums(path, checked, watcher)
    tensors = [entry.tensor for entry in catalogue.entries.values()]
    plan = make_plan({str(i): t for i, t in enumerate(tensors)}, catalogue.files, lambda _, stored: stored, 1 << 62)
    return VerifyReport(
        str(path), len(tensors), plan.parameters, plan.total_size, tuple(checked), tuple(problems), tuple(warnings)
    )


def _listed_files(path: Path, checked: list[str]) -> list[str]:
    manifest = manifest_of(path)
    if not manifest:
        return []
    checked.append("files that the merge wrote")
    names = [str(name) for name in manifest["files"]]  # type: ignore[attr-defined]
    return [f"{name} was written by the merge, but is gone" for name in names if not (path / name).is_file()]


def _model_class(
    catalogue: Catalogue, budget: int, checked: list[str], observer: Observer
) -> tuple[list[str], list[str]]:
    sidecars = find_sidecars(catalogue.hf_folder)
    if sidecars.config is None:
        return [], ["there is no config.json, so names and shapes were not compared with a model class"]
    config = read_config(sidecars.config)
    if budget < rss() + CHECK_BYTES:
        return [], ["the budget is too small for the check against the model class"]
    observer.phase("checking against the model class", 0)
    shapes = {name: entry.tensor.shape for name, entry in catalogue.entries.items()}
    report = check_against_class(sidecars.config, shapes)
    if report.note:
        return [], [f"not compared with the model class: {report.note}"]
    checked.append(f"names and shapes against {config.architecture}")
    problems = [f"{name} is missing" for name in report.missing]
    for name, (found, expected) in (report.wrong_shapes or {}).items():
        problems.append(f"{name} has shape {found}, but {config.architecture} expects {expected}")
    return problems, [f"{config.architecture} does not know {name}" for name in report.extra]


def _values(catalogue: Catalogue, budget: int, io: str, checked: list[str], observer: Observer) -> list[str]:
    tensors = {name: entry.tensor for name, entry in catalogue.entries.items()}
    plan = make_plan(tensors, catalogue.files, lambda _, stored: stored, 1 << 62)
    scan = ValueScan()
    observer.phase("reading values", plan.total_size)
    read_through(plan, divide(budget, 1, torch_needed=False), read_route(io, catalogue.files), [scan], observer.advance)
    checked.append("values (NaN, infinite, all zeros)")
    return scan.warnings()


def _checksums(path: Path, checked: list[str], observer: Observer) -> list[str]:
    listed = path / CHECKSUMS_NAME
    if not listed.is_file():
        return []
    checked.append(f"checksums of {CHECKSUMS_NAME}")
    problems = []
    for line in listed.read_text(errors="replace").splitlines():
        expected, _, name = line.partition("  ")
        file = path / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not file.is_file():
            problems.append(f"{CHECKSUMS_NAME} lists {name!r}, which is not in the folder")
        elif _sha256(file, observer.advance) != expected:
            problems.append(f"{name} does not have the checksum that {CHECKSUMS_NAME} lists")
    return problems


def _sha256(path: Path, on_read: Callable[[int], None]) -> str:
    hasher = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while part := file.read(_STEP):
            hasher.update(part)
            done += len(part)
            on_read(done)
    return hasher.hexdigest()
