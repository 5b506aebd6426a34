"""From the keys of a training job's state dict to the model's own parameter names."""

from __future__ import annotations

import re

__all__ = ["drop_reason", "model_name", "without_common_prefix"]

# Segments that FSDP1, torch.compile, activation checkpointing and (Distributed)DataParallel insert.
_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"}
# trl's value head model keeps the language model under this name.
_VALUE_HEAD_PREFIX = "pretrained_model."

_DROPPED = {
    re.compile(r"(^|\.)rotary(_pos)?_emb\.(.*\.)?(original_)?inv_freq$"): "rotary buffer, computed from the config",
    re.compile(r"(^|\.)rotary(_pos)?_emb\.(cos|sin)_cached$"): "rotary buffer, computed from the config",
}


def model_name(key: str) -> str:
    """The parameter name behind a state dict key: wrapper segments removed, wherever they are."""
    segments = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(segments).removeprefix(_VALUE_HEAD_PREFIX)


def without_common_prefix(names: list[str], base: str) -> dict[str, str]:
    """Names -> names without the attributes that a trainer's own module put before all of them.

    A segment that all names share goes, as long as some name still begins with the base model's
    own segment behind it: ``model.model.layers`` of a LightningModule, but not ``model.layers``.

    Args:
        base: the model's own first segment, as transformers' ``base_model_prefix``; mostly ``model``.
    """
    short = dict(zip(names, names, strict=True))
    while names:
        shared = {name.partition(".")[0] for name in short.values()}
        rest = {name: current.partition(".")[2] for name, current in short.items()}
        if len(shared) > 1 or not any(one.startswith(f"{base}.") for one in rest.values()):
            return short
        short = rest
    return short


def drop_reason(name: str) -> str | None:
    """Why a tensor is no part of the saved model, or None when it is."""
    return next((reason for pattern, reason in _DROPPED.items() if pattern.search(name)), None)
