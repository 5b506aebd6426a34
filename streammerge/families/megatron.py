"""Megatron state dicts: one tensor per layer and expert, whatever the format stacked, split or spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.families.apply_table import Applied, apply_table
from streammerge.families.config import ModelConfig
from streammerge.families.fields import Fields, fields_of
from streammerge.families.held import Held
from streammerge.families.megatron_adapters import adapters_of, is_adapter
from streammerge.families.megatron_names import EXPERT_STACK, GROUPED, LAYER_STACK, canonical_name
from streammerge.families.table_files import find_table
from streammerge.tensors.catalogue import Catalogue, Claim, Entry
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import Tensor, permute, unbind

__all__ = ["from_megatron"]

# Where the config and what the training recorded speak of the same thing: no tensor's shape tells
# these apart from (heads * 2, groups * 2, head_dim / 2).
_RECORDED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
}
# Recorded setting -> the field of tables whose models have it too, and what it does.
_MEANINGS = (
    ("apply_layernorm_1p", "zero_centered_norms", "its norms are centred at zero"),
    ("rotary_interleaved", "interleaved_rotary", "its rotary embeddings rotate neighbouring pairs"),
)


def from_megatron(
    catalogue: Catalogue, config: ModelConfig | None, *, tables: Sequence[Path] = (), value_model: bool = False
) -> Applied:
    """Hugging Face's tensors of a Megatron checkpoint.

    Args:
        tables: family tables of the user's own.
        value_model: whether the head is a value head, also when the config's class does not say so.

    Raises:
        UsageError: there is no config.
        UnsupportedError: a model or parameter without a rule.
        SourceError: parameters are missing, or contradict the config.
    """
    if config is None:
        raise UsageError(
            "these are Megatron's parameter names; name the Hugging Face config (a folder or a base model) "
            "with --hf-config"
        )
    table = find_table("megatron", config.model_type, tables)
    fields = fields_of(config, table, value_model=value_model)
    _compare_with_recorded(catalogue.settings, fields)
    _refuse_recorded(catalogue.settings, fields, config.model_type)
    held = _unstacked(catalogue.entries, fields)
    weights = {name: one for name, one in held.items() if not is_adapter(name)}
    adapters = adapters_of(held, table, fields)
    applied = apply_table(weights, table, fields) if weights else Applied()  # a PEFT run may save adapters alone
    applied.adapters = adapters.tensors
    applied.checks += adapters.checks
    return applied


def _refuse_recorded(settings: Mapping[str, object], fields: Fields, model_type: str | None) -> None:
    """Refuse what no shape tells: values that mean something else than in Hugging Face's model."""
    for setting, field, what in _MEANINGS:
        if settings.get(setting) is True and not fields.has(field):
            raise UnsupportedError(
                f"the checkpoint was trained with {setting}: {what}, and those of a {model_type} are not; "
                "converting that is not supported"
            )


def _compare_with_recorded(settings: Mapping[str, object], fields: Fields) -> None:
    """Refuse a config that differs from what the training framework recorded."""
    wrong = []
    latent = fields.has("qk_rope_head_dim")
    for setting, field in _RECORDED.items():
        if latent and field in ("head_dim", "num_key_value_heads"):
            continue  # latent attention has neither, and what Megatron records for them means nothing
        recorded = settings.get(setting)
        if setting == "num_query_groups" and settings.get("group_query_attention") is False:
            recorded = settings.get("num_attention_heads")
        if isinstance(recorded, int) and fields.has(field) and fields.size(field) != recorded:
            wrong.append(f"{fields.describe(field)}, but the checkpoint was trained with {setting} = {recorded}")
    if wrong:
        raise SourceError(f"the config is not that of the checkpoint: {'; '.join(wrong)}")


def _unstacked(entries: Mapping[str, Entry], fields: Fields) -> dict[str, Held]:
    """Canonical name -> what the checkpoint holds of it.

    Raises:
        SourceError: two keys of one parameter; stacks of another size than the config says.
    """
    found: dict[str, Held] = {}
    for key, entry in entries.items():
        claims = entry.claims or (Claim(entry.tensor, (), ()),)
        for name, part in _layers(canonical_name(key), claims, key, fields):
            other = found.setdefault(name, Held(key, part))
            if other.claims is not part:
                raise SourceError(f"{key} and {other.key} are the same parameter in two spellings")
    return found


