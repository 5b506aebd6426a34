"""Open a checkpoint of any supported format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streammerge.errors import StorageError, UsageError
from streammerge.sources.dcp import has_model, open_dcp
from streammerge.sources.dcp_hf import has_hf_shards, open_hf_shards
from streammerge.sources.fsdp import has_rank_files, open_fsdp
from streammerge.sources.hf_folder import has_hf_weights, open_hf_folder
from streammerge.sources.locate import locate
from streammerge.sources.megatron_files import has_model_parallel_ranks
from streammerge.sources.megatron_legacy import open_megatron
from streammerge.sources.mesh_order import MeshOrder
from streammerge.sources.torch_dist import has_torch_dist, open_torch_dist
from streammerge.tensors.catalogue import Catalogue

__all__ = ["open_reference", "open_source"]


def _is_checkpoint(folder: Path) -> bool:
    return any(
        holds(folder) for holds in (has_rank_files, has_hf_shards, has_model_parallel_ranks, has_torch_dist, has_model)
    )


def open_reference(path: Path, *, subtree: str | None = None) -> Catalogue:
    """Index what is compared with: a Hugging Face folder, or a checkpoint of any format.

    Raises: as ``open_source``.
    """
    if path.is_dir() and has_hf_weights(path):
        return open_hf_folder(path)
    return open_source([path], subtree=subtree)


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
        folders = list(dict.fromkeys(locate(path, _is_checkpoint) for path in paths))
        if has_rank_files(folders[0]):
            return open_fsdp(folders, mesh_order=mesh_order, subtree=subtree)
        if len(folders) > 1:
            raise UsageError("several sources are only joined when they hold rank files of one checkpoint")
        if has_hf_shards(folders[0]):
            return open_hf_shards(folders[0])
        if has_model_parallel_ranks(folders[0]):
            return open_megatron(folders[0])
        if has_torch_dist(folders[0]):
            return open_torch_dist(folders[0])
        return open_dcp(folders[0], subtree=subtree)
    except OSError as fault:
        raise StorageError(f"cannot read {fault.filename or paths[0]}: {fault.strerror}") from fault
