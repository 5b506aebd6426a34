"""Settle which rank order cut the tensors on a mesh whose rows do not ascend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from streammerge.errors import SourceError, UnsupportedError
from streammerge.sources.dtensor import Ambiguous
from streammerge.sources.pieces import Piece
from streammerge.tensors.fragment import Index

__all__ = ["MeshOrder", "settle"]

MeshOrder = Literal["auto", "group", "coordinate"]


def settle(found: Sequence[tuple[str, Ambiguous]], mesh_order: MeshOrder) -> Iterator[tuple[str, Piece]]:
    """Choose one order per device mesh.

    A tensor that does not divide evenly settles it: only one order gives every rank the size it
    stores. Tensors that divide evenly fit both, and follow the ones that do not.

    Raises:
        SourceError: the sizes point both ways.
        UnsupportedError: no size settles it, and the user has not chosen.
    """
    fits: dict[Index, dict[str, bool]] = {}
    for _, one in found:
        mesh = fits.setdefault(one.mesh.ranks, {"group": True, "coordinate": True})
        mesh["group"] &= one.by_group is not None
        mesh["coordinate"] &= one.by_coordinate is not None
    for key, one in found:
        order = _choose(key, one, fits[one.mesh.ranks], mesh_order)
        piece = one.by_group if order == "group" else one.by_coordinate
        assert piece is not None
        yield key, piece


def _choose(key: str, one: Ambiguous, fits: dict[str, bool], mesh_order: MeshOrder) -> str:
    possible = [order for order, fit in fits.items() if fit]
    listed = f"device mesh {list(one.mesh.ranks)} of shape {list(one.mesh.sizes)}"
    if not possible:
        raise SourceError(f"{key}: neither rank order fits the sizes stored on the {listed}")
    if mesh_order in possible:
        return mesh_order
    if mesh_order != "auto":
        raise SourceError(f"--mesh-order {mesh_order} contradicts the sizes stored on the {listed}")
    if len(possible) == 2:
        raise UnsupportedError(
            f"{key}: the ranks of the {listed} do not ascend, and all its tensors divide evenly, so the files do not "
            "say in which order they were cut. FSDP2 cuts by process group: if FSDP2 wrote them, use --mesh-order group"
        )
    return possible[0]
