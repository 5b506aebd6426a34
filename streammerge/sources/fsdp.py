"""FSDP rank files as verl writes them: ``model_world_size_W_rank_R.pt``, one per rank.

Each is ``torch.save(model.state_dict())`` with DTensor (FSDP2, FSDP1 on a device mesh),
ShardedTensor (FSDP1) or plain values. ``fsdp_config.json``, where present, repeats the world size.
accelerate without DCP (1.15) writes the same pickles as ``pytorch_model_fsdp_0_rankR.bin``; the
device meshes tell the world size then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError
from streammerge.sources.dtensor import Ambiguous, RankFile, decode_value
from streammerge.sources.mesh_order import MeshOrder, settle
from streammerge.sources.pieces import Piece, assemble
from streammerge.sources.state_dict import find_state_dict, refuse_flat_parameter
from streammerge.sources.torch_file import open_torch_file
from streammerge.tensors.catalogue import Catalogue, Entry, EqualityCheck, SourceFile

__all__ = ["has_rank_files", "open_fsdp"]

_RANK_FILE = re.compile(r"model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")
_MAX_WORLD = 1 << 20  # ranks; a number in a file's name is not to be counted up to
_ACCELERATE_FILE = re.compile(r"pytorch_model_fsdp(_\d+)?_rank(?P<rank>\d+)\.bin")


def has_rank_files(folder: Path) -> bool:
    """Whether the folder itself holds rank files."""
    return any(_rank_of(path.name) for path in folder.glob("*rank*"))


def _rank_of(name: str) -> tuple[int, int] | None:
    """(world size, rank) that a file's name states, the first 0 when it does not; None for other files."""
    match = _RANK_FILE.fullmatch(name)
    if match:
        return int(match["world"]), int(match["rank"])
    match = _ACCELERATE_FILE.fullmatch(name)
    return (0, int(match["rank"])) if match else None


@dataclass(slots=True)
class _Index:
    """What has been read of the rank files so far."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    ambiguous: list[tuple[str, Ambiguous]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    files: list[SourceFile] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    replicas: dict[int, frozenset[int]] = field(default_factory=dict)
    meshes: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    inert: set[str] = field(default_factory=set)


def open_fsdp(folders: Sequence[Path], *, mesh_order: MeshOrder = "auto", subtree: str | None = None) -> Catalogue:
    """Index the rank files of one checkpoint, possibly spread over several folders.

    Args:
        folders: where the files lie; multi-node runs without a shared disk leave some on each node.
        mesh_order: which rank order to believe on meshes whose rows do not ascend.
        subtree: which dict to take when a file holds several sets of tensors.

    Raises:
        SourceError: files are missing, truncated or contradict each other.
        UnsupportedError: a placement or tensor class that cannot be merged.
        UnsafeError: hostile content.
    """
    world, paths = _rank_paths(folders)
    index = _Index()
    for rank, path in sorted(paths.items()):
        _read_rank(index, rank, path, subtree)
    for key, piece in settle(index.ambiguous, mesh_order):
        index.pieces[key].append(piece)
    world = world or 1 + max(index.ranks | index.names.keys())
    warnings = _missing_ranks(world, index)
    entries: dict[str, Entry] = {}
    checks: list[EqualityCheck] = []
    for key, pieces in index.pieces.items():
        if not pieces:
            raise SourceError(f"{key}: no rank holds a part of it")
        entries[key], more = assemble(key, pieces, index.names)
        checks += more
    if not entries:
        raise SourceError(f"{folders[0]}: the rank files hold no tensors")
    if index.inert:
        warnings.append("left unread (classes unknown to streammerge): " + ", ".join(sorted(index.inert)[:10]))
    return Catalogue(
        format="fsdp",
        root=folders[0],
        files=tuple(index.files),
        entries=entries,
        checks=tuple(checks),
        skipped=index.skipped,
        facts=_facts(folders, world, index),
        warnings=tuple(warnings),
        hf_folder=_hf_folder(folders),
    )


def _rank_paths(folders: Sequence[Path]) -> tuple[int, dict[int, Path]]:
    """World size (0 when the names do not state it) and rank -> file, from the names."""
    paths: dict[int, Path] = {}
    worlds: dict[int, Path] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()):
            stated = _rank_of(path.name)
            if stated is None:
                continue
            world, rank = stated
            worlds.setdefault(world, path)
            if len(worlds) > 1:
                raise SourceError(
                    f"rank files of two world sizes: {' and '.join(str(p) for p in worlds.values())}; "
                    "move the files of the other run away"
                )
            if rank in paths and not path.samefile(paths[rank]):
                raise SourceError(f"rank {rank} occurs twice: {paths[rank]} and {path}")
            if max(world, rank) > _MAX_WORLD:
                raise SourceError(f"{path}: no job has that many ranks")
            if world and rank >= world:
                raise SourceError(f"{path}: rank {rank} of a world of {world}")
            paths[rank] = path
    if not paths:
        raise SourceError(f"{folders[0]}: no model_world_size_*_rank_*.pt files")
    world = next(iter(worlds))
    for folder in folders if world else ():
        _check_config(folder, world)
    return world, paths


def _check_config(folder: Path, world: int) -> None:
    path = folder / "fsdp_config.json"  # absent in older verl
    if not path.exists():
        return
    try:
        stated = json.loads(path.read_text()).get("world_size")
    except (ValueError, AttributeError, RecursionError, OSError) as fault:
        raise SourceError(f"{path}: cannot be read: {fault}") from fault
    if stated is not None and stated != world:
        raise SourceError(f"{path} says world size {stated}, but the rank files say {world}")


def _read_rank(index: _Index, rank: int, path: Path, subtree: str | None) -> None:
    status = path.stat()
    number = len(index.files)
    index.names[rank] = path.name
    with open_torch_file(path) as file:
        index.files.append(SourceFile(path, status.st_size, status.st_mtime_ns, file.digest))
        index.inert |= file.inert - _EXPECTED
        decoding = RankFile(file, number, rank)
        try:
            for key, value in find_state_dict(file.root, str(path), subtree).items():
                _read_value(index, decoding, key, value)
        except RecursionError:
            raise SourceError(f"{path}: the pickle is nested too deeply") from None
        index.meshes.update(mesh.describe() for mesh in decoding.meshes.values())
        index.ranks.update(*(mesh.ranks for mesh in decoding.meshes.values()))
        if decoding.peers is not None:
            index.replicas[rank] = decoding.peers


def _read_value(index: _Index, decoding: RankFile, key: str, value: Any) -> None:
    if key.endswith("_extra_state"):
        index.skipped[key] = "extra state of a module, not a weight"
        return
    refuse_flat_parameter(key, decoding.file.where)
    if value is None or isinstance(value, bool | int | float | str | bytes | dict | list | tuple):
        index.skipped[key] = f"a {type(value).__name__}, not a tensor"
        return
    decoded = decode_value(decoding, key, value)
    pieces = index.pieces.setdefault(key, [])
    if isinstance(decoded, Ambiguous):
        index.ambiguous.append((key, decoded))
    else:
        pieces.extend(decoded)


def _missing_ranks(world: int, index: _Index) -> list[str]:
    """Refuse missing rank files, unless each is a full replica of a file that is there."""
    missing = [rank for rank in range(world) if rank not in index.names]
    covered = frozenset[int]().union(*index.replicas.values())
    needed = [rank for rank in missing if rank not in covered]
    if needed:
        pattern = re.sub(r"rank(_?)\d+", r"rank\g<1>{}", next(iter(index.names.values())))
        shown = ", ".join(pattern.format(rank) for rank in needed[:8])
        raise SourceError(
            f"{len(needed)} of {world} rank files are missing: {shown}{', ...' if len(needed) > 8 else ''}. "
            "If they are on another node's disk, name that folder as well: streammerge NODE0 NODE1 ... DST"
        )
    if missing:
        return [f"{len(missing)} of {world} rank files are absent; the ones present hold full replicas of them"]
    return []


def _hf_folder(folders: Sequence[Path]) -> Path | None:
    """verl's ``huggingface`` folder; accelerate leaves config and tokenizer among the rank files."""
    inner = [folder / "huggingface" for folder in folders if (folder / "huggingface").is_dir()]
    return next(iter(inner + [folder for folder in folders if (folder / "config.json").is_file()]), None)


