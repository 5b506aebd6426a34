"""SHA-256 of whole output files, computed in the same pass that writes them."""

from __future__ import annotations

import hashlib
import threading

from streammerge.plan.plan import OutputFile

__all__ = ["CHECKSUMS_NAME", "Checksums"]

CHECKSUMS_NAME = "SHA256SUMS"


class Checksums:
    """A watcher that hashes each file's tiles in order.

    Tiles are handed out in order, so the worker that holds an earlier one is always at work: waiting
    for it cannot dead-lock. After a failure nobody finishes an earlier tile, so waiting ends then.
    """

    def __init__(self, halted: threading.Event) -> None:
        self._halted = halted
        self._turn = threading.Condition()
        self._next: dict[str, int] = {}
        self._hashes: dict[str, hashlib._Hash] = {}

    def __call__(self, output: OutputFile, start: int, content: memoryview) -> None:
        """Hash a tile when its turn has come."""
        with self._turn:
            while self._next.get(output.name, 0) != start:
                if self._halted.is_set():
                    return
                self._turn.wait(0.1)
        hasher = self._hashes.setdefault(output.name, hashlib.sha256())
        hasher.update(content)  # only the tile whose turn it is gets here
        with self._turn:
            self._next[output.name] = start + len(content)
            self._turn.notify_all()

    def lines(self) -> str:
        """In the format of ``sha256sum``, for ``sha256sum -c``."""
        return "".join(f"{hasher.hexdigest()}  {name}\n" for name, hasher in sorted(self._hashes.items()))
