"""References that cannot be compared with: each is refused with its own exit code, none is a pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compare.compare_support import Run, header_of, index_of, raw_file, write_folder

SINGLE = "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A sound folder."""
    return write_folder(tmp_path / "ours", {"a": torch.ones(4), "b": torch.zeros(2)})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in two shards with an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / SHARDS[0])
    save_file({"b": torch.zeros(2)}, folder / SHARDS[1])
    index_of(folder, {"a": SHARDS[0], "b": SHARDS[1]})
    return folder


def refused(run: Run, ours: Path, reference: Path, code: int, *words: str) -> None:
    """Both orders of ``compare``, and ``verify``, fail; the message says where."""
    for pair in ((ours, reference), (reference, ours)):
        ran = run("compare", *pair)
        assert ran.code == code, ran
        assert "error: " in ran.err
        assert all(word in ran.err for word in words), ran.err
        assert "equal" not in ran.out
    assert run("verify", reference).code not in (0, 1)


def test_the_sound_ones(run: Run, ours: Path, sharded: Path) -> None:
    assert run("compare", ours, sharded).code == 0
    assert run("verify", sharded).code == 0


def test_no_weights(run: Run, ours: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(run, ours, tmp_path / "empty", 3, "empty")
    refused(run, ours, tmp_path / "nowhere", 2, "nowhere")


def test_no_tensors(run: Run, ours: Path, tmp_path: Path) -> None:
    raw_file(tmp_path / "none" / SINGLE, {})
    refused(run, ours, tmp_path / "none", 3, "no tensors")


def test_missing_shard(run: Run, ours: Path, sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(run, ours, sharded, 3, SHARDS[1], "missing")


def test_index_names_a_tensor_that_is_not_there(run: Run, ours: Path, sharded: Path) -> None:
    index_of(sharded, {"a": SHARDS[0], "b": SHARDS[1], "ghost": SHARDS[1]})
    refused(run, ours, sharded, 3, "ghost", SHARDS[1])


def test_shard_with_a_tensor_that_the_index_does_not_name(run: Run, ours: Path, sharded: Path) -> None:
    save_file({"b": torch.zeros(2), "stray": torch.zeros(2)}, sharded / SHARDS[1])
    refused(run, ours, sharded, 3, "stray", SHARDS[1])


def test_single_file_and_index(run: Run, ours: Path, sharded: Path) -> None:
    shutil.copyfile(ours / SINGLE, sharded / SINGLE)
    refused(run, ours, sharded, 3, "both")


@pytest.mark.parametrize("name", ["../ours/model.safetensors", "/etc/passwd", "x/../model.safetensors", "..", "", 7])
def test_index_that_leads_out_of_the_folder(run: Run, ours: Path, sharded: Path, name: object) -> None:
    index_of(sharded, {"a": SHARDS[0], "b": name})
    refused(run, ours, sharded, 5, "index.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 99_999])
def test_damaged_index(run: Run, ours: Path, sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(run, ours, sharded, 3, "index.json")


DAMAGED: dict[str, tuple[int, Callable[[Path], object]]] = {
    "overlap": (5, lambda path: raw_file(path, header_of((0, 4), (2, 6)), bytes(6))),
    "hole": (5, lambda path: raw_file(path, header_of((0, 4), (6, 8)), bytes(8))),
    "truncated": (3, lambda path: raw_file(path, header_of((0, 4), (4, 8)), bytes(7))),
    "too long": (3, lambda path: raw_file(path, header_of((0, 4)), bytes(5))),
    "nothing": (3, lambda path: raw_file(path, "", length=0)),
    "seven bytes": (3, lambda path: path.write_bytes(bytes(7))),
    "duplicate names": (
        3,
        lambda path: raw_file(
            path,
            '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
            ' "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}',
            bytes(2),
        ),
    ),
    "long header that is not there": (3, lambda path: raw_file(path, "{}", length=100_000_001)),
    "largest number": (3, lambda path: raw_file(path, "{}", length=2**64 - 1)),
    "negative offset": (3, lambda path: raw_file(path, header_of((-4, 0)), bytes(4))),
    "size against shape": (
        3,
        lambda path: raw_file(path, {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
    ),
    "unknown dtype": (
        4,
        lambda path: raw_file(path, {"a": {"dtype": "F5", "shape": [3], "data_offsets": [0, 3]}}, bytes(3)),
    ),
    "no object": (3, lambda path: raw_file(path, '"text"')),
    "nested": (3, lambda path: raw_file(path, "[" * 99_999)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_header(run: Run, ours: Path, tmp_path: Path, damage: str) -> None:
    code, write = DAMAGED[damage]
    path = tmp_path / "damaged" / SINGLE
    path.parent.mkdir()
    write(path)
    refused(run, ours, path.parent, code, SINGLE)


def test_header_of_a_hundred_megabytes(run: Run, ours: Path, tmp_path: Path) -> None:
    """A sparse file that really has room for it; it must not be read."""
    path = tmp_path / "long" / SINGLE
    raw_file(path, "{", length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    refused(run, ours, path.parent, 5, "header")


@pytest.mark.parametrize("damage", ["overlap", "hole", "truncated", "unknown dtype"])
def test_verify_reports_damage_as_a_problem(run: Run, tmp_path: Path, damage: str) -> None:
    """``verify`` was asked whether the folder is whole: it answers, with its own exit code."""
    path = tmp_path / "damaged" / SINGLE
    path.parent.mkdir()
    DAMAGED[damage][1](path)
    ran = run("verify", path.parent)
    assert ran.code == 8, ran
    assert "problem" in ran.out
    assert "not whole" in ran.out
