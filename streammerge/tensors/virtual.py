"""Virtual tensors: a dtype, a shape, and the fragments that any box of them is made of.

Leaves are ``Stored``; the other nodes re-index their base exactly. Nothing here reads a byte:
``fragments_in`` answers with the file regions that hold a box, in the node's own coordinates.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streammerge.dtypes import DType
from streammerge.tensors.fragment import Fragment, Index, intersect

__all__ = ["Stored", "Tensor", "concat", "narrow", "nbytes", "numel", "permute", "select", "stack", "strided", "unbind"]


class Tensor(Protocol):
    """What the plan and the executor need to know of a tensor."""

    @property
    def dtype(self) -> DType:
        """Element type as stored."""
        ...

    @property
    def shape(self) -> Index:
        """Sizes in elements."""
        ...

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        """The fragments that hold the box, each cut to it, in this tensor's coordinates."""
        ...


def numel(tensor: Tensor) -> int:
    """Number of elements of the tensor."""
    return math.prod(tensor.shape)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the tensor in its stored dtype."""
    return numel(tensor) * tensor.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor as a source holds it: fragments that tile it exactly (the source has checked).

    Attributes:
        fragments: non-empty fragments, sorted by start.
    """

    dtype: DType
    shape: Index
    fragments: tuple[Fragment, ...]
    _first: list[int] = field(init=False, repr=False, compare=False)
    _longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted((f for f in self.fragments if f.numel), key=lambda f: f.start))
        object.__setattr__(self, "fragments", ordered)
        has_dims = bool(self.shape)
        object.__setattr__(self, "_first", [f.start[0] for f in ordered] if has_dims else [])
        longest = max((f.shape[0] for f in ordered), default=0) if has_dims else 0
        object.__setattr__(self, "_longest", longest)

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        """See ``Tensor.fragments_in``. Skips by dim 0, the one that shards are mostly cut along."""
        candidates = self.fragments
        if start:
            low = bisect_left(self._first, start[0] - self._longest + 1)
            high = bisect_right(self._first, start[0] + shape[0] - 1)
            candidates = self.fragments[low:high]
        for fragment in candidates:
            part = fragment.cut(start, shape)
            if part is not None:
                yield part


@dataclass(frozen=True, slots=True)
class _Narrowed:
    base: Tensor
    start: Index
    shape: Index

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        shifted = tuple(a + b for a, b in zip(start, self.start, strict=True))
        for f in self.base.fragments_in(shifted, shape):
            place = tuple(a - b for a, b in zip(f.start, self.start, strict=True))
            yield Fragment(f.file, f.offset, place, f.shape, f.strides)


@dataclass(frozen=True, slots=True)
class _Selected:
    base: Tensor
    dim: int
    index: int

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    @property
    def shape(self) -> Index:
        return _without(self.base.shape, self.dim)

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        inner_start = (*start[: self.dim], self.index, *start[self.dim :])
        inner_shape = (*shape[: self.dim], 1, *shape[self.dim :])
        for f in self.base.fragments_in(inner_start, inner_shape):
            yield Fragment(
                f.file,
                f.offset,
                _without(f.start, self.dim),
                _without(f.shape, self.dim),
                _without(f.strides, self.dim),
            )


