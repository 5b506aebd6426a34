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

_BLOCK = 1 << 18  # elements of a block of rows, about
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
            magnitude: ``[rows]``, for DoRA.
            round_delta: round the product to the base's dtype before it is added, as PEFT does for embeddings.
            exact: multiply whole matrices by torch, as PEFT does.

        Raises:
            SourceError: shapes that do not go together.
            UnsupportedError: a dtype that such sums are not made in.
        """
        rows, rank, columns = left.shape[0], left.shape[1], right.shape[1]
        if base.shape != (rows, columns) or right.shape[0] != rank or (magnitude and magnitude.shape != (rows,)):
            raise SourceError(
                f"an adapter of {list(left.shape)} x {list(right.shape)} does not fit a weight of {list(base.shape)}"
            )
        if base.dtype.name not in _ROUNDED:
            raise UnsupportedError(f"LoRA on {base.dtype} weights is not supported")
        self.dtype, self.shape = written, base.shape
        self.inputs: Sequence[Tensor] = (base, left, right, *([magnitude] if magnitude else []))
        self.constant_bytes = 4 * (numel(right) + (numel(base) + numel(left) if exact else 0))
        self._scale, self._round, self._exact, self._magnitude = scale, round_delta, exact, magnitude
        self._rows = max(1, _BLOCK // max(1, columns))

    def described(self) -> str:
        """See ``Formula.described``."""
        return repr((self._scale, self._round, self._exact, self._magnitude is not None))

    def scratch(self, elements: int) -> int:
        """See ``Formula.scratch``: values, product, and factors of whole blocks."""
        columns = max(1, self.shape[1])
        rows = elements // columns + 2 * self._rows
        return 4 * (4 * rows * columns + 2 * rows * self.inputs[1].shape[1])

    def constants(self, read: Read) -> Any:
        """The right factor whole; when exact, the whole product."""
        left, right = self.inputs[1:3]
        second = read(right, 0, numel(right)).reshape(right.shape)
        if not self._exact:
            return second
        import torch

        first = read(left, 0, numel(left)).reshape(left.shape)
        return (torch.from_numpy(first) @ torch.from_numpy(second) * self._scale).numpy()

    def evaluate(self, first: int, last: int, read: Read, constants: Any) -> Array:
        """See ``Formula.evaluate``."""
        columns = self.shape[1]
        top = first // columns // self._rows * self._rows
        end = (last + columns - 1) // columns
        bottom = min(self.shape[0], (end + self._rows - 1) // self._rows * self._rows)
        delta = self._delta(top, bottom, read, constants)
        if self._magnitude is not None:
            values = read(self.inputs[0], top * columns, bottom * columns).reshape(delta.shape) + delta
            norms = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float32))
            values *= (read(self._magnitude, top, bottom) / norms)[:, None]
            return values.reshape(-1)[first - top * columns : last - top * columns]
        if self._round:
            delta = delta.astype(_ROUNDED[self.inputs[0].dtype.name]).astype(np.float32)
        values = read(self.inputs[0], first, last)
        values += delta.reshape(-1)[first - top * columns : last - top * columns]
        return values

    def _delta(self, top: int, bottom: int, read: Read, constants: Any) -> Array:
        if self._exact:
            return np.array(constants[top:bottom])
        left = self.inputs[1]
        rank = left.shape[1]
        factor = read(left, top * rank, bottom * rank).reshape(bottom - top, rank)
        delta = np.empty((bottom - top, self.shape[1]), np.float32)
        for at in range(0, bottom - top, self._rows):
            np.matmul(factor[at : at + self._rows], constants, out=delta[at : at + self._rows])
        delta *= np.float32(self._scale)
        return delta
