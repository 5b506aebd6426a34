"""Sizes as people write them: ``16G`` and ``16GiB`` are 2**30-based, ``16GB`` is 10**9-based."""

from __future__ import annotations

import re

from streammerge.errors import UsageError

__all__ = ["format_size", "parse_size"]

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str | int, *, percent_of: int | None = None) -> int:
    """Read a size in bytes.

    Args:
        text: ``16G`` or ``16GiB`` (2**30), ``16GB`` (10**9), ``4096`` (bytes), ``50%``.
        percent_of: what a percentage is of, in bytes; without it percentages are refused.

    Raises:
        UsageError: the text is not a size, or not above zero.
    """
    if isinstance(text, int):
        size = text
    elif text.strip().endswith("%") and percent_of is not None:
        size = _percentage(text, percent_of)
    else:
        size = _units(text)
    if size <= 0:
        raise UsageError(f"size {text!r} must be above zero")
    return size


def _units(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"cannot read {text!r} as a size; write for example 16G, 512MiB, 5GB or 50%")
    number, prefix, suffix = match.groups()
    base = 1000 if suffix is not None and suffix.lower() == "b" else 1024
    return int(float(number) * base ** _POWERS[prefix.lower()])


def _percentage(text: str, whole: int) -> int:
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        raise UsageError(f"cannot read {text!r} as a percentage") from None
    if not 0 < share <= 100:
        raise UsageError(f"{text!r} must be above 0% and at most 100%")
    return int(whole * share / 100)


def format_size(size: float) -> str:
    """Write bytes for people, 2**30-based: ``7.1 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
