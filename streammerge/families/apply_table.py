"""Apply a family table: from the parameters of a training framework to Hugging Face's tensors.

Total in both directions: a parameter without a row is refused, and so is a row whose condition says
that its parameter exists when it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.fields import Fields
from streammerge.families.held import Held, whole
from streammerge.families.layouts import LAYOUTS
from streammerge.families.table import Block, Match, Row, Table, numbered
from streammerge.tensors.catalogue import EqualityCheck
from streammerge.tensors.formula import Formulas, PlusOne
from streammerge.tensors.reshape import stack_in_order
from streammerge.tensors.virtual import Tensor

__all__ = ["Applied", "apply_table", "target_numbers"]

_NONE = -1  # the layer or expert of a parameter that has none

# (which of the row's sources, which of its sections) -> what the checkpoint holds
_Sources = dict[tuple[int, str | None], Held]
# layer -> expert -> sources
_Instances = dict[int, dict[int, _Sources]]


@dataclass
class Applied:
    """What a table made of a state dict.

    Attributes:
        tensors: Hugging Face name -> tensor, in the table's order.
        checks: copies that must hold equal bytes.
        dropped: key -> why it is not written.
        adapters: module with ``.lora_A.weight`` or ``.lora_B.weight`` -> tensor.
        formulas: the tensors among them that are computed.
        lacking: for layers that the config asks for and the checkpoint lacks, as it may: what to say.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    checks: list[EqualityCheck] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    formulas: Formulas = field(default_factory=Formulas)


def apply_table(held: Mapping[str, Held], table: Table, fields: Fields) -> Applied:
    """Join, check, re-index and rename every parameter.

    Args:
        held: name in the table's spelling -> what the checkpoint holds.

    Raises:
        UnsupportedError: a parameter without a row.
        SourceError: a parameter is missing, or its sizes contradict the config.
    """
    run = _Run(table, fields)
    for name, one in held.items():
        run.sort_in(name, one)
    return run.finished()


def target_numbers(row: Row, numbers: Mapping[str, int], fields: Fields) -> dict[str, int]:
    """The numbers in Hugging Face's names: those of the framework, moved by the block's offset."""
    if row.block is None or row.block.offset == "0":
        return dict(numbers)
    return {**numbers, "layer": numbers["layer"] + fields.size(row.block.offset)}


