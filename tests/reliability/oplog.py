"""File operations of a process, from what strace saw of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.harness import MUTATORS

__all__ = ["Op", "operations", "trace_options"]

_LINE = re.compile(r"^(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)$")
_RESULT = re.compile(r"\) += (-?\d+)[^=]*$")
_TOKEN = re.compile(r'"((?:\\x[0-9a-f]{2})*)"|(?:AT_FDCWD|\d+)<((?:\\x[0-9a-f]{2})*)>|([^,\s()]+)')
_UNFINISHED = " <unfinished ...>"


def trace_options() -> tuple[str, ...]:
    """Options of strace that log all bytes written."""
    return ("-xx", "-s", str(1 << 24))


@dataclass(frozen=True)
class Op:
    """One operation; paths are absolute.

    Attributes:
        kind: create, write, append, truncate, sync_begin, sync, mkdir, unlink, rmdir, rename, exchange, copy.
        path: what it is done to.
        other: the new name of a rename, or where a copy comes from.
        data: bytes written.
        number: offset of a write, size of a truncation, bytes of a copy.
    """

    kind: str
    path: str
    other: str = ""
    data: bytes = b""
    number: int = 0


def operations(log: Path, below: Path) -> list[Op]:
    """The operations in a trace that change something below a folder.

    A write counts when it is done, a sync covers what was done when it began.
    """
    return [op for op in _all(log.read_text().splitlines()) if op.path.startswith(f"{below}/") or op.path == str(below)]


def _all(lines: list[str]) -> Iterator[Op]:
    begun: dict[str, str] = {}
    for line in lines:
        resumed = _RESUMED.match(line)
        if resumed and resumed["call"] not in MUTATORS:
            continue
        if resumed:
            yield from _parse(resumed["call"], begun.pop(resumed["pid"]) + resumed["rest"])
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        call, rest = match["call"], match["rest"]
        if call not in MUTATORS:
            continue  # strace also shows calls that it has no name for
        if call in ("fsync", "fdatasync"):
            yield Op("sync_begin", _decoded(next(_TOKEN.finditer(rest))))
        if rest.endswith(_UNFINISHED):
            begun[match["pid"]] = rest.removesuffix(_UNFINISHED)
        else:
            yield from _parse(call, rest)


def _decoded(token: re.Match[str]) -> str:
    raw = token[1] if token[1] is not None else token[2]
    return token[3] if raw is None else _bytes(raw).decode(errors="surrogateescape")


def _bytes(raw: str) -> bytes:
    return bytes.fromhex(raw.replace("\\x", ""))


def _parse(call: str, rest: str) -> Iterator[Op]:
    result = _RESULT.search(rest)
    if result is None or int(result[1]) < 0:
        return
    done = int(result[1])
    tokens = list(_TOKEN.finditer(rest[: result.start()]))
    words = [_decoded(token) for token in tokens]
    if call == "openat":
        if "O_CREAT" in words[2]:
            yield Op("create", _joined(words[0], words[1]))
    elif call == "write":
        yield Op("append", words[0], data=_bytes(tokens[1][1] or "")[:done])
    elif call == "pwrite64":
        yield Op("write", words[0], data=_bytes(tokens[1][1] or "")[:done], number=int(words[-1]))
    elif call in ("pwritev", "pwritev2"):
        yield _vector_write(call, rest, words, done)
    elif call == "ftruncate":
        yield Op("truncate", words[0], number=int(words[1]))
    elif call in ("fsync", "fdatasync"):
        yield Op("sync", words[0])
    elif call in ("mkdir", "rmdir", "unlink"):
        yield Op(call, words[0])
    elif call == "unlinkat":
        yield Op("rmdir" if "AT_REMOVEDIR" in words[2] else "unlink", _joined(words[0], words[1]))
    elif call == "rename":
        yield Op("rename", words[0], words[1])
    elif call in ("renameat", "renameat2"):
        kind = "exchange" if "RENAME_EXCHANGE" in words[-1] else "rename"
        yield Op(kind, _joined(words[0], words[1]), _joined(words[2], words[3]))
    elif call == "sendfile":
        yield Op("copy", words[0], words[1], number=done)
    elif call == "copy_file_range":
        yield Op("copy", words[0], words[2], number=done)
    else:
        raise AssertionError(f"{call} is not modelled: {rest[:200]}")


def _vector_write(call: str, rest: str, words: list[str], done: int) -> Op:
    parts = re.findall(r'iov_base="((?:\\x[0-9a-f]{2})*)"', rest)
    numbers = re.search(r"\], \d+, (\d+)(?:, [^,)]+)?\)", rest)
    assert numbers is not None, f"{call}: {rest[-200:]}"
    return Op("write", words[0], data=b"".join(map(_bytes, parts))[:done], number=int(numbers[1]))


def _joined(folder: str, name: str) -> str:
    return name if name.startswith("/") else f"{folder}/{name}"
