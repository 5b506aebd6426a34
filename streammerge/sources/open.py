"""Open a checkpoint of any supported format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streammerge.errors import StorageError, UsageError
from streammerge.sources.fsdp import has_rank_files, open_fsdp
from streammerge.sources.locate import locate
from streammerge.sources.mesh_order import MeshOrder
from streammerge.tensors.catalogue import Catalogue

__all__ = ["open_source"]


def open_source(paths: Sequence[Path], *, mesh_order: MeshOrder = "auto", subtree: str | None = None) -> Catalogue:
    """Find and index the checkpoint at ``paths`` (several only when its ranks are spread over folders).

    Raises:
        UsageError: no path, or one that leads nowhere or to several checkpoints.
        SourceError, UnsupportedError, UnsafeError: see ``open_fsdp``.
        StorageError: reading failed.
    """
    if not paths:
        raise UsageError("no source is named")
    try:
        folders = list(dict.fromkeys(locate(path, has_rank_files) for path in paths))
        return open_fsdp(folders, mesh_order=mesh_order, subtree=subtree)
    except OSError as fault:
        raise StorageError(f"cannot read {fault.filename or paths[0]}: {fault.strerror}") from fault
