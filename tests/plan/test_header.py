"""Headers that safetensors accepts, with every tensor as well aligned as the format allows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from streammerge.dtypes import dtype_named
from streammerge.errors import UnsupportedError
from streammerge.plan.dtypes import dtype_rule
from streammerge.plan.header import aligned_order, header_bytes
from streammerge.plan.plan import OutputFile, OutputTensor, make_plan
from streammerge.tensors.virtual import Stored, numel

DTYPES = ["float32", "bfloat16", "float64", "int64", "bool", "uint8", "float8_e4m3fn", "complex64"]
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
TENSORS = st.dictionaries(st.text(min_size=1, max_size=20), st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1)


def planned(tensors: dict[str, tuple[str, tuple[int, ...]]], shard: int = 10**9) -> list[OutputFile]:
    """The files of a plan of tensors without fragments, written as stored."""
    stored = {name: Stored(dtype_named(dtype), shape, ()) for name, (dtype, shape) in tensors.items()}
    return list(make_plan(stored, (), dtype_rule("keep", None, lambda name: False), shard).files)


def parsed(file: OutputFile) -> dict[str, dict[str, object]]:
    """The JSON of a file's header."""
    size = int.from_bytes(file.header[:8], "little")
    assert len(file.header) == size + 8
    entries: dict[str, dict[str, object]] = json.loads(file.header[8:])
    return entries


@given(TENSORS)
def test_layout(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    (file,) = planned(tensors)
    entries = parsed(file)
    assert entries.pop("__metadata__") == {"format": "pt"}
    assert set(entries) == set(tensors)
    assert len(file.header) % 64 == 0
    at = len(file.header)
    for tensor in file.tensors:
        assert tensor.offset == at, "holes are not allowed"
        dtype, shape = tensors[tensor.name]
        begin = at - len(file.header)
        assert entries[tensor.name] == {
            "dtype": dtype_named(dtype).safetensors,
            "shape": list(shape),
            "data_offsets": [begin, begin + tensor.size],
        }
        at += tensor.size
    assert at == file.size


@given(TENSORS)
def test_alignment(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    (file,) = planned(tensors)
    for tensor in file.tensors:
        assert tensor.offset % tensor.dtype.itemsize == 0
        for step in (64, 32, 16, 8, 4, 2):
            if tensor.size % step == 0:
                assert tensor.offset % step == 0, f"{tensor.size} bytes at {tensor.offset}"


@given(TENSORS)
def test_safetensors_accepts_it(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    (file,) = planned(tensors)
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    path.write_bytes(file.header + bytes(file.size - len(file.header)))
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == set(tensors)
        assert opened.metadata() == {"format": "pt"}
        for name, (dtype, shape) in tensors.items():
            value = opened.get_tensor(name)
            assert (tuple(value.shape), str(value.dtype)) == (shape, f"torch.{dtype}")


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 300), min_size=1))
def test_order_is_stable(sizes: dict[str, int]) -> None:
    order = aligned_order(sizes)
    assert sorted(order) == sorted(sizes)
    even = [name for name in sizes if sizes[name] % 64 == 0]
    assert order[: len(even)] == even


def test_odd_bool_comes_last() -> None:
    (file,) = planned({"mask": ("bool", (3,)), "half": ("bfloat16", (5,)), "weight": ("float32", (16,))})
    assert [tensor.name for tensor in file.tensors] == ["weight", "half", "mask"]


def test_zero_dims_and_zero_sizes() -> None:
    (file,) = planned({"scalar": ("int64", ()), "empty": ("float32", (0, 5)), "other": ("float32", (2, 0))})
    assert {tensor.name: tensor.size for tensor in file.tensors} == {"scalar": 8, "empty": 0, "other": 0}
    assert file.size == len(file.header) + 8


@pytest.mark.parametrize("name", ["complex128", "complex32"])
def test_dtype_that_safetensors_lacks(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"model\.weight.*{name}"):
        header_bytes([("model.weight", dtype_named(name), (1,), dtype_named(name).itemsize)])


def test_header_that_is_too_long() -> None:
    dtype = dtype_named("uint8")
    with pytest.raises(UnsupportedError, match="--max-shard-size"):
        header_bytes([("n" * 100_000_001, dtype, (1,), 1)])


@given(TENSORS, st.integers(1, 300), st.data())
def test_tensors_in_a_range(tensors: dict[str, tuple[str, tuple[int, ...]]], shard: int, data: st.DataObject) -> None:
    for file in planned(tensors, shard):
        start = data.draw(st.integers(0, file.size))
        end = data.draw(st.integers(start, file.size))

        def inside(tensor: OutputTensor, start: int = start, end: int = end) -> bool:
            return numel(tensor.tensor) > 0 and tensor.offset < end and tensor.offset + tensor.size > start

        found = [tensor for tensor in file.tensors_in(start, end) if tensor.size]
        assert start == end or found == [tensor for tensor in file.tensors if inside(tensor)]
