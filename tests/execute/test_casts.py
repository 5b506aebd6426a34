"""Casts give, bit for bit, what ``torch.Tensor.to`` gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammerge.dtypes import dtype_named
from streammerge.execute import casts
from streammerge.execute.casts import kernel, needs_torch

FLOATS = ("float64", "float32", "float16", "bfloat16")
PAIRS = [(a, b) for a in FLOATS for b in FLOATS if a != b]
INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
FIELDS = {"float64": (52, 11), "float32": (23, 8), "float16": (10, 5), "bfloat16": (7, 8)}


def bits_of(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Bit patterns as the numpy stand-in of a dtype."""
    dtype = dtype_named(name)
    return np.asarray(values, dtype=np.uint64).astype(INTEGERS[dtype.itemsize]).view(dtype.numpy)


def is_nan(source: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Which elements of an array of stand-ins are NaN."""
    mantissa, exponent = FIELDS[name]
    bits = source.view(INTEGERS[source.itemsize]) & ((1 << (mantissa + exponent)) - 1)
    return np.asarray(bits > ((1 << exponent) - 1) << mantissa)


def by_torch(source: np.ndarray[Any, Any], stored: str, written: str) -> bytes:
    """The reference: torch's own conversion, as bytes."""
    values = torch.from_numpy(source.copy()).view(getattr(torch, stored)).reshape(-1)
    converted = values.to(getattr(torch, written))
    vectorised = stored == "float32" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if written == "bfloat16" != stored and not vectorised:
        # torch's NaN bits depend on the layout here; ours are always those of its vector code for float32.
        converted.view(torch.int16)[values.isnan()] = -1
    return bytes(converted.view(torch.uint8).numpy()) if converted.numel() else b""


def by_kernel(source: np.ndarray[Any, Any], stored: str, written: str) -> bytes:
    """Our conversion into a fresh array."""
    target = np.empty(source.shape, dtype_named(written).numpy)
    kernel(dtype_named(stored), dtype_named(written))(source, target)
    return target.tobytes()


def special_bits(name: str) -> Iterator[int]:
    """Zeros, denormals, ties, infinities and NaNs of every payload bit, with both signs."""
    mantissa, exponent = FIELDS[name]
    top = ((1 << exponent) - 1) << mantissa
    bias = ((1 << (exponent - 1)) - 1) << mantissa
    for sign in (0, 1 << (mantissa + exponent)):
        for base in (0, 1 << mantissa, bias, top - (1 << mantissa), top):
            yield sign | base
            yield sign | base | ((1 << mantissa) - 1)
            for bit in range(mantissa):
                yield sign | base | 1 << bit
                yield sign | base | ((1 << bit) - 1)
                yield sign | base | 1 << bit | 1


@pytest.mark.parametrize(("stored", "written"), PAIRS)
def test_special_values(stored: str, written: str) -> None:
    source = bits_of(stored, list(special_bits(stored)))
    assert by_kernel(source, stored, written) == by_torch(source, stored, written)


@pytest.mark.parametrize(("stored", "written"), PAIRS)
def test_random_bits(stored: str, written: str) -> None:
    size = dtype_named(stored).itemsize
    raw = np.random.default_rng(11).bytes(size * 200_000)
    source = np.frombuffer(raw, dtype_named(stored).numpy).copy()
    assert by_kernel(source, stored, written) == by_torch(source, stored, written)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("written", FLOATS)
def test_every_16_bit_pattern(stored: str, written: str) -> None:
    source = bits_of(stored, range(1 << 16))
    assert by_kernel(source, stored, written) == by_torch(source, stored, written)


def test_every_upper_half_of_float32_around_the_ties() -> None:
    upper = np.arange(1 << 16, dtype=np.uint64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        source = bits_of("float32", upper | lower)
        assert by_kernel(source, "float32", "bfloat16") == by_torch(source, "float32", "bfloat16")


def test_nans_make_no_noise(recwarn: pytest.WarningsRecorder) -> None:
    """A warning of numpy's would end up on the user's terminal."""
    for stored, written in PAIRS:
        by_kernel(bits_of(stored, list(special_bits(stored))), stored, written)
    assert [str(warning.message) for warning in recwarn] == []


@given(
    st.sampled_from(PAIRS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 7),
    st.integers(0, 2**32),
    st.randoms(),
)
def test_strided_and_unaligned(pair: tuple[str, str], shape: list[int], shift: int, seed: int, random: Any) -> None:
    """A transposed, stepped source at an odd address, into a transposed target."""
    stored, written = map(dtype_named, pair)
    order = list(range(len(shape)))
    random.shuffle(order)
    wide = [2 * n for n in shape]
    raw = bytearray(np.random.default_rng(seed).bytes(shift + stored.itemsize * int(np.prod(wide))))
    whole = np.ndarray(tuple(wide), stored.numpy, raw, shift)
    whole[is_nan(whole, stored.name)] = 0  # the next test has these
    source = whole[tuple(slice(None, None, 2) for _ in shape)].transpose(order)
    target = np.empty(tuple(reversed(source.shape)), written.numpy).T
    kernel(stored, written)(source, target)
    assert target.tobytes("C") == by_torch(np.ascontiguousarray(source), *pair)


@pytest.mark.parametrize(("stored", "written"), PAIRS)
def test_nans_do_not_depend_on_the_layout(stored: str, written: str) -> None:
    """A tensor in one piece and one whose columns come from several ranks give the same bytes."""
    source = bits_of(stored, list(special_bits(stored)) * 2).reshape(2, -1)
    target = np.empty((source.shape[1], 2), dtype_named(written).numpy)
    kernel(dtype_named(stored), dtype_named(written))(source.T, target)
    assert target.T.tobytes() == by_torch(source, stored, written)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 70_000), (70_000, 1), (2, 3, 40_000), (131_073,)])
@pytest.mark.parametrize(
    ("stored", "written"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_shapes_around_the_step(stored: str, written: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    raw = np.random.default_rng(5).bytes(count * dtype_named(stored).itemsize)
    source = np.frombuffer(raw, dtype_named(stored).numpy).reshape(shape).copy()
    assert by_kernel(source, stored, written) == by_torch(source, stored, written)


def test_steps_cover_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_STEP", 4)
    source = np.arange(3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)
    assert by_kernel(source, "float32", "bfloat16") == by_torch(source, "float32", "bfloat16")


def test_expanded_source() -> None:
    source = np.broadcast_to(np.array([[1.5], [-2.25]], np.float32), (2, 5))
    assert by_kernel(source, "float32", "bfloat16") == by_torch(source, "float32", "bfloat16")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_same_dtype_is_a_copy(name: str) -> None:
    dtype = dtype_named(name)
    source = np.frombuffer(np.random.default_rng(1).bytes(dtype.itemsize * 33), dtype.numpy)
    assert by_kernel(source, name, name) == source.tobytes()


def test_which_casts_need_torch() -> None:
    float32, bfloat16, float16 = map(dtype_named, ("float32", "bfloat16", "float16"))
    assert not needs_torch([])
    assert not needs_torch([(float32, bfloat16), (bfloat16, float32)])
    assert needs_torch([(float32, bfloat16), (float32, float16)])
