"""DeviceMesh pickles of torch 2.1 to 2.14, as this file's rank sees them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeGuard

from streammerge.errors import SourceError
from streammerge.sources.pickle_reader import Record
from streammerge.sources.torch_values import TensorRef
from streammerge.tensors.fragment import Index

__all__ = ["Mesh", "decode_mesh"]

_MAX_DIMS = 64
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Mesh:
    """A device mesh through the eyes of one rank.

    Attributes:
        names: dim names, or None. Labels that users choose: for messages only.
        sizes: ranks along each dim.
        ranks: global ranks, row-major over ``sizes``.
        coordinate: this rank's own position, or None when it is not part of the mesh.
        root_axes: sizes of the root mesh's dims along which this mesh does not vary.
        root_coordinate: this rank's position on those.
    """

    names: tuple[str, ...] | None
    sizes: Index
    ranks: Index
    coordinate: Index | None
    root_axes: Index = ()
    root_coordinate: Index = ()

    @property
    def rank_set(self) -> frozenset[int]:
        """The ranks, as one object for all meshes of the same ranks."""
        return _rank_set(self.ranks)

    def row(self, dim: int) -> Index:
        """The ranks along one dim, through this rank."""
        assert self.coordinate is not None
        step = math.prod(self.sizes[dim + 1 :])
        first = _flat(self.coordinate, self.sizes) - self.coordinate[dim] * step
        return self.ranks[first : first + self.sizes[dim] * step : step]

    @cached_property
    def group_indices(self) -> Index:
        """This rank's place in each dim's process group; c10d sorts the ranks of a group."""
        assert self.coordinate is not None
        own = self.ranks[_flat(self.coordinate, self.sizes)]
        return tuple(sorted(self.row(dim)).index(own) for dim in range(len(self.sizes)))

    def peers(self, dims: Index) -> frozenset[int]:
        """The ranks that differ from this one on the given dims only, itself included."""
        assert self.coordinate is not None
        spans = [range(n) if d in dims else (self.coordinate[d],) for d, n in enumerate(self.sizes)]
        return frozenset(self.ranks[_flat(at, self.sizes)] for at in itertools.product(*spans))

    def describe(self) -> str:
        """For people: ``fsdp=2 x tp=2``."""
        names = self.names or tuple(f"dim{i}" for i in range(len(self.sizes)))
        return " x ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=False)) or "single rank"


@lru_cache(maxsize=4096)
def _rank_set(ranks: Index) -> frozenset[int]:
    return frozenset(ranks)


def decode_mesh(record: object, rank: int, where: str, read_ints: Callable[[TensorRef], list[int]]) -> Mesh:
    """Decode a pickled DeviceMesh.

    Args:
        record: the inert record.
        rank: the file's own global rank, from its name.
        where: the file, for messages.
        read_ints: reads a small metadata tensor; older files keep the ranks in one.

    Raises:
        SourceError: not a device mesh, or one that contradicts the file's rank.
    """
    if not isinstance(record, Record) or record.type_name != "DeviceMesh":
        raise SourceError(f"{where}: a DTensor has no device mesh")
    state = record.attributes
    own = state.get("_rank")
    if isinstance(own, int) and own != rank:
        raise SourceError(
            f"{where}: the file is named as rank {rank}, but was written by rank {own}; was it renamed or swapped?"
        )
    mesh = (
        _with_layout(state, rank, where, read_ints)
        if "_layout" in state
        else _with_tensor(state, rank, where, read_ints)
    )
    if mesh.coordinate is not None and mesh.ranks[_flat(mesh.coordinate, mesh.sizes)] != rank:
        found = mesh.ranks[_flat(mesh.coordinate, mesh.sizes)]
        raise SourceError(
            f"{where}: the file is named as rank {rank}, but its device mesh puts it at rank {found}; "
            "was it renamed or swapped?"
        )
    return mesh


def _with_tensor(state: dict[str, Any], rank: int, where: str, read_ints: Callable[[TensorRef], list[int]]) -> Mesh:
    """torch <= 2.9: a tensor gives the shape, and usually ``_flatten_mesh_list`` the ranks."""
    tensor = state.get("mesh")
    if not isinstance(tensor, TensorRef):
        raise SourceError(f"{where}: a device mesh without its ranks")
    ranks = state.get("_flatten_mesh_list")  # absent in torch 2.1
    ranks = read_ints(tensor) if ranks is None else ranks
    if not _all_ints(ranks) or len(ranks) != math.prod(tensor.size):
        raise SourceError(f"{where}: a device mesh of shape {list(tensor.size)} with a wrong list of ranks")
    coordinate = _coordinate(state.get("_coordinate_on_dim"), tensor.size, where)
    if coordinate is None and rank in ranks:
        coordinate = _unflat(tuple(ranks).index(rank), tensor.size)
    return Mesh(_names(state.get("mesh_dim_names")), tensor.size, tuple(ranks), coordinate)


def _with_layout(state: dict[str, Any], rank: int, where: str, read_ints: Callable[[TensorRef], list[int]]) -> Mesh:
    """torch >= 2.10: a layout over the root's rank map.

    A submesh keeps the root's whole map and its layout does not say which slice this file belongs
    to; the file's own rank and coordinate do.
    """
    rank_map = state.get("_flatten_rank_map")
    if rank_map is None and isinstance(state.get("_rank_map"), TensorRef):
        rank_map = read_ints(state["_rank_map"])
    if not _all_ints(rank_map):
        raise SourceError(f"{where}: a device mesh without its rank map")
    rank_map = tuple(rank_map)
    axes = _axes(state["_layout"], where)
    sizes = tuple(len(axis) for axis in axes)
    if math.prod(sizes) > len(rank_map):
        raise SourceError(f"{where}: a device mesh of {list(sizes)} over {len(rank_map)} ranks")
    names = _names(state.get("_mesh_dim_names"))
    coordinate = _coordinate(state.get("_coordinate_on_dim"), sizes, where)
    if coordinate is None or rank not in rank_map:
        return Mesh(names, sizes, (), None)
    base = rank_map.index(rank) - sum(axis[at] for axis, at in zip(axes, coordinate, strict=True))
    places = [base + sum(offsets) for offsets in itertools.product(*axes)]
    if min(places) < 0 or max(places) >= len(rank_map):
        raise SourceError(f"{where}: a device mesh whose layout leaves its rank map")
    ranks = tuple(rank_map[place] for place in places)
    root_axes, root_coordinate = _missing_axes(state.get("_root_mesh"), rank, where, read_ints, _rank_set(ranks))
    return Mesh(names, sizes, ranks, coordinate, root_axes, root_coordinate)


def _missing_axes(
    root: object, rank: int, where: str, read_ints: Callable[[TensorRef], list[int]], ranks: frozenset[int]
) -> tuple[Index, Index]:
    """Sizes of the root mesh's dims that the submesh of ``ranks`` lacks, and this rank's position."""
    if not isinstance(root, Record):
        return (), ()
    mesh = decode_mesh(root, rank, where, read_ints)
    if mesh.coordinate is None:
        return (), ()
    dims = [d for d, n in enumerate(mesh.sizes) if n > 1 and len(ranks.intersection(mesh.row(d))) == 1]
    return tuple(mesh.sizes[d] for d in dims), tuple(mesh.coordinate[d] for d in dims)


def _axes(layout: object, where: str) -> list[list[int]]:
    """Offsets into the rank map along each mesh dim; a flattened dim may have several strides."""
    if not isinstance(layout, Record):
        raise SourceError(f"{where}: a device mesh without a layout")
    state = layout.attributes
    if "axes" in state:  # torch >= 2.13: one _FlatLayout per dim, () for a dim of one rank
        axes = state["axes"] if isinstance(state["axes"], tuple | list) else ()
        parts = [part.attributes if isinstance(part, Record) else {} for part in axes]
        pairs = [(part.get("shape"), part.get("stride")) for part in parts]
    else:  # torch 2.10 to 2.12: ints or nested tuples
        shape, stride = state.get("shape"), state.get("stride")
        if isinstance(shape, int):
            shape, stride = (shape,), (stride,)
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
            raise SourceError(f"{where}: a device mesh with a malformed layout")
        pairs = list(zip(shape, stride, strict=True))
    return [_offsets(_flattened(s), _flattened(t), where) for s, t in pairs]


def _flattened(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    if not isinstance(value, tuple):
        return [-1]
    found: list[int] = []
    todo: list[object] = [value]
    while todo and len(found) <= _MAX_DIMS:
        part = todo.pop()
        if isinstance(part, tuple) and len(part) <= _MAX_DIMS:
            todo.extend(reversed(part))
        else:
            found.append(part if isinstance(part, int) else -1)
    return found if not todo else [-1]


def _offsets(shape: list[int], stride: list[int], where: str) -> list[int]:
    if len(shape) != len(stride) or min((*shape, *stride), default=0) < 0 or math.prod(shape) > _MAX_RANKS:
        raise SourceError(f"{where}: a device mesh with a malformed layout")
    return [
        sum(i * step for i, step in zip(at, stride, strict=True))
        for at in itertools.product(*(range(n) for n in shape))
    ]


def _coordinate(value: object, sizes: Index, where: str) -> Index | None:
    if value is None:
        return None
    if _all_ints(value) and len(value) == len(sizes) and all(0 <= i < n for i, n in zip(value, sizes, strict=True)):
        return tuple(value)
    raise SourceError(f"{where}: a device mesh with an impossible coordinate")


def _names(value: object) -> tuple[str, ...] | None:
    if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
        return value
    return None


def _all_ints(value: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(value, list | tuple) and all(isinstance(number, int) for number in value)


def _flat(at: Index, sizes: Index) -> int:
    flat = 0
    for index, size in zip(at, sizes, strict=True):
        flat = flat * size + index
    return flat


def _unflat(flat: int, sizes: Index) -> Index:
    at = []
    for size in reversed(sizes):
        flat, index = divmod(flat, size)
        at.append(index)
    return tuple(reversed(at))
