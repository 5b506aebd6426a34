"""How FSDP2 cuts a model over a mesh: meshes, placements and the box of each rank.

Facts: PyTorch `fully_shard` chunks dim 0 as `torch.chunk` does and pads the storage of short shards to the
size of the first one (torch/distributed/fsdp/_fully_shard/_fsdp_param.py); over tensor parallelism it cuts
the TP-local tensor, so TP comes first, and says so with `_StridedShard`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

MeshKind = Literal["fsdp", "hsdp", "fsdp-tp"]
Role = Literal["column", "row", "plain"]

OTHER_DIM = 2
"""Size of the mesh dim beside fsdp: replicas for hsdp, tensor parallel ranks for fsdp-tp."""

_COLUMN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
_ROW = {"o_proj", "down_proj"}


@dataclass(frozen=True)
class MeshShape:
    """The sizes of a mesh in ranks, and what is asked of a rank's place in it."""

    kind: MeshKind
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world size {self.world_size} is below 1")
        if self.kind != "fsdp" and self.world_size % OTHER_DIM:
            raise ValueError(f"a {self.kind} mesh needs a world size divisible by {OTHER_DIM}")

    @property
    def fsdp(self) -> int:
        """Ranks along the fsdp dim."""
        return self.world_size if self.kind == "fsdp" else self.world_size // OTHER_DIM

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh dims by name, outermost first; verl names its dims so."""
        if self.kind == "hsdp":
            return {"ddp": OTHER_DIM, "fsdp": self.fsdp}
        if self.kind == "fsdp-tp":
            return {"fsdp": self.fsdp, "tp": OTHER_DIM}
        return {"fsdp": self.fsdp}

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The (fsdp, tp) coordinates of `rank`; tp is 0 on meshes without tensor parallelism."""
        if self.kind == "fsdp-tp":
            return rank // OTHER_DIM, rank % OTHER_DIM
        return rank % self.fsdp, 0


@dataclass(frozen=True)
class Box:
    """The part of a tensor one rank holds, in elements: rows of dim 0, and columns of dim 1 or None for all.

    `padded_rows` is the number of rows in the rank's storage.
    """

    rows: range
    columns: range | None
    padded_rows: int


def tensor_role(name: str, kind: MeshKind) -> Role:
    """How tensor parallelism cuts parameter `name`: plain everywhere but on a fsdp-tp mesh.

    Fused experts have no `.weight` suffix and stay plain.
    """
    module, _, leaf = name.rpartition(".")
    owner = module.rpartition(".")[2]
    if kind == "fsdp-tp" and owner in _COLUMN:
        return "column"
    if kind == "fsdp-tp" and owner in _ROW and leaf == "weight":
        return "row"
    return "plain"


def chunk(size: int, parts: int, index: int) -> range:
    """Chunk `index` of `torch.chunk` over `size` elements; late chunks are short or empty."""
    step = -(-size // parts)
    return range(min(size, index * step), min(size, (index + 1) * step))


def local_box(shape: tuple[int, ...], role: Role, mesh: MeshShape, rank: int) -> Box:
    """What `rank` holds of a parameter of global `shape`."""
    fsdp, tp = mesh.coordinates(rank)
    outer = chunk(shape[0], OTHER_DIM, tp) if role == "column" else range(shape[0])
    columns = chunk(shape[1], OTHER_DIM, tp) if role == "row" else None
    inner = chunk(len(outer), mesh.fsdp, fsdp)
    first = chunk(len(outer), mesh.fsdp, 0)
    return Box(outer[inner.start : inner.stop], columns, len(first))


@functools.cache
def placements(role: Role, kind: MeshKind) -> tuple[Placement, ...]:
    """The DTensor placements FSDP2 gives a parameter, in mesh dim order."""
    if kind == "hsdp":
        return Replicate(), Shard(0)
    if role == "column":
        return _StridedShard(0, split_factor=OTHER_DIM), Shard(0)
    if role == "row":
        return Shard(0), Shard(1)
    return (Shard(0),)


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of `world_size` in this process alone, through torch's fake process group."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch wraps the hook once per group, which would prefix every traceback line once per rank.
        sys.excepthook = hook


def device_meshes(mesh: MeshShape) -> dict[Role, DeviceMesh]:
    """The mesh for each role, within `fake_rank`; plain ones lie on the fsdp submesh under TP."""
    full = init_device_mesh("cpu", tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
    if mesh.kind != "fsdp-tp":
        return {"plain": full}
    # FSDP2 does not reuse the user's mesh: it joins the two submeshes, and the result points at its root.
    joined = DeviceMesh._concatenate([full["fsdp"], full["tp"]])
    return {"column": joined, "row": joined, "plain": full["fsdp"]}


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape` in elements."""
    return torch.empty(shape, device="meta").stride()
