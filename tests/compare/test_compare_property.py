"""Counts, largest differences and the first index against torch.isclose and a brute-force count."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streammerge.execute import difference
from streammerge.execute.difference import Difference, Tolerance
from tests.compare.compare_support import compare_tiled, write_folder

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 11), (70, 9)]


@dataclass(frozen=True)
class Case:
    """Two tensors, the tolerance and the size of a tile."""

    first: torch.Tensor
    second: torch.Tensor
    tolerance: Tolerance
    tile: int


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits: NaN, infinities and denormals included."""
    return made_of(rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8), shape, dtype)


def made_of(content: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these bytes."""
    if not content.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content.copy()).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """One row per element."""
    if not tensor.numel():
        return np.empty((0, tensor.itemsize), np.uint8)
    return tensor.flatten().view(torch.uint8).numpy().copy().reshape(-1, tensor.itemsize)


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype]) -> Case:
    """The second tensor is the first with some bits and some whole elements changed."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    first = noise(rng, shape, dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        first = torch.from_numpy(rng.normal(size=shape)).reshape(shape).to(dtype)
    other = bytes_of(first)
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    other[:, 0] ^= ((rng.random(len(other)) < share) * 3).astype(np.uint8)
    replaced = rng.random(len(other)) < share / 4
    other[replaced] = bytes_of(noise(rng, shape, dtype))[replaced]
    sizes = st.sampled_from([0.0, 1e-8, 1e-3, 0.1, 2.0])
    return Case(
        first,
        made_of(other.reshape(-1), shape, dtype),
        Tolerance(draw(sizes), draw(sizes)),
        draw(st.sampled_from([8, 64, 1024, 1 << 20])),
    )


def found_by(case: Case) -> Difference:
    """What the product says."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, side) for side in ("first", "second")]
        write_folder(folders[0], {"a": case.first})
        write_folder(folders[1], {"a": case.second})
        return compare_tiled(*folders, case.tile, case.tolerance)


def close(case: Case) -> torch.Tensor:
    """torch's own opinion, in float64; without a tolerance the bits, or NaN on both sides."""
    a, b, tolerance = case.first.double(), case.second.double(), case.tolerance
    if tolerance.rtol or tolerance.atol:
        return torch.isclose(a, b, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    same = (bytes_of(case.first) == bytes_of(case.second)).all(axis=1)
    return torch.from_numpy(same).view(a.shape) | (a.isnan() & b.isnan())


def check(case: Case, found: Difference) -> None:
    """Compare with a count in plain Python."""
    equal = close(case).flatten().tolist()
    a, b = case.first.double().flatten().tolist(), case.second.double().flatten().tolist()
    assert found.elements == len(a)
    assert found.differing == equal.count(False)
    assert found.nan_both == sum(x != x and y != y for x, y in zip(a, b, strict=True))
    assert found.nan_one == sum((x != x) != (y != y) for x, y in zip(a, b, strict=True))
    if False not in equal:
        assert (found.first, found.values) == (None, None)
        return
    at = equal.index(False)
    assert found.first == tuple(int(i) for i in np.unravel_index(at, case.first.shape or (1,)))[: case.first.ndim]
    assert found.values is not None
    assert [repr(float(value)) for value in found.values] == [repr(a[at]), repr(b[at])]
    largest(found, [(x, y) for x, y in zip(a, b, strict=True) if x == x and y == y and x != y])


def largest(found: Difference, pairs: list[tuple[float, float]]) -> None:
    """The largest differences, where no infinity and no zero leaves room for opinions."""
    distances = [abs(x - y) for x, y in pairs]
    if all(map(math.isfinite, distances)):
        assert found.max_abs == max(distances, default=0.0)
        if all(y and math.isfinite(d / abs(y)) for d, (_, y) in zip(distances, pairs, strict=True)):
            assert found.max_rel == max([d / abs(y) for d, (_, y) in zip(distances, pairs, strict=True)], default=0.0)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of a few hundred elements is compared in several steps."""
    monkeypatch.setattr(difference, "_STEP", 100)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(FLOATS))
def test_floats_as_torch_isclose(case: Case) -> None:
    check(case, found_by(case))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(INTEGERS))
def test_integers_exactly(case: Case) -> None:
    """Of all sizes, with Python's integers as the judge."""
    found = found_by(Case(case.first, case.second, Tolerance(), case.tile))
    a, b = case.first.flatten().tolist(), case.second.flatten().tolist()
    assert found.differing == sum(x != y for x, y in zip(a, b, strict=True))
    assert found.max_abs == float(max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0))
    if found.differing:
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        assert found.values == (a[at], b[at])
