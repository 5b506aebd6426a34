"""Keep the disk from filling while a large merge of zeros is measured: finished shards become holes.

The input is sparse, so the output is all zeros too, and a hole reads as just that: the merge stays valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["HolePuncher", "punch"]

_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02  # FALLOC_FL_* of linux/falloc.h
_PAGE = 4096
_PERIOD_SECONDS = 0.2


def punch(path: Path) -> None:
    """Give back the disk blocks of a safetensors file's data; its size and header stay."""
    fd = os.open(path, os.O_RDWR)
    try:
        status = os.fstat(fd)
        header = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        start = header + -header % _PAGE
        if start < status.st_size:
            _fallocate(fd, start, status.st_size - start)
    finally:
        os.close(fd)


def _fallocate(fd: int, start: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate64(fd, _KEEP_SIZE_AND_PUNCH, start, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class HolePuncher(threading.Thread):
    """While inside, punches all ``*.safetensors`` in a folder but the newest two, again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Punch; called on entry."""
        while not self._stop_asked.wait(_PERIOD_SECONDS):
            for path in sorted(self._folder.glob("*.safetensors"))[:-2]:
                # The folder is renamed when the merge is complete.
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_blocks * 512 > 1 << 20:
                        punch(path)

    def __enter__(self) -> HolePuncher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_asked.set()
        self.join()
