"""Read a source as far as planning needs: catalogue, config, files beside the weights, model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from streammerge import hub
from streammerge.dtypes import dtype_named
from streammerge.errors import SourceError, UsageError
from streammerge.execute.casts import needs_torch
from streammerge.execute.compute import compute_scratch, formula_casts
from streammerge.execute.memory import Buffers, allowed_memory, default_budget, divide, rss
from streammerge.families.adapters import Adapter
from streammerge.families.config import ModelConfig, read_config
from streammerge.families.fuse import peft_config, peft_tensors
from streammerge.families.megatron_names import is_megatron
from streammerge.families.model import Model, describe_model, keeps_float32, output_tensors, usual_ties, with_adapters
from streammerge.folder.peft_config import PEFT_BYTES, peft_config_text
from streammerge.folder.sidecars import Sidecars, find_sidecars
from streammerge.options import MergeOptions
from streammerge.pipeline.lora import check_effect, lora_mode, named_adapters
from streammerge.plan.dtypes import dtype_rule
from streammerge.plan.plan import Plan, make_plan, with_adapter
from streammerge.sizes import parse_size
from streammerge.sources.hf_folder import has_hf_weights, open_hf_folder
from streammerge.sources.open import open_reference, open_source
from streammerge.sources.peft_folder import recorded_settings, with_peft_folders
from streammerge.tensors.catalogue import Catalogue
from streammerge.tensors.virtual import Tensor

__all__ = ["Observer", "PathLike", "Prepared", "as_paths", "budget_of", "buffers_for", "open_checked", "prepare"]

PathLike = str | Path


class Observer:
    """Told what a merge is doing. Override what you want to show."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins; ``total`` bytes will be moved in it (0 when that is not known)."""

    def advance(self, done: int) -> None:
        """``done`` bytes of the phase are moved; called about ten times a second."""

    def warn(self, message: str) -> None:
        """Something the user should know, also listed in the report."""


@dataclass
class Prepared:
    """A source that has been read as far as planning needs.

    Attributes:
        max_ram: the budget in bytes.
        warnings: what the user was told so far.
        filled: tensors taken from a base model, by their names in files.
        lora: what becomes of the LoRA adapter.
        adapter: the one to be written beside the weights, if any.
        adapter_config: the text of its adapter_config.json.
    """

    catalogue: Catalogue
    sidecars: Sidecars
    config: ModelConfig | None
    model: Model
    max_ram: int
    options: MergeOptions
    observer: Observer
    warnings: list[str] = field(default_factory=list)
    filled: Mapping[str, Tensor] = field(default_factory=dict)
    lora: str = ""
    adapter: Adapter | None = None
    adapter_config: str | None = None

    def warn(self, message: str) -> None:
        """Tell the user, now and in the report."""
        self.warnings.append(message)
        self.observer.warn(message)

    def plan(self, untied: Collection[str]) -> Plan:
        """The plan, with the tied names written whose values differ."""
        config_dtype = self.config.dtype if self.config else None
        rule = dtype_rule(self.options.dtype, config_dtype, keeps_float32(self.model))
        tensors = {**output_tensors(self.model, self.config, untied), **self.filled}
        made = make_plan(
            tensors, self.catalogue.files, rule, parse_size(self.options.max_shard_size), self.model.formulas
        )
        return made if self.adapter is None else with_adapter(made, peft_tensors(self.adapter))


def buffers_for(made: Plan, max_ram: int, workers: int) -> Buffers:
    """The buffers for carrying out a plan.

    Raises:
        BudgetError: it cannot be done within the budget.
    """
    torch_needed = needs_torch({*made.casts, *formula_casts(made.formulas)})
    return divide(max_ram, workers, torch_needed=torch_needed, scratch=partial(compute_scratch, made.formulas))


def as_paths(source: PathLike | Sequence[PathLike]) -> list[Path]:
    """One path or several, as a list."""
    return [Path(source)] if isinstance(source, str | Path) else [Path(one) for one in source]


