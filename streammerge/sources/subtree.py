"""Choose the model among the sets of tensors in a checkpoint, by structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from streammerge.errors import SourceError, UsageError

__all__ = ["choose_subtree", "holds_model"]

Value = TypeVar("Value")
KeyPath = tuple[str, ...]

# What an optimizer keeps beside its state; Megatron-FSDP (core 0.16) spreads it per parameter.
_GROUPS = ("param_groups", "param_to_group_meta")


def choose_subtree(
    tensors: Mapping[KeyPath, Value],
    others: tuple[KeyPath, ...],
    is_counter: Mapping[KeyPath, bool],
    subtree: str | None,
    where: str,
) -> dict[str, Value]:
    """The tensors of one container, by their names in it.

    An optimizer is recognised by its structure: ``state`` beside ``param_groups``, as containers or,
    flattened, as the beginnings of names. A container of nothing but 0-dim tensors is a trainer's state.

    Args:
        tensors: key path -> value.
        others: key paths of entries that are no tensors.
        is_counter: key path -> whether the tensor is 0-dim.
        subtree: dotted path of the container to take.

    Raises:
        SourceError: there is none, or several (they are listed).
        UsageError: ``subtree`` names none of them.
    """
    optimizers = _optimizers([*tensors, *others])
    found: dict[KeyPath, dict[str, Value]] = {}
    for path, value in tensors.items():
        container = path[:-1]
        if not any(container[: len(root)] == root and _is_optimizers(path, root) for root in optimizers):
            found.setdefault(container, {})[path[-1]] = value
    models = {c: t for c, t in found.items() if not all(is_counter[(*c, name)] for name in t)}
    listed = ", ".join(repr(".".join(container) or "(top)") for container in models)
    if subtree is not None:
        chosen = [t for container, t in models.items() if (".".join(container) or "(top)") == (subtree or "(top)")]
        if not chosen:
            raise UsageError(f"{where}: no tensors under {subtree!r}; there are: {listed}")
        return chosen[0]
    if not models:
        raise SourceError(f"{where}: holds no model (only optimizer or trainer state)")
    if len(models) > 1:
        raise SourceError(f"{where}: holds several sets of tensors: {listed}; choose one with --subtree")
    return next(iter(models.values()))


def holds_model(tensors: Mapping[KeyPath, bool], others: tuple[KeyPath, ...]) -> bool:
    """Whether some tensor is not an optimizer's; also true where there is neither tensor nor optimizer."""
    optimizers = _optimizers([*tensors, *others])
    if not optimizers and not tensors:
        return True
    return any(
        not counter and not any(path[: len(root)] == root and _is_optimizers(path, root) for root in optimizers)
        for path, counter in tensors.items()
    )


def _optimizers(paths: list[KeyPath]) -> set[KeyPath]:
    """Containers that hold ``param_groups``, as a child or as the beginning of flattened names."""
    roots = set()
    for path in paths:
        for depth, part in enumerate(path):
            if part.partition(".")[0] in _GROUPS:
                roots.add(path[:depth])
    return roots


def _is_optimizers(path: KeyPath, root: KeyPath) -> bool:
    """Whether a path below an optimizer's container is its own; a model saved at the top is beside it."""
    part = path[len(root)].partition(".")[0]
    return part in ("state", "param_groups") or bool(root)
