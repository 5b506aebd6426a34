"""The sizes of a model, by the names that its config and the family tables use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streammerge.errors import SourceError, UsageError
from streammerge.families.config import ModelConfig
from streammerge.families.expressions import evaluate, names_in
from streammerge.families.table import Table

__all__ = ["Fields", "fields_of"]

# Numbers in a parameter's name: what depends on them differs from one to the next.
_NUMBERS = {"layer", "expert"}


_VALUE_MODELS = ("ForTokenClassification", "ForSequenceClassification")


def fields_of(config: ModelConfig, table: Table, *, value_model: bool = False) -> Fields:
    """The fields that a table can use: the language model's part of a config over the rest of it.

    Args:
        value_model: whether the head is a value head, also when the config's class does not say so.
    """
    text = config.raw.get("text_config")
    values: dict[str, Any] = {**config.raw, **(text if isinstance(text, Mapping) else {})}
    values["is_value_model"] = value_model or (config.architecture or "").endswith(_VALUE_MODELS)
    if config.tie_word_embeddings is not None:
        values["tie_word_embeddings"] = config.tie_word_embeddings
    return Fields(values, table.fields)


class Fields:
    """Looks names up in a config, as a family table defines them.

    A table may define a name as several expressions: the first whose names all have a value is taken.
    Names that it does not define are fields of the config, dotted for those of a part of it.
    """

    def __init__(self, config: Mapping[str, Any], definitions: Mapping[str, Sequence[str]]) -> None:
        """Take values from ``config``; ``definitions``: name -> expressions, the first fitting one wins."""
        self._config = config
        self._definitions = definitions
        self._known: dict[str, Any] = {}
        self._varying: dict[str, bool] = {}

    def has(self, name: str) -> bool:
        """Whether a name has a value."""
        return self._find(name, {}, ()) is not None

    def size(self, text: str, **numbers: int) -> int:
        """The value of an expression that must be a size.

        Raises:
            SourceError: the config lacks a field, or the value is no size.
        """
        result = self.evaluate(text, **numbers)
        if isinstance(result, bool) or not isinstance(result, int) or result < 0:
            raise SourceError(f"{text} is {result!r} by the config, which is no size ({self.describe(text)})")
        return result

    def evaluate(self, text: str, **numbers: int) -> Any:
        """The value of an expression.

        Args:
            numbers: ``layer`` and ``expert``, as Hugging Face counts them.

        Raises:
            SourceError: the config lacks a field, or holds something that cannot be computed with.
        """
        if text not in self._known:
            try:
                value = evaluate(text, lambda name: self._needed(name, numbers))
            except UsageError as fault:
                raise SourceError(f"{fault} (by the config: {self.describe(text, **numbers)})") from fault
            if self._varies(text):
                return value
            self._known[text] = value
        return self._known[text]

    def describe(self, text: str, **numbers: int) -> str:
        """``field = value`` for every config field behind an expression, for messages."""
        listed = {}
        for name in names_in(text):
            for field in self._behind(name, numbers, ()):
                listed[field] = numbers[field] if field in numbers else self._plain(field)
        return ", ".join(f"{name} = {value}" for name, value in listed.items())

    def _needed(self, name: str, numbers: Mapping[str, int]) -> Any:
        value = self._find(name, numbers, ())
        if value is None:
            wanted = " or ".join(dict.fromkeys(self._behind(name, numbers, ())))
            raise SourceError(
                f"the config lacks {wanted}, which is needed to place the weights; is it the right config? "
                f"(--{wanted.replace('_', '-')} gives it, where there is such an option)"
            )
        return value

    def _find(self, name: str, numbers: Mapping[str, int], above: tuple[str, ...]) -> Any:
        if name in numbers:
            return numbers[name]
        chosen = self._chosen(name, numbers, above)
        if chosen is None:
            return self._plain(name)
        return evaluate(chosen, lambda one: self._find(one, numbers, (*above, name)))

    def _chosen(self, name: str, numbers: Mapping[str, int], above: tuple[str, ...]) -> str | None:
        """The definition of a name that applies, or None for a plain field."""
        if name in above:  # a definition may begin with the field of its own name
            return None
        for text in self._definitions.get(name, ()):
            if all(self._find(one, numbers, (*above, name)) is not None for one in names_in(text)):
                return text
        return None

    def _plain(self, name: str) -> Any:
        value: Any = self._config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _behind(self, name: str, numbers: Mapping[str, int], above: tuple[str, ...]) -> list[str]:
        """The config fields that decide a name's value."""
        if name in numbers or name in above or name not in self._definitions:
            return [name]
        chosen = self._chosen(name, numbers, above)
        found = [field for one in names_in(chosen or "None") for field in self._behind(one, numbers, (*above, name))]
        # A constant stands in for fields that the config lacks: it is these that a user can set.
        return found or [one for text in self._definitions[name] for one in names_in(text)] or [name]

    def _varies(self, text: str) -> bool:
        """Whether an expression depends on numbers in the parameter's name."""
        if text not in self._varying:
            self._varying[text] = False  # for definitions that begin with their own name
            names = names_in(text)
            definitions = [one for name in names for one in self._definitions.get(name, ())]
            self._varying[text] = bool(_NUMBERS.intersection(names)) or any(map(self._varies, definitions))
        return self._varying[text]
