"""LoRA adapters of Megatron-Bridge and mbridge, by the tables that the weights they adapt go by.

Beside ``X.weight`` there are ``X.adapter.linear_in.weight`` (PEFT's A, ``[rank, in]``) and
``X.adapter.linear_out.weight``
(B, ``[out, rank]``). The rows of B go where the rows of the weight go: a B of grouped q/k/v becomes three, and
A is the same for all of them. "Canonical" adapters (``X.adapter.adapter_q.linear_in.weight``) have a pair for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.apply_table import target_numbers
from streammerge.families.fields import Fields
from streammerge.families.held import Held
from streammerge.families.layouts import LAYOUTS
from streammerge.families.table import Match, Table, numbered
from streammerge.families.tensor_parallel import join_ranks
from streammerge.tensors.catalogue import EqualityCheck
from streammerge.tensors.virtual import Stored, Tensor

__all__ = ["Adapters", "adapters_of", "is_adapter"]

_NAME = re.compile(
    r"^(?P<base>.+)\.adapter\.(adapter_(?P<part>\w+)\.)?linear_(?P<side>in|out)\.weight(?P<section>_\w)?$"
)
_PARTS = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
# Layouts that only move rows, so that they can be applied to B.
_BY_ROWS = {"copy", "split", "grouped_qkv", "gated_qkv"}


@dataclass
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        tensors: Hugging Face module with ``.lora_A.weight`` or ``.lora_B.weight`` -> tensor.
        checks: copies that must hold equal bytes.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    checks: list[EqualityCheck] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """The weight that an adapter belongs to, and which part of it."""

    base: str
    part: str | None


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of an adapter."""
    return bool(_NAME.match(name))


def adapters_of(held: Mapping[str, Held], table: Table, fields: Fields) -> Adapters:
    """PEFT's pairs of the adapters in a state dict; names of other parameters are passed over.

    Raises:
        UnsupportedError: an adapter of a parameter that has no row, or of experts.
        SourceError: one of a pair is missing, or of a shape that does not fit the config.
    """
    pairs: dict[_Place, dict[str, dict[str | None, Held]]] = {}
    for name, one in held.items():
        found = _NAME.match(name)
        if found:
            sides = pairs.setdefault(_Place(found["base"], found["part"]), {})
            sides.setdefault(found["side"], {})[found["section"]] = one
    result = Adapters()
    for place, sides in pairs.items():
        _add(result, place, sides, table, fields)
    return result


def _add(
    result: Adapters, place: _Place, sides: Mapping[str, Mapping[str | None, Held]], table: Table, fields: Fields
) -> None:
    keys = [one.key for sections in sides.values() for one in sections.values()]
    match = next(table.matches(f"{place.base}.weight"), None)
    if match is None or match.row.per_expert or match.row.layout not in _BY_ROWS or len(match.row.shape) != 2:
        raise UnsupportedError(f"{keys[0]}: adapters of {place.base} are not supported; it would be lost")
    if sides.keys() != {"in", "out"}:
        raise SourceError(f"{keys[0]} has no linear_{'out' if 'in' in sides else 'in'} beside it")
    if set(sides["in"]) != {None}:
        raise UnsupportedError(f"{keys[0]}: an adapter whose linear_in is split is not supported")
    numbers = target_numbers(match.row, match.numbers, fields)
    rows, columns = (fields.size(text, **numbers) for text in match.row.shape)
    into = sides["in"][None]
    rank = _rank(next(iter(sides["out"].values())))
    first, checks = join_ranks(into.key, into.claims, (rank, columns), (), expert=False, wanted=_wanted(match, fields))
    result.checks += checks
    for target, tensor in _outs(result, match, place.part, sides["out"], (rows, rank), fields).items():
        module = numbered(target, numbers).removesuffix(".weight")
        result.tensors[f"{module}.lora_A.weight"] = first
        result.tensors[f"{module}.lora_B.weight"] = tensor


def _outs(
    result: Adapters,
    match: Match,
    part: str | None,
    held: Mapping[str | None, Held],
    shape: tuple[int, int],
    fields: Fields,
) -> dict[str, Tensor]:
    """Target -> its rows of B."""
    row = match.row
    sections = [fields.size(text) for text in row.sections.values()]
    any_one = next(iter(held.values()))
    layout = LAYOUTS[row.layout]
    if part is not None or None not in held:
        shapes = [made.shape for made in layout([Stored(any_one.claims[0].tensor.dtype, shape, ())], fields, sections)]
        chosen = {_PARTS.get(part or "", -1): held.get(None)} if part else dict(enumerate(map(held.get, row.sections)))
        outs: dict[str, Tensor] = {}
        for index, one in chosen.items():
            if one is None or not 0 <= index < len(row.targets):
                raise UnsupportedError(f"{any_one.key}: an adapter of such a part is not known")
            outs[row.targets[index]], checks = join_ranks(
                one.key, one.claims, shapes[index], (), expert=False, wanted=_wanted(match, fields)
            )
            result.checks += checks
        return outs
    one = held[None]
    whole, checks = join_ranks(one.key, one.claims, shape, sections, expert=False, wanted=_wanted(match, fields))
    result.checks += checks
    return dict(zip(row.targets, layout([whole], fields, sections), strict=True))


def _rank(out: Held) -> int:
    """The adapter's rank: ``linear_out`` is never cut along it."""
    shape = out.claims[0].tensor.shape
    if len(shape) != 2:
        raise SourceError(f"{out.key} has shape {list(shape)}; an adapter's has two dims")
    return shape[1]


def _wanted(match: Match, fields: Fields) -> str:
    return f"for an adapter of [{', '.join(match.row.shape)}], {fields.describe(' + '.join(match.row.shape))}"