def prepare(
    source: PathLike | Sequence[PathLike],
    options: MergeOptions,
    observer: Observer,
    *,
    other_config: Path | None = None,
) -> Prepared:
    """Read the source.

    Args:
        other_config: folder with config.json for a checkpoint that has none, when none is named.

    Raises:
        StreammergeError: it cannot be merged; see ``streammerge.errors``.
    """
    max_ram = _check_options(options)
    observer.phase("reading metadata", 0)
    catalogue = open_checked(source, options)
    folder = (
        hub.local_folder(options.hf_config) if options.hf_config is not None else catalogue.hf_folder or other_config
    )
    sidecars = find_sidecars(folder)
    config = read_config(sidecars.config, options.model_fields) if sidecars.config else None
    model = describe_model(
        catalogue,
        config,
        tie=options.tie_word_embeddings,
        tables=as_paths(list(options.family_tables)),
        value_model=options.value_model,
        adapter=named_adapters(options)[1],
    )
    prepared = Prepared(catalogue, sidecars, config, model, max_ram, options, observer)
    for warning in (*catalogue.warnings, *model.notes):
        prepared.warn(warning)
    prepared.filled = _filled(prepared)
    _prepare_lora(prepared)
    return prepared


def _filled(prepared: Prepared) -> dict[str, Tensor]:
    """What the checkpoint lacks and the base model of ``--fill-from`` has."""
    model = prepared.model
    if prepared.options.fill_from is None:
        return {}
    known = set(output_tensors(model, prepared.config, [tie.name for tie in model.ties]))
    tied = usual_ties(prepared.config.raw if prepared.config else {})
    missing: dict[str, Tensor] = {
        name: entry.tensor for name, entry in prepared.catalogue.fill.items() if name not in known | tied.keys()
    }
    shown = ", ".join(list(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    prepared.warn(f"taken from {prepared.options.fill_from}: {shown or 'nothing, the checkpoint has everything'}")
    return missing


def _prepare_lora(prepared: Prepared) -> None:
    """Fuse the model's adapters, or have one written beside it, as the options say."""
    model, config, options = prepared.model, prepared.config, prepared.options
    mode = lora_mode(options, model.adapters, named_adapters(options)[0])
    prepared.lora = mode.line
    if not mode.fuse and not mode.extract:
        return
    if not model.tensors:
        raise SourceError(
            f"{prepared.catalogue.root} holds adapters only, and not the weights that they belong to; this is not "
            "supported yet"
        )
    for warning in check_effect(model.adapters, mode, prepared.catalogue, options.io, prepared.max_ram):
        prepared.warn(warning)
    if mode.extract:
        (adapter,) = model.adapters
        architecture = config.architecture if config else None
        base = config.raw.get("_name_or_path") if config else None
        fields = peft_config(model.tensors, adapter, options.lora_alpha, architecture, base or None)
        text, note = peft_config_text(fields, by_peft=prepared.max_ram >= rss() + PEFT_BYTES)
        prepared.adapter, prepared.adapter_config = adapter, text
        if note:
            prepared.warn(note)
    if mode.fuse:
        rule = dtype_rule(options.dtype, config.dtype if config else None, keeps_float32(model))
        prepared.model = with_adapters(
            model,
            config,
            rule,
            alpha=options.lora_alpha,
            peft_rounding=options.peft_rounding,
            tie=options.tie_word_embeddings,
        )


def open_checked(source: PathLike | Sequence[PathLike], options: MergeOptions) -> Catalogue:
    """Index the source, and refuse one that is not of the kind that ``backend`` asks for.

    Raises:
        StreammergeError: it cannot be read; see ``streammerge.errors``.
    """
    folders, _ = named_adapters(options)
    paths = as_paths(source)
    if folders and len(paths) == 1:
        catalogue = open_reference(paths[0], subtree=options.subtree)
    else:
        catalogue = open_source(paths, mesh_order=options.mesh_order, subtree=options.subtree)
    if options.fill_from is not None:
        base = Path(options.fill_from)
        if not has_hf_weights(base):
            raise UsageError(f"--fill-from {base}: no folder with model.safetensors or its index")
        catalogue = catalogue.filled_from(open_hf_folder(base))
    catalogue = with_peft_folders(replace(catalogue, lora=recorded_settings(catalogue.root)), folders)
    kind = "megatron" if is_megatron(catalogue.entries) else "fsdp"
    if options.backend is not None and options.backend != kind:
        raise UsageError(
            f"--backend {options.backend}, but {catalogue.root} is a {kind} checkpoint ({catalogue.format}); "
            "leave the option out"
        )
    return catalogue


def _check_options(options: MergeOptions) -> int:
    """Refuse options that make no sense before anything is read; returns the budget in bytes."""
    parse_size(options.max_shard_size)
    if options.dtype not in ("auto", "keep"):
        dtype_named(options.dtype)
    return budget_of(options.max_ram)


def budget_of(max_ram: int | str | None) -> int:
    """The budget in bytes that an option stands for.

    Raises:
        UsageError: it is not a size.
    """
    return default_budget() if max_ram is None else parse_size(max_ram, percent_of=allowed_memory())
