"""Shared by the tests of the destination: a quick merge, and something that happens in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streammerge as sm


def quick(source: Path, destination: Path, **options: object) -> sm.MergeReport:
    """A merge without the check against the model class."""
    return sm.merge(source, destination, check=False, **options)  # type: ignore[arg-type]


class At(sm.Observer):
    """Does something when a phase begins."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def phase(self, name: str, total: int) -> None:
        """Called before each phase."""
        if name == self._name:
            self._action()
