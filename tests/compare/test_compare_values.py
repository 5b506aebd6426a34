"""Which values count as equal, and what is said about those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streammerge as sm
from streammerge.execute.difference import Difference
from tests.compare.compare_support import compare_tiled, write_folder

INF, NAN = float("inf"), float("nan")
ULPS = [
    (torch.bfloat16, 1.0, 1.0078125),
    (torch.float32, 1.0, 1.00000011920928955078125),
    (torch.float16, 1.0, 1.0009765625),
    (torch.float64, 1.0, 1.0000000000000002220446049250313),
    (torch.float8_e4m3fn, 1.0, 1.125),
    (torch.float8_e5m2, 1.0, 1.25),
    (torch.int64, 2**53, 2**53 + 1),
    (torch.int64, 2**63 - 2, 2**63 - 1),
    (torch.uint8, 7, 8),
    (torch.bool, False, True),
]


def pair(tmp_path: Path, first: torch.Tensor, second: torch.Tensor) -> tuple[Path, Path]:
    """Two folders that hold one tensor, ``a``."""
    return write_folder(tmp_path / "first", {"a": first}), write_folder(tmp_path / "second", {"a": second})


def pair_of(tmp_path: Path, first: list[float], second: list[float]) -> tuple[Path, Path]:
    """The same for lists of float32."""
    return pair(tmp_path, torch.tensor(first), torch.tensor(second))


@pytest.mark.parametrize(("dtype", "low", "high"), ULPS, ids=lambda value: str(value))
def test_one_unit_in_the_last_place(dtype: torch.dtype, low: float, high: float, tmp_path: Path) -> None:
    first = torch.full((3, 70, 5), low, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
    second = first.clone()
    second[1, 69, 2] = high
    report = sm.compare(*pair(tmp_path, first, second))
    assert not report.equal
    (found,) = report.tensors
    assert (found.name, found.first, found.values, found.differing) == ("a", (1, 69, 2), (low, high), 1)
    assert (found.elements, found.max_abs) == (1050, float(high - low))
    assert found.max_rel == pytest.approx((high - low) / high)
    assert f"[1, 69, 2]: {low!r} against {high!r}" in repr(report)


def test_signed_zero_differs_exactly_only(tmp_path: Path) -> None:
    folders = pair_of(tmp_path, [0.0, 1.0], [-0.0, 1.0])
    report = sm.compare(*folders)
    assert not report.equal
    assert (report.tensors[0].first, report.tensors[0].max_abs) == ((0,), 0.0)
    assert sm.compare(*folders, atol=1e-9).equal


def test_nan_at_the_same_place_is_equal_and_said(tmp_path: Path) -> None:
    report = sm.compare(*pair_of(tmp_path, [NAN, 1.0, NAN], [NAN, 1.0, NAN]))
    assert report.equal
    assert report.nan_both == 2
    assert "2 elements are NaN on both sides" in repr(report)


def test_nan_of_another_payload_is_equal(tmp_path: Path) -> None:
    other = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    report = sm.compare(*pair(tmp_path, torch.tensor([NAN, 0.0]), other))
    assert report.equal
    assert report.nan_both == 1


@pytest.mark.parametrize("tolerance", [0.0, 1e9])
def test_nan_on_one_side_differs(tmp_path: Path, tolerance: float) -> None:
    folders = pair_of(tmp_path, [NAN, 1.0, 2.0, NAN], [NAN, NAN, 2.0, 3.0])
    report = sm.compare(*folders, atol=tolerance, rtol=tolerance)
    (found,) = report.tensors
    assert (found.nan_both, found.nan_one, found.differing, found.first) == (1, 2, 2, (1,))
    assert "2 NaN on one side only" in repr(report)


@pytest.mark.parametrize("tolerance", [0.0, 1e9])
def test_infinities(tmp_path: Path, tolerance: float) -> None:
    folders = pair_of(tmp_path, [INF, -INF, INF, 1.0, INF], [INF, -INF, -INF, INF, 1.0])
    found = sm.compare(*folders, atol=tolerance, rtol=tolerance).tensors[0]
    assert (found.differing, found.first, found.values) == (3, (2,), (INF, -INF))


@pytest.mark.parametrize("place", [0, 1, 255, 256, 511])
def test_an_infinite_difference_is_told_whatever_the_tiles(place: int, tmp_path: Path) -> None:
    """What is said of a tensor must not depend on how it is cut for reading."""
    first = torch.ones(512)
    second = first.clone()
    second[place] = INF
    folders = pair(tmp_path, first, second)
    found = {tile: compare_tiled(*folders, tile) for tile in (4, 64, 1024, 1 << 16)}
    assert {result.max_abs for result in found.values()} == {INF}
    assert all(result == found[4] for result in found.values())


def test_a_reference_of_zero_whatever_the_tiles(tmp_path: Path) -> None:
    folders = pair_of(tmp_path, [3.0, 2.0, 5.0], [1.0, 2.0, 0.0])
    assert compare_tiled(*folders, 4) == compare_tiled(*folders, 1 << 16)


def test_the_worst_come_first(tmp_path: Path) -> None:
    """NaN on one side and infinities are the worst; otherwise by the largest difference."""
    ones = {name: torch.ones(2) for name in ("infinite", "large", "small", "nan", "same")}
    others = {name: tensor.clone() for name, tensor in ones.items()}
    for name, value in (("infinite", INF), ("large", 9.0), ("small", 1.5), ("nan", NAN)):
        others[name][1] = value
    folders = write_folder(tmp_path / "first", ones), write_folder(tmp_path / "second", others)
    names = [tensor.name for tensor in sm.compare(*folders).tensors]
    assert set(names[:2]) == {"infinite", "nan"}
    assert names[2:] == ["large", "small"]


def test_swapped_rows_are_found(tmp_path: Path) -> None:
    """A permutation keeps every sum and the set of values."""
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    halves = rows.view(2, 4, 4).transpose(0, 1).reshape(8, 4)  # as q and k are permuted for rotary embeddings
    found = sm.compare(*pair(tmp_path, rows, halves)).tensors[0]
    assert found.first == (1, 0)
    assert found.differing == 24


def test_swapped_gate_and_up_are_found(tmp_path: Path) -> None:
    gate, up = torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4)
    first = write_folder(tmp_path / "first", {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up})
    second = write_folder(tmp_path / "second", {"mlp.gate_proj.weight": up, "mlp.up_proj.weight": gate})
    report = sm.compare(first, second)
    assert {tensor.name: tensor.differing for tensor in report.tensors} == {
        "mlp.gate_proj.weight": 12,
        "mlp.up_proj.weight": 12,
    }


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    folders = pair(tmp_path, torch.zeros(shape), torch.ones(shape))
    report = sm.compare(*folders)
    assert report.compared == 1
    if shape:
        assert report.equal
    else:
        assert report.tensors[0].first == ()
        assert report.tensors[0].values == (0.0, 1.0)


def test_complex_numbers(tmp_path: Path) -> None:
    folders = pair(tmp_path, torch.tensor([1 + 2j, 3j]), torch.tensor([1 + 2j, 4j]))
    found = sm.compare(*folders).tensors[0]
    assert (found.first, found.values, found.max_abs) == ((1,), (3j, 4j), 1.0)


def test_every_tile_is_compared(tmp_path: Path) -> None:
    """One difference anywhere in a tensor of many tiles and of several steps of each."""
    first = torch.zeros(300_000)
    for place in (0, 131_071, 131_072, 262_143, 262_144, 299_999):
        second = first.clone()
        second[place] = 1
        folders = pair(tmp_path, first, second)
        for tile in (1 << 18, 1 << 23):
            result = compare_tiled(*folders, tile)
            assert result == Difference(300_000, 1, 1.0, 1.0, (place,), (0.0, 1.0), 0, 0)
