"""What a checkpoint holds of one parameter, and the whole tensor that it makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.fields import Fields
from streammerge.families.table import Row
from streammerge.families.tensor_parallel import join_ranks
from streammerge.tensors.catalogue import Claim, EqualityCheck
from streammerge.tensors.fragment import Index
from streammerge.tensors.virtual import Stored, Tensor, concat

__all__ = ["Held", "whole"]

# Megatron pads a vocabulary to a multiple of 128 * TP, or of what --make-vocab-size-divisible-by says in place of 128.
_MOST_PADDING = 128 * 8


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of one layer and expert.

    Attributes:
        key: its name in the checkpoint, for messages.
        claims: what each file holds of it; one without coordinate when it is whole.
    """

    key: str
    claims: tuple[Claim, ...]


def whole(
    name: str, row: Row, held: Mapping[str | None, Held], fields: Fields, numbers: Mapping[str, int]
) -> tuple[Tensor, list[EqualityCheck]]:
    """The whole tensor of a parameter, of the shape that the config makes it.

    Args:
        name: for a parameter of which nothing is there.
        held: section -> what is there under its name; None for all sections in one.
        numbers: ``layer`` and ``expert``, as Hugging Face counts them.

    Returns:
        The tensor, and the copies that must hold equal bytes.

    Raises:
        SourceError: parts are missing, there twice, or of a wrong shape.
        UnsupportedError: the row gives no shape, but the parameter may be cut.
    """
    sections = [fields.size(text, **numbers) for text in row.sections.values()]
    if None in held:
        if len(held) > 1:
            raise SourceError(f"{' and '.join(one.key for one in held.values())} are the same parameter in two forms")
        one = held[None]
        shape = _shape(row, one, fields, numbers)
        return _joined(row, one, shape, sections, fields, numbers)
    absent = [section for section in row.sections if section not in held]
    if absent or not held:
        raise SourceError(f"{name}{absent[0] if absent else ''} is missing from the checkpoint")
    parts, checks = [], []
    for section, rows in zip(row.sections, sections, strict=True):
        shape = _shape(row, held[section], fields, numbers)
        part, more = _joined(row, held[section], (rows, *shape[1:]), (), fields, numbers)
        parts.append(part)
        checks += more
    return concat(parts, 0), checks


def _joined(
    row: Row, held: Held, shape: Index, sections: Sequence[int], fields: Fields, numbers: Mapping[str, int]
) -> tuple[Tensor, list[EqualityCheck]]:
    wanted = f"[{', '.join(row.shape)}], {fields.describe(' + '.join(row.shape), **numbers)}" if row.shape else ""
    return join_ranks(held.key, held.claims, shape, sections, expert=row.per_expert, wanted=wanted)


def _shape(row: Row, held: Held, fields: Fields, numbers: Mapping[str, int]) -> Index:
    """The shape of the whole tensor, by the config."""
    if not row.shape:
        if len(held.claims) > 1:
            raise UnsupportedError(
                f"{held.key} lies in several rank files, but its row in the family table has no shape"
            )
        return held.claims[0].tensor.shape
    shape = tuple(fields.size(text, **numbers) for text in row.shape)
    return (_padded(held, shape[0], row.shape[0], fields), *shape[1:]) if row.layout == "vocab" else shape


def _padded(held: Held, vocabulary: int, text: str, fields: Fields) -> int:
    """The rows of a vocabulary as stored, padding included."""
    claim = held.claims[0]
    local = claim.tensor.shape[0] if claim.tensor.shape else 1
    ranks = claim.axes[0] if claim.axes else 1
    cuts = max(ranks, len(claim.tensor.fragments) if isinstance(claim.tensor, Stored) else 1)
    rows = local * ranks
    if not vocabulary <= rows < vocabulary + _MOST_PADDING * cuts:
        raise SourceError(
            f"{held.key} has {rows} rows, but the config has {fields.describe(text)}"
            + ("; more than padding explains" if rows > vocabulary else "")
            + "; is it of the same model?"
        )
    return rows
