"""Merges that were interrupted in the middle, for tests that go on with them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streammerge import files
from streammerge.errors import StoppedError
from tests.reliability.harness import Case
from tests.reliability.runner import Steps

__all__ = ["STEPS", "interrupt", "journal_of", "model_of"]

STEPS = Steps(1 << 14, 1 << 14)


def interrupt(case: Case, target: Path, *, after: int = 6) -> None:
    """Run a merge up to its n-th journal entry; what it did by then is durable."""
    import streammerge as sm

    stop = threading.Event()
    append, count = files.append, 0

    def counted(fd: int, data: bytes) -> None:
        nonlocal count
        count += 1
        append(fd, data)
        if count == after:
            stop.set()

    with pytest.MonkeyPatch.context() as patch:
        case.steps.apply(patch.setattr)
        patch.setattr(files, "append", counted)
        with pytest.raises(StoppedError, match="same command"):
            sm.merge(case.source, target, check=False, stop=stop, **case.options)
    assert journal_of(target).stat().st_size
    assert not target.exists()


def journal_of(target: Path) -> Path:
    """The journal of an unfinished merge."""
    return Path(f"{target}.streammerge-partial/journal.jsonl")


def model_of(target: Path) -> Path:
    """The folder that would have become the destination."""
    return Path(f"{target}.streammerge-partial/model")