def _layers(name: str, claims: tuple[Claim, ...], key: str, fields: Fields) -> Iterator[tuple[str, tuple[Claim, ...]]]:
    stack = LAYER_STACK.match(name)
    if stack is None:
        yield from _experts(name, claims, key, fields)
        return
    layers = _stack_size("num_hidden_layers", claims, key, fields)
    for layer, part in enumerate(_unbound(claims, layers)):
        yield from _experts(f"{stack['before']}.{layer}.{stack['after']}", part, key, fields)


def _experts(name: str, claims: tuple[Claim, ...], key: str, fields: Fields) -> Iterator[tuple[str, tuple[Claim, ...]]]:
    grouped, stack = GROUPED.match(name), EXPERT_STACK.match(name)
    if grouped is not None:
        claims = tuple(_with(claim, _ungrouped(claim, grouped["which"], key, fields)) for claim in claims)
        before, after = grouped["before"], f"linear_fc{grouped['which']}.weight"
    elif stack is not None:
        before, after = stack["before"], stack["after"]
    else:
        yield name, claims
        return
    experts = _stack_size("num_experts", claims, key, fields)
    for expert, part in enumerate(_unbound(claims, experts)):
        yield f"{before}.{expert}.{after}", part


def _stack_size(field: str, claims: tuple[Claim, ...], key: str, fields: Fields) -> int:
    """The size of a stack in all: of a whole one, or of the parts of all expert parallel ranks."""
    wanted = fields.size(field)
    for claim in claims:
        ranks = claim.axes[1] if field == "num_experts" and claim.axes else 1
        held = claim.tensor.shape[0] if claim.tensor.shape else 1
        if held * ranks != wanted:
            raise SourceError(
                f"{key} holds {held} {'experts' if field == 'num_experts' else 'layers'}"
                + (f" on each of {ranks} expert parallel ranks" if ranks > 1 else "")
                + f", but the config has {fields.describe(field)}; is it of the same model?"
            )
    return wanted


def _unbound(claims: tuple[Claim, ...], size: int) -> list[tuple[Claim, ...]]:
    """The claims of each index of a stack; an expert parallel rank holds the indices from its first one on."""
    parts: list[list[Claim]] = [[] for _ in range(size)]
    for claim in claims:
        held = unbind(claim.tensor)
        first = claim.coordinate[1] * len(held) if claim.coordinate and len(held) < size else 0
        for index, tensor in enumerate(held):
            parts[first + index].append(_with(claim, tensor))
    return [tuple(part) for part in parts]


def _ungrouped(claim: Claim, which: str, key: str, fields: Fields) -> Tensor:
    """GroupedMLP's matrix as a stack of its experts' matrices.

    ``weight1`` is printed as ``[H, experts * 2F]`` and ``weight2`` as ``[experts * F, H]``, but their memory is
    ``[experts, H, 2F]`` and ``[experts, F, H]``: input-major, so both are transposed (Megatron-core < 0.17).
    """
    ranks = claim.axes[1] if claim.axes else 1
    experts, rest = divmod(fields.size("num_experts"), ranks)
    shape = claim.tensor.shape
    hidden = fields.size("hidden_size")
    spread = 2 - int(which)  # the dim that the experts are along
    if rest or not experts or len(shape) != 2 or shape[1 - spread] != hidden or shape[spread] % experts:
        described = fields.describe("num_experts + hidden_size")
        raise SourceError(
            f"{key} has shape {list(shape)}, which does not fit the experts of {ranks} expert parallel ranks "
            f"({described}); is the config of the same model?"
        )
    inner = shape[spread] // experts
    stacked = reshape(claim.tensor, (experts, hidden, inner) if which == "1" else (experts, inner, hidden))
    return permute(stacked, (0, 2, 1))


def _with(claim: Claim, tensor: Tensor) -> Claim:
    return Claim(tensor, claim.coordinate, claim.axes)
