"""Virtual tensors against numpy: any nesting of the operations gives the same elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streammerge.dtypes import dtype_named
from streammerge.tensors.fragment import Fragment
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import (
    Stored,
    Tensor,
    concat,
    narrow,
    nbytes,
    numel,
    permute,
    select,
    stack,
    strided,
    unbind,
)
from tests.support.raw import materialise

_INT16 = dtype_named("int16")
_FILE_ELEMENTS = 1 << 14

Pair = tuple[Tensor, np.ndarray]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the numbers 0, 1, 2, ... as int16."""
    path = tmp_path_factory.mktemp("virtual") / "numbers"
    np.arange(_FILE_ELEMENTS, dtype="<i2").tofile(path)
    return path


def _leaf(draw: st.DrawFn, shape: tuple[int, ...]) -> Pair:
    """A stored tensor in pieces: cut along one dim, each piece somewhere in the file with strides of its own."""
    values = np.zeros(shape, dtype="<i2")
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    size = shape[dim] if shape else 1
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    fragments = []
    for low, high in itertools.pairwise(edges):
        place = tuple(slice(low, high) if d == dim else slice(0, n) for d, n in enumerate(shape))
        part = values[place]
        order = draw(st.permutations(range(len(shape))))
        steps, step = [0] * len(shape), draw(st.integers(1, 2))
        for d in order:
            steps[d], step = step, step * max(1, part.shape[d])
        offset = draw(st.integers(0, 99))
        source = np.arange(_FILE_ELEMENTS, dtype="<i2")[offset:]
        values[place] = np.lib.stride_tricks.as_strided(source, part.shape, [2 * s for s in steps])
        start = tuple(s.start for s in place)
        fragments.append(Fragment(0, 2 * offset, start, part.shape, tuple(2 * s for s in steps)))
    return Stored(_INT16, shape, tuple(fragments)), values


def _narrowed(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    dim = draw(st.integers(0, values.ndim - 1))
    start = draw(st.integers(0, values.shape[dim]))
    length = draw(st.integers(0, values.shape[dim] - start))
    return narrow(tensor, dim, start, length), np.take(values, range(start, start + length), dim)


def _selected(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    dims = [d for d, n in enumerate(values.shape) if n]
    if not dims:
        return pair
    dim = draw(st.sampled_from(dims))
    index = draw(st.integers(0, values.shape[dim] - 1))
    return select(tensor, dim, index), np.take(values, index, dim)


def _permuted(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    dims = draw(st.permutations(range(values.ndim)))
    return permute(tensor, dims), values.transpose(dims)


def _joined(draw: st.DrawFn, pair: Pair) -> Pair:
    shape = pair[1].shape
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 3), max_size=2))
    others = [_leaf(draw, (*shape[:dim], size, *shape[dim + 1 :])) for size in sizes]
    parts = draw(st.permutations([pair, *others]))
    return concat([p[0] for p in parts], dim), np.concatenate([p[1] for p in parts], dim)


def _every_second(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    dim = draw(st.integers(0, values.ndim - 1))
    first = draw(st.integers(0, values.shape[dim]))
    step = draw(st.integers(1, 3))
    picked = np.take(values, range(first, values.shape[dim], step), dim)
    return strided(tensor, dim, first, step, picked.shape[dim]), picked


def _stacked(draw: st.DrawFn, pair: Pair) -> Pair:
    others = [_leaf(draw, pair[1].shape) for _ in range(draw(st.integers(0, 2)))]
    parts = draw(st.permutations([pair, *others]))
    return stack([p[0] for p in parts]), np.stack([p[1] for p in parts])


def _unbound(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    parts = unbind(tensor)
    assert len(parts) == len(values)
    if not parts:
        return pair
    index = draw(st.integers(0, len(parts) - 1))
    return parts[index], values[index]


def _reshaped(draw: st.DrawFn, pair: Pair) -> Pair:
    tensor, values = pair
    size, shape = values.size, []
    while size > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])))
        size //= shape[-1]
    shape = draw(st.permutations([*shape, size]))
    return reshape(tensor, tuple(shape)), values.reshape(shape)


_STEPS: tuple[Callable[[st.DrawFn, Pair], Pair], ...] = (
    _narrowed,
    _selected,
    _permuted,
    _joined,
    _every_second,
    _stacked,
    _unbound,
    _reshaped,
)


@st.composite
def _nested(draw: st.DrawFn) -> Pair:
    pair = _leaf(draw, draw(st.lists(st.integers(0, 5), max_size=4).map(tuple)))
    for step in draw(st.lists(st.sampled_from(_STEPS), max_size=5)):
        if pair[1].ndim or step in (_permuted, _stacked, _reshaped):
            pair = step(draw, pair)
    return pair


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=_nested(), data=st.data())
def test_nested_operations_agree_with_numpy(numbers: Path, pair: Pair, data: st.DataObject) -> None:
    tensor, values = pair
    assert (tensor.shape, numel(tensor), nbytes(tensor)) == (values.shape, values.size, 2 * values.size)
    assert materialise(tensor, [numbers]).data == values.tobytes()
    start = tuple(data.draw(st.integers(0, n)) for n in values.shape)
    shape = tuple(data.draw(st.integers(0, n - s)) for n, s in zip(values.shape, start, strict=True))
    box = values[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
    part: Tensor = tensor
    for dim, (low, size) in enumerate(zip(start, shape, strict=True)):
        part = narrow(part, dim, low, size)
    assert materialise(part, [numbers]).data == box.tobytes()
    for fragment in tensor.fragments_in(start, shape):
        assert all(
            s <= own and own + n <= s + size
            for s, size, own, n in zip(start, shape, fragment.start, fragment.shape, strict=True)
        )


def test_wrong_arguments_are_refused() -> None:
    tensor = Stored(_INT16, (2, 3), (Fragment(0, 0, (0, 0), (2, 3), (6, 2)),))
    other = Stored(dtype_named("int8"), (2, 3), ())
    for call in (
        lambda: narrow(tensor, 0, 1, 2),
        lambda: narrow(tensor, 0, -1, 1),
        lambda: select(tensor, 1, 3),
        lambda: permute(tensor, (0, 0)),
        lambda: permute(tensor, (0,)),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="cannot join"):
        concat([tensor, other], 0)
    with pytest.raises(ValueError, match="cannot join"):
        concat([tensor, narrow(tensor, 1, 0, 2)], 0)
    with pytest.raises(ValueError, match="cannot stack"):
        stack([tensor, narrow(tensor, 1, 0, 2)])
    with pytest.raises(ValueError, match="cannot make"):
        reshape(tensor, (5,))
