"""Fill a tile: find the fragments behind a byte range of an output file and copy them into place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from streammerge.dtypes import DType
from streammerge.execute.casts import kernel
from streammerge.execute.read import Reader
from streammerge.plan.plan import OutputFile
from streammerge.tensors.fragment import Fragment, Index, contiguous_strides
from streammerge.tensors.reshape import flat_boxes, flat_order
from streammerge.tensors.virtual import Tensor

__all__ = ["Copy", "copies_of", "fill", "run_copies"]

# Reading a gap of this many bytes costs less than a second call.
_MAX_GAP = 32 << 10
# A strided fragment is read in one piece when at least a fourth of its extent is wanted, or when
# the extent is this small; otherwise it is split along its widest stride.
_MIN_DENSITY = 4
_SMALL_EXTENT = 64 << 10
# Transposing goes faster by a factor of ten in strips of so many elements: their lines stay in the cache.
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """One fragment's way into a buffer.

    Attributes:
        fragment: what to read; its extent fits a window.
        extent: bytes in the file from its first element to the end of its last.
        place: byte offset of its first element in the buffer.
        strides: bytes between its elements in the buffer, per dim.
        stored, written: element types before and after.
    """

    fragment: Fragment
    extent: int
    place: int
    strides: Index
    stored: DType
    written: DType


def fill(output: OutputFile, start: int, tile: memoryview, reader: Reader, window: int) -> int:
    """Fill ``tile`` with the bytes ``start ..`` of an output file.

    Args:
        start: byte offset in the file; a multiple of every element size.
        window: most bytes to read at once.

    Returns:
        The bytes read.
    """
    end = start + len(tile)
    header = output.header[start:end]
    tile[: len(header)] = header
    copies: list[Copy] = []
    for target in output.tensors_in(start, end):
        item = target.dtype.itemsize
        first = max(0, start - target.offset) // item
        last = (min(end, target.offset + target.size) - target.offset) // item
        place = target.offset + first * item - start
        copies += copies_of(target.tensor, first, last, target.dtype, place, window)
    return run_copies(copies, tile, reader, window)


def copies_of(tensor: Tensor, first: int, last: int, written: DType, place: int, window: int) -> Iterator[Copy]:
    """The copies that put elements ``first .. last`` (flat, row-major) of a tensor at ``place`` of a buffer."""
    tensor = flat_order(tensor)
    strides = contiguous_strides(tensor.shape, written.itemsize)
    item = tensor.dtype.itemsize
    origin = place - first * written.itemsize
    for box in flat_boxes(tensor.shape, first, last):
        for whole in tensor.fragments_in(box.start, box.shape):
            for fragment in _fitting(whole, item, window):
                at = origin + sum(i * step for i, step in zip(fragment.start, strides, strict=True))
                yield Copy(fragment, fragment.extent(item), at, strides, tensor.dtype, written)


def _fitting(fragment: Fragment, item: int, window: int) -> Iterator[Fragment]:
    """Split a fragment until each part can be read in one window without much waste."""
    extent = fragment.extent(item)
    spans = [(n - 1) * step for n, step in zip(fragment.shape, fragment.strides, strict=True)]
    dim = max(range(len(spans)), key=spans.__getitem__, default=0)
    gap = fragment.strides[dim] - (extent - spans[dim]) if spans else 0
    # Parts with small gaps between them would be read together again.
    wasteful = gap > _MAX_GAP and extent > _SMALL_EXTENT and extent > _MIN_DENSITY * fragment.numel * item
    if extent <= window and not wasteful:
        yield fragment
        return
    half = fragment.shape[dim] // 2
    for begin, size in ((0, half), (half, fragment.shape[dim] - half)):
        start = list(fragment.start)
        shape = list(fragment.shape)
        start[dim] += begin
        shape[dim] = size
        part = fragment.cut(tuple(start), tuple(shape))
        if part is not None:
            yield from _fitting(part, item, window)


def run_copies(copies: Iterable[Copy], buffer: memoryview, reader: Reader, most: int) -> int:
    """Read the copies' fragments in file order, neighbours together, and put them in place."""
    read = 0
    for group in _neighbours(sorted(copies, key=_position), most):
        begin = group[0].fragment.offset
        size = max(copy.fragment.offset + copy.extent for copy in group) - begin
        wanted = sum(copy.fragment.numel * copy.stored.itemsize for copy in group)
        window = reader.window if 2 * wanted > size else reader.shared_window
        view = window(group[0].fragment.file, begin, size)
        read += size
        for copy in group:
            _run(copy, view, begin, buffer)
    return read


def _position(copy: Copy) -> tuple[int, int]:
    return copy.fragment.file, copy.fragment.offset


def _neighbours(ordered: list[Copy], window: int) -> Iterator[list[Copy]]:
    group: list[Copy] = []
    end = 0
    for copy in ordered:
        fragment = copy.fragment
        if group and (
            fragment.file != group[0].fragment.file
            or fragment.offset > end + _MAX_GAP
            or max(end, fragment.offset + copy.extent) - group[0].fragment.offset > window
        ):
            yield group
            group = []
        end = max(end, fragment.offset + copy.extent) if group else fragment.offset + copy.extent
        group.append(copy)
    if group:
        yield group


def _run(copy: Copy, view: memoryview, begin: int, buffer: memoryview) -> None:
    fragment = copy.fragment
    source: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.ndarray(
        fragment.shape, copy.stored.numpy, view, fragment.offset - begin, fragment.strides
    )
    target: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.ndarray(
        fragment.shape, copy.written.numpy, buffer, copy.place, copy.strides
    )
    convert = kernel(copy.stored, copy.written)
    dim = _transposed_dim(fragment, copy.strides)
    if dim is None:
        convert(source, target)
        return
    for first in range(0, fragment.shape[dim], _BLOCK):
        block = (*(slice(None),) * dim, slice(first, first + _BLOCK))
        convert(source[block], target[block])


def _transposed_dim(fragment: Fragment, strides: Index) -> int | None:
    """The dim along which the target is contiguous, where the source is so along another one."""
    if fragment.numel < _BLOCK * _BLOCK:
        return None
    dims = [dim for dim, size in enumerate(fragment.shape) if size > 1]
    inner, outer = (min(dims, key=steps.__getitem__) for steps in (fragment.strides, strides))
    return outer if inner != outer else None
