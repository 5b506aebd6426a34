"""Computed tensors: read like a file of their row-major bytes, which are made when they are asked for.

A formula is exposed as a stored tensor whose fragment lies in a *virtual file*, by a negative file number. Every view
of it, every tile and every comparison then works as for bytes on a disk; only the executor's reader knows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streammerge.dtypes import DType
from streammerge.tensors.fragment import Fragment, Index, contiguous_strides
from streammerge.tensors.virtual import Stored, Tensor

__all__ = ["Array", "Formula", "Formulas", "PlusOne", "Read"]

Array = np.ndarray[Any, np.dtype[np.float32]]
# (tensor, first, last) -> its elements ``first .. last``, flat and row-major, as float32.
Read = Callable[[Tensor, int, int], Array]


class Formula(ABC):
    """A tensor whose values are computed in float32 and rounded once, to ``dtype``.

    Attributes:
        dtype: element type of the values.
        shape: in elements.
        inputs: the tensors that it reads.
        constant_bytes: memory that what ``constants`` returns takes.
    """

    dtype: DType
    shape: Index
    inputs: Sequence[Tensor]
    constant_bytes: int = 0

    @abstractmethod
    def scratch(self, elements: int) -> int:
        """Bytes of memory at most for computing ``elements`` in a row, the float32 values included."""

    def constants(self, read: Read) -> Any:
        """What every evaluation needs; read once and kept for the next ones."""
        return None

    @abstractmethod
    def evaluate(self, first: int, last: int, read: Read, constants: Any) -> Array:
        """The values ``first .. last``, flat and row-major."""

    def described(self) -> str:
        """What distinguishes it from another formula of its kind over the same inputs."""
        return ""


@dataclass
class Formulas:
    """The formulas of a model; number ``n`` of them is the virtual file ``-1 - n``."""

    listed: list[Formula] = field(default_factory=list)

    def add(self, formula: Formula) -> Tensor:
        """The formula as a tensor."""
        self.listed.append(formula)
        shape, item = formula.shape, formula.dtype.itemsize
        whole = Fragment(-len(self.listed), 0, (0,) * len(shape), shape, contiguous_strides(shape, item))
        return Stored(formula.dtype, shape, (whole,))

    def digest(self) -> str:
        """A hash of what the formulas compute, from what."""
        result = hashlib.sha256()
        for formula in self.listed:
            text = f"{type(formula).__name__}\0{formula.dtype}\0{formula.shape}\0{formula.described()}\0"
            result.update(text.encode())
            for tensor in formula.inputs:
                whole = tensor.fragments_in((0,) * len(tensor.shape), tensor.shape)
                result.update(repr((str(tensor.dtype), tensor.shape, list(whole))).encode())
        return result.hexdigest()


class PlusOne(Formula):
    """``base + 1``: the weight of a norm that was centred at zero."""

    def __init__(self, base: Tensor) -> None:
        """Of ``base``, in its dtype."""
        self.dtype, self.shape, self.inputs = base.dtype, base.shape, (base,)

    def scratch(self, elements: int) -> int:
        """See ``Formula.scratch``."""
        return 8 * elements

    def evaluate(self, first: int, last: int, read: Read, constants: Any) -> Array:
        """See ``Formula.evaluate``."""
        return read(self.inputs[0], first, last) + np.float32(1)
