"""A sync that has failed is not believed when it succeeds later: the kernel may have dropped the data."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from streammerge import files
from streammerge.errors import StorageError
from streammerge.execute import schedule as schedules
from streammerge.execute.journal import Journal, digest_of
from streammerge.execute.schedule import Schedule, Tile
from streammerge.plan.plan import OutputFile
from tests.reliability.cases import golden_of, problem_with
from tests.reliability.harness import Case, tree
from tests.reliability.runner import Steps

PAGE = 4096
NAME = "model.safetensors"
CASE = Case("shards", {"max_shard_size": "60KB"}, steps=Steps(1 << 14, 1 << 14))


def io_error(*arguments: object) -> None:
    """As the device reports it."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Counting:
    """Notes which files are written to, and makes one sync fail."""

    def __init__(self, patch: pytest.MonkeyPatch, failing: int) -> None:
        self.synced: list[str] = []
        self.written: dict[str, int] = {}
        self._sync, self._write, self._failing = files.sync, files.pwrite_all, failing
        patch.setattr(files, "sync", self.sync)
        patch.setattr(files, "pwrite_all", self.write)

    def sync(self, fd: int) -> None:
        """Sync, or fail."""
        self.synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        if len(self.synced) == self._failing:
            io_error()
        self._sync(fd)

    def write(self, fd: int, data: memoryview, offset: int, flags: int = 0) -> None:
        """Write."""
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        self.written[name] = self.written.get(name, 0) + len(data)
        self._write(fd, data, offset, flags)


def test_file_is_rewritten_after_a_failed_sync(tmp_path: Path) -> None:
    golden = golden_of(CASE, tmp_path / "golden")
    with pytest.MonkeyPatch.context() as patch:
        CASE.steps.apply(patch.setattr)
        total = len(syncs_of(CASE, tmp_path / "count"))
    for failing in range(1, total + 1):
        target = tmp_path / str(failing) / "merged"
        with pytest.MonkeyPatch.context() as patch:
            CASE.steps.apply(patch.setattr)
            first = Counting(patch, failing)
            with pytest.raises(StorageError, match="I/O error"):
                CASE.run(target)
        with pytest.MonkeyPatch.context() as patch:
            CASE.steps.apply(patch.setattr)
            second = Counting(patch, 0)
            CASE.run(target)
        victim = first.synced[failing - 1]
        size = (target / victim).stat().st_size
        assert second.written.get(victim, 0) >= size, f"{victim} was not written anew after sync {failing} failed"
        assert problem_with(tree(target), golden, finished=True) is None


def syncs_of(case: Case, folder: Path) -> list[str]:
    """The files that are synced, in order."""
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch, 0)
        case.run(folder / "merged")
    return counting.synced


@pytest.fixture
def tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Schedule, list[Tile], Callable[[], list[object]]]:
    """A file of four tiles, all written, none synced; and what a later merge would keep of it."""
    monkeypatch.setattr(schedules, "_FLUSH_BYTES", 1)
    journal = Journal(tmp_path / "journal", "plan")
    schedule = Schedule([OutputFile(NAME, b"", (), 4 * PAGE)], tmp_path, "buffered", PAGE, journal)
    taken = [tile for _ in range(4) if (tile := schedule.take())]
    for number, tile in enumerate(taken):
        tile.writer.write(memoryview(bytes([number]) * PAGE), tile.start)

    def kept() -> list[object]:
        return list(Journal(tmp_path / "journal", "plan").done(tmp_path / NAME, 4 * PAGE))

    return schedule, taken, kept


def digest(number: int) -> str:
    """Of the content of a tile."""
    return digest_of(memoryview(bytes([number]) * PAGE))


def fail_once(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> None:
    """The next sync fails, and those after it seem to succeed, as Linux has it."""
    sync = files.sync

    def failing(fd: int) -> None:
        monkeypatch.setattr(files, "sync", sync)
        meanwhile()
        io_error()

    monkeypatch.setattr(files, "sync", failing)


def test_other_worker_syncs_after_the_failure(
    tiles: tuple[Schedule, list[Tile], Callable[[], list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data was among what the failed sync should have written."""
    schedule, taken, kept = tiles
    fail_once(monkeypatch)
    with pytest.raises(StorageError):
        schedule.done(taken[0], digest(0))
    with suppress(StorageError):
        schedule.done(taken[1], digest(1))
    assert kept() == []


def test_other_worker_syncs_during_the_failure(
    tiles: tuple[Schedule, list[Tile], Callable[[], list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, taken, kept = tiles
    fail_once(monkeypatch, lambda: schedule.done(taken[1], digest(1)))
    with pytest.raises(StorageError):
        schedule.done(taken[0], digest(0))
    assert kept() == []


def test_suspending_after_the_failure(
    tiles: tuple[Schedule, list[Tile], Callable[[], list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, taken, kept = tiles

    def other_worker() -> None:
        monkeypatch.setattr(schedules, "_FLUSH_BYTES", 1 << 30)
        schedule.done(taken[1], digest(1))

    fail_once(monkeypatch, other_worker)
    with pytest.raises(StorageError):
        schedule.done(taken[0], digest(0))
    with suppress(StorageError):
        schedule.suspend()
    assert kept() == []


def test_file_stays_open_while_another_worker_syncs_it(
    tiles: tuple[Schedule, list[Tile], Callable[[], list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker makes some tiles durable while another finishes the last of the file, and closes it."""
    schedule, taken, kept = tiles
    sync = files.sync

    def slow(fd: int) -> None:
        monkeypatch.setattr(files, "sync", sync)
        for number, tile in enumerate(taken[1:], 1):
            schedule.done(tile, digest(number))
        sync(fd)

    monkeypatch.setattr(files, "sync", slow)
    schedule.done(taken[0], digest(0))
    with pytest.raises(StorageError, match="Bad file descriptor"):
        taken[0].writer.sync()  # closed in the end
    assert len(kept()) == len(taken)


def test_short_appends_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    fd = files.open_journal(tmp_path / "journal", goes_on=False)
    files.append(fd, b"a line that is longer than ten bytes\n")
    os.close(fd)
    assert (tmp_path / "journal").read_bytes() == b"a line that is longer than ten bytes\n"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_of(CASE, tmp_path / "golden")
    pwrite, write, writev = os.pwrite, os.write, os.pwritev
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:PAGE], offset))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, offset, flags=0: writev(fd, [part[:1000] for part in parts], offset, flags)
    )
    for io in ("pread", "direct"):
        case = Case("short", {**CASE.options, "io": io})
        case.run(tmp_path / io / "merged")
        assert problem_with(tree(tmp_path / io / "merged"), golden, finished=True) is None
