"""torchtitan's state dicts; the names are in ``tables/torchtitan*.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from streammerge.errors import SourceError, UsageError
from streammerge.families.apply_table import Applied, apply_table
from streammerge.families.config import ModelConfig
from streammerge.families.fields import fields_of
from streammerge.families.held import Held
from streammerge.families.table_files import find_table
from streammerge.tensors.catalogue import Claim
from streammerge.tensors.virtual import Tensor

__all__ = ["from_torchtitan", "is_torchtitan"]

_LAYER = re.compile(r"^layers\.\d+\.")


def is_torchtitan(names: Iterable[str]) -> bool:
    """Whether these are torchtitan's names: an embedding of its own name, and layers at the root."""
    known = set(names)
    return "tok_embeddings.weight" in known and any(_LAYER.match(name) for name in known)


def from_torchtitan(tensors: Mapping[str, Tensor], config: ModelConfig | None, tables: Sequence[Path] = ()) -> Applied:
    """Hugging Face's tensors of a torchtitan state dict.

    Args:
        tables: family tables of the user's own.

    Raises:
        UsageError: without a config the number of heads is unknown.
        UnsupportedError: a model type or parameter without a rule.
        SourceError: parameters are missing, there twice, or contradict the config.
    """
    if config is None:
        raise UsageError("these are torchtitan's parameter names; name the Hugging Face config with --hf-config")
    table = find_table("torchtitan", config.model_type, tables)
    held: dict[str, Held] = {}
    for key, tensor in tensors.items():
        name = _older_spelling(key)
        if name in held:
            raise SourceError(f"{key} and {held[name].key} are the same parameter in two spellings")
        held[name] = Held(key, (Claim(tensor, (), ()),))
    return apply_table(held, table, fields_of(config, table))


def _older_spelling(name: str) -> str:
    """Since 2026 q, k and v are below ``qkv_linear``, and some names say their dims."""
    name = name.replace(".attention.qkv_linear.", ".attention.")
    if name == "lm_head.weight":
        return "output.weight"
    return name.removesuffix("_E") if name.endswith(".moe.expert_bias_E") else name
