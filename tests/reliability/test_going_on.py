"""The same command goes on where it was; another source or other options start over, and say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streammerge as sm
from tests.reliability.harness import SMALL, Case, process, tree
from tests.reliability.interrupted import STEPS, interrupt, model_of
from tests.reliability.runner import Steps

CASE = Case("shards", {"max_shard_size": "60KB"}, steps=STEPS)
RANK = "model_world_size_4_rank_2.pt"
OVER = "starting over"


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A merge of a source that may be changed."""
    shutil.copytree(SMALL, tmp_path / "source")
    STEPS.apply(monkeypatch.setattr)
    return replace(CASE, source=tmp_path / "source")


def fresh(case: Case, folder: Path, **options: Any) -> object:
    """What an undisturbed merge gives."""
    sm.merge(case.source, folder, check=False, **{**case.options, **options})
    return tree(folder)


def test_same_command_keeps_what_was_done(case: Case, tmp_path: Path) -> None:
    interrupt(case, tmp_path / "merged")
    report = case.run(tmp_path / "merged")
    assert report.bytes_kept >= 4 * STEPS.tile
    assert report.bytes_kept + report.bytes_written == sum(
        path.stat().st_size for path in (tmp_path / "merged").glob("*.safetensors")
    )
    assert report.warnings == ()
    assert tree(tmp_path / "merged") == fresh(case, tmp_path / "fresh")


@pytest.mark.parametrize("io", ["auto", "direct", "pread", "mmap"])
@pytest.mark.parametrize("tile", [1 << 13, 1 << 14, 1 << 16, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_how_it_works_may_change(
    io: str, tile: int, workers: int, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget decides on the tile, and smaller tiles cannot check what larger ones wrote."""
    expected = fresh(case, tmp_path / "fresh")
    interrupt(case, tmp_path / "merged")
    Steps(tile, tile, inline=False).apply(monkeypatch.setattr)
    report = sm.merge(case.source, tmp_path / "merged", check=False, io=io, workers=workers, **case.options)
    assert report.bytes_kept >= (4 * STEPS.tile if tile >= STEPS.tile else 0)
    assert OVER not in str(report.warnings)
    assert tree(tmp_path / "merged") == expected


def touched(source: Path) -> None:
    """A newer time."""
    status = (source / RANK).stat()
    os.utime(source / RANK, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def changed(source: Path) -> None:
    """Other weights in a file of the same size."""
    content = bytearray((source / RANK).read_bytes())
    content[len(content) // 2] ^= 1
    (source / RANK).write_bytes(content)


def moved(source: Path) -> None:
    """Other rank files: the same ones saved again."""
    content = (source / RANK).read_bytes()
    (source / RANK).unlink()
    (source / RANK).write_bytes(content)


@pytest.mark.parametrize("change", [touched, changed, moved])
def test_changed_source_starts_over(change: Callable[[Path], None], case: Case, tmp_path: Path) -> None:
    interrupt(case, tmp_path / "merged")
    change(case.source)
    report = case.run(tmp_path / "merged")
    assert report.bytes_kept == 0
    assert OVER in str(report.warnings)
    assert tree(tmp_path / "merged") == fresh(case, tmp_path / "fresh")


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"max_shard_size": "90KB"}, {"max_shard_size": "5GB"}])
def test_other_options_start_over(options: dict[str, Any], case: Case, tmp_path: Path) -> None:
    interrupt(case, tmp_path / "merged")
    report = sm.merge(case.source, tmp_path / "merged", check=False, **{**case.options, **options})
    assert report.bytes_kept == 0
    assert OVER in str(report.warnings)
    assert tree(tmp_path / "merged") == fresh(case, tmp_path / "fresh", **options)


def test_starting_over_is_said_on_stderr(case: Case, tmp_path: Path) -> None:
    interrupt(case, tmp_path / "merged")
    line = [word for word in case.line(tmp_path / "merged") if word != "-q"]
    done = process(*line, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert OVER in done.stderr


def test_small_files_of_the_interrupted_one_do_not_stay(case: Case, tmp_path: Path) -> None:
    """Checksums were asked for, then not: what the folder holds depends on the last command only."""
    interrupt(case, tmp_path / "merged")
    (model_of(tmp_path / "merged") / "SHA256SUMS").write_text("of other weights\n")
    case.run(tmp_path / "merged")
    assert tree(tmp_path / "merged") == fresh(case, tmp_path / "fresh")


def test_other_config_folder_after_the_small_files_were_written(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first folder's chat template must not end up beside the second folder's tokenizer."""
    from streammerge import files

    shutil.copytree(case.source / "huggingface", tmp_path / "config")
    (tmp_path / "config" / "chat_template.jinja").write_text("{{ messages }}")
    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", lambda *names: (_ for _ in ()).throw(sm.StreammergeError("killed")))
        patch.setattr(files, "remove_tree", lambda path: None)
        with pytest.raises(sm.StreammergeError, match="killed"):
            sm.merge(case.source, tmp_path / "merged", check=False, hf_config=tmp_path / "config", **case.options)
    case.run(tmp_path / "merged")
    assert tree(tmp_path / "merged") == fresh(case, tmp_path / "fresh")


def test_note_that_was_removed_does_not_come_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' files are those at the destination when it is replaced, not when a killed merge looked."""
    from streammerge import files

    fresh(case, tmp_path / "merged")
    note = tmp_path / "merged" / "notes.md"
    note.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(files, "exchange", lambda *names: (_ for _ in ()).throw(sm.StreammergeError("killed")))
        patch.setattr(files, "remove_tree", lambda path: None)
        with pytest.raises(sm.StreammergeError, match="killed"):
            sm.merge(case.source, tmp_path / "merged", check=False, overwrite=True, **case.options)
    note.unlink()
    sm.merge(case.source, tmp_path / "merged", check=False, overwrite=True, **case.options)
    assert not note.exists()
