"""The command with small steps: small tiles, a journal entry per few tiles, workers in the calling thread.

The product's sizes are made for gigabytes. With these, a merge of a megabyte has as many steps as one
of a terabyte, and with ``inline`` it makes the same system calls in the same order every time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from streammerge import files
from streammerge.execute import compare, engine, memory, schedule

__all__ = ["Steps"]

VARIABLE = "RELIABILITY_STEPS"


class _InlineThread:
    """Looks like a thread, and does its work when it is started."""

    ident = 0

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> None:
        self.start = partial(target, *args)

    def is_alive(self) -> bool:
        """Never, after ``start``."""
        return False

    def join(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Steps:
    """How small the steps are.

    Attributes:
        tile, flush: bytes.
        inline: do all work in the calling thread.
        pause: seconds to wait before each write of weights, each small file and each comparison.
    """

    tile: int = 1 << 18
    flush: int = 1 << 18
    inline: bool = True
    pause: float = 0

    def apply(self, patch: Callable[[Any, str, Any], None] = setattr) -> None:
        """Change the product in this process."""
        patch(memory, "_TILE_SIZES", (self.tile,))
        patch(schedule, "_FLUSH_BYTES", self.flush)
        if self.inline:
            stub = SimpleNamespace(**{**vars(threading), "Thread": _InlineThread})
            patch(engine, "threading", stub)
        if self.pause:
            for module, name in ((files, "pwrite_all"), (files, "write_file"), (compare, "run_copies")):
                patch(module, name, _paused(getattr(module, name), self.pause))

    def environment(self) -> dict[str, str]:
        """For the process that runs this module."""
        return {VARIABLE: json.dumps(asdict(self))}


def _paused(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def paused(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return paused


if __name__ == "__main__":
    from streammerge.cli.main import main

    Steps(**json.loads(os.environ[VARIABLE])).apply()
    main(sys.argv[1:])
