"""A fragment: this box of a tensor lives in this strided region of that file."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Box", "Fragment", "contiguous_strides", "intersect"]

Index = tuple[int, ...]


def contiguous_strides(shape: Index, itemsize: int) -> Index:
    """Row-major strides in bytes of ``shape`` (elements)."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: first index and size per dim, in elements."""

    start: Index
    shape: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def intersect(a_start: Index, a_shape: Index, b_start: Index, b_shape: Index) -> Box | None:
    """The box both cover, or None when that is empty. All have the same number of dims."""
    start = tuple(map(max, a_start, b_start))
    shape = tuple(
        min(s + n, t + m) - lo for s, n, t, m, lo in zip(a_start, a_shape, b_start, b_shape, start, strict=True)
    )
    return Box(start, shape) if all(n > 0 for n in shape) else None


@dataclass(frozen=True, slots=True)
class Fragment:
    """Where one box of a tensor lies on disk.

    Attributes:
        file: index into the catalogue's list of files.
        offset: absolute byte offset of the box's first element.
        start: first index of the box in the tensor, in elements per dim.
        shape: size of the box, in elements per dim.
        strides: bytes between neighbours per dim, as the elements lie in the file; 0 for an
            expanded dim.
    """

    file: int
    offset: int
    start: Index
    shape: Index
    strides: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def extent(self, itemsize: int) -> int:
        """Bytes from the first element to the end of the last one in the file."""
        if not self.numel:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return last + itemsize

    def cut(self, start: Index, shape: Index) -> Fragment | None:
        """The part of this fragment inside the box, or None when there is none."""
        box = intersect(self.start, self.shape, start, shape)
        if box is None:
            return None
        shift = sum((lo - own) * step for lo, own, step in zip(box.start, self.start, self.strides, strict=True))
        return Fragment(self.file, self.offset + shift, box.start, box.shape, self.strides)
