"""Find the model's state dict in what a trainer saved."""

from __future__ import annotations

from typing import Any

from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.sources.torch_values import TensorRef, TypedRef, UnreadableRef

__all__ = ["find_state_dict", "refuse_flat_parameter"]

_MAX_DEPTH = 3


def find_state_dict(root: Any, where: str, subtree: str | None = None) -> dict[str, Any]:
    """The dict that holds the weights: ``root`` itself or, when it wraps one, the one inside.

    Optimizer states are recognised by their structure (``state`` beside ``param_groups``).

    Args:
        subtree: dotted path of the dict to take when there are several.

    Raises:
        SourceError: there is none, or several (they are listed).
        UsageError: ``subtree`` names none of them.
    """
    if not isinstance(root, dict):
        raise SourceError(f"{where}: holds no state dict (a {type(root).__name__} at the top)")
    found: dict[str, dict[str, Any]] = {}
    _collect(root, "", found, 0, set(), where)
    if subtree is not None:
        if subtree not in found:
            raise UsageError(f"{where}: no tensors under {subtree!r}; there are: {_listed(found)}")
        return found[subtree]
    # Counters that a trainer keeps as 0-dim tensors beside the model do not make the top a state dict.
    if len(found) > 1 and "" in found and all(_is_counter(value) for value in found[""].values()):
        del found[""]
    if not found:
        if root:
            raise SourceError(f"{where}: holds no tensors")
        return {}  # a pipeline rank may hold nothing
    if len(found) > 1:
        raise SourceError(f"{where}: holds several sets of tensors: {_listed(found)}; choose one with --subtree")
    return next(iter(found.values()))


def _collect(
    value: dict[Any, Any], path: str, found: dict[str, dict[str, Any]], depth: int, seen: set[int], where: str
) -> None:
    if id(value) in seen or ("param_groups" in value and "state" in value):
        return
    seen.add(id(value))
    if any(isinstance(one, TensorRef | TypedRef | UnreadableRef) for one in value.values()):
        found[path] = {_name(key): one for key, one in value.items()}
        if len(found[path]) != len(value):
            raise SourceError(f"{where}: two keys of {path or 'the state dict'} are the same when written as text")
    if depth < _MAX_DEPTH:
        for key, one in value.items():
            if isinstance(one, dict):
                _collect(one, f"{path}.{_name(key)}" if path else _name(key), found, depth + 1, seen, where)


def _name(key: object) -> str:
    return str(key) if isinstance(key, str | int | float | bytes | None) else f"({type(key).__name__})"


def _is_counter(value: object) -> bool:
    return not isinstance(value, TensorRef | TypedRef | UnreadableRef) or (
        isinstance(value, TensorRef) and not value.size
    )


def _listed(found: dict[str, dict[str, Any]]) -> str:
    return ", ".join(repr(path or "(top)") for path in found)


def refuse_flat_parameter(key: str, where: str) -> None:
    """Refuse a flat parameter of FSDP1's LOCAL_STATE_DICT.

    Raises:
        UnsupportedError: always, for such a key.
    """
    if "_flat_param" in key:
        raise UnsupportedError(
            f"{where}: {key} is a flat parameter of FSDP1's LOCAL_STATE_DICT; the names and shapes "
            "inside it are not in the file, so it cannot be merged. Load it in the training job and save with "
            "SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
