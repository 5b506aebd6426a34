"""The model's config.json, as far as a merge needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError, UsageError

__all__ = ["ModelConfig", "edited_config", "read_config"]

# What different architectures call the number of routed experts (transformers 5.24).
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DTYPES = ("dtype", "torch_dtype")  # transformers 5 and 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A parsed config.json.

    Attributes:
        raw: the whole JSON object.
        architecture: class name, such as ``Qwen2ForCausalLM``, or None.
        model_type: such as ``qwen2``, or None.
        dtype: such as ``bfloat16``, or None.
        tie_word_embeddings: as written, or None when the file leaves it to the class.
        experts: number of routed experts, or None.
        added: fields of ``raw`` that the file lacks.
    """

    raw: Mapping[str, Any]
    architecture: str | None
    model_type: str | None
    dtype: str | None
    tie_word_embeddings: bool | None
    experts: int | None
    added: Mapping[str, int] = field(default_factory=dict)


def read_config(path: Path, sizes: Mapping[str, int] | None = None) -> ModelConfig:
    """Read a config.json.

    Args:
        sizes: fields that it may lack.

    Raises:
        SourceError: it is not a JSON object.
        UsageError: it has another value for one of the ``sizes``.
    """
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise SourceError(f"{path} cannot be read: {fault}") from fault
    if not isinstance(raw, dict):
        raise SourceError(f"{path} is not a JSON object")
    added: dict[str, int] = {}
    for name, value in (sizes or {}).items():
        stated = _first(raw, _EXPERT_COUNTS if name == "num_experts" else (name,))
        if stated is not None and stated != value:
            raise UsageError(f"{path} has {name} = {stated}, not {value}; such an option is for what the file lacks")
        if stated is None:
            raw[name] = added[name] = value
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return ModelConfig(
        raw=raw,
        architecture=_string(first),
        model_type=_string(raw.get("model_type")),
        dtype=_string(_first(raw, _DTYPES)),
        tie_word_embeddings=_tie(raw),
        experts=_integer(_first(raw, _EXPERT_COUNTS)),
        added=added,
    )


def _tie(raw: Mapping[str, Any]) -> bool | None:
    for part in (raw, raw.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> object:
    """The first of these fields that has a value, in the config or in the language model's part of it."""
    parts = (raw, raw.get("text_config"), raw.get("thinker_config"), raw.get("llm_config"))
    values = (part.get(name) for part in parts if isinstance(part, dict) for name in names)
    return next((value for value in values if value is not None), None)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def edited_config(config: ModelConfig, *, dtype: str | None, untie: bool) -> bytes | None:
    """The config with another dtype or untied embeddings, or None when nothing changes.

    Only those fields are touched, wherever they occur, and what the file lacked is added; it is laid
    out as transformers does.
    """
    edited = json.loads(json.dumps(config.raw))
    for part in _parts(edited):
        for name in _DTYPES:
            if dtype is not None and part.get(name) is not None:
                part[name] = dtype
        if untie and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    if untie:
        edited["tie_word_embeddings"] = False
    if edited == config.raw and not config.added:
        return None
    return (json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode()


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            yield from _parts(value)
