"""Compare pairs of tensors that must be equal, in bounded memory, before anything is written."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from streammerge.execute.compute import computing_reader
from streammerge.execute.gather import copies_of, run_copies
from streammerge.execute.memory import Buffers
from streammerge.execute.read import Reader, make_reader
from streammerge.tensors.catalogue import EqualityCheck, SourceFile
from streammerge.tensors.formula import Formulas
from streammerge.tensors.fragment import Fragment
from streammerge.tensors.virtual import Tensor, numel

__all__ = ["all_zero", "same_place", "unequal"]


def unequal(
    checks: Iterable[EqualityCheck],
    sources: tuple[SourceFile, ...],
    buffers: Buffers,
    route: str,
    on_read: Callable[[int], None] = lambda size: None,
    formulas: Formulas | None = None,
) -> Iterator[EqualityCheck]:
    """The checks whose two tensors differ in at least one byte.

    Raises:
        SourceError, StorageError: reading failed.
    """
    reader = computing_reader(route, sources, formulas, buffers.window)
    views = [memoryview(mmap.mmap(-1, buffers.tile // 2)) for _ in range(2)]
    try:
        for check in checks:
            if not same_place(check.first, check.second) and not _equal(check, reader, views, buffers.window, on_read):
                yield check
    finally:
        reader.close()


def all_zero(tensor: Tensor, sources: tuple[SourceFile, ...], buffers: Buffers, route: str) -> bool:
    """Whether every byte of a tensor is zero.

    Raises:
        SourceError, StorageError: reading failed.
    """
    reader = make_reader(route, sources, buffers.window)
    view = memoryview(bytearray(buffers.tile))
    step = buffers.tile // tensor.dtype.itemsize
    try:
        for start in range(0, numel(tensor), step):
            end = min(numel(tensor), start + step)
            size = (end - start) * tensor.dtype.itemsize
            copies = copies_of(tensor, start, end, tensor.dtype, 0, buffers.window)
            run_copies(copies, view[:size], reader, buffers.window)
            if np.frombuffer(view, np.uint8, size).any():
                return False
        return True
    finally:
        reader.close()


def same_place(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same bytes of the same files, so that they cannot differ."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return _whole(first) == _whole(second)


def _whole(tensor: Tensor) -> list[Fragment]:
    return sorted(
        tensor.fragments_in((0,) * len(tensor.shape), tensor.shape), key=lambda f: (f.start, f.file, f.offset)
    )


def _equal(
    check: EqualityCheck, reader: Reader, views: list[memoryview], window: int, on_read: Callable[[int], None]
) -> bool:
    dtype = check.first.dtype
    if (dtype, check.first.shape) != (check.second.dtype, check.second.shape):
        return False
    step = len(views[0]) // dtype.itemsize
    total = numel(check.first)
    for start in range(0, total, step):
        end = min(total, start + step)
        size = (end - start) * dtype.itemsize
        for tensor, view in zip((check.first, check.second), views, strict=True):
            on_read(run_copies(copies_of(tensor, start, end, dtype, 0, window), view[:size], reader, window))
        first, second = (np.frombuffer(view, np.uint8, size) for view in views)
        if not np.array_equal(first, second):
            return False
    return True
