"""Boxes and copies behind a byte range, against numpy."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammerge.dtypes import dtype_named
from streammerge.execute.gather import copies_of, run_copies
from streammerge.execute.read import make_reader
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.fragment import Fragment
from streammerge.tensors.reshape import flat_boxes
from streammerge.tensors.virtual import Stored

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
Array = np.ndarray[Any, Any]


class Memory:
    """A reader of bytes in memory that refuses what a real one could not do."""

    def __init__(self, files: list[bytes], window: int) -> None:
        self._files, self._window = files, window
        self.calls = 0

    def window(self, file: int, offset: int, size: int) -> memoryview:
        """See ``Reader.window``."""
        assert 0 < size <= self._window
        assert 0 <= offset <= offset + size <= len(self._files[file])
        self.calls += 1
        return memoryview(self._files[file])[offset : offset + size]

    shared_window = window

    def close(self) -> None:
        """Nothing to close."""


@st.composite
def ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, int]:
    """A flat range of elements of a shape."""
    count = math.prod(shape)
    first = draw(st.integers(0, count))
    return first, draw(st.integers(first, count))


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    first, last = data.draw(ranges(shape))
    flat = np.arange(math.prod(shape)).reshape(shape)
    found = [
        flat[tuple(slice(s, s + n) for s, n in zip(b.start, b.shape, strict=True))]
        for b in flat_boxes(shape, first, last)
    ]
    assert [int(i) for part in found for i in part.ravel()] == list(range(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 5)])
def test_no_boxes_in_an_empty_shape(shape: tuple[int, ...]) -> None:
    assert list(flat_boxes(shape, 0, 0)) == []


def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """A grid of boxes that tile a shape, each as (start, size) per dim."""
    grid: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        steps = [(a, b - a) for a, b in pairwise(edges)]
        grid = [(*box, step) for box in grid for step in steps]
    return grid


def laid_out(values: Array, order: list[int], gap: int) -> tuple[bytes, tuple[int, ...]]:
    """A part as it may lie in a file: dims in another order, with ``gap`` unused elements between neighbours."""
    wide = np.zeros([values.shape[d] * (1 + gap) for d in order], values.dtype)
    steps: tuple[Any, ...] = (..., *(slice(None, None, 1 + gap) for _ in order))
    view = wide[steps].transpose(np.argsort(order))
    view[...] = values
    return wide.tobytes(), view.strides


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[Stored, Array, list[bytes]]:
    """A float32 tensor spread over fragments of two files, and its values."""
    shape = draw(SHAPES)
    values = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape).astype(np.float32)
    files = [b"\x01" * draw(st.integers(0, 9)), b"\x02" * draw(st.integers(0, 9))]
    fragments = []
    for box in cuts_of(draw, shape):
        part = values[tuple(slice(s, s + n) for s, n in box)]
        number = draw(st.integers(0, 1))
        content, strides = laid_out(part, list(draw(st.permutations(range(len(shape))))), draw(st.integers(0, 1)))
        fragments.append(
            Fragment(number, len(files[number]), tuple(s for s, _ in box), tuple(n for _, n in box), strides)
        )
        files[number] += content + b"\x03" * draw(st.integers(0, 5))
    return Stored(dtype_named("float32"), shape, tuple(fragments)), values, files


@given(stored_tensors(), st.data(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([4, 8, 12, 64, 4096]))
def test_copies_give_the_range(
    made: tuple[Stored, Array, list[bytes]], data: st.DataObject, written: str, window: int
) -> None:
    """Any range, at any place of the buffer, with windows down to one element."""
    tensor, values, files = made
    first, last = data.draw(ranges(tensor.shape))
    place = data.draw(st.integers(0, 9))
    dtype = dtype_named(written)
    buffer = bytearray(b"\xee" * (place + (last - first) * dtype.itemsize + 5))
    copies = copies_of(tensor, first, last, dtype, place, window)
    run_copies(copies, memoryview(buffer), Memory(files, window), window)
    assert buffer[:place] == b"\xee" * place
    assert buffer[-5:] == b"\xee" * 5
    import ml_dtypes

    expected = values.ravel()[first:last].astype(ml_dtypes.bfloat16 if written == "bfloat16" else np.float32)
    assert bytes(buffer[place:-5]) == expected.tobytes()


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 25), st.integers(0, 25), st.sampled_from([4, 8, 64]))
def test_expanded_fragment(rows: int, columns: int, one: int, two: int, window: int) -> None:
    """A dim with stride 0 holds the same bytes again and again."""
    row = np.arange(columns, dtype=np.int32) + 7
    tensor = Stored(dtype_named("int32"), (rows, columns), (Fragment(0, 0, (0, 0), (rows, columns), (0, 4)),))
    first, last = sorted(min(n, rows * columns) for n in (one, two))
    buffer = bytearray(4 * (last - first))
    copies = copies_of(tensor, first, last, tensor.dtype, 0, window)
    run_copies(copies, memoryview(buffer), Memory([row.tobytes()], window), window)
    assert bytes(buffer) == np.tile(row, rows)[first:last].tobytes()


def test_neighbours_are_read_together() -> None:
    """Eight pieces that lie side by side in the file are one call."""
    values = np.arange(64, dtype=np.int32).reshape(8, 8)
    parts = tuple(Fragment(0, 32 * i, (i, 0), (1, 8), (32, 4)) for i in range(8))
    tensor = Stored(dtype_named("int32"), (8, 8), parts)
    reader, buffer = Memory([values.tobytes()], 4096), bytearray(256)
    assert run_copies(copies_of(tensor, 0, 64, tensor.dtype, 0, 4096), memoryview(buffer), reader, 4096) == 256
    assert (reader.calls, bytes(buffer)) == (1, values.tobytes())


def test_little_of_a_wide_stride_is_not_read_whole() -> None:
    """One column of a large matrix costs less than the matrix."""
    wide = 1 << 16
    tensor = Stored(dtype_named("int32"), (16, 1), (Fragment(0, 0, (0, 0), (16, 1), (4 * wide, 4)),))
    reader, buffer = Memory([bytes(4 * wide * 16)], 8 << 20), bytearray(64)
    assert run_copies(copies_of(tensor, 0, 16, tensor.dtype, 0, 8 << 20), memoryview(buffer), reader, 8 << 20) < 1 << 20


@pytest.mark.parametrize("route", ["pread", "direct", "mmap"])
def test_readers_return_any_range(route: str, tmp_path: Path) -> None:
    """Around pages and at the end of the file, cached or not."""
    content = np.random.default_rng(0).bytes(40_000)
    path = tmp_path / "weights"
    path.write_bytes(content)
    status = path.stat()
    reader = make_reader(route, [SourceFile(path, status.st_size, status.st_mtime_ns, "")], 16_384)
    for offset in (0, 1, 4095, 4096, 4097, 12_288, 39_999, 40_000 - 16_384):
        for size in (1, 2, 4095, 4096, 4097, 16_384):
            end = min(offset + size, len(content))
            assert bytes(reader.window(0, offset, end - offset)) == content[offset:end]
    reader.close()
