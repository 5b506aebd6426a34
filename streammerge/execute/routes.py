"""Choose the routes for reading and writing by what the file systems can do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from streammerge import files
from streammerge.errors import UsageError
from streammerge.tensors.catalogue import SourceFile

__all__ = ["IO_CHOICES", "read_route", "write_route"]

IO_CHOICES = ("auto", "direct", "pread", "mmap")
# Direct I/O over a network is slow or only emulated; these do better with large buffered calls.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs"}


def read_route(io: str, sources: Sequence[SourceFile]) -> str:
    """The route for reading (see ``read.READERS``) that ``--io`` stands for.

    ``auto`` reads past the page cache on local disks, where that was measured to be fastest and
    leaves the cache to others, and by ordinary large calls on network file systems and where the
    file system has no direct I/O (tmpfs).

    Raises:
        UsageError: ``io`` is not one of ``IO_CHOICES``.
    """
    if io not in IO_CHOICES:
        raise UsageError(f"unknown --io {io!r}; use one of {', '.join(IO_CHOICES)}")
    if io in ("pread", "mmap"):
        return io
    paths = list({source.path.parent: source.path for source in sources}.values())
    if not all(_can_read_directly(path) for path in paths):
        return "pread"
    return "pread" if io == "auto" and any(_on_network(path) for path in paths) else "direct"


def write_route(io: str, folder: Path) -> str:
    """The route for writing into an existing folder (see ``write.WRITERS``); chosen as for reading."""
    if io not in ("auto", "direct") or not _can_write_directly(folder):
        return "buffered"
    return "buffered" if io == "auto" and _on_network(folder) else "direct"


def _can_read_directly(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def _can_write_directly(folder: Path) -> bool:
    probe = folder / ".direct-io-probe"
    try:
        os.close(files.create(probe, direct=True))
    except (OSError, AttributeError):
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return True


def _on_network(path: Path) -> bool:
    """Whether the mount that holds the path is of a network file system (Linux)."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    real = str(path.resolve())
    best, kind = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind in _NETWORK
