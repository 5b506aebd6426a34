"""DTensor and ShardedTensor values of a state dict, decoded into pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streammerge.errors import SourceError, UnsupportedError
from streammerge.sources.device_mesh import Mesh, decode_mesh
from streammerge.sources.pickle_reader import Record
from streammerge.sources.pieces import Piece
from streammerge.sources.sharding import Placement, Replicate, Shard, StridedShard, local_box, shard_order
from streammerge.sources.torch_file import TorchFile
from streammerge.sources.torch_values import TensorRef, TypedRef, UnreadableRef, WrapperRef
from streammerge.tensors.fragment import Box, Fragment, Index

__all__ = ["Ambiguous", "RankFile", "decode_value"]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A piece on a mesh whose rows do not ascend.

    c10d sorts the ranks of a process group and FSDP2 cuts by group rank, while other paths cut by
    mesh coordinate (torch 2.13); the file does not say which was used.

    Attributes:
        piece: as it is when cut by group rank (``by_coordinate`` otherwise), or None where the
            stored size rules that out.
    """

    by_group: Piece | None
    by_coordinate: Piece | None
    mesh: Mesh


@dataclass(slots=True)
class RankFile:
    """A rank file being decoded: the open file, its rank, and the meshes met so far."""

    file: TorchFile
    index: int
    rank: int
    meshes: dict[int, Mesh] = field(default_factory=dict)
    peers: frozenset[int] | None = None
    noted: set[tuple[int, Index]] = field(default_factory=set)

    def mesh(self, record: object) -> Mesh:
        """Decode a mesh once; many tensors share it."""
        found = self.meshes.get(id(record))
        if found is None:
            found = decode_mesh(record, self.rank, self.file.where, self.file.read_ints)
            self.meshes[id(record)] = found
        return found

    def note_replicas(self, mesh: Mesh | None, replicated: Index) -> None:
        """Narrow the ranks whose files hold the same as this one, for every sharded tensor.

        Args:
            mesh: of a tensor, or None when the tensor has no replicas.
            replicated: the mesh dims along which it is replicated.
        """
        if (id(mesh), replicated) in self.noted:
            return
        self.noted.add((id(mesh), replicated))
        peers = mesh.peers(replicated) if mesh else frozenset((self.rank,))
        self.peers = peers if self.peers is None else self.peers & peers


def decode_value(file: RankFile, key: str, value: object) -> list[Piece] | Ambiguous:
    """Decode one value of a state dict; several pieces only for a ShardedTensor.

    Raises:
        SourceError: sizes contradict the placements.
        UnsupportedError: a value that is no tensor we can read, named with the reason.
    """
    if isinstance(value, TensorRef):
        return _plain(file, value)
    where = f"{key} in {file.file.where}"
    if isinstance(value, UnreadableRef):
        raise UnsupportedError(f"{where}: {value.why}")
    if isinstance(value, TypedRef):
        decoder = _DECODERS.get(value.type.name)
        if decoder is not None and value.type.module.startswith("torch."):
            return decoder(file, where, value)
        raise UnsupportedError(f"{where}: tensors of class {value.type} are not supported")
    named = value.callee if isinstance(value, Record) else type(value).__name__
    raise UnsupportedError(f"{where}: a {named} stands where a tensor is expected")


def _plain(file: RankFile, value: TensorRef) -> list[Piece]:
    fragment = file.file.fragment(value, file.index, (0,) * len(value.size))
    return [Piece(file.rank, value.dtype, value.size, fragment, frozenset())]


def _plain_subclass(file: RankFile, where: str, value: TypedRef) -> list[Piece] | Ambiguous:
    if not isinstance(value.inner, TensorRef):
        raise UnsupportedError(f"{where}: a {value.type} over something that is no plain tensor")
    return _plain(file, value.inner)


