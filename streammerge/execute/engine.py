"""Run a plan: workers take tiles in file order, fill them and write them."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streammerge.errors import StoppedError, StorageError
from streammerge.execute.casts import kernel
from streammerge.execute.compute import computing_reader, formula_casts
from streammerge.execute.gather import fill
from streammerge.execute.journal import Journal, digest_of
from streammerge.execute.memory import Buffers
from streammerge.execute.schedule import Schedule, Tile
from streammerge.plan.plan import OutputFile, Plan
from streammerge.sizes import format_size

__all__ = ["Progress", "Routes", "Watcher", "read_through", "run"]

_POLL_SECONDS = 0.1

# Sees every tile's content (output, start in bytes, content) once, from the worker that has it.
Watcher = Callable[[OutputFile, int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Routes:
    """How to read and write: names in ``read.READERS`` and ``write.WRITERS``."""

    read: str
    write: str


@dataclass(slots=True)
class Progress:
    """Bytes moved so far; updated by the workers, read by whoever shows it.

    Attributes:
        read: from the source.
        written: to the output files.
        kept: found in the output files as an earlier run had left them.
    """

    read: int = 0
    written: int = 0
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> int:
        """Bytes of the output files that are as they should be."""
        return self.written + self.kept


def run(
    plan: Plan,
    folder: Path,
    buffers: Buffers,
    routes: Routes,
    journal: Journal,
    *,
    progress: Progress | None = None,
    watchers: Sequence[Watcher] = (),
    on_poll: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
    halt: threading.Event | None = None,
) -> Progress:
    """Write all weight files of a plan into an existing folder, and make them durable.

    Args:
        plan: what to write.
        folder: where.
        buffers: threads and buffer sizes.
        routes: how to read and write.
        journal: of this plan; what it says is done is checked and kept.
        progress: counts bytes while it runs.
        watchers: see every tile's content.
        on_poll: called about ten times a second from the calling thread.
        stop: set from outside to stop after the tiles in flight; only read here.
        halt: set here when the workers are to end, for watchers that wait for one another.

    Raises:
        StoppedError: ``stop`` was set. The journal says what is done.
        SourceError, StorageError: reading or writing failed.
    """
    progress = progress or Progress()
    halt = halt or threading.Event()
    for stored, written in {*plan.casts, *formula_casts(plan.formulas)}:
        kernel(stored, written)  # import what it needs before the threads start
    schedule = Schedule(plan.files, folder, routes.write, buffers.tile, journal)
    failures: list[BaseException] = []

    def ending() -> bool:
        return halt.is_set() or (stop is not None and stop.is_set())

    def work(ended: threading.Event) -> None:
        try:
            _work(schedule, plan, buffers, routes, progress, watchers, ending)
        except BaseException as failure:  # handed to the calling thread below
            failures.append(failure)
            halt.set()
        finally:
            ended.set()

    # An exception from a signal handler makes Thread.join take a running thread for ended (Python
    # 3.10 to 3.12), so the workers say themselves when they have ended.
    running: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for number in range(buffers.workers):
            ended = threading.Event()
            thread = threading.Thread(target=work, args=(ended,), name=f"worker-{number}", daemon=True)
            running.append((thread, ended))  # before it starts: a signal may arrive in between
            thread.start()
        with contextlib.suppress(StoppedError):  # from a signal handler; told with more detail below
            _wait(running, on_poll)
    finally:
        halt.set()
        _wait(running, lambda: None)
        # When the disk has failed already, a second failure adds nothing to the first.
        with contextlib.suppress(StorageError):
            schedule.suspend()
    if failures:
        raise failures[0]
    if progress.done < plan.write_size:
        raise StoppedError(
            f"stopped on request: {format_size(progress.done)} of {format_size(plan.write_size)} are done and kept; "
            "the same command goes on from there"
        )
    return progress


def read_through(
    plan: Plan, buffers: Buffers, route: str, watchers: Sequence[Watcher], on_read: Callable[[int], None]
) -> None:
    """Show the content of all output files of a plan to watchers, without writing anything.

    Args:
        on_read: told the bytes seen so far.

    Raises:
        SourceError, StorageError: reading failed.
    """
    reader = computing_reader(route, plan.sources, plan.formulas, buffers.window)
    whole = memoryview(mmap.mmap(-1, buffers.tile))
    seen = 0
    try:
        for output in plan.files:
            for start in range(0, output.size, buffers.tile):
                view = whole[: min(buffers.tile, output.size - start)]
                fill(output, start, view, reader, buffers.window)
                for watcher in watchers:
                    watcher(output, start, view)
                seen += len(view)
                on_read(seen)
    finally:
        reader.close()


def _wait(running: Sequence[tuple[threading.Thread, threading.Event]], on_poll: Callable[[], None]) -> None:
    for thread, ended in running:
        # A thread without an identity was never started; should it start late, it finds the halt set.
        while not ended.wait(_POLL_SECONDS) and thread.ident is not None:
            on_poll()


def _work(
    schedule: Schedule,
    plan: Plan,
    buffers: Buffers,
    routes: Routes,
    progress: Progress,
    watchers: Sequence[Watcher],
    ending: Callable[[], bool],
) -> None:
    reader = computing_reader(routes.read, plan.sources, plan.formulas, buffers.window)
    whole = memoryview(mmap.mmap(-1, buffers.tile))  # page aligned, as direct writes need
    try:
        while not ending() and (tile := schedule.take()) is not None:
            view = whole[: tile.size]
            kept = _is_kept(tile, view)
            read = 0 if kept else fill(tile.output, tile.start, view, reader, buffers.window)
            if not kept:
                tile.writer.write(view, tile.start)
            for watcher in watchers:
                watcher(tile.output, tile.start, view)
            schedule.done(tile, digest_of(view))
            with progress.lock:
                progress.read += read
                progress.written += 0 if kept else tile.size
                progress.kept += tile.size if kept else 0
    finally:
        reader.close()


def _is_kept(tile: Tile, view: memoryview) -> bool:
    """Whether the file holds the tile already, intact; its content is in ``view`` then."""
    return tile.digest is not None and tile.writer.read(view, tile.start) and digest_of(view) == tile.digest
