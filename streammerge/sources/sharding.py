"""The arithmetic of DTensor placements: which box of the global tensor a rank holds.

Pure functions over sizes and indices; checked against torch in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streammerge.errors import UnsupportedError
from streammerge.tensors.fragment import Box, Index

__all__ = ["Placement", "Replicate", "Shard", "StridedShard", "chunk", "local_box", "shard_order"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the mesh dim holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor dim is cut over the mesh dim."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """As ``Shard``, but applied after mesh dims to its right that cut the same tensor dim into
    ``split_factor`` parts (FSDP2 over tensor parallelism)."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk ``index``, as ``torch.chunk`` over ranks: late ones may be short or empty."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def shard_order(placements: Sequence[Placement], mesh_sizes: Index) -> dict[int, list[int]]:
    """For each cut tensor dim, the mesh dims that cut it, in the order of application.

    Read right to left: a ``Shard`` was applied before everything read so far, a ``StridedShard``
    after the first mesh dims whose sizes multiply to its split factor. This is how FSDP2 and tensor
    parallelism make the bytes (torch 2.5 to 2.14); DTensor's own replay of ``_StridedShard``
    disagrees for uneven sizes, and with it the stored local shapes.

    Raises:
        UnsupportedError: a split factor that no mesh dims account for.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        dims = order.setdefault(placement.dim, [])
        at = 0
        if isinstance(placement, StridedShard):
            product = 1
            while product < placement.split_factor and at < len(dims):
                product *= mesh_sizes[dims[at]]
                at += 1
            if product != placement.split_factor:
                raise UnsupportedError(
                    f"_StridedShard(dim={placement.dim}, split_factor={placement.split_factor}) does not fit "
                    f"a device mesh of {list(mesh_sizes)}"
                )
        dims.insert(at, mesh_dim)
    return order


def local_box(shape: Index, order: Mapping[int, Sequence[int]], mesh_sizes: Index, indices: Sequence[int]) -> Box:
    """The box of a tensor of ``shape`` that the rank at ``indices`` of the mesh holds."""
    start, sizes = [0] * len(shape), list(shape)
    for dim, mesh_dims in order.items():
        for mesh_dim in mesh_dims:
            shift, sizes[dim] = chunk(sizes[dim], mesh_sizes[mesh_dim], indices[mesh_dim])
            start[dim] += shift
    return Box(tuple(start), tuple(sizes))
