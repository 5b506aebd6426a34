"""The yardstick: copy files past the page cache with a few threads, and do nothing else.

With ``--written 0.5`` only that share of every block is written, as a cast from float32 to bfloat16 would.
The output is then a file of the right size and of no use.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

__all__ = ["BLOCK", "direct_copy", "main"]

BLOCK = 8 << 20
_PAGE = 4096


@dataclass(frozen=True)
class _Job:
    """A file being copied: open descriptors and sizes in bytes."""

    source: int
    target: int
    size: int
    block_written: int

    @property
    def target_size(self) -> int:
        whole, rest = divmod(self.size, BLOCK)
        return whole * self.block_written + rest * self.block_written // BLOCK

    def blocks(self) -> Iterator[int]:
        return iter(range(-(-self.size // BLOCK)))


def _open(source: Path, target: Path, written: float) -> _Job:
    read_fd = os.open(source, os.O_RDONLY | os.O_DIRECT)
    write_fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
    job = _Job(read_fd, write_fd, os.fstat(read_fd).st_size, int(BLOCK * written) // _PAGE * _PAGE)
    os.ftruncate(write_fd, job.target_size)
    return job


def _copy_block(job: _Job, index: int, buffer: memoryview) -> None:
    size = min(BLOCK, job.size - index * BLOCK)
    done = 0
    while done < size:
        got = os.preadv(job.source, [buffer[done:]], index * BLOCK + done)
        if got == 0:
            raise OSError("the source became shorter")
        done += got
    start = index * job.block_written
    length = min(job.block_written, job.target_size - start)
    length += -length % _PAGE
    done = 0
    while done < length:
        done += os.pwrite(job.target, buffer[done:length], start + done)


def _work(blocks: queue.SimpleQueue[tuple[_Job, int] | None], failures: list[BaseException]) -> None:
    buffer = memoryview(mmap.mmap(-1, BLOCK))
    try:
        while (item := blocks.get()) is not None:
            _copy_block(*item, buffer)
    except BaseException as failure:  # raised again by the caller
        failures.append(failure)


def direct_copy(sources: Sequence[Path], folder: Path, *, workers: int = 2, written: float = 1.0) -> int:
    """Copy files into a folder with direct I/O and make them durable; returns the bytes written.

    Args:
        sources: files, on a file system that can do direct I/O.
        folder: made if need be.
        workers: threads; each has one page-aligned buffer of 8 MiB.
        written: share of each block that is written, 1.0 for a true copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [_open(source, folder / source.name, written) for source in sources]
    blocks: queue.SimpleQueue[tuple[_Job, int] | None] = queue.SimpleQueue()
    for job in jobs:
        for index in job.blocks():
            blocks.put((job, index))
    failures: list[BaseException] = []
    threads = [threading.Thread(target=_work, args=(blocks, failures)) for _ in range(workers)]
    for thread in threads:
        blocks.put(None)
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(map(_close, jobs))


def _close(job: _Job) -> int:
    os.ftruncate(job.target, job.target_size)
    os.fsync(job.target)
    os.close(job.source)
    os.close(job.target)
    return job.target_size


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads.")
@click.option("--written", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Share that is written.")
def main(sources: tuple[Path, ...], folder: Path, workers: int, written: float) -> None:
    """Copy SOURCES into FOLDER with direct I/O."""
    click.echo(f"{direct_copy(sources, folder, workers=workers, written=written)} bytes written")


if __name__ == "__main__":
    main()
