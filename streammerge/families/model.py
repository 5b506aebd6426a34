"""From a catalogue to the model's tensors: names, ties, dropped buffers, expert slices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streammerge.dtypes import DType
from streammerge.errors import SourceError
from streammerge.families.adapters import Adapter, choose_adapter, split_names
from streammerge.families.config import ModelConfig
from streammerge.families.conversion import to_file_tensors
from streammerge.families.experts import resolve_claims
from streammerge.families.fuse import fused
from streammerge.families.megatron import from_megatron
from streammerge.families.megatron_names import is_megatron
from streammerge.families.names import drop_reason, model_name, without_common_prefix
from streammerge.families.save_rules import SaveRules, save_rules
from streammerge.families.torchtitan import from_torchtitan, is_torchtitan
from streammerge.tensors.catalogue import Catalogue, Entry, EqualityCheck
from streammerge.tensors.formula import Formulas
from streammerge.tensors.virtual import Tensor

__all__ = ["Model", "describe_model", "keeps_float32", "output_tensors", "usual_ties", "with_adapters"]


@dataclass(frozen=True)
class Model:
    """The tensors of a model under the names that it has in memory.

    Attributes:
        tensors: name -> tensor, in state dict order.
        ties: for each tied name, that it equals the one it is tied to. Where they do, the name is
            not written; where they don't, both are and the config is untied.
        checks: replicas that must hold equal bytes.
        dropped: name -> the rule that keeps it out of the folder.
        rules: how ``save_pretrained`` treats the class, or None when that is not known.
        notes: what the user should know.
        formulas: the tensors that are computed.
        adapters: in the order in which they are fused.
        absent: names that the class has and the training framework does not -> what they will be.
    """

    tensors: Mapping[str, Tensor]
    ties: tuple[EqualityCheck, ...]
    checks: tuple[EqualityCheck, ...]
    dropped: Mapping[str, str]
    rules: SaveRules | None
    notes: tuple[str, ...] = ()
    formulas: Formulas = field(default_factory=Formulas)
    absent: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[Adapter, ...] = ()


def describe_model(
    catalogue: Catalogue,
    config: ModelConfig | None,
    *,
    tie: bool | None = None,
    tables: Sequence[Path] = (),
    value_model: bool = False,
    adapter: str | None = None,
) -> Model:
    """Name the catalogue's tensors as the model does and find what need not be written.

    Args:
        config: the model's config; without one nothing is tied and no name is converted.
        tie: whether embeddings are tied, against what the config says.
        tables: family tables of the user's own.
        value_model: whether the head is a value head, where the config's class does not say so.
        adapter: which of several adapters in the checkpoint to take.

    Raises:
        UnsupportedError: adapters of an unknown kind; expert slices whose place is unknown; names without a rule.
        UsageError: names that cannot be understood without a config.
        SourceError: two keys of one name; slices that are missing.
    """
    rules = save_rules(config.architecture, config.model_type) if config else None
    if is_megatron(catalogue.entries):
        applied = from_megatron(catalogue, config, tables=tables, value_model=value_model)
        own = choose_adapter(*_by_adapter(applied.adapters), catalogue.lora, adapter)
        return Model(
            tensors=applied.tensors,
            ties=_ties(applied.tensors, config, rules, tie),
            checks=(*applied.checks, *catalogue.checks),
            dropped=applied.dropped,
            rules=rules,
            notes=tuple(applied.lacking),
            formulas=applied.formulas,
            absent={"score.bias": "zeros in transformers"} if "score.weight" in applied.tensors else {},
            adapters=_adapters(catalogue, own),
        )
    named, *lora = split_names(_named(catalogue, (rules.prefix if rules else "") or "model"))
    tensors: dict[str, Tensor] = {}
    dropped: dict[str, str] = {}
    checks: list[EqualityCheck] = []
    for name, entry in named.items():
        reason = drop_reason(name)
        if reason is None and rules and name in rules.not_saved:
            reason = "the model class does not save it"
        if reason is not None:
            dropped[name] = reason
            continue
        tensors[name], copies = resolve_claims(name, entry, config.experts if config else None)
        checks += copies
    if is_torchtitan(tensors):
        applied = from_torchtitan(tensors, config, tables)
        tensors, dropped = applied.tensors, dropped | applied.dropped
    checks += [check for check in catalogue.checks if model_name(check.name) not in dropped]
    parts = [{name: _tensors(held) for name, held in one.items()} for one in lora]
    own = choose_adapter(parts[0], parts[1], catalogue.lora, adapter)
    ties = _ties(tensors, config, rules, tie)
    return Model(tensors, ties, tuple(checks), dropped, rules, adapters=_adapters(catalogue, own))


def _tensors(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    return {name: entry.tensor for name, entry in entries.items()}


def _by_adapter(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    _, adapters, saved = split_names(tensors)
    return adapters, saved


def _adapters(catalogue: Catalogue, own: Adapter | None) -> tuple[Adapter, ...]:
    """The adapter in the checkpoint, and those named besides: what these hold beside pairs replaces the base's."""
    made = [own] if own is not None else []
    for folder in catalogue.adapters:
        replaced, adapters, saved = split_names(_tensors(folder.entries))
        chosen = choose_adapter(adapters, saved, folder.settings, None)
        if chosen is None:
            raise SourceError(f"{folder.label} holds no LoRA matrices")
        chosen.saved |= replaced
        made.append(chosen)
    return tuple(made)


