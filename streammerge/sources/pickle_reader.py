"""Read a pickle symbolically: nothing in it is ever imported, called or set on a real object.

A class or function named by the pickle becomes a ``Global``; applying one makes an inert ``Record``
of callee, arguments and state. Only the caller's own pure functions, keyed by (module, name), are
run: that is how a torch rebuild function becomes a description of a tensor. A callable of the
standard library outside of a short list of plain data types marks the file as hostile.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammerge.errors import SourceError, StreammergeError, UnsafeError

__all__ = ["Folds", "Functions", "Global", "Record", "read_pickle"]

Functions = Mapping[tuple[str, str], Callable[..., object]]
Folds = Mapping[str, Callable[[Any], object]]

_BININT1, _BINGET, _LONG_BINGET, _LONG_BINPUT, _MEMOIZE = 0x4B, 0x68, 0x6A, 0x72, 0x94
_SLICE = 8 << 20
_uint32 = struct.Struct("<I").unpack_from

_MAX_OPS = 40_000_000  # a 671B model's largest rank file needs about a million
# A distributed checkpoint's metadata has about 50 per chunk: 70 million with the optimizer of 671B over 8 x 32
# ranks, and as many again for Megatron's copies of the plans.
_MAX_FOLDED_OPS = 400_000_000
_MAX_INT_BYTES = 64
_MAX_KEY_PARTS = 256

# Plain data of the standard library that trainers keep beside weights. They stay inert as well.
_PLAIN_STDLIB = {
    "argparse": {"Namespace"},
    "builtins": {
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple",
    },
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "_io": {"BytesIO"},  # extra state of Transformer Engine 1.x
    "io": {"BytesIO"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "signal": {"Handlers", "Sigmasks", "Signals"},  # enums; Megatron's args have one
    "types": {"SimpleNamespace"},
    "uuid": {"UUID"},
}  # fmt: skip
# Python 2 names (pickle protocol 2 writes them) and Python 3.13's private home of pathlib.
_SAME_MODULE = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the pickle names; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """What applying an unknown callee would have made. Compared by identity; graphs may be cyclic.

    Attributes:
        callee: the ``Global`` (or another record) that was applied.
        args: its positional arguments, as they were in the pickle.
        state: what ``__setstate__`` would have been given, or None.
        items: dict items set on it, or None.
        elements: list elements appended to it, or None.
    """

    __slots__ = ("args", "callee", "elements", "items", "state")

    def __init__(self, callee: object, args: object) -> None:
        self.callee = callee
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] | None = None
        self.elements: list[Any] | None = None

    @property
    def type_name(self) -> str:
        """Name of the class without its module, or an empty string."""
        return self.callee.name if isinstance(self.callee, Global) else ""

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes from the state: a dict, or the (dict, slots) pair of classes with slots."""
        state = self.state
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        merged: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update(part)
        return merged

    def __repr__(self) -> str:
        return f"<Record of {self.callee if isinstance(self.callee, Global) else 'unnamed'}>"


def read_pickle(
    data: bytes | memoryview,
    where: str,
    functions: Functions,
    persistent: Callable[[object], object] | None = None,
    start: int = 0,
    folds: Folds | None = None,
) -> tuple[Any, int, set[str]]:
    """Read one pickle.

    Args:
        data: the bytes; the pickle begins at ``start``.
        where: file (and member) for messages.
        functions: pure functions to run for these (module, name) callees.
        persistent: makes an object of a persistent id; without it persistent ids are refused.
        folds: class name without module -> makes a smaller state of the state of such an object. With
            folds, what the pickle never refers to again is not remembered either: pickles of
            millions of objects need it.

    Returns:
        The object, the position after the pickle, and the names of the callees that stayed inert.

    Raises:
        SourceError: damaged.
        UnsafeError: it names something that no checkpoint needs; the message says what.
    """
    machine = _Machine(bytes(data), where, functions, persistent, start)
    if folds is not None:
        machine.folds, machine.kept, machine.limit = folds, _referred_to(machine.data), _MAX_FOLDED_OPS
    # The collector would look at millions of objects again and again (a fifth of the time), and there is no garbage.
    collects = folds is not None and gc.isenabled()
    try:
        if collects:
            gc.disable()
        value = machine.run()
    except RecursionError:
        raise SourceError(f"{where}: the pickle is nested too deeply at byte {machine.position}") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError) as fault:
        raise SourceError(
            f"{where}: the pickle is damaged at byte {machine.position} ({type(fault).__name__}: {fault})"
        ) from fault
    finally:
        if collects:
            gc.enable()
    return value, machine.position, machine.inert


