"""Look for bad values in what is written: NaN, infinities, tensors of nothing but zeros."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from streammerge.dtypes import DType
from streammerge.plan.plan import OutputFile

__all__ = ["Finding", "ValueScan"]

_FLOATS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(slots=True)
class Finding:
    """What was counted in one tensor, in elements."""

    nan: int = 0
    infinite: int = 0
    nonzero: bool = False


class ValueScan:
    """A watcher that counts bad values per tensor of ordinary floating point."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Finding] = {}

    def __call__(self, output: OutputFile, start: int, content: memoryview) -> None:
        """Count in the part of each tensor that the tile holds."""
        for tensor in output.tensors_in(start, start + len(content)):
            first = max(tensor.offset, start) - start
            last = min(tensor.offset + tensor.size, start + len(content)) - start
            if tensor.dtype.name in _FLOATS:
                self._add(tensor.name, _count(content[first:last], tensor.dtype))

    def _add(self, name: str, part: Finding) -> None:
        with self._lock:
            total = self._found.setdefault(name, Finding())
            total.nan += part.nan
            total.infinite += part.infinite
            total.nonzero |= part.nonzero

    def warnings(self) -> list[str]:
        """One sentence per tensor with bad values."""
        out = []
        for name, found in self._found.items():
            if found.nan or found.infinite:
                out.append(f"{name} holds {found.nan} NaN and {found.infinite} infinite values")
            elif not found.nonzero:
                out.append(f"{name} is all zeros")
        return out


def _count(content: memoryview, dtype: DType) -> Finding:
    values = np.frombuffer(content, _FLOATS[dtype.name])
    finite = np.isfinite(values)
    if finite.all():
        return Finding(nonzero=bool(values.any()))
    nan = int(np.isnan(values).sum())
    return Finding(nan, int(values.size - finite.sum()) - nan, True)
