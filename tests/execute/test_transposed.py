"""Matrices that lie transposed in the file: every route, tiles and windows much smaller than they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streammerge.dtypes import dtype_named
from streammerge.errors import SourceError
from streammerge.execute.gather import copies_of, run_copies
from streammerge.execute.read import READERS, make_reader
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.fragment import Fragment, contiguous_strides
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import Stored, Tensor, permute, stack

ROWS, COLUMNS = 2000, 700
WINDOW = 256 << 10


@pytest.fixture
def file(tmp_path: Path) -> SourceFile:
    """Two matrices of 16-bit numbers, [ROWS, COLUMNS] each, behind a few other bytes."""
    path = tmp_path / "source"
    values = np.random.default_rng(1).integers(0, 1 << 16, 2 * ROWS * COLUMNS, dtype=np.uint16)
    path.write_bytes(b"x" * 10 + values.tobytes())
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns, "")


def _matrix(number: int) -> Tensor:
    place = Fragment(
        0, 10 + number * ROWS * COLUMNS * 2, (0, 0), (ROWS, COLUMNS), contiguous_strides((ROWS, COLUMNS), 2)
    )
    return Stored(dtype_named("float16"), (ROWS, COLUMNS), (place,))


def _read(tensor: Tensor, file: SourceFile, route: str) -> bytes:
    reader = make_reader(route, [file], WINDOW)
    size = ROWS * COLUMNS * 2 * (2 if len(tensor.shape) > 2 or tensor.shape[1] > ROWS else 1)
    content = b""
    try:
        for start in range(0, size, WINDOW):
            tile = bytearray(min(WINDOW, size - start))
            first, last = start // 2, (start + len(tile)) // 2
            copies = copies_of(tensor, first, last, tensor.dtype, 0, WINDOW)
            run_copies(copies, memoryview(tile), reader, WINDOW)
            content += bytes(tile)
    finally:
        reader.close()
    return content


def _values(file: SourceFile) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.frombuffer(file.path.read_bytes()[10:], np.uint16).reshape(2, ROWS, COLUMNS)


@pytest.mark.parametrize("route", READERS)
def test_transposed(file: SourceFile, route: str) -> None:
    assert _read(permute(_matrix(1), (1, 0)), file, route) == _values(file)[1].T.tobytes()


@pytest.mark.parametrize("route", READERS)
def test_two_that_take_turns(file: SourceFile, route: str) -> None:
    """As gate and up of gpt-oss: columns of both in turn, each matrix transposed."""
    pair = permute(stack([_matrix(0), _matrix(1)]), (2, 1, 0))
    woven = reshape(pair, (COLUMNS, 2 * ROWS))
    assert _read(woven, file, route) == _values(file).transpose(2, 1, 0).tobytes()


@pytest.mark.parametrize("route", READERS)
def test_a_file_that_shrinks_is_an_error(file: SourceFile, route: str) -> None:
    reader = make_reader(route, [file], WINDOW)
    try:
        reader.shared_window(0, 0, WINDOW)
        with file.path.open("r+b") as handle:
            handle.truncate(file.size // 2)
        with pytest.raises(SourceError, match=r"shorter|changed"):
            reader.shared_window(0, file.size - WINDOW, WINDOW)
    finally:
        reader.close()
