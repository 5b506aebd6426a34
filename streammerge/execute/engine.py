"""Run a plan: workers take tiles in file order, fill them and write them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streammerge.errors import StoppedError
from streammerge.execute.casts import kernel
from streammerge.execute.gather import fill
from streammerge.execute.memory import Buffers
from streammerge.execute.read import make_reader
from streammerge.execute.write import Writer, make_writer
from streammerge.plan.plan import OutputFile, Plan

__all__ = ["Progress", "Routes", "run"]

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Routes:
    """How to read and write: names in ``read.READERS`` and ``write.WRITERS``."""

    read: str
    write: str


@dataclass(slots=True)
class Progress:
    """Bytes moved so far; updated by the workers, read by whoever shows it."""

    read: int = 0
    written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, read: int, written: int) -> None:
        """Count a finished tile."""
        with self.lock:
            self.read += read
            self.written += written


@dataclass(frozen=True, slots=True)
class _Tile:
    output: OutputFile
    writer: Writer
    start: int
    size: int


class _Tiles:
    """Hands out the tiles of all files in order; opens each file when its first tile is due and
    makes it durable when its last is written."""

    def __init__(self, outputs: Sequence[OutputFile], folder: Path, route: str, size: int) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, int] = {}
        self._open: dict[str, Writer] = {}
        self._iterator = self._tiles(outputs, folder, route, size)

    def _tiles(self, outputs: Sequence[OutputFile], folder: Path, route: str, size: int) -> Iterator[_Tile]:
        for output in outputs:
            starts = range(0, output.size, size)
            self._pending[output.name] = len(starts)
            writer = self._open[output.name] = make_writer(route, folder / output.name, output.size)
            for start in starts:
                yield _Tile(output, writer, start, min(size, output.size - start))

    def take(self) -> _Tile | None:
        """The next tile, or None when all are taken."""
        with self._lock:
            return next(self._iterator, None)

    def done(self, tile: _Tile) -> None:
        """A tile is written; the worker that writes a file's last one makes it durable."""
        name = tile.output.name
        with self._lock:
            self._pending[name] -= 1
            last = self._pending[name] == 0
            writer = self._open.pop(name) if last else None
        if writer is not None:
            try:
                writer.finish()
            finally:
                writer.close()

    def close(self) -> None:
        """Close what a failure left open."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()


def run(
    plan: Plan,
    folder: Path,
    buffers: Buffers,
    routes: Routes,
    *,
    progress: Progress | None = None,
    on_poll: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> Progress:
    """Write all weight files of a plan into an existing folder, and make them durable.

    Args:
        plan: what to write.
        folder: where; the files must not exist under names that matter.
        buffers: threads and buffer sizes.
        routes: how to read and write.
        progress: counts bytes while it runs.
        on_poll: called about ten times a second from the calling thread.
        stop: set from outside (a signal) to stop after the tiles in flight.

    Raises:
        StoppedError: ``stop`` was set.
        SourceError, StorageError: reading or writing failed.
    """
    progress = progress or Progress()
    halt = stop or threading.Event()
    for stored, written in plan.casts:
        kernel(stored, written)  # import what it needs before the threads start
    tiles = _Tiles(plan.files, folder, routes.write, buffers.tile)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _work(tiles, plan, buffers, routes, progress, halt)
        except BaseException as failure:  # handed to the calling thread below
            failures.append(failure)
            halt.set()

    threads = [threading.Thread(target=work, name=f"worker-{i}", daemon=True) for i in range(buffers.workers)]
    for thread in threads:
        thread.start()
    try:
        _wait(threads, on_poll)
    finally:
        halt.set()
        for thread in threads:
            thread.join()
        tiles.close()
    if failures:
        raise failures[0]
    if progress.written < plan.write_size:
        raise StoppedError("stopped on request")
    return progress


def _wait(threads: Sequence[threading.Thread], on_poll: Callable[[], None]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            on_poll()


def _work(
    tiles: _Tiles, plan: Plan, buffers: Buffers, routes: Routes, progress: Progress, halt: threading.Event
) -> None:
    reader = make_reader(routes.read, plan.sources, buffers.window)
    whole = memoryview(mmap.mmap(-1, buffers.tile))  # page aligned, as direct writes need
    try:
        while not halt.is_set() and (tile := tiles.take()) is not None:
            view = whole[: tile.size]
            read = fill(tile.output, tile.start, view, reader, buffers.window)
            tile.writer.write(view, tile.start)
            tiles.done(tile)
            progress.add(read, tile.size)
    finally:
        reader.close()