def with_adapters(
    model: Model,
    config: ModelConfig | None,
    rule: Callable[[str, DType], DType],
    *,
    alpha: float | None,
    peft_rounding: bool,
    tie: bool | None = None,
) -> Model:
    """The model with its adapters fused into it.

    Args:
        rule: (name, stored dtype) -> written dtype.
        alpha: lora_alpha, where it is not recorded.
        peft_rounding: round as PEFT's ``merge_and_unload`` does.
        tie: see ``describe_model``.

    Raises:
        SourceError: an adapter does not fit.
        UsageError: alpha is not known.
    """
    tensors = dict(model.tensors)
    tied = {check.name for check in model.ties} | set(usual_ties({"tie_word_embeddings": True}))
    for adapter in model.adapters:
        tensors = fused(
            tensors,
            adapter,
            alpha,
            rule,
            model.formulas,
            peft_rounding=peft_rounding,
            may_lack=tied,
            to_files=lambda named: output_tensors(replace(model, tensors=named, ties=()), config, ()),
        )
    return replace(model, tensors=tensors, ties=_ties(tensors, config, model.rules, tie))


def _named(catalogue: Catalogue, base: str) -> dict[str, Entry]:
    """The entries under the model's own names."""
    cleaned = [model_name(key) for key in catalogue.entries]
    short = without_common_prefix(cleaned, base)
    named: dict[str, Entry] = {}
    for key, name in zip(catalogue.entries, cleaned, strict=True):
        if short[name] in named:
            raise SourceError(f"{short[name]} occurs twice in the state dict, once as {key}")
        named[short[name]] = catalogue.entries[key]
    return named


def _ties(
    tensors: Mapping[str, Tensor], config: ModelConfig | None, rules: SaveRules | None, tie: bool | None
) -> tuple[EqualityCheck, ...]:
    if config is None:
        return ()
    raw = dict(config.raw)
    if tie is not None:
        raw["tie_word_embeddings"] = tie
    tied = rules.tied_names(tensors, raw) if rules is not None else usual_ties(raw)
    return tuple(
        EqualityCheck(name, tensors[name], tensors[kept], f"the config ties it to {kept}", tolerated=True, kept=kept)
        for name, kept in tied.items()
        if name in tensors and kept in tensors
    )


def usual_ties(config: Mapping[str, object]) -> dict[str, str]:
    """What nearly every language model ties when its config says so."""
    wanted = config.get("tie_word_embeddings") is True
    return {"lm_head.weight": "model.embed_tokens.weight"} if wanted else {}


def output_tensors(model: Model, config: ModelConfig | None, untied: Collection[str]) -> dict[str, Tensor]:
    """The tensors to write, under the names that ``save_pretrained`` gives them, in its order.

    Args:
        untied: the tied names whose values turned out to differ; they are written.

    Raises:
        UnsupportedError: the class is saved in a way that cannot be reproduced.
    """
    left_out = {tie.name for tie in model.ties} - set(untied)
    kept = {name: tensor for name, tensor in model.tensors.items() if name not in left_out}
    if model.rules is None or config is None:
        return kept
    return to_file_tensors(kept, model.rules, config.raw)


def keeps_float32(model: Model) -> Callable[[str], bool]:
    """Whether transformers keeps the tensor of a name in float32 even in a bfloat16 model."""
    parts = model.rules.fp32_strict if model.rules else ("e_score_correction_bias",)
    return lambda name: any(f".{part}" in f".{name}" for part in parts)