def _dtensor(file: RankFile, where: str, value: TypedRef) -> list[Piece] | Ambiguous:
    state = _state(value.state)
    spec, local = state.get("_spec"), _local(state.get("_local_tensor"))
    if not isinstance(spec, Record) or not isinstance(value.inner, WrapperRef):
        raise SourceError(f"{where}: a DTensor without its spec")
    if isinstance(local, UnreadableRef):
        raise UnsupportedError(f"{where}: {local.why}")
    attributes = spec.attributes
    mesh = file.mesh(attributes.get("mesh"))
    # torch gives ranks outside of the mesh an empty tensor of one dim.
    if not isinstance(local, TensorRef) or (mesh.coordinate and len(local.size) != len(value.inner.size)):
        raise SourceError(f"{where}: a DTensor without its local tensor")
    shape = value.inner.size
    placements = _placements(attributes.get("placements"), len(shape), where)
    if mesh.coordinate is None:
        if 0 not in local.size:
            raise SourceError(f"{where}: rank {file.rank} is not in the device mesh, but holds {list(local.size)}")
        return []
    if len(placements) != len(mesh.sizes):
        raise SourceError(f"{where}: {len(placements)} placements on a {len(mesh.sizes)}-dim device mesh")
    replicated = tuple(d for d, placement in enumerate(placements) if isinstance(placement, Replicate))
    file.note_replicas(mesh, replicated)
    order = _order(attributes.get("shard_order"), placements, mesh, where)
    draft = _Draft(file, where, local, shape, mesh, tuple(mesh.coordinate[d] for d in replicated))
    cut = [d for dims in order.values() for d in dims]
    group = mesh.group_indices
    boxes = {at: local_box(shape, order, mesh.sizes, at) for at in (group, mesh.coordinate)}
    if all(group[d] == mesh.coordinate[d] for d in cut):
        return [draft.place(boxes[group])]
    fitting = {at: box for at, box in boxes.items() if box.shape == local.size}
    if not fitting:
        return [draft.place(boxes[group])]
    return Ambiguous(
        draft.place(fitting[group]) if group in fitting else None,
        draft.place(fitting[mesh.coordinate]) if mesh.coordinate in fitting else None,
        mesh,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A DTensor's local part before its place in the global tensor is known."""

    file: RankFile
    where: str
    local: TensorRef
    shape: Index
    mesh: Mesh
    replica: Index

    def place(self, box: Box) -> Piece:
        """The piece at ``box``; its size must be what the file stores."""
        if box.shape != self.local.size:
            raise SourceError(
                f"{self.where}: the placements give rank {self.file.rank} a part of {list(box.shape)}, "
                f"but it stores {list(self.local.size)}"
            )
        return Piece(
            self.file.rank,
            self.local.dtype,
            self.shape,
            self.file.file.fragment(self.local, self.file.index, box.start),
            self.mesh.rank_set,
            self.replica,
            self.mesh.root_axes,
            self.mesh.root_coordinate,
        )


def _state(state: object) -> dict[str, Any]:
    """A subclass's state: a dict, or the (dict, slots) pair; a Parameter over a DTensor has both."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


def _local(value: object) -> object:
    """The local tensor, out of an nn.Parameter or AsyncCollectiveTensor shell if there is one."""
    return value.inner if isinstance(value, TypedRef) and isinstance(value.inner, TensorRef) else value


def _placements(value: object, num_dims: int, where: str) -> list[Placement]:
    if not isinstance(value, tuple | list):
        raise SourceError(f"{where}: a DTensor without placements")
    return [_placement(one, num_dims, where) for one in value]


def _placement(value: object, num_dims: int, where: str) -> Placement:
    name = value.type_name if isinstance(value, Record) else type(value).__name__
    state = value.attributes if isinstance(value, Record) else {}
    if name == "Replicate":
        return Replicate()
    if name not in ("Shard", "_StridedShard"):
        raise UnsupportedError(
            f"{where}: placement {name} cannot be merged"
            + (": its values are unreduced partial sums, not the tensor" if "Partial" in name else "")
        )
    dim, factor = state.get("dim"), state.get("split_factor", 1)
    if not isinstance(dim, int) or not isinstance(factor, int) or not -num_dims <= dim < num_dims or factor < 1:
        shown = dim if isinstance(dim, int) else type(dim).__name__
        raise SourceError(f"{where}: placement {name} with dim={shown} of a {num_dims}-dim tensor")
    dim %= num_dims
    return Shard(dim) if name == "Shard" else StridedShard(dim, factor)


def _order(value: object, placements: list[Placement], mesh: Mesh, where: str) -> Mapping[int, list[int]]:
    """The order in which mesh dims cut each tensor dim; ``shard_order`` (torch >= 2.10) overrides."""
    decoded = shard_order(placements, mesh.sizes)
    if not value or any(isinstance(placement, StridedShard) for placement in placements):
        return decoded
    stated: dict[int, list[int]] = {}
    for entry in value if isinstance(value, tuple | list) else ():
        # ShardOrderEntry is a NamedTuple: its fields arrive as arguments.
        fields = entry.args if isinstance(entry, Record) else entry
        if not isinstance(fields, tuple) or len(fields) != 2 or not isinstance(fields[0], int) or not _dims(fields[1]):
            raise SourceError(f"{where}: a malformed shard_order")
        stated[fields[0]] = list(fields[1])
    if {d: sorted(dims) for d, dims in stated.items()} != {d: sorted(dims) for d, dims in decoded.items()}:
        raise SourceError(f"{where}: shard_order {stated} contradicts the placements")
    return stated


def _dims(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(dim, int) for dim in value)


def _sharded_tensor(file: RankFile, where: str, value: TypedRef) -> list[Piece] | Ambiguous:
    """FSDP1's ShardedTensor: a 5-tuple state, every shard with explicit offsets (torch 2.1 to 2.14)."""
    state = value.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(value.inner, WrapperRef):
        raise SourceError(f"{where}: a malformed ShardedTensor")
    shards, metadata = state[0], state[1]
    described = metadata.attributes.get("shards_metadata") if isinstance(metadata, Record) else None
    if not isinstance(shards, list) or not isinstance(described, list):
        raise SourceError(f"{where}: a malformed ShardedTensor")
    # Every file describes the whole tiling, so all agree on this stand-in for the process group.
    group = frozenset(range(len(described)))
    pieces = []
    for shard in shards:
        tensor, place = _shard_parts(shard, where)
        if place.shape != tensor.size:
            raise SourceError(f"{where}: a shard of {list(tensor.size)} where {list(place.shape)} is described")
        fragment: Fragment = file.file.fragment(tensor, file.index, place.start)
        pieces.append(Piece(file.rank, tensor.dtype, value.inner.size, fragment, group))
    if pieces:
        file.note_replicas(None, ())
    return pieces


def _shard_parts(shard: object, where: str) -> tuple[TensorRef, Box]:
    state = shard.attributes if isinstance(shard, Record) else {}
    tensor, metadata = _local(state.get("tensor")), state.get("metadata")
    place = metadata.attributes if isinstance(metadata, Record) else {}
    start, sizes = place.get("shard_offsets"), place.get("shard_sizes")
    if (
        not isinstance(tensor, TensorRef)
        or not isinstance(start, list | tuple)
        or not isinstance(sizes, list | tuple)
        or not all(isinstance(n, int) and n >= 0 for n in (*start, *sizes))
        or len(start) != len(sizes)
    ):
        raise SourceError(f"{where}: a malformed shard")
    return tensor, Box(tuple(start), tuple(sizes))


_Decoder = Callable[[RankFile, str, TypedRef], "list[Piece] | Ambiguous"]
_DECODERS: dict[str, _Decoder] = {
    "DTensor": _dtensor,
    "ShardedTensor": _sharded_tensor,
    "Parameter": _plain_subclass,
    "Buffer": _plain_subclass,
}
