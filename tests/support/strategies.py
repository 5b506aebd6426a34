"""Hypothesis strategies: meshes, cuts as FSDP, HSDP and tensor parallelism make them, and whole checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.support.ranks import Cut, Mesh, junk

__all__ = ["DTYPES", "Checkpoint", "checkpoints", "cuts", "mesh_sizes"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """A state dict and how it is spread over a mesh; tensors without a cut are plain."""

    mesh: Mesh
    tensors: dict[str, torch.Tensor]
    cuts: dict[str, Cut]


def mesh_sizes(max_dims: int = 3, max_world: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of meshes with 1 to `max_dims` dims."""
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=max_dims).map(tuple)
    return sizes.filter(lambda s: Mesh(s).world <= max_world)


@st.composite
def cuts(draw: st.DrawFn, num_dims: int, mesh: Mesh) -> Cut:
    """Every mesh dim replicates or cuts some tensor dim; those that cut the same one do so in any order."""
    known = None
    if len(mesh.sizes) > 1 and draw(st.integers(0, 3)) == 0:
        known = (draw(st.integers(0, len(mesh.sizes) - 1)),)
    order: dict[int, list[int]] = {}
    for mesh_dim in draw(st.permutations(known or range(len(mesh.sizes)))):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            order.setdefault(dim, []).append(mesh_dim)
    return Cut(order, known, draw(st.sampled_from(["padded", "exact", "transposed"])))


@st.composite
def _transposed(draw: st.DrawFn, sizes: tuple[int, ...]) -> Mesh:
    """A mesh whose ranks count up along its dims in any order, so that every row ascends."""
    dims = draw(st.permutations(range(len(sizes))))
    counted = torch.arange(Mesh(sizes).world).reshape([sizes[d] for d in dims])
    ranks = counted.permute([dims.index(d) for d in range(len(sizes))])
    return Mesh(sizes, tuple(ranks.flatten().tolist()))


@st.composite
def checkpoints(draw: st.DrawFn, *, max_world: int = 12) -> Checkpoint:
    """A few tensors of any shape: scalars, single elements, sizes that leave ranks empty."""
    mesh = draw(_transposed(draw(mesh_sizes(max_world=max_world))))
    tensors, found = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7, 8, 13]), max_size=3))
        name = f"layers.{number}.weight"
        tensors[name] = junk(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))
        if draw(st.integers(0, 5)):
            found[name] = draw(cuts(len(shape), mesh))
    return Checkpoint(mesh, tensors, found)
