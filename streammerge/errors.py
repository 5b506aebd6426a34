"""Every error a user can meet, each with the exit code that the command returns for it.

    StreammergeError                    1  unexpected: a bug in streammerge
    ├── UsageError                      2  the command was called wrongly
    ├── SourceError                     3  the source is incomplete or corrupt
    ├── UnsupportedError                4  a format, placement, dtype or model we do not handle
    ├── UnsafeError                     5  the source asks for something unsafe
    ├── StorageError                    6  no space, quota, or the disk failed
    ├── BudgetError                     7  the RAM budget is too small to work
    ├── DifferenceError                 8  two things that should be equal differ
    ├── DestinationError                9  the destination exists or is in use
    └── StoppedError                   75  stopped on request; the same command starts again

A message says what is wrong, where (file, tensor, rank) and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DestinationError",
    "DifferenceError",
    "SourceError",
    "StoppedError",
    "StorageError",
    "StreammergeError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
]


class StreammergeError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command returns."""

    exit_code = 1


class UsageError(StreammergeError):
    """The command or the call was wrong: an option, a size, a path that names nothing."""

    exit_code = 2


class SourceError(StreammergeError):
    """The source is incomplete, truncated, contradictory or corrupt."""

    exit_code = 3


class UnsupportedError(StreammergeError):
    """The source is well formed, but of a kind that cannot be merged correctly."""

    exit_code = 4


class UnsafeError(StreammergeError):
    """The source holds content that no honest checkpoint holds."""

    exit_code = 5


class StorageError(StreammergeError):
    """Reading or writing failed: no space, quota exceeded, I/O error, permission denied."""

    exit_code = 6


class BudgetError(StreammergeError):
    """The RAM budget is too small.

    Attributes:
        least: the smallest budget that would do, in bytes.
    """

    exit_code = 7

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


class DifferenceError(StreammergeError):
    """Values that must be equal are not."""

    exit_code = 8


class DestinationError(StreammergeError):
    """The destination already holds something, or another merge is writing it."""

    exit_code = 9


class StoppedError(StreammergeError):
    """A signal asked us to stop. Nothing stands under the final name; the same command goes on."""

    exit_code = 75
