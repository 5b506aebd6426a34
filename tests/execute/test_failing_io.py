"""Sources that change and disks that are full: a clear error, and nothing under the destination."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import streammerge as sm
from streammerge.errors import SourceError, StorageError

Mount = Callable[[str], Path]
Contents = Callable[[Path], dict[str, str]]


class Meddler(sm.Observer):
    """Does something to the source when the weights are about to be read."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        self._meddle = meddle

    def phase(self, name: str, total: int) -> None:
        """Called before each phase; the merge proper is the one that knows its size."""
        if total:
            self._meddle()


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that may be damaged."""
    shutil.copytree(tiny, tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs with the given options, for root only."""
    mounted: list[Path] = []

    def on(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip("a tmpfs cannot be mounted here (needs root)")
        mounted.append(folder)
        return folder

    yield on
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def nothing_but(folder: Path, *names: str) -> bool:
    """Whether the folder holds just these names, and what a merge keeps to go on from."""
    left = {path.name for path in folder.iterdir()} - {"merged.streammerge-partial"}
    return left == set(names)


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("change", ["time", "longer", "shorter", "replaced"])
def test_source_that_changes(io: str, change: str, source: Path, tmp_path: Path) -> None:
    path = source / "model_world_size_3_rank_1.pt"
    status = path.stat()

    def meddle() -> None:
        if change == "time":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        elif change == "replaced":
            path.unlink()
            path.write_bytes(bytes(status.st_size))
        else:
            os.truncate(path, status.st_size + (1 if change == "longer" else -1))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(SourceError, match=r"model_world_size_3_rank_1\.pt"):
        sm.merge(source, tmp_path / "merged", io=io, check=False, observer=Meddler(meddle))
    assert not (tmp_path / "merged").exists()


def test_source_that_vanishes(source: Path, tmp_path: Path) -> None:
    with pytest.raises((SourceError, StorageError), match=r"model_world_size_3_rank_2\.pt"):
        sm.merge(
            source,
            tmp_path / "merged",
            check=False,
            observer=Meddler((source / "model_world_size_3_rank_2.pt").unlink),
        )
    assert not (tmp_path / "merged").exists()


def test_read_error_names_the_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    observer = Meddler(lambda: monkeypatch.setattr(os, "preadv", broken))
    with pytest.raises(StorageError, match=r"cannot read .*rank_0\.pt: .*I/O error"):
        sm.merge(source, tmp_path / "merged", io="pread", check=False, observer=observer)
    assert nothing_but(tmp_path, "source")


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_full_disk(io: str, tiny: Path, mount: Mount, tmp_path: Path, contents: Contents) -> None:
    """And with more room, the same command goes on."""
    disk = mount("size=1M")
    with pytest.raises(StorageError, match="no space is left") as caught:
        sm.merge(tiny, disk / "merged", io=io, check=False, space_check=False)
    assert caught.value.exit_code == 6
    assert nothing_but(disk)
    subprocess.run(["mount", "-o", "remount,size=20M", disk], check=True)
    sm.merge(tiny, disk / "merged", io=io, check=False)
    sm.merge(tiny, tmp_path / "whole", check=False)
    assert contents(disk / "merged") == contents(tmp_path / "whole")
    assert [path.name for path in disk.iterdir()] == ["merged"]


def test_disk_that_fills_with_the_sidecars(tiny: Path, mount: Mount) -> None:
    """The weights of 1 733 196 bytes fit, the files beside them do not."""
    disk = mount("size=1700K")
    with pytest.raises(StorageError, match="no space is left"):
        sm.merge(tiny, disk / "merged", check=False, space_check=False)
    assert nothing_but(disk)


def test_disk_without_inodes(tiny: Path, mount: Mount) -> None:
    """A file that cannot even be created is a storage error as well."""
    disk = mount("size=20M,nr_inodes=8")
    with pytest.raises(StorageError, match="no space is left"):
        sm.merge(tiny, disk / "merged", check=False, space_check=False, max_shard_size=100_000)
    assert nothing_but(disk)


def test_space_is_checked_first(tiny: Path, mount: Mount, snapshot: Callable[[Path], object]) -> None:
    disk = mount("size=1M")
    with pytest.raises(StorageError, match="--no-space-check"):
        sm.merge(tiny, disk / "deep" / "er" / "merged", check=False)
    assert nothing_but(disk)


def test_read_only_disk(tiny: Path, mount: Mount) -> None:
    disk = mount("size=20M,ro")
    with pytest.raises(StorageError, match="read-only"):
        sm.merge(tiny, disk / "merged", check=False)


def test_overlay(tiny: Path, mount: Mount, tmp_path: Path, contents: Contents) -> None:
    """Containers write to an overlay; the staging folder is renamed within it."""
    disk = mount("size=50M")
    for name in ("lower", "upper", "work", "merged"):
        (disk / name).mkdir()
    options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    made = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", disk / "merged"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("an overlay cannot be mounted here")
    try:
        sm.merge(tiny, disk / "merged" / "out", check=False)
        sm.merge(tiny, disk / "merged" / "out", check=False, overwrite=True)
        sm.merge(tiny, tmp_path / "plain", check=False)
        assert contents(disk / "merged" / "out") == contents(tmp_path / "plain")
    finally:
        subprocess.run(["umount", disk / "merged"], check=True)
