"""Put the tensor parallel parts of a parameter together, as far as files do not say how they are cut.

Megatron's rank files hold plain tensors. The whole shape, which the config gives, tells a replicated
parameter from one that is cut, and along which dim (Megatron-core 0.8 to 0.20 cuts evenly, always).
"""

from __future__ import annotations

from collections.abc import Sequence

from streammerge.errors import SourceError
from streammerge.tensors.catalogue import Claim, EqualityCheck
from streammerge.tensors.fragment import Index
from streammerge.tensors.virtual import Tensor, concat, narrow

__all__ = ["join_ranks"]


def join_ranks(
    name: str, claims: Sequence[Claim], shape: Index, sections: Sequence[int], *, expert: bool, wanted: str
) -> tuple[Tensor, list[EqualityCheck]]:
    """The whole tensor of ``shape`` that the files' parts make up.

    Args:
        name: the parameter, for messages.
        claims: what each file holds, with its (tensor, expert) parallel rank as coordinate.
        shape: of the whole tensor, in elements.
        sections: rows of the parts of dim 0 that each rank has its piece of (gate and up); empty when
            dim 0 is of one kind.
        expert: whether expert tensor parallelism applies, which may be smaller than the dense one.
        wanted: what makes ``shape`` what it is, for messages.

    Returns:
        The tensor, and the copies that must hold equal bytes.

    Raises:
        SourceError: sizes do not fit, or ranks are missing.
    """
    first = claims[0]
    for claim in claims[1:]:
        if (claim.tensor.shape, claim.tensor.dtype) != (first.tensor.shape, first.tensor.dtype):
            raise SourceError(
                f"{name} is {first.tensor.dtype} {list(first.tensor.shape)} on {_rank(first)}, but "
                f"{claim.tensor.dtype} {list(claim.tensor.shape)} on {_rank(claim)}"
            )
    ranks = first.axes[0] if first.axes else 1
    dim, parts = _cut_along(name, first.tensor.shape, shape, ranks, expert, wanted)
    chosen: dict[int, Claim] = {}
    checks = []
    for claim in sorted(claims, key=lambda claim: claim.coordinate):
        # Expert tensor parallel ranks count round within the tensor parallel ones.
        part = claim.coordinate[0] % parts if claim.coordinate else 0
        other = chosen.setdefault(part, claim)
        if other is not claim and other.coordinate[1:] == claim.coordinate[1:]:
            checks.append(_copies(name, other, claim, wanted))
    missing = [part for part in range(parts) if part not in chosen]
    if missing:
        raise SourceError(f"{name}: the files of tensor parallel ranks {missing} (of {parts}) are missing")
    if dim == 0 and any(rows % parts for rows in sections):
        raise SourceError(f"{name}: {' + '.join(map(str, sections))} rows do not divide over {parts} ranks")
    return _joined([chosen[part].tensor for part in range(parts)], dim, sections), checks


def _cut_along(name: str, local: Index, shape: Index, ranks: int, expert: bool, wanted: str) -> tuple[int, int]:
    """The dim that the ranks' parts are joined along, and how many parts there are."""
    if local == shape:
        return 0, 1
    differing = [dim for dim in range(len(shape)) if len(local) == len(shape) and local[dim] != shape[dim]]
    if len(differing) == 1 and local[differing[0]] and shape[differing[0]] % local[differing[0]] == 0:
        parts = shape[differing[0]] // local[differing[0]]
        if parts == ranks or (expert and ranks % parts == 0):
            return differing[0], parts
    held = f"on each of {ranks} tensor parallel ranks " if ranks > 1 else ""
    raise SourceError(
        f"{name} has shape {list(local)} {held}where {list(shape)} in all is expected ({wanted}); "
        "is the config of the same model?"
    )


def _joined(parts: Sequence[Tensor], dim: int, sections: Sequence[int]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if dim != 0 or len(sections) < 2:
        return concat(parts, dim)
    pieces = []
    at = 0
    for size in (rows // len(parts) for rows in sections):
        pieces += [narrow(part, 0, at, size) for part in parts]
        at += size
    return concat(pieces, 0)


def _copies(name: str, first: Claim, second: Claim, wanted: str) -> EqualityCheck:
    reason = f"{_rank(first)} and {_rank(second)} hold different copies of this replicated parameter"
    # A norm may have drifted. Matrices are hardly ever replicated: more likely half of one is taken for the whole.
    drifted = len(first.tensor.shape) < 2
    if not drifted:
        reason = f"{_rank(first)} and {_rank(second)} must hold the same by the config ({wanted})"
    return EqualityCheck(name, first.tensor, second.tensor, reason, tolerated=drifted)


def _rank(claim: Claim) -> str:
    if not claim.coordinate:
        return "one rank"
    tensor, *rest = claim.coordinate
    return f"tensor parallel rank {tensor}" + (
        f" (expert parallel rank {rest[0]})" if rest and claim.axes[1] > 1 else ""
    )
