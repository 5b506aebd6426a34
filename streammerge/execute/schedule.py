"""The order of work: tiles of all output files, what is durable of them, and when files are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streammerge import files
from streammerge.errors import StorageError
from streammerge.execute.journal import Journal, Range
from streammerge.execute.write import Writer, make_writer
from streammerge.plan.plan import OutputFile

__all__ = ["Schedule", "Tile"]

# Bytes written to a file before they are made durable and noted in the journal: what a kill may cost.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of an output file.

    Attributes:
        output: the file.
        writer: its open writer.
        start, size: bytes.
        digest: of the content that an earlier run wrote there, or None.
    """

    output: OutputFile
    writer: Writer
    start: int
    size: int
    digest: str | None


@dataclass(slots=True)
class _Open:
    """A file being written: tiles still to come, and ranges written but not yet durable."""

    writer: Writer
    pending: int
    fresh: list[Range] = field(default_factory=list)
    fresh_bytes: int = 0
    failed: bool = False

    def take_fresh(self) -> list[Range]:
        """What was written since it was last made durable."""
        taken, self.fresh, self.fresh_bytes = self.fresh, [], 0
        return taken


class Schedule:
    """Hands out tiles in file order, and makes what was written durable from time to time."""

    def __init__(
        self, outputs: Sequence[OutputFile], folder: Path, route: str, tile_size: int, journal: Journal
    ) -> None:
        self._folder, self._route, self._size, self._journal = folder, route, tile_size, journal
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._tiles = self._all_tiles(outputs)

    def _all_tiles(self, outputs: Sequence[OutputFile]) -> Iterator[Tile]:
        for output in outputs:
            parts = list(_parts(self._journal.done(self._folder / output.name, output.size), output.size, self._size))
            with files.io_errors("create", self._folder / output.name):
                writer = make_writer(self._route, self._folder / output.name, output.size)
            self._open[output.name] = _Open(writer, len(parts))
            for start, end, digest in parts:
                yield Tile(output, writer, start, end - start, digest)

    def take(self) -> Tile | None:
        """The next tile, or None when all are taken."""
        with self._lock:
            return next(self._tiles, None)

    def done(self, tile: Tile, digest: str) -> None:
        """A tile is written (or was found written). Called by the worker that did it."""
        name = tile.output.name
        with self._lock:
            state = self._open[name]
            if digest != tile.digest:
                state.fresh.append(Range(tile.start, tile.start + tile.size, digest))
                state.fresh_bytes += tile.size
            due = state.take_fresh() if state.fresh_bytes >= _FLUSH_BYTES else []
        if due:
            self._make_durable(name, state, due, finish=False)
        with self._lock:
            state.pending -= 1  # only now: the last worker closes the file
            if state.pending:
                return
            del self._open[name]
            due = state.take_fresh()
        try:
            self._make_durable(name, state, due, finish=True)
        finally:
            state.writer.close()

    def _make_durable(self, name: str, state: _Open, ranges: list[Range], *, finish: bool) -> None:
        try:
            if finish:
                state.writer.finish()
            else:
                state.writer.sync()
        except StorageError:
            state.failed = True
            self._journal.void(name)
            raise
        if not state.failed:
            self._journal.record(name, ranges)

    def suspend(self) -> None:
        """Make what was written of unfinished files durable, and close them."""
        for name, state in list(self._open.items()):
            try:
                self._make_durable(name, state, state.fresh, finish=False)
            finally:
                state.writer.close()
                del self._open[name]


def _parts(done: Sequence[Range], size: int, tile_size: int) -> Iterator[tuple[int, int, str | None]]:
    """Cut a file into (start, end, digest): ranges found in the journal, and tiles of what is between.

    A range that is larger than today's tiles cannot be checked in one buffer, so it is done anew.
    """
    at = 0
    for found in [*(one for one in done if one.end - one.start <= tile_size), Range(size, size, "")]:
        for start in range(at, found.start, tile_size):
            yield start, min(start + tile_size, found.start), None
        if found.end > found.start:
            yield found.start, found.end, found.digest
        at = found.end
