"""Read everything a checkpoint holds through `open_source`, with all its equality checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streammerge
from streammerge.errors import BudgetError, SourceError
from streammerge.sources.open import open_source
from streammerge.tensors.catalogue import Catalogue
from tests.support.raw import Raw, materialise

__all__ = ["catalogued", "merge_tightly", "read_all", "values"]

_MARGIN = 32 << 20


def catalogued(source: Path | Sequence[Path], **options: Any) -> Catalogue:
    """The catalogue of a checkpoint."""
    return open_source([source] if isinstance(source, Path) else list(source), **options)


def values(catalogue: Catalogue) -> dict[str, Raw]:
    """The tensors of a catalogue, after the comparisons that it asks for.

    Raises:
        SourceError: copies that have to be equal differ.
    """
    paths = [file.path for file in catalogue.files]
    for check in catalogue.checks:
        if materialise(check.first, paths) != materialise(check.second, paths):
            raise SourceError(f"{check.name}: {check.reason}")
    found = {}
    for name, entry in catalogue.entries.items():
        found[name] = materialise(entry.tensor, paths)
        for claim in entry.claims:
            if materialise(claim.tensor, paths) != found[name]:
                raise SourceError(f"{name}: claims differ")
    return found


def read_all(source: Path | Sequence[Path], **options: Any) -> dict[str, Raw]:
    """All tensors of a checkpoint."""
    return values(catalogued(source, **options))


def merge_tightly(source: Path | Sequence[Path], target: Path, **options: Any) -> streammerge.MergeReport:
    """Merge with little more memory than this process has already, which pytest and torch have made large."""
    chosen = {"dtype": "keep", "check": False, **options}
    try:
        return streammerge.merge(source, target, max_ram="256M", **chosen)
    except BudgetError as too_small:
        return streammerge.merge(source, target, max_ram=too_small.least + _MARGIN, **chosen)
