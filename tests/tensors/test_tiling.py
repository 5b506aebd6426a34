"""`tiling_fault` against counting every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streammerge.tensors import tiling
from streammerge.tensors.fragment import Box
from streammerge.tensors.tiling import tiling_fault

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def _tiled(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape cut into boxes at random, sometimes with one box lost, doubled, moved or stretched."""
    shape = draw(_SHAPES)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(0, box.shape[dim]))
        boxes += [_part(box, dim, 0, size), _part(box, dim, size, box.shape[dim] - size)]
    fault = draw(st.sampled_from(["none", "none", "lose", "double", "move", "stretch"]))
    at = draw(st.integers(0, len(boxes) - 1))
    box = boxes[at]
    if fault == "lose":
        del boxes[at]
    elif fault == "double":
        boxes.append(box)
    elif shape and fault in ("move", "stretch"):
        dim, by = draw(st.integers(0, len(shape) - 1)), draw(st.integers(-2, 2))
        boxes[at] = (
            _part(box, dim, by, box.shape[dim]) if fault == "move" else _part(box, dim, 0, max(0, box.shape[dim] + by))
        )
    return shape, draw(st.permutations(boxes))


def _part(box: Box, dim: int, shift: int, size: int) -> Box:
    start, shape = list(box.start), list(box.shape)
    start[dim] += shift
    shape[dim] = size
    return Box(tuple(start), tuple(shape))


def _exact(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    margin = 8
    count = np.zeros([size + 2 * margin for size in shape], dtype=int)
    for box in boxes:
        count[tuple(slice(margin + s, margin + s + n) for s, n in zip(box.start, box.shape, strict=True))] += 1
    wanted = np.zeros_like(count)
    wanted[tuple(slice(margin, margin + size) for size in shape)] = 1
    return bool((count == wanted).all())


@settings(deadline=None)
@given(_tiled())
def test_agrees_with_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert (tiling_fault(shape, boxes) is None) == _exact(shape, boxes)


@settings(deadline=None)
@given(_tiled())
def test_the_way_for_many_boxes_agrees_too(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    limit = tiling._MAX_CELLS
    tiling._MAX_CELLS = 0
    try:
        assert (tiling_fault(shape, boxes) is None) == _exact(shape, boxes)
    finally:
        tiling._MAX_CELLS = limit


def test_says_what_is_wrong() -> None:
    half, whole = Box((0, 0), (2, 3)), Box((0, 0), (4, 3))
    assert tiling_fault((4, 3), [half]) == "6 of 12 elements are missing"
    assert tiling_fault((4, 3), [whole, half]) == "6 of 12 elements are claimed more than once"
    assert "outside" in (tiling_fault((4, 3), [Box((3, 0), (2, 3))]) or "")
    assert "more than once and others not at all" in (tiling_fault((4, 3), [half, half]) or "")
