"""Reshaping, and flat row-major element ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammerge.dtypes import DType
from streammerge.tensors.fragment import Box, Fragment, Index, contiguous_strides
from streammerge.tensors.virtual import Stored, Tensor, stack

__all__ = ["flat_boxes", "flat_order", "reshape", "stack_in_order"]


def reshape(tensor: Tensor, shape: Index) -> Tensor:
    """The same elements in the same row-major order, as ``torch.reshape``."""
    if math.prod(shape) != math.prod(tensor.shape):
        raise ValueError(f"cannot make {shape} of {tensor.shape}")
    if shape == tensor.shape:
        return tensor
    if isinstance(tensor, Stored) and len(tensor.fragments) == 1:
        (f,) = tensor.fragments
        item = tensor.dtype.itemsize
        if f.shape == tensor.shape and f.strides == contiguous_strides(f.shape, item):
            whole = Fragment(f.file, f.offset, (0,) * len(shape), shape, contiguous_strides(shape, item))
            return Stored(tensor.dtype, shape, (whole,))
    return _Reshaped(tensor, shape)


def flat_order(tensor: Tensor) -> Tensor:
    """A tensor with the same elements in the same row-major order, whose boxes are cheap to find."""
    while isinstance(tensor, _Reshaped):
        tensor = tensor.base
    return tensor


def stack_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """As ``stack``; where the tensors are reshaped, so is the stack, and its flat order stays cheap."""
    return reshape(stack([flat_order(tensor) for tensor in tensors]), (len(tensors), *tensors[0].shape))


@dataclass(frozen=True, slots=True)
class _Reshaped:
    """A box of it is in general no box of the base.

    What is written in flat order asks the base (``flat_order``). Only a view of this node comes to
    ``fragments_in``, which goes through the base row by row.
    """

    base: Tensor
    shape: Index

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        for first, last in _flat_ranges(self.shape, start, shape):
            for box in flat_boxes(self.base.shape, first, last):
                for fragment in self.base.fragments_in(box.start, box.shape):
                    yield from self._placed(fragment)

    def _placed(self, fragment: Fragment) -> Iterator[Fragment]:
        item = self.dtype.itemsize
        step = fragment.strides[-1] if fragment.strides else item
        for row in _rows(fragment):
            first = _flat_index(self.base.shape, row.start)
            offset = row.offset
            for box in flat_boxes(self.shape, first, first + row.numel):
                yield Fragment(fragment.file, offset, box.start, box.shape, contiguous_strides(box.shape, step))
                offset += box.numel * step


def flat_boxes(shape: Index, first: int, last: int) -> Iterator[Box]:
    """Cut the flat, row-major element range ``first .. last`` of a shape into as few boxes as possible."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (row, begin), (end_row, end) = divmod(first, inner), divmod(last, inner)
    if begin and row < end_row:
        yield from _within_row(shape, row, begin, inner)
        row, begin = row + 1, 0
    if row == end_row:
        yield from _within_row(shape, row, begin, end)
        return
    yield Box((row, *(0 for _ in shape[1:])), (end_row - row, *shape[1:]))
    yield from _within_row(shape, end_row, 0, end)


def _within_row(shape: Index, row: int, begin: int, end: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], begin, end):
        yield Box((row, *box.start), (1, *box.shape))


def _flat_ranges(shape: Index, start: Index, box: Index) -> Iterator[tuple[int, int]]:
    """The flat element ranges that make up a box, in order."""
    if not all(box):
        return
    whole = len(shape)  # dims from here on are covered fully
    while whole and box[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    length = math.prod(box[outer:])
    for index in itertools.product(*(range(s, s + n) for s, n in zip(start[:outer], box[:outer], strict=True))):
        first = _flat_index(shape, (*index, *start[outer:]))
        yield first, first + length


def _flat_index(shape: Index, index: Index) -> int:
    return sum(i * step for i, step in zip(index, contiguous_strides(shape, 1), strict=True))


def _rows(fragment: Fragment) -> Iterator[Fragment]:
    """The fragment cut into pieces with one index in all dims but the last."""
    outer = fragment.shape[:-1]
    for index in itertools.product(*map(range, outer)):
        shift = sum(i * step for i, step in zip(index, fragment.strides[:-1], strict=True))
        place = (*(s + i for s, i in zip(fragment.start[:-1], index, strict=True)), *fragment.start[len(outer) :])
        yield Fragment(
            fragment.file,
            fragment.offset + shift,
            place,
            (*(1 for _ in outer), *fragment.shape[len(outer) :]),
            fragment.strides,
        )
