"""Megatron's ``torch_dist`` and ``zarr`` checkpoints: whole tensors under global names, stored in chunks.

``torch_dist`` is a DCP folder with a ``metadata.json`` that is written last. Beside the model, the training state is
in it too: optimizer, rng and everything else in one key space (Megatron-core 0.8 to 0.20).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError, UnsupportedError
from streammerge.files import io_errors
from streammerge.sources.dcp import index_tensors
from streammerge.sources.dcp_metadata import DcpMetadata, metadata_files, read_metadata
from streammerge.sources.locate import config_beside
from streammerge.sources.megatron_settings import parallel_facts, settings_beside, settings_of
from streammerge.sources.torch_file import open_torch_file, read_torch_archive
from streammerge.sources.zarr_folder import is_zarr_tensor, read_zarr_tensors
from streammerge.tensors.catalogue import Catalogue

__all__ = ["has_torch_dist", "open_torch_dist", "skip_reason"]

_INFO = "metadata.json"
_COMMON = "common.pt"  # everything that is not sharded, until core 0.18
_COMMON_STATE = "common_state/shard_0_1"  # the same, in a list of one, since core 0.19

_SKIPPED = (
    (re.compile(r"^(chained_\d+\.)?optimizer\."), "optimizer state"),
    (re.compile(r"^(rng_state|rerun_state_machine_state)(/|$)"), "state of the training, not a weight"),
    (re.compile(r"^common_state/"), "settings of the training"),
    (re.compile(r"(^|[._])extra_state(/shard_|$)"), "extra state of a module, not a weight"),
)


def skip_reason(key: str) -> str | None:
    """Why a key holds no weight, or None when it does."""
    return next((why for pattern, why in _SKIPPED if pattern.search(key)), None)


def has_torch_dist(folder: Path) -> bool:
    """Whether the folder itself is a ``torch_dist`` or ``zarr`` save, finished or not."""
    if (folder / _INFO).is_file():
        info = _info(folder, strict=False)
        # A file that was cut short, beside the data, is of an interrupted save; one of another tool is no matter.
        if "sharded_backend" in info or (not info and any(folder.glob("*.distcp"))):
            return True
    return (folder / _COMMON).is_file() and (
        any(folder.glob("*.distcp")) or any(is_zarr_tensor(one) for one in folder.iterdir())
    )


def open_torch_dist(folder: Path) -> Catalogue:
    """Index a ``torch_dist`` or ``zarr`` save.

    Raises:
        SourceError: the save is not finished, files are missing or contradict each other, or there
            is no model in it.
        UnsupportedError: a backend or dtype that cannot be read.
        UnsafeError: hostile content.
    """
    if not (folder / _INFO).is_file():
        raise SourceError(
            f"{folder}: no {_INFO}, which is written last; the save was interrupted before it was complete"
        )
    info = _info(folder, strict=True)
    backend = info.get("sharded_backend")
    if backend == "zarr":
        return _open_zarr(folder)
    if backend != "torch_dist":
        raise UnsupportedError(f"{folder / _INFO}: the backend {backend!r} is not supported (torch_dist and zarr are)")
    files = metadata_files(folder)
    if not files:
        raise SourceError(f"{folder}: no .metadata; the save was interrupted before it was complete")
    metadata = read_metadata(files, lambda key: skip_reason(key) is not None)
    model = {".".join(path): tensor for path, tensor in metadata.tensors.items()}
    skipped = _skipped([*metadata.passed_over, *map(".".join, metadata.others)])
    _check_model(folder, model)
    settings = _settings(folder, metadata)
    entries, checks, items = index_tensors(folder, metadata, model)
    skipped |= {".".join(path): "not a tensor" for path in metadata.others if ".".join(path) not in skipped}
    return Catalogue(
        format="torch_dist",
        root=folder,
        files=tuple(items.sources),
        entries=entries,
        checks=tuple(checks),
        skipped=skipped,
        facts=_facts(settings, len(model) + len(metadata.passed_over), len(items.sources)),
        warnings=_warnings(folder),
        hf_folder=config_beside(folder) or _export(folder),
        settings=settings,
        scratch=items.scratch,
    )


def _open_zarr(folder: Path) -> Catalogue:
    keys = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(".zarray"))
    skipped = _skipped(keys)
    model = [key for key in keys if key not in skipped]
    _check_model(folder, model)
    settings = _settings(folder, None)
    entries, files = read_zarr_tensors(folder, model)
    return Catalogue(
        format="zarr",
        root=folder,
        files=files,
        entries=entries,
        skipped=skipped,
        facts=_facts(settings, len(keys), len(files)),
        hf_folder=config_beside(folder),
        settings=settings,
    )


def _info(folder: Path, *, strict: bool) -> dict[str, Any]:
    try:
        content = json.loads((folder / _INFO).read_bytes())
    except (ValueError, RecursionError) as fault:
        if strict:
            raise SourceError(f"{folder / _INFO} cannot be read: {fault}") from fault
        content = None
    return content if isinstance(content, dict) else {}


def _skipped(keys: Iterable[str]) -> dict[str, str]:
    return {key: why for key in keys if (why := skip_reason(key)) is not None}


def _check_model(folder: Path, model: Iterable[str]) -> None:
    if any(True for _ in model):
        return
    message = f"{folder}: holds no model, only optimizer and training state"
    beside = folder.parent / "huggingface"
    if any(beside.glob("*.safetensors")):
        # verl's default since 2025: the model is saved through the bridge, as a Hugging Face folder.
        message += f"; the weights are in {beside} already"
    raise SourceError(message)


def _facts(settings: Mapping[str, object], tensors: int, files: int) -> dict[str, str]:
    return {**parallel_facts(settings), "tensors of all": str(tensors), "data files": str(files)}


def _export(folder: Path) -> Path | None:
    """Megatron-Bridge's own export, beside the files of the save."""
    return folder / "hf" if (folder / "hf" / "config.json").is_file() else None


def _warnings(folder: Path) -> tuple[str, ...]:
    if _export(folder):
        return (f"{folder / 'hf'} is a finished export to Hugging Face by the training framework",)
    return ()


def _settings(folder: Path, metadata: DcpMetadata | None) -> dict[str, object]:
    common = folder / _COMMON
    root: Any = None
    if common.is_file():
        with open_torch_file(common) as file:
            root = file.root
    elif metadata is not None:
        place = metadata.others.get((_COMMON_STATE,))
        if place is not None:
            path = folder / place.file
            with io_errors("read", path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    root = read_torch_archive(fd, f"{_COMMON_STATE} in {path}", place.offset, place.length).root
                finally:
                    os.close(fd)
            root = root[0] if isinstance(root, list) and len(root) == 1 else root
    found = settings_of(root.get("args")) if isinstance(root, dict) else {}
    return found or settings_beside(folder)
