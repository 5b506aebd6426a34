"""The destination is absent or complete, and what others put there is left alone."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import streammerge as sm
from streammerge import files
from streammerge.errors import DestinationError, SourceError, StoppedError, StorageError, UsageError
from streammerge.folder.staging import staged
from tests.folder.merging import At, quick

Contents = Callable[[Path], dict[str, str]]


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask; put back afterwards."""
    former = os.umask(0o022)
    os.umask(former)
    yield os.umask
    os.umask(former)


def test_parents_are_created(tiny: Path, tmp_path: Path) -> None:
    quick(tiny, tmp_path / "a" / "b" / "merged")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["merged"]


def test_empty_destination_is_taken(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    quick(tiny, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_relative_destination(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick(tiny, Path("merged"))
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", [".", "../here", "sub/.."])
def test_destination_without_a_name_of_its_own(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mkdir here && cd here && streammerge SRC .`` merges, or says clearly why not."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        quick(tiny, Path(name))
    except UsageError:
        return
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_what_is_not_empty_is_refused(tiny: Path, tmp_path: Path, snapshot: Callable[[Path], object]) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(DestinationError, match="--overwrite") as caught:
        quick(tiny, tmp_path / "merged")
    assert caught.value.exit_code == 9
    with pytest.raises(DestinationError, match="not written by streammerge"):
        quick(tiny, tmp_path / "merged", overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_is_no_folder_is_refused(kind: str, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    (tmp_path / "other").mkdir()
    if kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / ("other" if kind == "link" else "nowhere"))
    with pytest.raises(UsageError):
        quick(tiny, target, overwrite=True)
    assert list((tmp_path / "other").iterdir()) == []


def test_parent_that_is_a_file(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises((UsageError, StorageError)):
        quick(tiny, tmp_path / "file" / "merged")


@pytest.mark.parametrize(
    ("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_modes_follow_the_umask(
    mask: int, file_mode: int, folder_mode: int, tiny: Path, tmp_path: Path, umask: Callable[[int], int]
) -> None:
    umask(mask)
    quick(tiny, tmp_path / "merged")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "merged").iterdir()}
    assert set(modes.values()) == {file_mode}, modes
    assert (tmp_path / "merged").stat().st_mode & 0o777 == folder_mode


def test_second_merge_into_the_same_place(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"

    def second() -> None:
        with pytest.raises(DestinationError, match="another merge"):
            quick(tiny, target)

    quick(tiny, target, observer=At("merging", second))
    assert (target / "model.safetensors").is_file()


def test_second_merge_during_the_commit(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held until the rename, or the second merge empties the folder of the first."""
    target = tmp_path / "merged"
    sync = files.sync_folder
    intruded: list[Path] = []

    def intrude(path: Path) -> None:
        if not intruded:
            intruded.append(path)
            with pytest.raises(DestinationError), staged(target):
                pass
        sync(path)

    monkeypatch.setattr(files, "sync_folder", intrude)
    quick(tiny, target)
    assert intruded
    assert (target / "model.safetensors").is_file()


def test_left_over_staging_of_a_killed_merge(tiny: Path, tmp_path: Path, contents: Contents) -> None:
    """It is not locked any more, so it is taken over and none of its content survives."""
    partial = tmp_path / "merged.streammerge-partial"
    (partial / "model" / "sub").mkdir(parents=True)
    (partial / "model" / "sub" / "junk").write_text("junk")
    (partial / "model" / "model.safetensors").write_bytes(bytes(99))
    (partial / "journal.jsonl").write_text('{"fingerprint": "of another merge"}\n')
    quick(tiny, tmp_path / "merged")
    quick(tiny, tmp_path / "fresh")
    assert contents(tmp_path / "merged") == contents(tmp_path / "fresh")
    assert not partial.exists()


@pytest.mark.parametrize("step", ["rename", "sync_folder", "write_file"])
def test_failure_in_the_commit(step: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise StorageError("the disk failed")

    monkeypatch.setattr(files, step, broken)
    with pytest.raises(StorageError, match="the disk failed"):
        quick(tiny, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    monkeypatch.undo()
    quick(tiny, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_refusal_leaves_no_staging_folder(tiny: Path, tmp_path: Path) -> None:
    """What cannot be continued is removed; what can (a stop, a full disk) stays for the next try."""

    def meddle() -> None:
        raise SourceError("the source is bad")

    with pytest.raises(SourceError):
        quick(tiny, tmp_path / "merged", observer=At("merging", meddle))
    assert list(tmp_path.iterdir()) == []


def test_stop_before_and_while_merging(tiny: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(StoppedError) as caught:
        quick(tiny, tmp_path / "merged", stop=stop, observer=At("merging", stop.set))
    assert caught.value.exit_code == 75
    assert not (tmp_path / "merged").exists()
    with pytest.raises(StoppedError):
        quick(tiny, tmp_path / "merged", stop=stop)
    assert not (tmp_path / "merged").exists()


def test_stop_leaves_an_earlier_result(tiny: Path, tmp_path: Path, contents: Contents) -> None:
    quick(tiny, tmp_path / "merged")
    before, stop = contents(tmp_path / "merged"), threading.Event()
    with pytest.raises(StoppedError):
        quick(tiny, tmp_path / "merged", overwrite=True, stop=stop, observer=At("merging", stop.set))
    assert contents(tmp_path / "merged") == before


def test_the_callers_event_is_only_read(tiny: Path, tmp_path: Path) -> None:
    """It can be used for the next merge, and a later Ctrl-C is the first one."""
    stop = threading.Event()
    quick(tiny, tmp_path / "merged", stop=stop)
    assert not stop.is_set()


@pytest.mark.parametrize("call", ["inspect", "plan", "merge", "refused"])
def test_the_source_is_never_modified(
    call: str, tiny: Path, tmp_path: Path, snapshot: Callable[[Path], object]
) -> None:
    shutil.copytree(tiny, tmp_path / "source")
    before = snapshot(tmp_path / "source")
    if call == "inspect":
        sm.inspect(tmp_path / "source")
    elif call == "plan":
        sm.plan(tmp_path / "source", tmp_path / "merged")
    elif call == "merge":
        quick(tmp_path / "source", tmp_path / "merged")
    else:
        with pytest.raises(DestinationError):
            quick(tmp_path / "source", tmp_path / "source")
    assert snapshot(tmp_path / "source") == before
