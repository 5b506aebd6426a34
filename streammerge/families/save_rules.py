"""What ``save_pretrained`` does to each model class, read from a table made from transformers itself.

``save_rules.json`` is written by ``tools/make_save_rules.py`` from the conversion mapping of
transformers 5.24; nothing here imports transformers or torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from streammerge.errors import UnsupportedError

__all__ = ["Operation", "Part", "Rule", "SaveRules", "Segment", "Tie", "save_rules", "table_version"]

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a conversion: transformers' class name and the arguments it was built with."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reversed transform (transformers 5.24, ``WeightTransform.reverse_transform``).

    Attributes:
        kind: transformers' class name.
        match: searched in the name; group ``gN`` belongs to the N-th source pattern.
        targets: what the match becomes; ``\\1`` is the first group inside the group that matched.
        sources: patterns that converted tensors are collected under; empty for a renaming.
        operations: what a converter does to the collected tensors.
        offset: what an index-offset renaming adds to the index.
        prefixes: the rule applies only to names with one of these, and to what follows it; the
            first that fits counts.
    """

    kind: str
    match: re.Pattern[str]
    targets: tuple[str, ...]
    sources: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    offset: int = 0
    prefixes: tuple[str, ...] = ("",)

    def __str__(self) -> str:
        what = "+".join((self.kind, *(op.name for op in self.operations)))
        return f"{what}({self.match.pattern!r} -> {'|'.join(self.targets)!r})"