def _facts(folders: Sequence[Path], world: int, index: _Index) -> Mapping[str, str]:
    facts = {"world size": str(world), "rank files": str(len(index.names))}
    if len(folders) > 1:
        facts["folders"] = ", ".join(map(str, folders))
    facts["device meshes"] = "; ".join(sorted(index.meshes)) or "none (plain or FSDP1 sharded tensors)"
    return facts


# Classes that every DTensor or ShardedTensor file names; they are decoded as records.
_EXPECTED = frozenset(
    f"torch.distributed.{name}"
    for name in (
        "_tensor.placement_types.DTensorSpec", "_tensor.placement_types.Replicate",
        "_tensor.placement_types.Shard", "_tensor.placement_types._Partial",
        "_tensor.placement_types.Partial", "_tensor.placement_types.TensorMeta",
        "_tensor.device_mesh.DeviceMesh", "device_mesh.DeviceMesh", "device_mesh._MeshLayout",
        "_mesh_layout._MeshLayout", "_mesh_layout._FlatLayout",
        "tensor._dtensor_spec.DTensorSpec", "tensor._dtensor_spec.TensorMeta",
        "tensor._dtensor_spec.ShardOrderEntry", "tensor.placement_types.Replicate",
        "tensor.placement_types.Shard", "tensor.placement_types._StridedShard",
        "tensor.placement_types.Partial",
        "_shard.sharded_tensor.shard.Shard", "_shard.metadata.ShardMetadata",
        "_shard.sharded_tensor.metadata.ShardedTensorMetadata",
        "_shard.sharded_tensor.metadata.TensorProperties",
        "_shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "_shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "_shard.sharding_spec.api.EnumerableShardingSpec",
        "_shard.sharded_tensor.api.ShardedTensor.ProcessGroupState",
        "remote_device._remote_device",
    )
) | {"torch.device", "torch.fx.passes.shape_prop.TensorMetadata", "torch.serialization._get_layout"}  # fmt: skip
