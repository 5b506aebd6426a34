"""Progress on stderr: a bar on a terminal, a plain line every 30 seconds otherwise."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import click
from tqdm import tqdm

from streammerge.execute.memory import rss
from streammerge.pipeline import Observer
from streammerge.sizes import format_size

__all__ = ["ConsoleObserver", "QuietObserver"]

_PLAIN_SECONDS = 30.0


class QuietObserver(Observer):
    """Warnings only."""

    def warn(self, message: str) -> None:
        """Print the warning on stderr."""
        click.echo(f"warning: {message}", err=True)


class ConsoleObserver(QuietObserver):
    """A bar or plain lines: bytes, speed, time left, memory against the budget."""

    def __init__(self, max_ram: int) -> None:
        self._max_ram = max_ram
        self._bar: tqdm[NoReturn] | None = None
        self._name = ""
        self._total = 0
        self._began = self._told = 0.0
        self._terminal = sys.stderr.isatty() and not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")

    def phase(self, name: str, total: int) -> None:
        """Close the bar of the phase before and begin anew."""
        self.close()
        self._name, self._total = name, total
        self._began = self._told = time.monotonic()
        if self._terminal and total:
            self._bar = tqdm(
                total=total, desc=name, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True, mininterval=0.2
            )
        else:
            click.echo(f"{name} ...", err=True)

    def advance(self, done: int) -> None:
        """Move the bar, or print a line when 30 seconds have passed."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"RSS {format_size(rss())}/{format_size(self._max_ram)}", refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._total and time.monotonic() - self._told >= _PLAIN_SECONDS:
            self._told = time.monotonic()
            click.echo(self._line(done), err=True)

    def _line(self, done: int) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = done / seconds
        left = f"{(self._total - done) / rate:.0f} s left" if rate else "time left unknown"
        return (
            f"{self._name}: {format_size(done)} of {format_size(self._total)}, {rate / 1e9:.2f} GB/s, {left}, "
            f"RSS {format_size(rss())} of {format_size(self._max_ram)}"
        )

    def warn(self, message: str) -> None:
        """Print the warning without tearing the bar."""
        tqdm.write(f"warning: {message}", file=sys.stderr)

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
