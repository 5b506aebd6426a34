"""The staging folder beside the destination, and the rename that is the only commit point."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from streammerge import files
from streammerge.errors import DestinationError, UsageError

__all__ = ["MANIFEST_NAME", "check_destination", "commit", "staged", "staging_path"]

# Lists what streammerge wrote into a folder, so that --overwrite replaces nothing else.
MANIFEST_NAME = ".streammerge.json"
_LOCK_NAME = ".lock"


def staging_path(destination: Path) -> Path:
    """Where the folder is built: on the same file system, so that the rename is atomic."""
    return destination.with_name(destination.name + ".streammerge-partial")


def check_destination(destination: Path, *, overwrite: bool) -> list[Path]:
    """Look at the destination before anything is written.

    Returns:
        Files in it that are not streammerge's own, to be kept when it is replaced.

    Raises:
        DestinationError: it holds something and may not be replaced.
        UsageError: it is a file, or its parent cannot be a folder.
    """
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(f"{destination} exists and is not a folder")
    if not destination.exists() or not any(destination.iterdir()):
        return []
    if not overwrite:
        raise DestinationError(
            f"{destination} is not empty; choose another destination, "
            "or --overwrite to replace what an earlier merge wrote"
        )
    return _foreign_files(destination)


def _foreign_files(destination: Path) -> list[Path]:
    try:
        written = set(json.loads((destination / MANIFEST_NAME).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DestinationError(
            f"{destination} was not written by streammerge, so --overwrite does not touch it; move it away first"
        ) from None
    foreign = [
        path.relative_to(destination)
        for path in sorted(destination.rglob("*"))
        if not path.is_dir() and str(path.relative_to(destination)) not in {*written, MANIFEST_NAME}
    ]
    for path in foreign:
        if path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json"):
            raise DestinationError(
                f"{destination / path} was not written by streammerge and would be mixed with the new weights; "
                "move it away first"
            )
    return foreign


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """An empty staging folder, locked against a second merge; removed unless it was committed.

    Raises:
        DestinationError: another merge is writing to the same destination.
    """
    folder = staging_path(destination)
    lock = _locked(folder, destination)
    try:
        for path in folder.iterdir():
            if path.name != _LOCK_NAME:
                files.remove_tree(path) if path.is_dir() else path.unlink()
        yield folder
    finally:
        if folder.exists() and _same_file(lock, folder / _LOCK_NAME):
            files.remove_tree(folder)
        os.close(lock)


def _locked(folder: Path, destination: Path) -> int:
    """Lock the staging folder; the lock dies with the process."""
    while True:
        files.make_folder(folder)
        with files.io_errors("lock", folder):
            fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DestinationError(
                f"another merge is writing to {destination}; wait for it or choose another destination"
            ) from None
        except OSError:
            pass  # a network file system without locks
        # The former holder may have renamed or removed the folder between our open and our lock.
        if _same_file(fd, folder / _LOCK_NAME):
            return fd
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def commit(
    folder: Path, destination: Path, written: list[str], kept: list[Path], manifest: Mapping[str, object]
) -> None:
    """Make the staged folder the destination: the sole commit point is one rename.

    Args:
        folder: the staging folder, all its weight files durable.
        written: names of the files that streammerge wrote, relative to it.
        kept: foreign files of an earlier destination, carried over.
        manifest: further facts for the manifest.
    """
    for path in kept:
        files.make_folder((folder / path).parent)
        files.write_file(folder / path, (destination / path).read_bytes())
    content = json.dumps({**manifest, "files": sorted(written)}, indent=2) + "\n"
    files.write_file(folder / MANIFEST_NAME, content.encode())
    (folder / _LOCK_NAME).unlink()
    for path in sorted({folder / Path(name).parent for name in written} | {folder}, reverse=True):
        files.sync_folder(path)
    if not destination.exists():
        files.rename(folder, destination)
    elif not any(destination.iterdir()):
        with files.io_errors("replace", destination):
            destination.rmdir()
        files.rename(folder, destination)
    else:
        _replace(folder, destination)
    files.sync_folder(destination.parent)


def _replace(folder: Path, destination: Path) -> None:
    old = destination.with_name(destination.name + ".streammerge-old")
    files.remove_tree(old)
    if files.exchange(folder, destination):
        files.remove_tree(folder)
        return
    # Without an atomic exchange there is a moment with no destination; both folders are whole then.
    files.rename(destination, old)
    files.rename(folder, destination)
    files.remove_tree(old)
