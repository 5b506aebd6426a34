"""Which dtype each tensor is written in."""

from __future__ import annotations

from collections.abc import Callable

from streammerge.dtypes import DType, dtype_named
from streammerge.errors import UsageError

__all__ = ["DtypeRule", "dtype_rule"]

DtypeRule = Callable[[str, DType], DType]


def dtype_rule(wanted: str, config_dtype: str | None, keep_float32: Callable[[str], bool]) -> DtypeRule:
    """Make the rule (name, stored dtype) -> written dtype.

    Only ordinary floating point is ever cast. float32 tensors that the model keeps in float32
    (router score bias) stay so.

    Args:
        wanted: ``auto`` (the config's dtype, or as stored without one), ``keep``, or a dtype name.
        config_dtype: what the model's config says.
        keep_float32: whether the model keeps the tensor of this name in float32.

    Raises:
        UsageError: an unknown dtype, or one that weights cannot be cast to.
    """
    name = config_dtype if wanted == "auto" else wanted
    if wanted == "keep" or name is None:
        return lambda _, stored: stored
    target = dtype_named(name)
    if not target.castable:
        raise UsageError(f"cannot cast weights to {target}; use float32, bfloat16, float16, float64 or keep")

    def rule(tensor_name: str, stored: DType) -> DType:
        if not stored.castable:
            return stored
        if stored.name == "float32" and target.itemsize < stored.itemsize and keep_float32(tensor_name):
            return stored
        return target

    return rule
