"""A disk that may lose whatever was not synced, as far as POSIX lets it.

A file keeps what it held when it was last synced, plus any pages of what was written since. A name in
a folder is as it was when the folder was last synced, or as any later operation on it left it, whatever
the order among different names. A rename happens wholly or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.reliability.harness import Tree
from tests.reliability.oplog import Op

__all__ = ["Crash", "Disk", "everything", "nothing", "random_crash"]

_PAGE = 4096


@dataclass(frozen=True)
class Change:
    """An unsynced change of a file: data written at an offset, or a new size."""

    data: bytes
    number: int
    is_size: bool = False


@dataclass(eq=False)
class Node:
    """A file (``entries`` is None) or a folder, as it is now and as it surely is on the disk."""

    entries: dict[str, Node] | None
    now: bytes = b""
    durable: bytes = b""
    pending: list[Change] = field(default_factory=list)
    durable_entries: dict[str, Node] = field(default_factory=dict)
    covered: int = 0


@dataclass(eq=False)
class Rename:
    """An unsynced change of names: (folder, name, what it names from then on)."""

    names: tuple[tuple[Node, str, Node | None], ...]


@dataclass(frozen=True)
class Crash:
    """What a power cut keeps of what was not synced."""

    names: Callable[[Rename], bool]
    changes: Callable[[Change], Iterable[Change]]


def _all_changes(change: Change) -> Iterable[Change]:
    return (change,)


def nothing(*, names: bool = False, sizes: bool = False) -> Crash:
    """Nothing unsynced is kept; or all names, or all names and sizes, whose data is zeros then."""
    return Crash(lambda op: names, lambda change: (change,) if sizes and change.is_size else ())


def everything(*, names: bool = True) -> Crash:
    """All data is kept; all names too, or none."""
    return Crash(lambda op: names, _all_changes)


def random_crash(seed: int) -> Crash:
    """Any names, any pages, and the last page of a write torn."""
    rng = random.Random(seed)
    share = rng.choice((0.1, 0.5, 0.9))

    def changes(change: Change) -> Iterable[Change]:
        if change.is_size:
            return (change,) if rng.random() < share else ()
        pages = range(0, len(change.data), _PAGE)
        kept = [page for page in pages if rng.random() < share]
        torn = rng.choice((0, 1, 100, 512, _PAGE))
        return [
            Change(change.data[page : page + (torn if page == kept[-1] and torn else _PAGE)], change.number + page)
            for page in kept
        ]

    return Crash(lambda op: rng.random() < share, changes)


class Disk:
    """Replays operations; ``after`` says what a power cut at this moment may leave."""

    def __init__(self, root: str, content: Tree) -> None:
        """A disk that durably holds ``content`` at the absolute path ``root``."""
        self._root = root.rstrip("/")
        self._top = Node({})
        self._names: list[Rename] = []
        for name, data in sorted(content.items()):
            node = Node({}) if data is None else Node(None, data, data)
            self._link(f"{self._root}/{name}", node)
            folder, last = self._parent(f"{self._root}/{name}")
            folder.durable_entries[last] = node
        self._names.clear()

    def apply(self, op: Op) -> None:
        """Carry out an operation."""
        getattr(self, f"_do_{op.kind}")(op)

    def after(self, crash: Crash) -> Tree:
        """What the disk holds after a power cut."""
        names = self._surviving_names(crash)
        found: Tree = {}

        def walk(node: Node, prefix: str) -> None:
            for name, child in sorted(names.get(node, node.durable_entries).items()):
                if child.entries is None:
                    found[prefix + name] = _surviving_data(child, crash)
                else:
                    found[prefix + name] = None
                    walk(child, f"{prefix}{name}/")

        walk(self._top, "")
        return found

    def now(self) -> Tree:
        """What a process sees."""
        return self.after(everything())

    def _surviving_names(self, crash: Crash) -> dict[Node, dict[str, Node]]:
        names: dict[Node, dict[str, Node]] = {}
        kept: set[Rename] = set()
        for op in self._names:
            if crash.names(op):
                kept |= self._with_earlier(op)
        for op in self._names:
            if op in kept:
                _set_names(op, lambda folder: names.setdefault(folder, dict(folder.durable_entries)))
        return names

    def _with_earlier(self, op: Rename) -> set[Rename]:
        """An operation, and the earlier ones on the same names, which it builds on."""
        kept, keys = {op}, {(folder, name) for folder, name, _ in op.names}
        for earlier in reversed(self._names[: self._names.index(op)]):
            if any((folder, name) in keys for folder, name, _ in earlier.names):
                kept.add(earlier)
                keys |= {(folder, name) for folder, name, _ in earlier.names}
        return kept

    def _parent(self, path: str) -> tuple[Node, str]:
        node, parts = self._top, path.removeprefix(self._root).strip("/").split("/")
        for part in parts[:-1]:
            assert node.entries is not None
            node = node.entries[part]
        return node, parts[-1]

    def _node(self, path: str) -> Node | None:
        if path.rstrip("/") == self._root:
            return self._top
        folder, name = self._parent(path)
        return (folder.entries or {}).get(name)

    def _file(self, path: str) -> Node:
        node = self._node(path)
        assert node is not None, path
        return node

    def _change(self, *names: tuple[str, Node | None]) -> None:
        found = [(*self._parent(path), node) for path, node in names]
        op = Rename(tuple(found))
        _set_names(op, lambda folder: folder.entries if folder.entries is not None else {})
        self._names.append(op)

    def _link(self, path: str, node: Node | None) -> None:
        self._change((path, node))

    def _do_create(self, op: Op) -> None:
        if self._node(op.path) is None:
            self._link(op.path, Node(None))

    def _do_mkdir(self, op: Op) -> None:
        self._link(op.path, Node({}))

    def _do_unlink(self, op: Op) -> None:
        self._link(op.path, None)

    _do_rmdir = _do_unlink

    def _do_rename(self, op: Op) -> None:
        self._change((op.path, None), (op.other, self._node(op.path)))

    def _do_exchange(self, op: Op) -> None:
        self._change((op.path, self._node(op.other)), (op.other, self._node(op.path)))

    def _write(self, node: Node, change: Change) -> None:
        node.pending.append(change)
        node.now = _changed(node.now, change)

    def _do_write(self, op: Op) -> None:
        self._write(self._file(op.path), Change(op.data, op.number))

    def _do_append(self, op: Op) -> None:
        node = self._file(op.path)
        self._write(node, Change(op.data, len(node.now)))

    def _do_truncate(self, op: Op) -> None:
        self._write(self._file(op.path), Change(b"", op.number, is_size=True))

    def _do_copy(self, op: Op) -> None:
        target, source = self._file(op.path), self._file(op.other)
        at = len(target.now)
        self._write(target, Change(source.now[at : at + op.number], at))

    def _do_sync_begin(self, op: Op) -> None:
        node = self._node(op.path)
        if node is not None:
            node.covered = len(node.pending)

    def _do_sync(self, op: Op) -> None:
        node = self._node(op.path)
        if node is None:
            return
        if node.entries is None:
            for change in node.pending[: node.covered]:
                node.durable = _changed(node.durable, change)
            del node.pending[: node.covered]
            node.covered = 0
            return
        synced: set[Rename] = set()
        for one in self._names:
            if any(folder is node for folder, _, _ in one.names):
                synced |= self._with_earlier(one)
        for one in self._names:
            if one in synced:
                _set_names(one, lambda folder: folder.durable_entries)
        self._names = [one for one in self._names if one not in synced]


def _set_names(op: Rename, entries_of: Callable[[Node], dict[str, Node]]) -> None:
    for folder, name, node in op.names:
        if node is None:
            entries_of(folder).pop(name, None)
        else:
            entries_of(folder)[name] = node


def _changed(content: bytes, change: Change) -> bytes:
    if change.is_size:
        return content[: change.number].ljust(change.number, b"\0")
    padded = content.ljust(change.number, b"\0")
    return padded[: change.number] + change.data + padded[change.number + len(change.data) :]


def _surviving_data(node: Node, crash: Crash) -> bytes:
    content = node.durable
    for change in node.pending:
        for part in crash.changes(change):
            content = _changed(content, part)
    return content
