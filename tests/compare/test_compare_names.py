"""Which tensors are compared with which: key sets, ties, shapes, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import streammerge as sm
from streammerge.errors import DifferenceError
from tests.compare.compare_support import QWEN2_TIED, write_folder

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {**QWEN2_TIED}
UNTIED = {**QWEN2_TIED, "tie_word_embeddings": False}
TABLE = torch.arange(12.0).view(4, 3)


def both(tmp_path: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> tuple[Path, Path]:
    """Two folders without a config."""
    return write_folder(tmp_path / "first", first), write_folder(tmp_path / "second", second)


def test_missing_and_extra_names(tmp_path: Path) -> None:
    one = torch.ones(2)
    report = sm.compare(*both(tmp_path, {"a": one, "ours": one}, {"a": one, "theirs": one, "too": one}))
    assert not report.equal
    assert (report.missing, report.extra, report.compared) == (("theirs", "too"), ("ours",), 1)
    text = repr(report)
    assert "only in second  2: theirs, too" in text
    assert "only in first   1: ours" in text
    assert "they differ" in text


@pytest.mark.parametrize("side", ["missing", "extra"])
def test_one_name_more_is_enough(tmp_path: Path, side: str) -> None:
    small, large = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    report = sm.compare(*both(tmp_path, *((small, large) if side == "missing" else (large, small))))
    assert not report.equal
    assert getattr(report, side) == ("b",)


def test_nothing_in_common_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(DifferenceError, match="no tensor in common") as raised:
        sm.compare(*both(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)}))
    assert raised.value.exit_code == 8


def test_other_shapes(tmp_path: Path) -> None:
    report = sm.compare(*both(tmp_path, {"a": torch.ones(2, 3), "b": TABLE}, {"a": torch.ones(3, 2), "b": TABLE}))
    assert not report.equal
    assert report.shapes == {"a": ([2, 3], [3, 2])}
    assert "a: [2, 3] against [3, 2]" in repr(report)
    assert report.compared == 1


def test_only_other_shapes_is_no_pass(tmp_path: Path) -> None:
    assert not sm.compare(*both(tmp_path, {"a": torch.ones(6)}, {"a": torch.ones(3, 2)})).equal


@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_head_left_out_on_one_side(tmp_path: Path, order: int) -> None:
    stored = write_folder(tmp_path / "stored", {EMBED: TABLE, HEAD: TABLE}, TIED)
    dropped = write_folder(tmp_path / "dropped", {EMBED: TABLE}, TIED)
    assert sm.compare(*[stored, dropped][::order]).equal
    other = write_folder(tmp_path / "other", {EMBED: TABLE, HEAD: TABLE + 1}, TIED)
    report = sm.compare(*[other, dropped][::order])
    assert [tensor.name for tensor in report.tensors] == [HEAD]


@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_head_where_only_one_side_has_a_config(tmp_path: Path, order: int) -> None:
    stored = write_folder(tmp_path / "stored", {EMBED: TABLE, HEAD: TABLE})
    dropped = write_folder(tmp_path / "dropped", {EMBED: TABLE}, TIED)
    assert sm.compare(*[stored, dropped][::order]).equal


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("config", [UNTIED, None])
def test_a_head_that_nothing_ties_is_missing(tmp_path: Path, order: int, config: dict[str, Any] | None) -> None:
    stored = write_folder(tmp_path / "stored", {EMBED: TABLE, HEAD: TABLE}, config)
    dropped = write_folder(tmp_path / "dropped", {EMBED: TABLE}, config)
    report = sm.compare(*[stored, dropped][::order])
    assert (report.extra if order == 1 else report.missing) == (HEAD,)


@pytest.mark.parametrize("order", [1, -1])
def test_a_head_missing_against_its_own_config(tmp_path: Path, order: int) -> None:
    """The other side's config ties them; this side would be loaded with a random head."""
    stored = write_folder(tmp_path / "stored", {EMBED: TABLE, HEAD: TABLE}, TIED)
    broken = write_folder(tmp_path / "broken", {EMBED: TABLE}, UNTIED)
    assert not sm.compare(*[stored, broken][::order]).equal


@pytest.mark.parametrize("order", [1, -1])
def test_ties_of_a_class_that_is_not_known(tmp_path: Path, order: int) -> None:
    """A merge leaves the head out by the usual names; comparing has to understand what it wrote."""
    unknown = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody", "tie_word_embeddings": True}
    stored = write_folder(tmp_path / "stored", {EMBED: TABLE, HEAD: TABLE}, unknown)
    dropped = write_folder(tmp_path / "dropped", {EMBED: TABLE}, unknown)
    assert sm.compare(*[stored, dropped][::order]).equal


def test_another_dtype_is_a_difference(tmp_path: Path) -> None:
    folders = both(tmp_path, {"a": TABLE.bfloat16()}, {"a": TABLE})
    report = sm.compare(*folders)
    assert not report.equal
    (found,) = report.tensors
    assert (found.dtypes, found.differing) == (("bfloat16", "float32"), 0)
    assert "a: bfloat16 against float32, equal values" in repr(report)
    assert not sm.compare(*folders, rtol=1.0).equal
    assert sm.compare(*folders, dtype_aware=True).equal


def test_dtype_aware_rounds_the_reference(tmp_path: Path) -> None:
    exact = torch.randn(50, 7, generator=torch.Generator().manual_seed(2))
    folders = both(tmp_path, {"a": exact.bfloat16()}, {"a": exact})
    assert sm.compare(*folders, dtype_aware=True).equal
    (found,) = sm.compare(*folders).tensors
    assert found.differing > 300
    mirrored = sm.compare(*folders[::-1], dtype_aware=True)
    assert not mirrored.equal  # float32 on the first side holds what the reference lost
    changed = exact.bfloat16()
    changed[3, 2] *= 2
    write_folder(folders[0], {"a": changed})
    assert sm.compare(*folders, dtype_aware=True).tensors[0].first == (3, 2)


@pytest.mark.parametrize("first", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("second", [torch.float32, torch.int32, torch.bool])
def test_dtype_aware_between_any_two(tmp_path: Path, first: torch.dtype, second: torch.dtype) -> None:
    ones = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    folders = both(tmp_path, {"a": ones.to(first)}, {"a": ones.to(second)})
    assert sm.compare(*folders, dtype_aware=True).equal
    assert not sm.compare(*folders).equal


def test_integers_against_floats(tmp_path: Path) -> None:
    folders = both(tmp_path, {"a": torch.tensor([2**53 + 1, 5])}, {"a": torch.tensor([2.0**53, 5], dtype=torch.double)})
    (found,) = sm.compare(*folders).tensors
    assert (found.differing, found.first, found.max_abs) == (1, (0,), 1.0)
