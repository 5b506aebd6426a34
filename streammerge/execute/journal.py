"""The journal: which parts of the output files are durable, so that a merge can go on where it was.

One JSON object per line. The first names the plan by its fingerprint; the others are appended when
the bytes that they speak of are durable: ``{"file", "start", "end", "digest"}`` for a written range
(bytes, and its xxh3_128), ``{"file", "void": true}`` when a file's content can no longer be trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from streammerge import files

__all__ = ["Journal", "Range", "digest_of", "journal_fingerprint"]


_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Range:
    """A durable part of an output file: ``start .. end`` in bytes, and the digest of its content."""

    start: int
    end: int
    digest: str


def digest_of(data: memoryview) -> str:
    """The digest of a range's content."""
    return xxhash.xxh3_128_hexdigest(data)


def journal_fingerprint(path: Path) -> str | None:
    """The fingerprint of the plan that a journal belongs to, or None without a readable journal."""
    lines = _lines(path)
    found = lines[0].get("fingerprint") if lines else None
    return found if isinstance(found, str) else None


class Journal:
    """An open journal. Safe to append to from several threads: each call is one write."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Open the journal of the plan with this fingerprint; one of another plan is begun anew."""
        self._path = path
        self._done: dict[str, dict[int, Range]] = {}
        goes_on = journal_fingerprint(path) == fingerprint
        for line in _lines(path)[1:] if goes_on else ():
            self._load(line)
        with files.io_errors("write", path):
            self._fd = files.open_journal(path, goes_on=goes_on)
        if not goes_on:
            self._append([{"fingerprint": fingerprint}])
            files.sync_folder(path.parent)

    def _load(self, line: dict[str, Any]) -> None:
        name = line.get("file")
        if not isinstance(name, str):
            return
        if line.get("void"):
            self._done.pop(name, None)
            return
        start, end, digest = line.get("start"), line.get("end"), line.get("digest")
        if isinstance(start, int) and isinstance(end, int) and isinstance(digest, str) and 0 <= start < end:
            self._done.setdefault(name, {})[start] = Range(start, end, digest)

    def done(self, path: Path, size: int) -> list[Range]:
        """The durable ranges of a file of ``size`` bytes, in order; none when it has another size."""
        if not path.is_file() or path.stat().st_size != size:
            return []
        ranges: list[Range] = []
        for found in sorted(self._done.get(path.name, {}).values(), key=lambda one: one.start):
            # Tiles begin and end at whole pages; a line that says otherwise is damaged.
            whole = found.start % _PAGE == 0 and (found.end % _PAGE == 0 or found.end == size)
            if whole and found.end <= size and (not ranges or found.start >= ranges[-1].end):
                ranges.append(found)
        return ranges

    def record(self, name: str, ranges: Iterable[Range]) -> None:
        """Note ranges whose bytes are durable."""
        self._append([{"file": name, "start": r.start, "end": r.end, "digest": r.digest} for r in ranges])

    def void(self, name: str) -> None:
        """Note that nothing in a file can be trusted: making it durable failed, and may only seem to
        succeed when tried again."""
        self._append([{"file": name, "void": True}])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with files.io_errors("write", self._path):
            files.append(self._fd, text)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; what a crash left half-written at the end is no line."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    lines = []
    for raw in text.split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        lines.append(line if isinstance(line, dict) else {})
    return lines
