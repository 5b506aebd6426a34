"""The exact-cover check: boxes must tile a shape with no hole and no overlap."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from streammerge.tensors.fragment import Box, Index, intersect

__all__ = ["tiling_fault"]

_MAX_CELLS = 1 << 26


def tiling_fault(shape: Index, boxes: Sequence[Box]) -> str | None:
    """Say what is wrong with a tiling, or None when every element is covered exactly once.

    Works on the grid of all box edges, so its cost depends on the number of boxes, not on sizes.
    """
    boxes = [box for box in boxes if box.numel]
    for box in boxes:
        if any(s < 0 or s + n > size for s, n, size in zip(box.start, box.shape, shape, strict=True)):
            return f"box {list(box.shape)} at {list(box.start)} lies outside of {list(shape)}"
    if math.prod(shape) == 0:
        return None
    volume = sum(box.numel for box in boxes)
    if volume != math.prod(shape):
        word = "missing" if volume < math.prod(shape) else "claimed more than once"
        return f"{abs(volume - math.prod(shape))} of {math.prod(shape)} elements are {word}"
    if len(boxes) > 1 and _overlapping(shape, boxes):
        return "some elements are claimed more than once and others not at all"
    return None


def _overlapping(shape: Index, boxes: Sequence[Box]) -> bool:
    edges = [
        sorted({0, size, *(b.start[d] for b in boxes), *(b.start[d] + b.shape[d] for b in boxes)})
        for d, size in enumerate(shape)
    ]
    cells_per_dim = [len(e) - 1 for e in edges]
    if math.prod(cells_per_dim) > _MAX_CELLS:  # no real mesh: compare box by box instead
        return any(intersect(a.start, a.shape, b.start, b.shape) for i, a in enumerate(boxes) for b in boxes[:i])
    covered = np.zeros(cells_per_dim, dtype=bool)
    for box in boxes:
        cells = tuple(
            slice(bisect_left(e, s), bisect_left(e, s + n)) for e, s, n in zip(edges, box.start, box.shape, strict=True)
        )
        if covered[cells].any():
            return True
        covered[cells] = True
    return False
