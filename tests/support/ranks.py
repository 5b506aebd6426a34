"""Write verl rank files of any state dict over any device mesh, with torch's own DTensors.

The local parts are cut by `torch.chunk`, once per mesh dim, in the order in which the training framework
applies them (tensor parallelism first, then FSDP), and the placements are spelled from that order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.sharding import fake_rank

__all__ = ["Cut", "Mesh", "junk", "local_part", "placements_of", "rank_path", "sharded", "write_plain", "write_ranks"]

Indexing = Literal["group", "coordinate"]


@dataclass(frozen=True)
class Mesh:
    """A device mesh: sizes per dim, and the global ranks in row-major order (ascending by default)."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"d{dim}" for dim in range(len(self.sizes)))

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def array(self) -> torch.Tensor:
        return torch.tensor(self.ranks or range(self.world)).reshape(self.sizes)

    def build(self) -> DeviceMesh:
        """The real mesh, within a process group."""
        return DeviceMesh("cpu", self.array, mesh_dim_names=self.names)

    def indices(self, rank: int, by: Indexing) -> tuple[int, ...]:
        """The rank's chunk index along every dim: its coordinate, or its place in each sorted process group."""
        coordinate = tuple(int(i) for i in (self.array == rank).nonzero()[0])
        if by == "coordinate":
            return coordinate
        rows = [self.array[(*coordinate[:d], slice(None), *coordinate[d + 1 :])] for d in range(len(self.sizes))]
        return tuple(sorted(row.tolist()).index(rank) for row in rows)


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut.

    Attributes:
        order: tensor dim -> the mesh dims that cut it, in the order of application.
        on: the mesh dims that the tensor knows of (a submesh), or None for all.
        stored: ``padded`` (a view into a larger storage with a tail of junk, as FSDP2 leaves it),
            ``exact`` or ``transposed`` (strides in reverse order).
    """

    order: Mapping[int, Sequence[int]] = field(default_factory=dict)
    on: tuple[int, ...] | None = None
    stored: Literal["padded", "exact", "transposed"] = "padded"


def rank_path(folder: Path, world: int, rank: int) -> Path:
    """The file of a rank, as verl names it."""
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def junk(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes of a dtype; no two regions look alike."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.view(dtype).reshape(tuple(shape)) if size else torch.empty(tuple(shape), dtype=dtype)


def _chunk(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, tensor.shape[dim], 0)


def local_part(tensor: torch.Tensor, cut: Cut, mesh: Mesh, indices: Sequence[int]) -> torch.Tensor:
    """What the rank at these chunk indices holds of the tensor."""
    for dim, mesh_dims in cut.order.items():
        for mesh_dim in mesh_dims:
            tensor = _chunk(tensor, dim, mesh.sizes[mesh_dim], indices[mesh_dim])
    return tensor


def placements_of(cut: Cut, mesh: Mesh) -> list[Placement]:
    """The placements that spell the order: a dim applied after dims to its right is a strided shard."""
    found: list[Placement] = []
    for mesh_dim in cut.on if cut.on is not None else range(len(mesh.sizes)):
        owner = next((dim for dim, dims in cut.order.items() if mesh_dim in dims), None)
        if owner is None:
            found.append(Replicate())
            continue
        before = list(cut.order[owner])[: list(cut.order[owner]).index(mesh_dim)]
        later = [mesh.sizes[m] for m in before if m > mesh_dim]
        found.append(_StridedShard(owner, split_factor=math.prod(later)) if later else Shard(owner))
    return found


def _store(local: torch.Tensor, stored: str) -> torch.Tensor:
    if stored == "transposed":
        order = tuple(reversed(range(local.dim())))
        return local.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if stored == "exact" or not local.dim():
        return local.clone(memory_format=torch.contiguous_format)
    whole = junk((local.shape[0] + 2, *local.shape[1:]), local.dtype, 987654321)
    whole[: local.shape[0]] = local
    return whole[: local.shape[0]]


def sharded(
    tensor: torch.Tensor, cut: Cut, mesh: Mesh, device_mesh: DeviceMesh, rank: int, by: Indexing = "coordinate"
) -> DTensor:
    """The rank's DTensor, within `fake_rank`."""
    local = local_part(tensor, cut, mesh, mesh.indices(rank, by))
    own = device_mesh if cut.on is None else device_mesh[tuple(mesh.names[d] for d in cut.on)]
    return DTensor.from_local(
        _store(local, cut.stored),
        own,
        placements_of(cut, mesh),
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )


def write_ranks(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    mesh: Mesh,
    cuts: Mapping[str, Cut],
    *,
    by: Indexing = "coordinate",
    ranks: Iterable[int] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write the rank files of a state dict and return the folder.

    Args:
        cuts: name -> how it is cut; tensors without one are saved plain by every rank.
        by: whether chunks follow coordinates or process group ranks.
        ranks: which ranks' files to write; all by default.
        extra: further entries for every file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(mesh.world) if ranks is None else ranks:
        with fake_rank(rank, mesh.world):
            device_mesh = mesh.build()
            state: dict[str, Any] = {
                name: sharded(tensor, cuts[name], mesh, device_mesh, rank, by) if name in cuts else tensor
                for name, tensor in tensors.items()
            }
            torch.save({**state, **(extra or {})}, rank_path(folder, mesh.world, rank))
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": mesh.world}))
    return folder


def write_plain(folder: Path, *states: Any, **save: Any) -> Path:
    """Write one rank file per given object, saved as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, rank_path(folder, len(states), rank), **save)
    return folder
