"""Tensors are divided into files as huggingface_hub divides them."""

from __future__ import annotations

import math

import pytest
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from streammerge.plan.shards import file_names, split

torch = pytest.importorskip("torch")


def by_hub(sizes: list[int], limit: int) -> dict[str, list[str]]:
    """The reference: file name -> tensor names."""
    state = {f"t{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    made = split_torch_state_dict_into_shards(state, filename_pattern="model{suffix}.safetensors", max_shard_size=limit)
    return dict(made.filename_to_tensors)


def ours(sizes: list[int], limit: int) -> dict[str, list[str]]:
    """The same from ``split`` and ``file_names``."""
    shards = split({f"t{i}": size for i, size in enumerate(sizes)}, limit)
    return dict(zip(file_names(len(shards)), shards, strict=True))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_random_sizes(sizes: list[int], limit: int) -> None:
    assert ours(sizes, limit) == by_hub(sizes, limit)


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ([10], 1),
        ([10], 10),
        ([5, 5, 5], 10),
        ([1, 50, 1, 50, 1], 10),
        ([50, 1], 10),
        ([1, 50], 10),
        ([9, 2, 8, 50], 10),
        ([11, 11, 11], 10),
        ([10, 10, 10], 10),
        ([1, 10], 10),
        ([1, 10, 9, 1, 10], 10),
    ],
)
def test_around_the_limit(sizes: list[int], limit: int) -> None:
    assert ours(sizes, limit) == by_hub(sizes, limit)


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 100), min_size=1), st.integers(1, 150))
def test_nothing_is_lost(sizes: dict[str, int], limit: int) -> None:
    shards = split(sizes, limit)
    assert sorted(name for shard in shards for name in shard) == sorted(sizes)
    for shard in shards:
        assert sum(sizes[name] for name in shard) <= limit or len(shard) == 1
    assert len(shards) >= math.ceil(sum(sizes.values()) / limit) or any(size > limit for size in sizes.values())


def test_names_of_many_files() -> None:
    names = file_names(123)
    assert (names[0], names[-1]) == ("model-00001-of-00123.safetensors", "model-00123-of-00123.safetensors")
    assert file_names(1) == ["model.safetensors"]