def _referred_to(data: bytes) -> memoryview | None:
    """Flags of the memo's entries that the pickle may fetch; None when all may be.

    Every byte that could be the opcode of a fetch counts as one, wherever it stands, so no entry that
    is fetched is ever missed. Only for protocols 4 and 5, which number entries in order and fetch
    them with two opcodes.
    """
    if data[:2] not in (b"\x80\x04", b"\x80\x05"):
        return None
    kept = np.zeros(len(data) + 1, dtype=np.uint8)
    kept[:256] = 1  # what the opcode with one byte can name
    content = np.frombuffer(data, dtype=np.uint8)
    for begin in range(0, len(data), _SLICE):
        at = np.flatnonzero(content[begin : begin + _SLICE] == _LONG_BINGET).astype(np.int64) + begin
        at = at[at + 4 < len(data)]
        numbers = sum(content[at + 1 + i].astype(np.int64) << (8 * i) for i in range(4))
        kept[np.minimum(numbers, len(data))] = 1
    return kept.data


class _Machine:
    """The pickle virtual machine over inert values."""

    def __init__(
        self,
        data: bytes,
        where: str,
        functions: Functions,
        persistent: Callable[[object], object] | None,
        start: int,
    ) -> None:
        self.data = data
        self.where = where
        self.functions = functions
        self.persistent = persistent
        self.position = start
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.inert: set[str] = set()
        self.globals: dict[tuple[str, str], Global] = {}
        self.limit = _MAX_OPS
        self.folds: Folds = {}
        self.kept: memoryview | None = None
        self.memoized = 0

    def run(self) -> Any:
        data, memo, handlers, kept = self.data, self.memo, _HANDLERS, self.kept
        for _ in range(self.limit):
            position = self.position
            code = data[position]
            # Memo traffic and small numbers are most of all steps, so these do without a call.
            if code == _LONG_BINPUT:
                memo[_uint32(data, position + 1)[0]] = self.stack[-1]
                self.position = position + 5
                continue
            self.position = position + 1
            if code == _BINGET:
                self.stack.append(memo[data[position + 1]])
                self.position = position + 2
                continue
            if code == _BININT1:
                self.stack.append(data[position + 1])
                self.position = position + 2
                continue
            if code == _MEMOIZE and kept is not None:
                if kept[self.memoized]:
                    memo[self.memoized] = self.stack[-1]
                self.memoized += 1
                continue
            handler = handlers[code]
            if handler is None:
                raise UnsafeError(
                    f"{self.where}: pickle opcode {code:#04x} at byte {position} has no place in a checkpoint"
                )
            if handler is _stop:
                return self.stack.pop()
            handler(self)
        raise UnsafeError(f"{self.where}: the pickle runs over {self.limit} steps")

    # Reading of arguments

    def take(self, size: int) -> bytes:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise ValueError("an argument reaches past the end")
        raw = self.data[self.position : end]
        self.position = end
        return raw

    def number(self, size: int) -> int:
        start = self.position
        end = self.position = start + size
        if end > len(self.data):
            raise ValueError("an argument reaches past the end")
        return int.from_bytes(self.data[start:end], "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        raw = self.data[self.position : end]
        self.position = end + 1
        return raw.decode("utf-8")

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    # Meaning

    def lookup(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global is not named by strings")
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(_SAME_MODULE.get(module, module), name)
        return found

    def apply(self, callee: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise TypeError("arguments are no tuple")
        if isinstance(callee, Global):
            function = self.functions.get((callee.module, callee.name))
            if function is not None:
                return self.run_function(function, args)
            self.refuse_hostile(callee)
            self.inert.add(str(callee))
        elif not isinstance(callee, Record):
            raise TypeError(f"a {type(callee).__name__} is called")
        return Record(callee, args)

    def run_function(self, function: Callable[..., object], args: tuple[Any, ...]) -> object:
        try:
            return function(*args)
        except StreammergeError as fault:
            raise type(fault)(f"{self.where}: {fault}") from fault

    def refuse_hostile(self, callee: Global) -> None:
        top = callee.module.partition(".")[0]
        if top not in sys.stdlib_module_names:
            return
        if callee.name not in _PLAIN_STDLIB.get(callee.module, ()):
            raise UnsafeError(
                f"{self.where}: the pickle wants to call {callee}, which no checkpoint needs; "
                "nothing was run. Do not load this file with other tools."
            )

    def set_items(self, target: Any, pairs: list[Any]) -> None:
        if isinstance(target, Record):
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict:
            raise TypeError(f"items are set on a {type(target).__name__}")
        for i in range(0, len(pairs), 2):
            key = pairs[i]
            if type(key) is not str:
                _check_key(key)
            target[key] = pairs[i + 1]

    def append(self, target: Any, values: list[Any]) -> None:
        if isinstance(target, Record):
            if target.elements is None:
                target.elements = []
            target = target.elements
        if type(target) is not list:
            raise TypeError(f"elements are appended to a {type(target).__name__}")
        target.extend(values)


def _check_key(key: Any) -> None:
    """Hashing a tuple visits every part (shared ones again and again) on the C stack: keys must be small."""
    todo = [key]
    for _ in range(_MAX_KEY_PARTS):
        if not todo:
            return
        part = todo.pop()
        if isinstance(part, tuple | frozenset):
            if len(part) > _MAX_KEY_PARTS:
                break
            todo.extend(part)
    if todo:
        raise ValueError("a dict key has too many parts")


# One function per opcode. The names are those of the pickle module (Python 3.13, protocols 0 to 5).


def _stop(m: _Machine) -> None:
    raise AssertionError("the loop ends before this is called")


def _proto(m: _Machine) -> None:
    if m.number(1) > 5:
        raise ValueError("pickle protocol above 5")


def _frame(m: _Machine) -> None:
    m.number(8)


def _mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _pop_mark(m: _Machine) -> None:
    m.pop_mark()


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


def _binunicode(m: _Machine) -> None:
    m.stack.append(m.take(m.number(4)).decode("utf-8", "surrogatepass"))


def _short_binunicode(m: _Machine) -> None:
    m.stack.append(m.take(m.number(1)).decode("utf-8", "surrogatepass"))


def _binunicode8(m: _Machine) -> None:
    m.stack.append(m.take(m.number(8)).decode("utf-8", "surrogatepass"))


def _unicode(m: _Machine) -> None:
    m.stack.append(m.line().encode("latin-1").decode("raw-unicode-escape"))


def _binbytes(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(size)))


def _binint(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _binint1(m: _Machine) -> None:
    m.stack.append(m.data[m.position])
    m.position += 1


def _binint2(m: _Machine) -> None:
    m.stack.append(m.number(2))


def _long(size: int) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        length = m.number(size)
        if length > _MAX_INT_BYTES:
            raise ValueError("an integer is too long")
        m.stack.append(int.from_bytes(m.take(length), "little", signed=True))

    return read


def _int_text(m: _Machine) -> None:
    text = m.line().removesuffix("L")
    if len(text) > 2 * _MAX_INT_BYTES:
        raise ValueError("an integer is too long")
    m.stack.append(text == "01" if text in ("00", "01") else int(text))  # protocol 0's booleans


def _float_text(m: _Machine) -> None:
    m.stack.append(float(m.line()))


def _binfloat(m: _Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _empty_list(m: _Machine) -> None:
    m.stack.append([])


def _empty_dict(m: _Machine) -> None:
    m.stack.append({})


def _empty_set(m: _Machine) -> None:
    m.stack.append(set())


def _tuple(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(tuple(items))


def _list(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(items)


def _dict(m: _Machine) -> None:
    items = m.pop_mark()
    made: dict[Any, Any] = {}
    m.set_items(made, items)
    m.stack.append(made)


def _frozenset(m: _Machine) -> None:
    items = m.pop_mark()
    for item in items:
        _check_key(item)
    m.stack.append(frozenset(items))


def _short_tuple(size: int) -> Callable[[_Machine], None]:
    def make(m: _Machine) -> None:
        if len(m.stack) < size:
            raise IndexError("the stack is too short")
        m.stack[-size:] = [tuple(m.stack[-size:])]

    return make


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.append(m.stack[-1], [value])


def _appends(m: _Machine) -> None:
    items = m.pop_mark()
    m.append(m.stack[-1], items)


def _additems(m: _Machine) -> None:
    items = m.pop_mark()
    target = m.stack[-1]
    if type(target) is not set:
        raise TypeError(f"elements are added to a {type(target).__name__}")
    for item in items:
        _check_key(item)
        target.add(item)


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    items = m.pop_mark()
    if len(items) % 2:
        raise ValueError("a key has no value")
    m.set_items(m.stack[-1], items)


def _binput(m: _Machine) -> None:
    m.memo[m.data[m.position]] = m.stack[-1]
    m.position += 1


def _long_binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.number(4)])


def _put_text(m: _Machine) -> None:
    m.memo[int(m.line())] = m.stack[-1]


def _get_text(m: _Machine) -> None:
    m.stack.append(m.memo[int(m.line())])


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _dup(m: _Machine) -> None:
    m.stack.append(m.stack[-1])


def _global(m: _Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(m.lookup(module, name))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.lookup(module, name))


def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.apply(m.stack[-1], args)


def _newobj_ex(m: _Machine) -> None:
    kwargs, args = m.stack.pop(), m.stack.pop()
    if kwargs:
        args = (*args, kwargs)
    m.stack[-1] = m.apply(m.stack[-1], args)


def _obj(m: _Machine) -> None:
    callee, *args = m.pop_mark()
    m.stack.append(m.apply(callee, tuple(args)))


def _inst(m: _Machine) -> None:
    module, name = m.line(), m.line()
    args = m.pop_mark()
    m.stack.append(m.apply(m.lookup(module, name), tuple(args)))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if isinstance(target, Record):
        fold = m.folds.get(target.type_name) if m.folds else None
        target.state = m.run_function(fold, (state,)) if fold else state
    elif type(target) is not dict:  # an OrderedDict's `_metadata` is of no use to us
        raise TypeError(f"state is set on a {type(target).__name__}")


def _binpersid(m: _Machine) -> None:
    if m.persistent is None:
        raise UnsafeError(f"{m.where}: a persistent id where none belongs")
    m.stack[-1] = m.run_function(m.persistent, (m.stack[-1],))


_HANDLERS: list[Callable[[_Machine], None] | None] = [None] * 256
for _code, _handler in {
    b".": _stop, b"\x80": _proto, b"\x95": _frame, b"(": _mark, b"0": _pop, b"1": _pop_mark,
    b"2": _dup, b"X": _binunicode, b"\x8c": _short_binunicode, b"\x8d": _binunicode8, b"V": _unicode,
    b"C": _binbytes(1), b"B": _binbytes(4), b"\x8e": _binbytes(8), b"\x96": _binbytes(8),
    b"U": _short_binunicode, b"T": _binunicode,
    b"J": _binint, b"K": _binint1, b"M": _binint2, b"\x8a": _long(1), b"\x8b": _long(4),
    b"I": _int_text, b"L": _int_text, b"F": _float_text, b"G": _binfloat,
    b"N": _constant(None), b"\x88": _constant(True), b"\x89": _constant(False),
    b"]": _empty_list, b"}": _empty_dict, b"\x8f": _empty_set, b")": _constant(()),
    b"t": _tuple, b"l": _list, b"d": _dict, b"\x91": _frozenset,
    b"\x85": _short_tuple(1), b"\x86": _short_tuple(2), b"\x87": _short_tuple(3),
    b"a": _append, b"e": _appends, b"\x90": _additems, b"s": _setitem, b"u": _setitems,
    b"q": _binput, b"p": _put_text, b"\x94": _memoize,
    b"j": _long_binget, b"g": _get_text,
    b"c": _global, b"\x93": _stack_global, b"R": _reduce, b"\x81": _reduce, b"\x92": _newobj_ex,
    b"o": _obj, b"i": _inst, b"b": _build, b"Q": _binpersid,
}.items():  # fmt: skip
    _HANDLERS[_code[0]] = _handler