@dataclass(frozen=True, slots=True)
class _Strided:
    base: Tensor
    dim: int
    first: int
    step: int
    length: int

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    @property
    def shape(self) -> Index:
        return _replaced(self.base.shape, self.dim, self.length)

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        d, step = self.dim, self.step
        if shape[d] == 0:
            return
        inner_start = _replaced(start, d, self.first + start[d] * step)
        inner_shape = _replaced(shape, d, (shape[d] - 1) * step + 1)
        for f in self.base.fragments_in(inner_start, inner_shape):
            low = -(-(f.start[d] - self.first) // step)  # the first of our indices at or after the fragment
            skip = self.first + low * step - f.start[d]
            count = -(-(f.shape[d] - skip) // step)
            if count > 0:
                yield Fragment(
                    f.file,
                    f.offset + skip * f.strides[d],
                    _replaced(f.start, d, low),
                    _replaced(f.shape, d, count),
                    _replaced(f.strides, d, f.strides[d] * step),
                )


@dataclass(frozen=True, slots=True)
class _Permuted:
    base: Tensor
    dims: Index

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    @property
    def shape(self) -> Index:
        return _reorder(self.base.shape, self.dims)

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        back = tuple(self.dims.index(d) for d in range(len(self.dims)))
        for f in self.base.fragments_in(_reorder(start, back), _reorder(shape, back)):
            yield Fragment(
                f.file,
                f.offset,
                _reorder(f.start, self.dims),
                _reorder(f.shape, self.dims),
                _reorder(f.strides, self.dims),
            )


@dataclass(frozen=True, slots=True)
class _Concatenated:
    parts: tuple[Tensor, ...]
    dim: int
    edges: Index

    @property
    def dtype(self) -> DType:
        return self.parts[0].dtype

    @property
    def shape(self) -> Index:
        return _replaced(self.parts[0].shape, self.dim, self.edges[-1])

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        first, last = start[self.dim], start[self.dim] + shape[self.dim]
        for number in range(bisect_right(self.edges, first) - 1, bisect_left(self.edges, last)):
            part, edge = self.parts[number], self.edges[number]
            own = _replaced(start, self.dim, first - edge)
            box = intersect(own, shape, (0,) * len(shape), part.shape)
            if box is None:
                continue
            for f in part.fragments_in(box.start, box.shape):
                place = _replaced(f.start, self.dim, f.start[self.dim] + edge)
                yield Fragment(f.file, f.offset, place, f.shape, f.strides)


@dataclass(frozen=True, slots=True)
class _Stacked:
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> DType:
        return self.parts[0].dtype

    @property
    def shape(self) -> Index:
        return (len(self.parts), *self.parts[0].shape)

    def fragments_in(self, start: Index, shape: Index) -> Iterator[Fragment]:
        for number in range(start[0], start[0] + shape[0]):
            for f in self.parts[number].fragments_in(start[1:], shape[1:]):
                yield Fragment(f.file, f.offset, (number, *f.start), (1, *f.shape), (0, *f.strides))


def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Indices ``start .. start + length`` of one dim, as ``torch.narrow``."""
    if not 0 <= start <= start + length <= tensor.shape[dim]:
        raise IndexError(f"narrow({start}, {length}) of a dim of size {tensor.shape[dim]}")
    first = _replaced((0,) * len(tensor.shape), dim, start)
    return _Narrowed(tensor, first, _replaced(tensor.shape, dim, length))


def strided(tensor: Tensor, dim: int, first: int, step: int, length: int) -> Tensor:
    """Every ``step``-th index of one dim, ``length`` of them from ``first`` on."""
    if first < 0 or step < 1 or length < 0 or (length and first + (length - 1) * step >= tensor.shape[dim]):
        raise IndexError(f"strided({first}, {step}, {length}) of a dim of size {tensor.shape[dim]}")
    return _Strided(tensor, dim, first, step, length)


def select(tensor: Tensor, dim: int, index: int) -> Tensor:
    """One index of a dim, which goes away, as ``torch.select``."""
    if not 0 <= index < tensor.shape[dim]:
        raise IndexError(f"select({index}) of a dim of size {tensor.shape[dim]}")
    return _Selected(tensor, dim, index)


def permute(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Reorder the dims, as ``torch.permute``."""
    if sorted(dims) != list(range(len(tensor.shape))):
        raise IndexError(f"{tuple(dims)} is no order of {len(tensor.shape)} dims")
    return _Permuted(tensor, tuple(dims))


def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join along one dim, as ``torch.cat``. All other sizes and the dtypes must agree."""
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or _without(part.shape, dim) != _without(first.shape, dim):
            raise ValueError(f"cannot join {part.dtype} {part.shape} to {first.dtype} {first.shape} along dim {dim}")
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + part.shape[dim])
    return _Concatenated(tuple(parts), dim, tuple(edges))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Join along a new first dim, as ``torch.stack``. All shapes and dtypes must agree."""
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape != first.shape:
            raise ValueError(f"cannot stack {part.dtype} {part.shape} on {first.dtype} {first.shape}")
    return _Stacked(tuple(parts))


def unbind(tensor: Tensor) -> list[Tensor]:
    """The tensors along the first dim, as ``torch.unbind``.

    A stored tensor that is cut there anyway (layers, experts) comes apart into stored tensors, so that
    each looks through its own fragments only.
    """
    if not isinstance(tensor, Stored) or any(f.shape[0] != 1 for f in tensor.fragments):
        return [select(tensor, 0, index) for index in range(tensor.shape[0])]
    parts: list[list[Fragment]] = [[] for _ in range(tensor.shape[0])]
    for f in tensor.fragments:
        parts[f.start[0]].append(Fragment(f.file, f.offset, f.start[1:], f.shape[1:], f.strides[1:]))
    return [Stored(tensor.dtype, tensor.shape[1:], tuple(part)) for part in parts]


def _without(values: Index, dim: int) -> Index:
    return values[:dim] + values[dim + 1 :]


def _replaced(values: Index, dim: int, value: int) -> Index:
    return (*values[:dim], value, *values[dim + 1 :])


def _reorder(values: Index, dims: Index) -> Index:
    return tuple(values[d] for d in dims)
