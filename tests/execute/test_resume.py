"""A merge that was stopped goes on where it was, and trusts nothing that it has not checked."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import streammerge as sm
from streammerge import files
from streammerge.errors import StoppedError, StorageError
from streammerge.execute import memory

Contents = Callable[[Path], dict[str, str]]
TILE = 1 << 18


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that may be changed."""
    shutil.copytree(tiny, tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def whole(tiny: Path, tmp_path: Path, contents: Contents) -> dict[str, str]:
    """What a merge without interruption gives."""
    sm.merge(tiny, tmp_path / "whole", check=False)
    return contents(tmp_path / "whole")


@pytest.fixture
def interrupted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The staging folder of a merge of seven tiles that was stopped after three."""
    monkeypatch.setattr(memory, "_TILE_SIZES", (TILE,))
    stop, write, done = threading.Event(), files.pwrite_all, []

    def counting(fd: int, data: memoryview, offset: int, flags: int = 0) -> None:
        write(fd, data, offset, flags)
        if len(data) == TILE:
            done.append(offset)
        if len(done) == 3:
            stop.set()

    with monkeypatch.context() as patched:
        patched.setattr(files, "pwrite_all", counting)
        with pytest.raises(StoppedError, match="goes on from there"):
            sm.merge(source, tmp_path / "merged", workers=1, check=False, stop=stop)
    assert len(done) == 3
    assert not (tmp_path / "merged").exists()
    return tmp_path / "merged.streammerge-partial"


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("io", ["auto", "pread"])
def test_goes_on(
    io: str, workers: int, interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    report = sm.merge(source, tmp_path / "merged", io=io, workers=workers, check=False)
    assert report.bytes_kept == 3 * TILE
    assert report.bytes_kept + report.bytes_written == (tmp_path / "merged" / "model.safetensors").stat().st_size
    assert contents(tmp_path / "merged") == whole
    assert not interrupted.exists()


def test_a_damaged_part_is_done_anew(
    interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    with (interrupted / "model" / "model.safetensors").open("r+b") as file:
        file.seek(TILE + 5)
        file.write(b"\xff\xfe")
    report = sm.merge(source, tmp_path / "merged", check=False)
    assert report.bytes_kept == 2 * TILE
    assert contents(tmp_path / "merged") == whole


def test_what_is_there_already_needs_no_space(
    interrupted: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has room for the rest has room enough."""
    need = sm.plan(source, tmp_path / "merged").disk
    monkeypatch.setattr(files, "free_space", lambda path: need - 2 * TILE)
    assert sm.merge(source, tmp_path / "merged", check=False).bytes_kept == 3 * TILE


@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_a_file_that_is_not_as_it_was(
    damage: str, interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    path = interrupted / "model" / "model.safetensors"
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        os.truncate(path, 2 * TILE)
    else:
        path.write_bytes(bytes(path.stat().st_size))
    assert sm.merge(source, tmp_path / "merged", check=False).bytes_kept == 0
    assert contents(tmp_path / "merged") == whole


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\n", b'{"fingerprint": 5}\n', b"[" * 9999 + b"\n"])
def test_a_broken_journal_means_starting_over(
    damage: bytes, interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    (interrupted / "journal.jsonl").write_bytes(damage)
    assert sm.merge(source, tmp_path / "merged", check=False).bytes_kept == 0
    assert contents(tmp_path / "merged") == whole


def test_a_line_that_a_crash_cut_off(
    interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    path = interrupted / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    sm.merge(source, tmp_path / "merged", check=False)
    assert contents(tmp_path / "merged") == whole


def test_lines_that_lie(
    interrupted: Path, source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents
) -> None:
    """Ranges that overlap, lie outside, or have types that no merge wrote."""
    name = "model.safetensors"
    lies = [
        {"file": name, "start": 5, "end": 99, "digest": "0"},
        {"file": name, "start": 6 * TILE, "end": 99 * TILE, "digest": "0"},
        {"file": name, "start": "x", "end": None, "digest": 1},
        {"file": [name], "void": True},
        {"file": name, "start": 4 * TILE, "end": 4 * TILE + 7, "digest": "0" * 32},
    ]
    with (interrupted / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(lie) + "\n" for lie in lies)
    sm.merge(source, tmp_path / "merged", check=False)
    assert contents(tmp_path / "merged") == whole


@pytest.mark.parametrize("change", ["options", "time", "content"])
def test_another_merge_starts_over(
    change: str, interrupted: Path, source: Path, tmp_path: Path, contents: Contents
) -> None:
    path, dtype = source / "model_world_size_3_rank_0.pt", "float32" if change == "options" else "auto"
    if change == "time":
        os.utime(path, ns=(0, 1))
    elif change == "content":
        shutil.copy(path, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    report = sm.merge(source, tmp_path / "merged", check=False, dtype=dtype)
    assert report.bytes_kept == 0
    assert any("starting over" in warning for warning in report.warnings)
    sm.merge(source, tmp_path / "fresh", check=False, dtype=dtype)
    assert contents(tmp_path / "merged") == contents(tmp_path / "fresh")


def test_nothing_is_trusted_after_a_failed_sync(
    source: Path, tmp_path: Path, whole: dict[str, str], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel forgets what it failed to write, and a second fsync succeeds all the same."""

    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync", failing)
        with pytest.raises(StorageError, match="I/O error"):
            sm.merge(source, tmp_path / "merged", check=False)
    assert sm.merge(source, tmp_path / "merged", check=False).bytes_kept == 0
    assert contents(tmp_path / "merged") == whole


def test_checksums_of_a_continued_merge(interrupted: Path, source: Path, tmp_path: Path) -> None:
    """They cover the kept parts as well."""
    import hashlib

    sm.merge(source, tmp_path / "merged", workers=5, checksums=True, check=False)
    lines = (tmp_path / "merged" / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256((tmp_path / "merged" / "model.safetensors").read_bytes()).hexdigest()
    assert lines == [f"{digest}  model.safetensors"]
