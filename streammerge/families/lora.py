"""The arithmetic of LoRA, as formulas: the product in float32, the sum in float32, rounded once.

Values are computed in blocks of rows at fixed places, whatever range is asked for: a matrix product may round
differently in another shape, and the result must not depend on the memory budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from streammerge.dtypes import DType
from streammerge.errors import SourceError, UnsupportedError
from streammerge.tensors.formula import Array, Formula, Read
from streammerge.tensors.virtual import Tensor, numel

__all__ = ["LoraSum"]

_BLOCK = 1 << 17  # elements of a block of rows, about
_ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class LoraSum(Formula):
    """``base + scale * left @ right``, all of the rows of ``left`` in blocks.

    With a ``magnitude`` it is DoRA: each row is scaled to have that norm.
    """

    def __init__(
        self,
        base: Tensor,
        left: Tensor,
        right: Tensor,
        scale: float,
        written: DType,
        *,
        magnitude: Tensor | None = None,
        by_column: bool = False,
        round_delta: bool = False,
        exact: bool = False,
    ) -> None:
        """Describe the sum.

        Args:
            base: ``[rows, columns]``.
            left: ``[rows, rank]``.
            right: ``[rank, columns]``.
            scale: alpha over rank, or over its root.
            written: element type of the result.
            magnitude: the norms of the rows, for DoRA.
            by_column: ``magnitude`` has the norms of the columns instead, as for an embedding.
            round_delta: round the product to the base's dtype before it is added, as PEFT does for embeddings.
            exact: multiply whole matrices by torch, as PEFT does.

        Raises:
            SourceError: shapes that do not go together.
            UnsupportedError: a dtype that such sums are not made in.
        """
        rows, rank, columns = left.shape[0], left.shape[1], right.shape[1]
        if (
            base.shape != (rows, columns)
            or right.shape[0] != rank
            or (magnitude and magnitude.shape != (columns if by_column else rows,))
        ):
            raise SourceError(
                f"an adapter of {list(left.shape)} x {list(right.shape)} does not fit a weight of {list(base.shape)}"
            )
        if base.dtype.name not in _ROUNDED:
            raise UnsupportedError(f"LoRA on {base.dtype} weights is not supported")
        self.dtype, self.shape = written, base.shape
        self.inputs: Sequence[Tensor] = (base, left, right, *([magnitude] if magnitude else []))
        self.constant_bytes = 4 * (numel(right) + (3 * numel(base) + numel(left) if exact else 0))
        self._scale, self._round, self._exact, self._magnitude = scale, round_delta, exact, magnitude
        self._by_column = by_column
        self._rows = max(1, _BLOCK // max(1, columns))

    def described(self) -> str:
        """See ``Formula.described``."""
        return repr((self._scale, self._round, self._exact, self._magnitude is not None, self._by_column))

    def scratch(self, elements: int) -> int:
        """See ``Formula.scratch``: values, product, and factors of whole blocks."""
        columns = max(1, self.shape[1])
        rows = elements // columns + 2 * self._rows
        return 4 * (4 * rows * columns + 2 * rows * self.inputs[1].shape[1])

    def constants(self, read: Read) -> Any:
        """The right factor whole, or when exact the product; and for DoRA by columns their factors."""
        right = self.inputs[2]
        factor = read(right, 0, numel(right)).reshape(right.shape)
        if self._exact:
            factor = self._product(read, factor)
        else:
            factor *= np.float32(self._scale)
        return factor, self._column_factors(read, factor) if self._magnitude is not None and self._by_column else None

    def _product(self, read: Read, right: Array) -> Array:
        import torch

        left = self.inputs[1]
        first = read(left, 0, numel(left)).reshape(left.shape)
        made: Array = (torch.from_numpy(first) @ torch.from_numpy(right) * self._scale).numpy()
        return made

    def _column_factors(self, read: Read, factor: Array) -> Array:
        """What each column is multiplied by: its magnitude over the norm of all of its rows."""
        assert self._magnitude is not None
        if self._exact:
            norms = _norms(self._sums(0, self.shape[0], read, factor).T)
            return _quotient(read(self._magnitude, 0, self.shape[1]), norms)
        squares = np.zeros(self.shape[1], np.float64)
        for top in range(0, self.shape[0], self._rows):
            values = self._sums(top, min(self.shape[0], top + self._rows), read, factor)
            squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
        norms = np.sqrt(squares).astype(np.float32)
        return _quotient(read(self._magnitude, 0, self.shape[1]), norms)

    def evaluate(self, first: int, last: int, read: Read, constants: Any) -> Array:
        """See ``Formula.evaluate``."""
        factor, by_column = constants
        columns = self.shape[1]
        top = first // columns // self._rows * self._rows
        end = (last + columns - 1) // columns
        bottom = min(self.shape[0], (end + self._rows - 1) // self._rows * self._rows)
        wanted = slice(first - top * columns, last - top * columns)
        if self._magnitude is not None:
            values = self._sums(top, bottom, read, factor)
            values *= by_column if by_column is not None else self._row_factors(values, top, bottom, read)
            return values.reshape(-1)[wanted]
        delta = self._delta(top, bottom, read, factor)
        if self._round:
            delta = delta.astype(_ROUNDED[self.inputs[0].dtype.name]).astype(np.float32)
        base = read(self.inputs[0], first, last)
        base += delta.reshape(-1)[wanted]
        return base

    def _row_factors(self, values: Array, top: int, bottom: int, read: Read) -> Array:
        assert self._magnitude is not None
        squares = np.asarray(np.einsum("ij,ij->i", values, values, dtype=np.float64), np.float64)
        norms = np.sqrt(squares).astype(np.float32)
        return _quotient(read(self._magnitude, top, bottom), _norms(values) if self._exact else norms)[:, None]

    def _sums(self, top: int, bottom: int, read: Read, factor: Array) -> Array:
        values = self._delta(top, bottom, read, factor)
        columns = self.shape[1]
        values += read(self.inputs[0], top * columns, bottom * columns).reshape(values.shape)
        return values

    def _delta(self, top: int, bottom: int, read: Read, factor: Array) -> Array:
        if self._exact:
            return np.array(factor[top:bottom])
        left = self.inputs[1]
        rank = left.shape[1]
        rows = read(left, top * rank, bottom * rank).reshape(bottom - top, rank)
        delta = np.empty((bottom - top, self.shape[1]), np.float32)
        for at in range(0, bottom - top, self._rows):
            np.matmul(rows[at : at + self._rows], factor, out=delta[at : at + self._rows])
        return delta


def _quotient(magnitude: Array, norms: Array) -> Array:
    return np.divide(magnitude, norms, dtype=np.float32)


def _norms(values: Array) -> Array:
    """The norm of each row, with torch's rounding."""
    import torch

    made: Array = torch.linalg.norm(torch.from_numpy(values), dim=1).numpy()
    return made
