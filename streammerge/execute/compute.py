"""Read what is computed: a reader that makes the bytes of virtual files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from streammerge.dtypes import dtype_named
from streammerge.execute.casts import kernel
from streammerge.execute.gather import copies_of, run_copies
from streammerge.execute.read import Reader, make_reader
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.formula import Array, Formula, Formulas
from streammerge.tensors.virtual import Stored, Tensor

__all__ = ["compute_scratch", "computing_reader", "formula_casts"]

_FLOAT32 = dtype_named("float32")
_KEPT = 2  # formulas whose constants are kept; neighbouring tiles belong to one or two tensors


def computing_reader(route: str, sources: Sequence[SourceFile], formulas: Formulas | None, size: int) -> Reader:
    """A reader of files and formulas whose windows hold up to ``size`` bytes.

    Args:
        route: a name in ``read.READERS``.
        sources: the files with a number from 0 on.
        formulas: the virtual files, or None without.
    """
    reader = make_reader(route, sources, size)
    if formulas is None or not formulas.listed:
        return reader
    # Each worker computes for itself; the linear algebra library must not start threads of its own.
    threadpool_limits(1)
    return _ComputingReader(reader, formulas.listed, size)


def formula_casts(formulas: Formulas) -> set[tuple[Any, Any]]:
    """The (stored, written) dtypes that computing converts between."""
    read = {(tensor.dtype, _FLOAT32) for one in formulas.listed for tensor in one.inputs}
    written = {(_FLOAT32, one.dtype) for one in formulas.listed}
    return {pair for pair in read | written if pair[0] != pair[1]}


def compute_scratch(formulas: Formulas, window: int) -> int:
    """Bytes that a worker with such a window needs for computing."""
    scratch = max((one.scratch(_elements(one, window)) for one in formulas.listed), default=0)
    constants = max((one.constant_bytes for one in formulas.listed), default=0)
    return _depth(formulas) * (scratch + _KEPT * constants)


def _depth(formulas: Formulas) -> int:
    """How many formulas are computed one inside another, at most."""
    depths: list[int] = []
    for formula in formulas.listed:  # an input is always listed before what is made of it
        below = [
            depths[-1 - f.file]
            for one in formula.inputs
            if isinstance(one, Stored)
            for f in one.fragments
            if f.file < 0
        ]
        depths.append(1 + max(below, default=0))
    return max(depths, default=0)


def _elements(formula: Formula, window: int) -> int:
    total = 1
    for size in formula.shape:
        total *= size
    return min(total, window // formula.dtype.itemsize)


class _ComputingReader:
    """See ``Reader``."""

    def __init__(self, reader: Reader, formulas: Sequence[Formula], size: int) -> None:
        self._reader, self._formulas, self._size = reader, formulas, size
        self._constants: OrderedDict[int, Any] = OrderedDict()

    def window(self, file: int, offset: int, size: int) -> memoryview:
        return self._reader.window(file, offset, size) if file >= 0 else self._computed(file, offset, size)

    def shared_window(self, file: int, offset: int, size: int) -> memoryview:
        return self._reader.shared_window(file, offset, size) if file >= 0 else self._computed(file, offset, size)

    def close(self) -> None:
        self._constants.clear()
        self._reader.close()

    def _computed(self, file: int, offset: int, size: int) -> memoryview:
        formula = self._formulas[-1 - file]
        item = formula.dtype.itemsize
        first, last = offset // item, (offset + size) // item
        values = np.ascontiguousarray(formula.evaluate(first, last, self._read, self._constants_of(file, formula)))
        rounded = np.empty(last - first, formula.dtype.numpy)
        kernel(_FLOAT32, formula.dtype)(values.view(_FLOAT32.numpy), rounded)
        return rounded.data.cast("B")

    def _constants_of(self, file: int, formula: Formula) -> Any:
        if file not in self._constants:
            while len(self._constants) >= _KEPT:
                self._constants.popitem(last=False)
            self._constants[file] = formula.constants(self._read)
        self._constants.move_to_end(file)
        return self._constants[file]

    def _read(self, tensor: Tensor, first: int, last: int) -> Array:
        values = np.empty(last - first, np.float32)
        copies = copies_of(tensor, first, last, _FLOAT32, 0, self._size)
        run_copies(copies, values.data.cast("B"), self, self._size)  # an input may be computed, too
        return values
