"""Tensors whose offset, size, stride or storage cannot be true, and legacy files with impossible counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streammerge.errors import SourceError, StreammergeError, UnsafeError
from tests.support import pickles as p
from tests.support.ranks import junk, rank_path, write_plain
from tests.support.raw import of_torch
from tests.support.results import catalogued, read_all
from tests.support.zips import write_state

STORED = junk((12,), torch.float32, 1)
STORAGES = {"0": of_torch(STORED).data}
PLACE = p.storage("0", 12)
HUGE = 1 << 63

OUT_OF_BOUNDS = {
    "offset": p.tensor(PLACE, (4,), (1,), 9),
    "offset at the end": p.tensor(PLACE, (1,), (1,), 12),
    "huge offset": p.tensor(PLACE, (1,), (1,), (1 << 61) - 1),
    "stride": p.tensor(PLACE, (4,), (4,)),
    "stride of a dim of two": p.tensor(PLACE, (2, 6), (7, 1)),
    "huge stride": p.tensor(PLACE, (2,), ((1 << 62) - 1,)),
    "size": p.tensor(PLACE, (13,), (1,)),
    "size by product": p.tensor(PLACE, (1 << 40, 1 << 40), (1, 1)),
    "scalar past the end": p.tensor(PLACE, (), (), 12),
    "more bytes by dtype": p.call(
        p.glob("torch._utils", "_rebuild_tensor_v3"), PLACE, p.integer(0), p.tup(p.integer(12)), p.tup(p.integer(1)),
        b"\x89", p.call(p.glob("collections", "OrderedDict")), p.glob("torch", "float64"),
    ),
}  # fmt: skip
IMPOSSIBLE = {
    "negative offset": p.tensor(PLACE, (4,), (1,), -4),
    "negative size": p.tensor(PLACE, (-4,), (1,)),
    "negative stride": p.tensor(PLACE, (4,), (-1,), 11),
    "offset 2^63": p.tensor(PLACE, (4,), (1,), HUGE),
    "size 2^63": p.tensor(PLACE, (HUGE,), (0,)),
    "stride 2^63": p.tensor(PLACE, (2,), (HUGE,)),
    "stride 2^64": p.tensor(PLACE, (2,), (1 << 64,)),
    "too few strides": p.tensor(PLACE, (3, 4), (1,)),
    "too many strides": p.tensor(PLACE, (12,), (1, 1)),
    "a hundred dims": p.tensor(PLACE, (1,) * 100, (1,) * 100),
    "no storage": p.tensor(b"N", (4,), (1,)),
    "a longer storage than there is": p.tensor(p.storage("0", 13), (12,), (1,)),
    "a shorter storage than there is": p.tensor(p.storage("0", 11), (11,), (1,)),
    "the storage of another dtype": p.tensor(p.storage("0", 12, "DoubleStorage"), (4,), (1,)),
    "no such storage": p.tensor(p.storage("7", 12), (12,), (1,)),
    "a storage outside of data/": p.tensor(p.storage("../data.pkl", 12), (12,), (1,)),
    "untyped without dtype": p.tensor(p.storage("0", 48, "UntypedStorage"), (12,), (1,)),
}


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_nothing_is_read_past_the_storage(case: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match=r"rank_0\.pt.*reads past"):
        catalogued(write_state(tmp_path, {"w": OUT_OF_BOUNDS[case]}, STORAGES))


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_descriptions(case: str, tmp_path: Path) -> None:
    with pytest.raises((SourceError, UnsafeError), match=r"rank_0\.pt"):
        catalogued(write_state(tmp_path, {"w": IMPOSSIBLE[case]}, STORAGES))


@pytest.mark.parametrize(
    ("size", "stride", "offset", "wanted"),
    [
        ((12,), (1,), 0, STORED),
        ((3,), (1,), 9, STORED[9:]),
        ((4, 3), (1, 4), 0, STORED.reshape(3, 4).t()),
        ((2, 5), (0, 1), 7, STORED[7:].expand(2, 5)),
        ((3, 2), (1, 2), 1, STORED.as_strided((3, 2), (1, 2), 1)),
        ((), (), 11, STORED[11]),
        ((1, 2), (1 << 40, 1), 10, STORED[10:].reshape(1, 2)),
        ((0, 5), (1 << 40, 1), 5, torch.empty(0, 5)),
    ],
)
def test_odd_but_possible_ones(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, wanted: torch.Tensor, tmp_path: Path
) -> None:
    folder = write_state(tmp_path, {"w": p.tensor(PLACE, size, stride, offset)}, STORAGES)
    assert read_all(folder) == {"w": of_torch(wanted)}


@pytest.mark.parametrize("count", [0, 11, 13, 1 << 31, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_legacy_files_with_a_wrong_count(count: int, tmp_path: Path) -> None:
    """Where the next storage lies is computed from the count of the one before."""
    state = {"a": STORED, "b": STORED + 1}
    path = rank_path(write_plain(tmp_path, state, _use_new_zipfile_serialization=False), 1, 0)
    content = path.read_bytes()
    at = content.index((12).to_bytes(8, "little") + of_torch(STORED).data)
    path.write_bytes(content[:at] + count.to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(StreammergeError, match=r"rank_0\.pt"):
        read_all(tmp_path)
