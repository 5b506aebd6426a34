"""Pieces: what single rank files hold of a tensor, and how they are put together.

A source decodes each file into pieces; ``assemble`` groups those of one key, takes one replica and
checks that it tiles the tensor exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from streammerge.dtypes import DType
from streammerge.errors import SourceError
from streammerge.tensors.catalogue import Claim, Entry, EqualityCheck
from streammerge.tensors.fragment import Box, Fragment, Index
from streammerge.tensors.tiling import tiling_fault
from streammerge.tensors.virtual import Stored

__all__ = ["Piece", "assemble"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one tensor.

    Attributes:
        rank: the rank whose file holds it.
        dtype: element type.
        shape: global shape, in elements.
        fragment: where the part lies, placed in the global tensor.
        ranks: the ranks that share the tensor between them; empty for a plain tensor, of which
            every rank holds a whole copy.
        replica: the rank's coordinate on the replicated dims of the mesh.
        root_axes, root_coordinate: see ``Mesh``.
    """

    rank: int
    dtype: DType
    shape: Index
    fragment: Fragment
    ranks: frozenset[int]
    replica: Index = ()
    root_axes: Index = ()
    root_coordinate: Index = ()


def assemble(key: str, pieces: Sequence[Piece], names: Mapping[int, str]) -> tuple[Entry, list[EqualityCheck]]:
    """Put the pieces of one key together.

    Args:
        key: the state dict key, for messages.
        pieces: from all files that have the key.
        names: rank -> file name, for messages.

    Raises:
        SourceError: the files contradict each other, or do not tile the tensor.
    """
    first = pieces[0]
    for piece in pieces:
        if (piece.shape, piece.dtype, bool(piece.ranks)) != (first.shape, first.dtype, bool(first.ranks)):
            raise SourceError(
                f"{key}: {_described(first)} in {names[first.rank]}, but {_described(piece)} in {names[piece.rank]}"
            )
    if not first.ranks:
        return _plain(key, pieces, names)
    groups: dict[frozenset[int], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.ranks, []).append(piece)
    ordered = sorted(groups.values(), key=lambda group: (group[0].root_coordinate, group[0].rank))
    claims: list[Claim] = []
    tensors: list[Stored] = []
    checks: list[EqualityCheck] = []
    for number, group in enumerate(ordered):
        axes, coordinate = group[0].root_axes, group[0].root_coordinate
        if not axes:  # torch < 2.10 has no root mesh: the order of the groups is all there is
            axes, coordinate = (len(ordered),), (number,)
        tensor, duplicates = _tiled(key, group, names)
        tensors.append(tensor)
        claims.append(Claim(tensor, coordinate, axes))
        checks += duplicates
    return Entry(tensors[0], tuple(claims) if len(claims) > 1 else ()), checks


def _described(piece: Piece) -> str:
    kind = "sharded" if piece.ranks else "plain"
    return f"{kind} {piece.dtype} {list(piece.shape)}"


def _plain(key: str, pieces: Sequence[Piece], names: Mapping[int, str]) -> tuple[Entry, list[EqualityCheck]]:
    """Plain tensors are replicated: take the lowest rank's copy, and have the others compared."""
    copies = [Stored(piece.dtype, piece.shape, (piece.fragment,)) for piece in pieces]
    checks = [
        EqualityCheck(
            key,
            copies[0],
            copy,
            f"{names[pieces[0].rank]} and {names[piece.rank]} hold different copies of this unsharded tensor",
            tolerated=True,
        )
        for piece, copy in zip(pieces[1:], copies[1:], strict=True)
    ]
    return Entry(copies[0]), checks


def _tiled(key: str, group: Sequence[Piece], names: Mapping[int, str]) -> tuple[Stored, list[EqualityCheck]]:
    """One replica of the group's tensor, and the duplicates that no placement explains."""
    chosen: dict[tuple[Index, Index], Piece] = {}
    checks = []
    for piece in sorted(group, key=lambda piece: (piece.replica, piece.rank)):
        place = (piece.fragment.start, piece.fragment.shape)
        other = chosen.setdefault(place, piece)
        if piece.fragment.numel and other is not piece and other.replica == piece.replica:
            reason = f"{names[other.rank]} and {names[piece.rank]} claim the same part of the tensor"
            checks.append(EqualityCheck(key, _alone(other), _alone(piece), reason, tolerated=False))
    fragments = [piece.fragment for piece in chosen.values() if piece.fragment.numel]
    fault = tiling_fault(group[0].shape, [Box(f.start, f.shape) for f in fragments])
    if fault is not None:
        raise SourceError(f"{key}: {fault}{_absent(group, names)}")
    return Stored(group[0].dtype, group[0].shape, tuple(fragments)), checks


def _alone(piece: Piece) -> Stored:
    """The piece as a tensor of its own."""
    part = replace(piece.fragment, start=(0,) * len(piece.shape))
    return Stored(piece.dtype, part.shape, (part,))


def _absent(group: Sequence[Piece], names: Mapping[int, str]) -> str:
    missing = sorted(group[0].ranks.difference(piece.rank for piece in group))
    if missing:
        return f"; the parts of {_ranks(missing)} are missing: copy their files beside the others"
    return f" (files {names[group[0].rank]} and others)"


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"