class _Run:
    """One state dict on its way through a table."""

    def __init__(self, table: Table, fields: Fields) -> None:
        self._table = table
        self._fields = fields
        self._result = Applied()
        self._found: dict[int, _Instances] = {order: {} for order in range(len(table.rows))}
        self._order = {id(row): order for order, row in enumerate(table.rows)}

    def sort_in(self, name: str, held: Held) -> None:
        """Find the row of a parameter."""
        candidates = list(self._table.matches(name))
        match = next((one for one in candidates if self._wanted(one.row, one.numbers) is not False), None)
        if match is None:
            raise self._unknown(name, held, candidates)
        if match.row.drop:
            self._result.dropped[held.key] = match.row.drop
            return
        layer, expert = (match.numbers.get(key, _NONE) for key in ("layer", "expert"))
        instances = self._found[self._order[id(match.row)]]
        instances.setdefault(layer, {}).setdefault(expert, {})[match.part, match.section] = held

    def _wanted(self, row: Row, numbers: Mapping[str, int]) -> bool | None:
        """Whether a parameter has to exist (True), may (None), or must not (False)."""
        own = self._target_numbers(row, numbers)
        if row.optional != "False" and self._fields.evaluate(row.optional, **own):
            return None
        return row.when == "True" or bool(self._fields.evaluate(row.when, **own))

    def _target_numbers(self, row: Row, numbers: Mapping[str, int]) -> dict[str, int]:
        return target_numbers(row, numbers, self._fields)

    def _unknown(self, name: str, held: Held, candidates: Sequence[Match]) -> SourceError | UnsupportedError:
        if not candidates:
            return UnsupportedError(
                f"{held.key} is no parameter of a {'/'.join(self._table.model_types)} that is known; it would be "
                f"lost, so nothing is merged ({self._table.origin} has no row for {name})"
            )
        row = candidates[0].row
        why = self._fields.describe(row.when, **self._target_numbers(row, candidates[0].numbers))
        return SourceError(
            f"{held.key} is in the checkpoint, but by the config it must not be: {row.when} is false ({why}); "
            "is the config of the same model?"
        )

    def finished(self) -> Applied:
        """Everything that was sorted in, checked to be complete."""
        # Blocks of one count belong together: the two halves of a multi token prediction layer.
        there = {row.block.count: False for row in self._table.rows if row.block}
        for order, row in enumerate(self._table.rows):
            if row.block is not None:
                there[row.block.count] |= bool(self._found[order])
        for order, row in enumerate(self._table.rows):
            if row.block is None or there[row.block.count] or not row.block.optional:
                self._check_complete(row, self._found[order])
        for row, layer in self._in_output_order():
            self._emit(row, layer, self._found[self._order[id(row)]][layer])
        for block in {row.block.count: row.block for row in self._table.rows if row.block}.values():
            if not there[block.count] and self._count(block):
                self._result.lacking.append(
                    f"the config has {self._fields.describe(block.count)}, but the checkpoint holds none of these "
                    "layers, so they are not written (--fill-from BASE takes them from a base model)"
                )
        return self._result

    def _count(self, block: Block) -> int:
        return self._fields.size(block.count)

    def _check_complete(self, row: Row, present: _Instances) -> None:
        layers = range(self._count(row.block)) if row.block else (_NONE,)
        for layer in layers:
            numbers = {"layer": layer} if row.block else {}
            experts = present.get(layer, {})
            wanted = not row.drop and self._wanted(row, numbers) is True
            if not row.per_expert:
                if wanted and not experts:
                    raise self._missing(row, numbers)
                continue
            if not wanted and not experts:
                continue
            count = self._fields.size("num_experts")
            for expert in range(count):
                if expert not in experts:
                    raise self._missing(row, {**numbers, "expert": expert})
            if len(experts) > count:
                raise self._surplus(row, {**numbers, "expert": max(experts)}, "num_experts")
        for layer in present:
            if layer not in layers:
                more = {"expert": min(present[layer])} if row.per_expert else {}
                raise self._surplus(row, {"layer": layer, **more}, row.block.count if row.block else "")

    def _missing(self, row: Row, numbers: Mapping[str, int]) -> SourceError:
        texts = [
            row.when,
            row.optional,
            row.block.count if row.block else "True",
            "num_experts" if row.per_expert else "True",
        ]
        own = self._target_numbers(row, numbers)
        why = ", ".join(filter(None, (self._fields.describe(text, **own) for text in texts)))
        return SourceError(
            f"{numbered(row.sources[0], numbers)} is missing from the checkpoint"
            + (f" (by the config: {why})" if why else "")
            + "; is the config of the same model, and is the checkpoint complete?"
        )

    def _surplus(self, row: Row, numbers: Mapping[str, int], count: str) -> SourceError:
        return SourceError(
            f"{numbered(row.sources[0], numbers)} is in the checkpoint, but the config has only "
            f"{self._fields.describe(count)}; is it of the same model?"
        )

    def _in_output_order(self) -> Iterator[tuple[Row, int]]:
        """Rows and layers: what is before the layers, the blocks layer by layer, what is after them."""
        blocks = list(dict.fromkeys(row.block for row in self._table.rows))
        listed = [
            ((row.last, blocks.index(row.block), layer, order), row)
            for order, row in enumerate(self._table.rows)
            for layer in self._found[order]
        ]
        for key, row in sorted(listed, key=lambda pair: pair[0]):
            yield row, key[2]

    def _emit(self, row: Row, layer: int, experts: Mapping[int, _Sources]) -> None:
        """Make the targets of one row in one layer."""
        made: dict[int, list[Tensor]] = {}
        for expert, sources in sorted(experts.items()):
            numbers = {key: n for key, n in (("layer", layer), ("expert", expert)) if n != _NONE}
            made[expert] = self._laid_out(row, numbers, sources)
        own = self._target_numbers(row, {"layer": layer} if layer != _NONE else {})
        for number, target in enumerate(row.targets):
            if "{expert}" in target and not row.per_expert:
                parts = dict(enumerate(made[_NONE]))
            elif "{expert}" in target or not row.per_expert:
                parts = {expert: tensors[number] for expert, tensors in made.items()}
            else:
                parts = {_NONE: stack_in_order([tensors[number] for _, tensors in sorted(made.items())])}
            for expert, tensor in parts.items():
                self._name(numbered(target, {**own, "expert": expert}), tensor)

    def _laid_out(self, row: Row, numbers: Mapping[str, int], found: _Sources) -> list[Tensor]:
        own = self._target_numbers(row, numbers)
        tensors = []
        for part, source in enumerate(row.sources):
            held = {section: one for (index, section), one in found.items() if index == part}
            tensor, checks = whole(numbered(source, numbers), row, held, self._fields, own)
            tensors.append(tensor)
            self._result.checks += checks
        sections = [self._fields.size(text, **own) for text in row.sections.values()]
        try:
            if row.layout == "plus_one":
                return [self._result.formulas.add(PlusOne(tensor)) for tensor in tensors]
            return LAYOUTS[row.layout](tensors, self._fields, sections)
        except SourceError as fault:
            raise SourceError(f"{numbered(row.sources[0], numbers)}: {fault}") from fault

    def _name(self, name: str, tensor: Tensor) -> None:
        if name in self._result.tensors:
            raise SourceError(f"{name} would be made of two different parameters of the checkpoint")
        self._result.tensors[name] = tensor