@dataclass(frozen=True, slots=True)
class Segment:
    """The rules that one sub-model contributes.

    Attributes:
        list_name: name of the list in the table.
        scope: path of the sub-model below the base model; None for the model itself.
    """

    list_name: str
    scope: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-model whose class depends on the config.

    Attributes:
        key: key of its sub-config.
        path: where it sits in the model.
        class_name, model_type: what the default config puts there.
    """

    key: str
    path: str
    class_name: str
    model_type: str


@dataclass(frozen=True, slots=True)
class Tie:
    """Weights of one (sub-)model that share storage when its config says so.

    Attributes:
        keys: dropped on save -> kept; names, module paths or regexes, below ``path``.
        path: the sub-model, empty for the model itself.
        config_key: sub-config that holds the flag; empty for the top level, None when unknown.
        default: value of the flag when the config does not say.
        dynamic: whether another config than the default would declare other keys.
    """

    keys: Mapping[str, str]
    path: str
    config_key: str | None
    default: bool
    dynamic: bool


@dataclass(frozen=True, slots=True)
class SaveRules:
    """How ``save_pretrained`` of one class, made from a config, treats its state dict.

    Attributes:
        architecture: class that the table holds.
        model_type: its model type.
        exact: False when the class asked for is not in the table and this one stands for its type.
        segments: rules in the order in which they apply.
        prefix: transformers' ``base_model_prefix``.
        parts: sub-models that the config chooses.
        ties: declared ties.
        tie_from: sub-config that can switch the ties of the top level on.
        fp32: parts of names of parameters kept in float32 when float16 is asked for.
        fp32_strict: the same, also when bfloat16 is asked for.
        not_saved: names that saving leaves out.
        in_file: matches names that only files have, where the rules themselves would take them for
            names in memory and rename them again; None where that cannot happen.
    """

    architecture: str
    model_type: str
    exact: bool
    segments: tuple[Segment, ...]
    prefix: str
    parts: tuple[Part, ...]
    ties: tuple[Tie, ...]
    tie_from: str | None
    fp32: tuple[str, ...]
    fp32_strict: tuple[str, ...]
    not_saved: tuple[str, ...]
    in_file: re.Pattern[str] | None

    def rules_for(self, config: Config) -> tuple[Rule, ...]:
        """The rules in order, with those of sub-models that the config exchanges.

        Raises:
            UnsupportedError: the config puts a model type into a part that the table cannot place.
        """
        segments = self.segments
        for part in self.parts:
            segments = self._exchanged(segments, part, config)
        return tuple(rule for s in segments for rule in _scoped(s, self.prefix))

    def _exchanged(self, segments: tuple[Segment, ...], part: Part, config: Config) -> tuple[Segment, ...]:
        section = config.get(part.key)
        model_type = section.get("model_type") if isinstance(section, Mapping) else None
        if not isinstance(model_type, str) or model_type == part.model_type:
            return segments
        scope = part.path.removeprefix(self.prefix).removeprefix(".")
        others = tuple(s for s in segments if s.scope is None or not f"{s.scope}.".startswith(f"{scope}."))
        inner = _part_rules(part, model_type)
        if any(s.scope is not None for s in inner.segments):
            raise UnsupportedError(
                f"{self.architecture} with {part.key} of type {model_type!r}: "
                "names of a composite model within another one are not known"
            )
        # Sub-models come after their parents in transformers' list, so first in the reversed one.
        return tuple(Segment(s.list_name, scope) for s in inner.segments) + others

    def tied_names(self, names: Iterable[str], config: Config) -> dict[str, str]:
        """Names that saving drops -> the name whose weight they share, among ``names`` in memory.

        Follows ``get_expanded_tied_weights_keys`` of transformers 5.24. Only ties that the config
        switches on are returned, and only where both names are known.
        """
        known = sorted(names)
        tied: dict[str, str] = {}
        for tie in self.ties:
            if self._is_tied(tie, config):
                for dropped, kept in tie.keys.items():
                    tied.update(_expanded(f"{tie.path}." if tie.path else "", dropped, kept, known))
        return {dropped: tied.get(kept, kept) for dropped, kept in tied.items()}

    def _is_tied(self, tie: Tie, config: Config) -> bool:
        flag = _flag(config if tie.config_key == "" else config.get(tie.config_key or ""))
        # Configs from before transformers 5 hold the flag in text_config; True there wins.
        if not flag and tie.config_key == "" and self.tie_from and _flag(config.get(self.tie_from)):
            return True
        return tie.default if flag is None else flag


def save_rules(architecture: str | None, model_type: str | None) -> SaveRules | None:
    """The rules of a model class; without one, those of a class that stands for the model type.

    None when the table knows neither, which says nothing about how such a model is saved.
    """
    table = _table()
    for key in (f"{architecture}@{model_type}", architecture):
        if key in table["architectures"]:
            return _rules_of(str(key), True)
    if model_type in table["types"]:
        return _rules_of(table["types"][model_type], False)
    return None


def table_version() -> str:
    """The version of transformers that the table was made from."""
    return str(_table()["transformers"])


def _flag(section: object) -> bool | None:
    flag = section.get("tie_word_embeddings") if isinstance(section, Mapping) else None
    return flag if isinstance(flag, bool) else None


@cache
def _table() -> dict[str, Any]:
    text = resources.files("streammerge.families").joinpath("save_rules.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def _rules_of(key: str, exact: bool) -> SaveRules:
    entry = _table()["architectures"][key]
    parts = entry.get("parts", {})
    return SaveRules(
        architecture=key.partition("@")[0],
        model_type=entry["type"],
        exact=exact,
        segments=tuple(Segment(s["rules"], s.get("at")) for s in entry.get("rules", ())),
        prefix=entry.get("prefix", ""),
        parts=tuple(Part(key, p["path"], p["class"], p["type"]) for key, p in parts.items()),
        ties=tuple(_tie(t) for t in entry.get("ties", ())),
        tie_from=entry.get("tie_from"),
        fp32=tuple(entry.get("fp32", ())),
        fp32_strict=tuple(entry.get("fp32_strict", ())),
        not_saved=tuple(entry.get("not_saved", ())),
        in_file=_paths_pattern(entry.get("file_paths", ())),
    )


def _paths_pattern(paths: Iterable[str]) -> re.Pattern[str] | None:
    branches = [re.escape(path).replace(r"\*", r"\d+") for path in paths]
    return re.compile(rf"(?:{'|'.join(branches)})(?:\.|$)") if branches else None


def _tie(data: Mapping[str, Any]) -> Tie:
    config_key = data.get("config", "")
    return Tie(data["keys"], data.get("at", ""), config_key, data.get("default", False), "dynamic" in data)


def _part_rules(part: Part, model_type: str) -> SaveRules:
    table = _table()
    # A part with a head keeps one: AutoModelForCausalLM chose it.
    column = "types" if part.class_name.endswith("ForCausalLM") else "bases"
    if model_type not in table[column]:
        raise UnsupportedError(
            f"{part.key} of type {model_type!r} is not known to the table of transformers {table_version()}"
        )
    return _rules_of(table[column][model_type], True)


def _scoped(segment: Segment, prefix: str) -> tuple[Rule, ...]:
    if segment.scope is None:
        return _list(segment.list_name, ("",))
    scope = f"{segment.scope}." if segment.scope else ""
    return _list(segment.list_name, ((f"{prefix}." if prefix else "") + scope, scope))


@cache
def _list(name: str, prefixes: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            kind=data["kind"],
            match=re.compile(data["match"]),
            targets=tuple(data["targets"]),
            sources=tuple(data.get("sources", ())),
            operations=tuple(_operation(op) for op in data.get("ops", ())),
            offset=data.get("offset", 0),
            prefixes=prefixes,
        )
        for data in _table()["lists"][name]
    )


def _operation(data: Mapping[str, Any]) -> Operation:
    return Operation(data["op"], {key: value for key, value in data.items() if key != "op"})


def _expanded(prefix: str, dropped: str, kept: str, names: list[str]) -> dict[str, str]:
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    if dropped in own and kept in own:
        return {prefix + dropped: prefix + kept}
    sources = [name for name in own if re.search(f"^{kept}", name)]
    targets = [name for name in own if re.search(f"^{dropped}", name)]
    if not sources or len(targets) % len(sources):
        return {}
    pairs = {prefix + t: prefix + sources[i % len(sources)] for i, t in enumerate(targets)}
    return {target: source for target, source in pairs.items() if target != source}
