"""Family tables: which parameter of a training framework becomes which of Hugging Face, as data.

A table is a TOML file; ``docs/add-a-family.md`` describes it. The package's own are in ``tables/``, a
user's come from ``--family FILE`` or from an entry point of the group ``streammerge.families``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammerge.errors import UsageError

__all__ = ["Block", "Match", "Row", "Table", "numbered", "without_numbers"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Block:
    """A stack of layers.

    Attributes:
        count: expression for the number of layers.
        offset: expression for the number of the first layer in Hugging Face's names.
        optional: whether all of it may be absent.
    """

    count: str
    offset: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one kind of parameter.

    Attributes:
        sources: names in the framework, ``{layer}`` and ``{expert}`` standing for numbers; several
            when they become one tensor.
        targets: Hugging Face names; none when the parameter is dropped.
        layout: a name in ``layouts.LAYOUTS``.
        shape: expressions for the whole tensor's sizes; empty where they are free.
        sections: suffix -> expression for its rows, of a parameter whose first dim is made of
            several parts (gate and up): each tensor parallel rank holds its piece of each, and some
            formats store the parts one by one under names with the suffix.
        when: condition on the config (and ``layer``) for the parameter to exist.
        optional: condition for it to be allowed to be there, or to lack.
        drop: why it is left out, where it is.
        last: whether it comes after the layers.
        block: the layers it is in, or None.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    layout: str = "copy"
    shape: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    when: str = "True"
    optional: str = "False"
    drop: str = ""
    last: bool = False
    block: Block | None = None

    @property
    def per_expert(self) -> bool:
        """Whether there is one source for every expert."""
        return "{expert}" in self.sources[0]


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter's row, and the numbers in its name.

    Attributes:
        part: which of the row's sources the name is.
        section: the one of the row's sections that the name stands for, or None for all of them.
        numbers: such as ``layer`` and ``expert``.
    """

    row: Row
    part: int
    section: str | None
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Table:
    """The rows of a family, names spelled out.

    Attributes:
        framework: ``megatron`` or ``torchtitan``.
        model_types: the ``model_type`` values of the configs it is for.
        fields: see ``Fields``.
        rows: in output order.
        origin: where it comes from, for messages.
    """

    framework: str
    model_types: tuple[str, ...]
    fields: Mapping[str, Sequence[str]]
    rows: tuple[Row, ...]
    origin: str
    _index: dict[str, list[tuple[re.Pattern[str], Row, int, str | None]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for row in self.rows:
            for part, source in enumerate(row.sources):
                for section in (None, *row.sections):
                    name = source + (section or "")
                    place = self._index.setdefault(_PLACEHOLDER.sub("#", name), [])
                    place.append((_pattern(name), row, part, section))

    def matches(self, name: str) -> Iterator[Match]:
        """The rows for a parameter, in the table's order; several where conditions choose."""
        for pattern, row, part, section in self._index.get(without_numbers(name), ()):
            found = pattern.fullmatch(name)
            if found:
                yield Match(row, part, section, {key: int(text) for key, text in found.groupdict().items()})


def without_numbers(name: str) -> str:
    """A parameter name with ``#`` for every segment that is a number."""
    return _NUMBER.sub("#", name)


def numbered(name: str, numbers: Mapping[str, int]) -> str:
    """A name with its placeholders filled in.

    Raises:
        UsageError: there is no number for one.
    """
    try:
        return _PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), name)
    except KeyError as fault:
        raise UsageError(f"the family table's name {name} has a placeholder without a number: {fault}") from fault


def _pattern(name: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(name)  # text and placeholders in turn
    return re.compile("".join(rf"(?P<{part}>\d+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))
