"""The staging folder beside the destination, and the rename that is the only commit point.

DST.streammerge-partial/
    lock            held while a merge runs
    journal.jsonl   what is durable
    model/          becomes DST
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streammerge import files
from streammerge.errors import DestinationError, StoppedError, StorageError, StreammergeError, UsageError

__all__ = [
    "MANIFEST_NAME",
    "Staging",
    "check_destination",
    "commit",
    "finished_plan",
    "manifest_of",
    "staged",
    "staging_of",
]

# Lists what streammerge wrote into a folder, so that --overwrite replaces nothing else.
MANIFEST_NAME = ".streammerge.json"


@dataclass(frozen=True, slots=True)
class Staging:
    """Where a destination is built: on the same file system, so that the rename is atomic."""

    root: Path

    @property
    def folder(self) -> Path:
        """What becomes the destination."""
        return self.root / "model"

    @property
    def journal(self) -> Path:
        """The journal of the merge."""
        return self.root / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.root / "lock"

    def keep_only(self, names: Collection[str]) -> None:
        """Remove what is in the folder besides these files: it would become part of the destination."""
        kept = {self.folder / name for name in names}
        for path in self.folder.iterdir():
            if path.is_symlink() or not path.is_dir():
                if path not in kept:
                    files.remove_file(path)
            elif not any(path in one.parents for one in kept):
                files.remove_tree(path)

    def clear(self) -> None:
        """Forget what an earlier merge left: the journal first, as it speaks of the folder."""
        files.remove_file(self.journal)
        files.remove_tree(self.folder)


def finished_plan(destination: Path) -> object:
    """The plan of a merge that was killed after the commit, before it could clean up; else None."""
    staging = staging_of(destination)
    if staging.root.exists() and not staging.folder.exists():
        return manifest_of(destination).get("plan")
    return None


def staging_of(destination: Path) -> Staging:
    """The staging folder of a destination."""
    return Staging(destination.with_name(destination.name + ".streammerge-partial"))


def manifest_of(destination: Path) -> Mapping[str, object]:
    """What streammerge noted about a folder that it wrote; empty for any other."""
    try:
        manifest = json.loads((destination / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), list) else {}


def check_destination(destination: Path, *, overwrite: bool) -> list[Path]:
    """Look at the destination: before anything is written, and again at the end.

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
    manifest = manifest_of(destination)
    if not manifest:
        raise DestinationError(
            f"{destination} was not written by streammerge, so --overwrite does not touch it; move it away first"
        )
    written = {MANIFEST_NAME, *map(str, manifest["files"])}  # type: ignore[call-overload]
    foreign = [
        path.relative_to(destination)
        for path in sorted(destination.rglob("*"))
        if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(destination)) not in written
    ]
    for path in foreign:
        if path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json"):
            raise DestinationError(
                f"{destination / path} was not written by streammerge and would be mixed with the new weights; "
                "move it away first"
            )
    return foreign


@contextmanager
def staged(destination: Path) -> Iterator[Staging]:
    """The locked staging folder of a destination.

    What an earlier merge left in it is still there. It stays when the merge stops or the disk fails,
    so that the same command can go on, and goes when it is committed or cannot be continued.

    Raises:
        DestinationError: another merge is writing to the same destination.
    """
    staging = staging_of(destination)
    lock = _locked(staging, destination)
    try:
        yield staging
        files.remove_tree(staging.root)
    except StreammergeError as fault:
        if not isinstance(fault, StoppedError | StorageError):
            files.remove_tree(staging.root)
        raise
    finally:
        os.close(lock)


def _locked(staging: Staging, destination: Path) -> int:
    """Lock the staging folder; the lock dies with the process."""
    while True:
        files.make_folder(staging.root)
        with files.io_errors("lock", staging.root):
            fd = files.create(staging.lock, direct=False)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DestinationError(
                f"another merge is writing to {destination}; wait for it or choose another destination"
            ) from None
        except OSError:
            return fd  # a network file system without locks
        # The former holder may have removed the folder between our open and our lock.
        if _same_file(fd, staging.lock):
            return fd
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def commit(
    staging: Staging, destination: Path, written: list[str], manifest: Mapping[str, object], *, overwrite: bool
) -> None:
    """Make the staged folder the destination: the sole commit point is one rename.

    Args:
        staging: its folder is complete and all its files are durable.
        written: names of the files that streammerge wrote, relative to the folder.
        manifest: further facts for the manifest.
        overwrite: whether a folder of an earlier merge is replaced; foreign files in it are carried over.

    Raises:
        DestinationError: something has appeared at the destination meanwhile.
    """
    folder = staging.folder
    kept = check_destination(destination, overwrite=overwrite)
    for path in kept:
        files.make_folder((folder / path).parent)
        files.copy_file(destination / path, folder / path)
    content = json.dumps({**manifest, "files": sorted(written)}, indent=2) + "\n"
    files.write_file(folder / MANIFEST_NAME, content.encode())
    holders = {(folder / name).parent for name in [*written, *map(str, kept)]}
    inner = {folder, *holders, *(above for path in holders for above in path.parents if folder in above.parents)}
    for path in sorted(inner, reverse=True):
        files.sync_folder(path)
    if destination.exists() and any(destination.iterdir()):
        _replace(folder, destination)
    else:
        files.rename(folder, destination)  # also over an empty folder
    files.sync_folder(destination.parent)
    files.sync_folder(staging.root)


def _replace(folder: Path, destination: Path) -> None:
    old = destination.with_name(destination.name + ".streammerge-old")
    files.remove_tree(old)
    if files.exchange(folder, destination):
        files.sync_folder(destination.parent)
        files.sync_folder(folder.parent)
        files.remove_tree(folder)
        return
    # Without an atomic exchange there is a moment with no destination; both folders are whole then.
    files.rename(destination, old)
    files.rename(folder, destination)
    files.remove_tree(old)
