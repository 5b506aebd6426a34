"""Expert parallelism that left no trace in the placements.

VeOmni (and verl's veomni engine) cuts expert stacks over the expert parallel ranks before FSDP sees
them: the DTensor then claims to be the whole stack, and files of different expert ranks claim the
same region with different bytes. The config's expert count tells, and the root device mesh says
which slice each file holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from streammerge.errors import SourceError, UnsupportedError
from streammerge.tensors.catalogue import Claim, Entry, EqualityCheck
from streammerge.tensors.virtual import Tensor, concat

__all__ = ["resolve_claims"]

# A stack of all experts, as against a single numbered expert or shared experts.
_STACK = re.compile(r"(^|\.)experts\.(?!\d+\.)[a-z_]+$")


def resolve_claims(name: str, entry: Entry, experts: int | None) -> tuple[Tensor, list[EqualityCheck]]:
    """The tensor behind an entry, and which of its claims must hold equal bytes.

    Args:
        name: the parameter.
        entry: from the catalogue.
        experts: number of routed experts in the config, or None.

    Raises:
        SourceError: expert slices are missing.
        UnsupportedError: a stack with too few experts whose files do not say which they are.
    """
    if experts is None or not _STACK.search(name) or len(entry.tensor.shape) < 2 or entry.tensor.shape[0] == experts:
        return entry.tensor, _copies(name, entry.claims)
    held = entry.tensor.shape[0]
    if held == 0 or experts % held or not entry.claims:
        raise UnsupportedError(
            f"{name} holds {held} experts, but the config has {experts}, and the files do not say where the others are"
        )
    return _join(name, entry.claims, experts // held)


def _copies(name: str, claims: Sequence[Claim]) -> list[EqualityCheck]:
    reason = (
        "the files of different ranks claim the same region without a Replicate placement, so they must hold equal "
        "bytes (expert parallelism that the placements do not mention looks like this)"
    )
    return [EqualityCheck(name, claims[0].tensor, claim.tensor, reason, tolerated=False) for claim in claims[1:]]


def _join(name: str, claims: Sequence[Claim], ranks: int) -> tuple[Tensor, list[EqualityCheck]]:
    """Join the slices of ``ranks`` expert parallel ranks along the expert dim."""
    axes = [axis for axis, size in enumerate(claims[0].axes) if size == ranks]
    if len(axes) != 1:
        raise UnsupportedError(
            f"{name}: its experts are spread over {ranks} expert parallel ranks, but no dim of the device mesh "
            f"(or more than one) has that size: {list(claims[0].axes)}; the order of the slices is unknown"
        )
    slices: dict[int, list[Claim]] = {}
    for claim in claims:
        slices.setdefault(claim.coordinate[axes[0]], []).append(claim)
    absent = [index for index in range(ranks) if index not in slices]
    if absent:
        raise SourceError(f"{name}: the files of expert parallel ranks {absent} are missing")
    checks = [check for index in range(ranks) for check in _copies(name, slices[index])]
    return concat([slices[index][0].tensor for index in range(ranks)], 0), checks
