"""Names and layouts in memory -> names and layouts in files, as ``save_pretrained`` does it.

Follows ``revert_weight_conversion`` of transformers 5.24 step by step, on virtual tensors: a fused
expert tensor becomes many regions of itself, and no byte is read. Where transformers would go on
with a result that depends on luck (a dim that does not divide, two tensors of one name), this stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.save_rules import Operation, Rule, SaveRules
from streammerge.tensors.virtual import Tensor, concat, narrow, permute, select

__all__ = ["natural_key", "to_file_tensors"]

Config = Mapping[str, object]
Parts = dict[str, tuple[Tensor, ...]]

_RENAMINGS = {"WeightRenaming", "GroupWeightRename", "Inkling2IndexOffsetWeightRename"}


def to_file_tensors(tensors: Mapping[str, Tensor], rules: SaveRules, config: Config) -> dict[str, Tensor]:
    """The tensors that ``save_pretrained`` of a model made from ``config`` would write.

    Args:
        tensors: state dict in memory, tied duplicates already dropped. Names that are file names
            already stay as they are.
        rules: of the model's class.
        config: the model's ``config.json``.

    Returns:
        File name -> tensor, in transformers' order: that of ``tensors`` when the class has no
        rule, else sorted by ``natural_key`` of the names in memory.

    Raises:
        UnsupportedError: a rule applies that cannot be followed on virtual tensors.
        SourceError: tensors of a wrong shape or dtype, a missing one, or two with one file name.
    """
    return _Reversal(rules, tensors, config).run() if rules.rules_for(config) else dict(tensors)


def natural_key(name: str) -> list[tuple[int | str, ...]]:
    """Sort key of transformers 5.24 (``dot_natural_key``): numbers by value, at the end of parts too."""
    return [_natural_part(part, part.rstrip("0123456789")) for part in name.split(".")]


def _natural_part(part: str, text: str) -> tuple[int | str, ...]:
    if part.isdigit():
        return (0, int(part))
    return (1, text, int(part[len(text) :])) if len(text) < len(part) else (1, text)


@dataclass
class _Group:
    """Tensors that one rule converts together; ``rule`` is None for a plain renaming."""

    key: str
    rule: Rule | None
    collected: dict[str, list[Tensor]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


class _Reversal:
    """One run over a state dict."""

    def __init__(self, rules: SaveRules, tensors: Mapping[str, Tensor], config: Config) -> None:
        self._tensors = tensors
        self._config = config
        self._in_file = rules.in_file
        ordered = rules.rules_for(config)
        self._converters = [rule for rule in ordered if rule.kind == "WeightConverter"]
        self._renamings = [rule for rule in ordered if rule.kind != "WeightConverter"]
        # As in transformers: of two converters with one source pattern, the last one converts.
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.sources}
        self._active: set[int] = set()

    def run(self) -> dict[str, Tensor]:
        groups: dict[str, _Group] = {}
        for name in sorted(self._tensors, key=natural_key):
            self._collect(name, groups)
        result: dict[str, Tensor] = {}
        for group in groups.values():
            for name, tensor in self._finished(group):
                if name in result:
                    raise SourceError(f"{group.names[0]} and another tensor would both be saved as {name}")
                result[name] = tensor
        return result

    def _collect(self, name: str, groups: dict[str, _Group]) -> None:
        rule, pattern, key = None, name, name
        if self._in_file is None or not self._in_file.match(name):
            rule, pattern, key = self._converted_name(name)
            key = key if rule else self._renamed(name)
        group = groups.setdefault(key, _Group(key, rule))
        if group.names and (rule is None or group.rule is not rule):
            raise SourceError(f"{group.names[0]} and {name} would both be saved as {key}")
        group.collected.setdefault(pattern, []).append(self._tensors[name])
        group.names.append(name)

    def _converted_name(self, name: str) -> tuple[Rule | None, str, str]:
        for rule in self._converters:
            found = _match(rule, name)
            if found is not None:
                pattern = rule.sources[found.index]
                return self._by_pattern[pattern], pattern, found.replaced(rule.targets[0])
        return None, name, name

    def _renamed(self, name: str) -> str:
        new = name
        for rule in self._renamings:
            found = _match(rule, new)
            if found is None:
                continue
            if rule.kind not in _RENAMINGS:
                raise UnsupportedError(f"{name}: {rule}, which applies on saving, is not supported")
            new = self._replaced(rule, found, new)
        return new

    def _replaced(self, rule: Rule, found: _Match, name: str) -> str:
        if rule.kind == "WeightRenaming":
            return found.replaced(rule.targets[0])
        if rule.kind == "Inkling2IndexOffsetWeightRename":
            return found.replaced(rule.targets[0].replace(r"\1", str(int(found.group(1)) + rule.offset)))
        # A group of renamings begins with its first pattern; before that, the others are left alone.
        if found.index == 0:
            self._active.add(id(rule))
        elif id(rule) not in self._active:
            return name
        target = re.sub(r"\\(\d+)", lambda m: found.group(int(m[1])), rule.targets[found.index])
        return found.replaced(target)

    def _finished(self, group: _Group) -> list[tuple[str, Tensor]]:
        if group.rule is None:
            return [(group.key, self._tensors[group.names[0]])]
        context = _Context(group.key, group.rule, tuple(group.names), self._tensors, self._config)
        parts = _converted(group.collected, context)
        full = group.key.replace("*.", "0.")
        inside = next((k for k in parts if k in full), None)
        if inside is None:
            raise context.unsupported(f"gives names that do not fit {full}")
        before, _, after = full.partition(inside)
        return [(self._renamed(before + k + after), context.one(tensors)) for k, tensors in parts.items()]


@dataclass(frozen=True)
class _Match:
    rule: Rule
    prefix: str
    name: str
    found: re.Match[str]
    index: int

    def group(self, number: int) -> str:
        """A group inside the one that matched, by its number in there."""
        return self.found.group(self.rule.match.groupindex[f"g{self.index}"] + number) or ""

    def replaced(self, target: str) -> str:
        """The name with the first place that reads like the match replaced, as transformers does."""
        if r"\1" in target:
            target = target.replace(r"\1", self.group(1))
        return self.prefix + self.name.replace(self.found.group(0), target, 1)


def _match(rule: Rule, name: str) -> _Match | None:
    prefix = next((p for p in rule.prefixes if name.startswith(p)), None)
    found = rule.match.search(name[len(prefix) :]) if prefix is not None else None
    if prefix is None or found is None:
        return None
    groups = found.groupdict().items()
    index = next((int(group[1:]) for group, text in groups if text is not None), 0)
    return _Match(rule, prefix, name[len(prefix) :], found, index)


@dataclass(frozen=True)
class _Context:
    """What an operation may look at beside its tensors."""

    key: str
    rule: Rule
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    config: Config

    def unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self.names[0]}: {self.rule}, which applies on saving, {what}")

    def wrong(self, tensor: Tensor, what: str) -> SourceError:
        return SourceError(f"{self.names[0]} has shape {list(tensor.shape)}: {what}")

    def one(self, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise SourceError(f"{' and '.join(self.names[:2])} would both be saved as {self.key}")
        return tensors[0]

    def only(self, parts: Parts) -> Tensor:
        if len(parts) != 1:
            raise self.unsupported(f"takes one tensor, not {len(parts)}")
        return self.one(next(iter(parts.values())))

    def result_name(self) -> str:
        """The target, or the source while there are several targets for a later step to name."""
        return self.rule.targets[0] if len(self.rule.targets) == 1 else self.rule.sources[0]

    def dim(self, tensor: Tensor, number: int) -> int:
        if not -len(tensor.shape) <= number < len(tensor.shape):
            raise self.wrong(tensor, f"dim {number} is missing")
        return number % len(tensor.shape)


def _converted(collected: Mapping[str, Sequence[Tensor]], context: _Context) -> Parts:
    missing = [pattern for pattern in context.rule.sources if pattern not in collected]
    if missing:
        raise SourceError(f"{context.names[0]} is saved together with {missing[0]!r}, which is missing")
    parts: Parts = {pattern: tuple(tensors) for pattern, tensors in collected.items()}
    for operation in context.rule.operations:
        step = _STEPS.get(operation.name)
        if step is None:
            raise context.unsupported(f"takes {operation.name}, which is not supported")
        parts = step(parts, operation, context)
    return parts


def _chunk(parts: Parts, operation: Operation, context: _Context) -> Parts:
    tensor = context.only(parts)
    targets = list(context.rule.targets)
    if (attribute := operation.arguments.get("num_shards_attribute")) is not None:
        targets = [targets[0].replace("*", str(i)) for i in range(_number(attribute, context))]
    dim = context.dim(tensor, operation.arguments["dim"])
    length, rest = divmod(tensor.shape[dim], len(targets))
    if rest:
        raise context.wrong(tensor, f"dim {dim} does not divide into {len(targets)} equal parts")
    return {target: (narrow(tensor, dim, i * length, length),) for i, target in enumerate(targets)}


def _concatenate(parts: Parts, operation: Operation, context: _Context) -> Parts:
    tensors: list[Tensor] = []
    for source in context.rule.sources:
        found = parts[source]
        tensors += found if "*" in source else [context.one(found)]
    try:
        joined = concat(tensors, context.dim(tensors[0], operation.arguments["dim"]))
    except ValueError as error:
        raise SourceError(f"{' and '.join(context.names)} are saved as one: {error}") from error
    return {context.result_name(): (joined,)}


def _split_modulelist(parts: Parts, operation: Operation, context: _Context) -> Parts:
    alone = len(parts) == 1
    if alone and len(context.rule.targets) != 1:
        raise context.unsupported("has too many targets")
    result: Parts = {}
    for pattern, tensors in parts.items():
        tensor = context.one(tensors)
        dim = context.dim(tensor, operation.arguments["dim"])
        target = context.rule.targets[0] if alone else pattern
        for i in range(tensor.shape[dim]):
            result[target.replace("*", str(i))] = (select(tensor, dim, i),)
    return result


def _transpose(parts: Parts, operation: Operation, context: _Context) -> Parts:
    tensor = context.only(parts)
    if operation.arguments.get("check_dims"):
        # transformers compares with the model's own parameter of that name: here, with the source's.
        own = context.tensors.get(context.key)
        if own is None:
            raise context.unsupported(f"depends on the shape of {context.key}, which is missing")
        if own.shape == tensor.shape:
            return {context.result_name(): (tensor,)}
    dims = list(range(len(tensor.shape)))
    first, second = (context.dim(tensor, operation.arguments[key]) for key in ("dim0", "dim1"))
    dims[first], dims[second] = second, first
    return {context.result_name(): (permute(tensor, dims),)}


def _number(key: str, context: _Context) -> int:
    config = context.config
    # The sub-configs that transformers' get_text_config knows.
    for name in ("text_encoder", "decoder", "generator", "text_config"):
        section = config.get(name)
        config = section if isinstance(section, Mapping) else config
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise context.unsupported(f"needs {key} in config.json")
    return value


_Step = Callable[[Parts, Operation, _Context], Parts]
_STEPS: dict[str, _Step] = {
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "SplitModulelist": _split_modulelist,
    "Transpose": _transpose,
}
