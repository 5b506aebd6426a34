"""How two tensors differ: streamed in bounded memory, element by element, vectorised."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from streammerge.dtypes import DType
from streammerge.execute.compute import computing_reader
from streammerge.execute.gather import copies_of, run_copies
from streammerge.execute.memory import Buffers
from streammerge.execute.read import Reader
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.formula import Formulas
from streammerge.tensors.virtual import Tensor, numel

__all__ = ["Comparer", "Difference", "Side", "Tolerance"]

_NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "complex64": np.dtype(np.complex64),
    "bool": np.dtype(np.bool_),
}
# Elements compared at once; their float64 copies and masks are the largest temporaries.
_STEP = 1 << 17


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two values count as equal: ``|a - b| <= atol + rtol * |b|``, as torch.isclose.

    NaN equals NaN at the same place; both zero means exact equality.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(slots=True)
class Difference:
    """What was found in one pair of tensors.

    Attributes:
        elements: number of elements compared.
        differing: elements that are not equal within the tolerance.
        max_abs: largest absolute difference, infinite where an infinity meets anything else; NaN
            does not count.
        max_rel: the same relative to the second value, where that is not zero.
        first: index of the first differing element, or None.
        values: both values there.
        nan_both, nan_one: elements that are NaN on both sides, or on one only.
    """

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    nan_both: int = 0
    nan_one: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: where its fragments point, and how to read them."""

    sources: tuple[SourceFile, ...]
    route: str
    formulas: Formulas | None = None


class Comparer:
    """One worker that compares tensors of two sides. Not shared between threads."""

    def __init__(self, first: Side, second: Side, buffers: Buffers) -> None:
        """Allocate the buffers: a tile for each side and a window for each."""
        self._window = buffers.window
        self._readers = [
            computing_reader(side.route, side.sources, side.formulas, buffers.window) for side in (first, second)
        ]
        self._views = [memoryview(mmap.mmap(-1, buffers.tile)) for _ in range(2)]

    def close(self) -> None:
        """Give descriptors back."""
        for reader in self._readers:
            reader.close()

    def compare(
        self,
        first: Tensor,
        second: Tensor,
        dtypes: tuple[DType, DType],
        tolerance: Tolerance,
        on_read: Callable[[int], None] = lambda size: None,
    ) -> Difference:
        """Compare two tensors of the same shape.

        Args:
            dtypes: what each side is cast to before it is compared.
            on_read: told the bytes read.

        Raises:
            SourceError, StorageError: reading failed.
        """
        found = Difference(elements=numel(first))
        step = min(len(view) // dtype.itemsize for view, dtype in zip(self._views, dtypes, strict=True))
        for start in range(0, found.elements, step):
            end = min(found.elements, start + step)
            parts = []
            for tensor, dtype, view, reader in zip((first, second), dtypes, self._views, self._readers, strict=True):
                parts.append(self._read(tensor, start, end, dtype, view, reader, on_read))
            _compare_flat(parts[0], parts[1], start, first.shape, tolerance, found)
        return found

    def _read(
        self,
        tensor: Tensor,
        start: int,
        end: int,
        dtype: DType,
        view: memoryview,
        reader: Reader,
        on_read: Callable[[int], None],
    ) -> npt.NDArray[Any]:
        copies = copies_of(tensor, start, end, dtype, 0, self._window)
        on_read(run_copies(copies, view, reader, self._window))
        return np.frombuffer(view, _NUMPY.get(dtype.name, np.dtype(dtype.numpy)), end - start)


def _compare_flat(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    start: int,
    shape: tuple[int, ...],
    tolerance: Tolerance,
    found: Difference,
) -> None:
    if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        found.nan_both += _count_nan(a)
        return
    for at in range(0, len(a), _STEP):
        _compare_step(a[at : at + _STEP], b[at : at + _STEP], start + at, shape, tolerance, found)


def _compare_step(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    start: int,
    shape: tuple[int, ...],
    tolerance: Tolerance,
    found: Difference,
) -> None:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # signalling NaN, too
        wide_a, wide_b = _widened(a), _widened(b)
        exact = a.dtype == b.dtype and not (tolerance.rtol or tolerance.atol)
        equal = _same_bits(a, b) if exact else wide_a == wide_b
        nan_a, nan_b = wide_a != wide_a, wide_b != wide_b
        distance = np.where(wide_a == wide_b, 0, np.abs(wide_a - wide_b))  # infinities that agree
        size = np.abs(wide_b)
        if tolerance.rtol or tolerance.atol:
            equal |= np.isfinite(distance) & (distance <= tolerance.atol + tolerance.rtol * size)
        relative = np.where((distance == 0) | (size == 0), 0, distance / size)
    equal |= nan_a & nan_b
    found.nan_both += int((nan_a & nan_b).sum())
    found.nan_one += int((nan_a ^ nan_b).sum())
    found.max_abs = max(found.max_abs, _largest(distance))
    found.max_rel = max(found.max_rel, _largest(relative))
    if equal.all():
        return
    found.differing += int(equal.size - equal.sum())
    if found.first is None:
        place = int(np.argmin(equal))
        found.first = tuple(int(i) for i in np.unravel_index(start + place, shape)) if shape else ()
        found.values = (a[place].item(), b[place].item())


def _same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Exact equality tells 0.0 from -0.0."""
    bits = f"u{a.dtype.itemsize}"
    return np.asarray(a.view(bits) == b.view(bits))


def _widened(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In a type in which differences are exact enough: float64, complex128, or Python-sized integers."""
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        return values.astype(np.longdouble)
    return values.astype(np.float64)


def _largest(values: npt.NDArray[Any]) -> float:
    return float(np.fmax.reduce(values, initial=0.0))


def _count_nan(values: npt.NDArray[Any]) -> int:
    return int(np.isnan(values).sum()) if values.dtype.kind in "fcV" else 0
