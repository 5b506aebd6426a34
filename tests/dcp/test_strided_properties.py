"""`strided` re-indexes any stored tensor as numpy does, also below and above the other virtual tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammerge.dtypes import dtype_named
from streammerge.tensors.fragment import Fragment
from streammerge.tensors.virtual import Stored, Tensor, concat, narrow, permute, strided
from tests.support.raw import materialise

INT16 = dtype_named("int16")


@dataclass(frozen=True)
class Case:
    """A tensor in fragments of one file, its values, and the file's bytes."""

    tensor: Stored
    values: np.ndarray
    content: bytes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cut along every dim at random places; each piece lies anywhere, in any order of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    values = np.arange(1, math.prod(shape) + 1, dtype=np.int16).reshape(shape)
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    content, fragments = bytearray(), []
    for place in np.ndindex(*(len(edges) - 1 for edges in cuts)):
        start = tuple(edges[i] for edges, i in zip(cuts, place, strict=True))
        stop = tuple(edges[i + 1] for edges, i in zip(cuts, place, strict=True))
        piece = values[tuple(map(slice, start, stop))]
        order = draw(st.permutations(range(len(shape))))
        laid = np.ascontiguousarray(piece.transpose(order))
        content += bytes(draw(st.integers(0, 3)))
        strides = tuple(laid.strides[order.index(dim)] for dim in range(len(shape)))
        fragments.append(Fragment(0, len(content), start, piece.shape, strides))
        content += laid.tobytes()
    return Case(Stored(INT16, shape, tuple(draw(st.permutations(fragments)))), values, bytes(content))


@st.composite
def steps(draw: st.DrawFn, size: int) -> tuple[int, int, int]:
    """First index, step and length that fit into a dim."""
    first, step = draw(st.integers(0, size)), draw(st.integers(1, 4))
    return first, step, draw(st.integers(0, max(0, -(-(size - first) // step))))


def _strided(tensor: Tensor, values: np.ndarray, dim: int, how: tuple[int, int, int]) -> tuple[Tensor, np.ndarray]:
    first, step, length = how
    index = np.arange(length) * step + first
    return strided(tensor, dim, first, step, length), np.take(values, index, dim)


def _check(tensor: Tensor, values: np.ndarray, content: bytes, data: st.DataObject) -> None:
    """The whole tensor and a random box of it."""
    assert tensor.shape == values.shape
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        assert materialise(tensor, [path]).data == values.tobytes()
        start = tuple(data.draw(st.integers(0, size)) for size in values.shape)
        stop = tuple(data.draw(st.integers(low, size)) for low, size in zip(start, values.shape, strict=True))
        part: Tensor = tensor
        for dim, (low, high) in enumerate(zip(start, stop, strict=True)):
            part = narrow(part, dim, low, high - low)
        assert materialise(part, [path]).data == values[tuple(map(slice, start, stop))].tobytes()


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_any_dim(case: Case, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(case.tensor.shape) - 1))
    _check(*_strided(case.tensor, case.values, dim, data.draw(steps(case.values.shape[dim]))), case.content, data)


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_below_and_above_others(case: Case, data: st.DataObject) -> None:
    """Twice, over and under a permutation and a concatenation."""
    tensor: Tensor = case.tensor
    values = case.values
    for _ in range(3):
        dim = data.draw(st.integers(0, values.ndim - 1))
        tensor, values = _strided(tensor, values, dim, data.draw(steps(values.shape[dim])))
        order = data.draw(st.permutations(range(values.ndim)))
        tensor, values = permute(tensor, order), values.transpose(order)
        if data.draw(st.booleans()):
            dim = data.draw(st.integers(0, values.ndim - 1))
            tensor, values = concat([tensor, tensor], dim), np.concatenate([values, values], dim)
    _check(tensor, values, case.content, data)


@pytest.mark.parametrize("how", [(-1, 1, 1), (0, 0, 1), (0, -1, 1), (0, 1, -1), (4, 1, 1), (0, 2, 3), (3, 2, 2)])
def test_out_of_the_tensor(how: tuple[int, int, int]) -> None:
    tensor = Stored(INT16, (4, 2), (Fragment(0, 0, (0, 0), (4, 2), (4, 2)),))
    with pytest.raises(IndexError):
        strided(tensor, 0, *how)
