"""Pickles meant to exhaust time, memory or the stack, or to trip the reader: refused or ignored, and quickly."""

from __future__ import annotations

import struct

import pytest

from tests.support import pickles as p
from tests.support.canary import Outcome, read_safely
from tests.support.zips import archive_of, write_archive, write_state

LOCAL = p.tensor(p.storage("0", 4), (4,), (1,))
SIZE = p.tup(p.integer(4))
STORAGES = {"0": bytes(16)}
MILLION = 1_000_000

_TYPED = p.glob("torch._tensor", "_rebuild_from_type_v2")
_ONE_RANK = p.record("torch.distributed._mesh_layout", "_MeshLayout", shape=p.integer(1), stride=p.integer(1))


def _typed(state: bytes, depth: int = 0) -> bytes:
    """A tensor subclass with a state, whose description is itself rebuilt by the same function `depth` times."""
    function, cls = p.glob("torch._utils", "_rebuild_parameter"), p.glob("mine", "Subclass")
    head = _TYPED + b"("
    inner = (_TYPED + cls + b"(") * depth
    tail = (b"t" + b"N") * depth
    return head + inner + function + cls + p.tup(b"N") + state + tail + b"tR"


def _unreadable(args: bytes) -> bytes:
    return p.call(p.glob("torch._utils", "_rebuild_sparse_tensor"), args)


def _key(value: bytes) -> bytes:
    return b"}" + value + b"Ns"


def _layout(*axes: tuple[bytes, bytes]) -> bytes:
    flat = [p.record("torch.distributed._mesh_layout", "_FlatLayout", shape=s, stride=t) for s, t in axes]
    return p.record("torch.distributed._mesh_layout", "_MeshLayout", axes=p.tup(*flat))


def _on(layout: bytes, **state: bytes) -> bytes:
    return p.dtensor(LOCAL, SIZE, device_mesh=p.mesh(layout, **state))


def _ints(*values: int) -> bytes:
    return p.tup(*map(p.integer, values))


def _wide_dicts(width: int) -> bytes:
    """Dicts of dicts of dicts that hold a tensor, each many times the same: width**3 paths."""
    inner = p.dict_of(w=LOCAL)
    for _ in range(3):
        entries = b"".join(p.text(f"k{i}") + b"h\x07" for i in range(width))
        inner = inner + b"q\x070(" + entries + b"d"
    return inner


def _old_mesh(**state: bytes) -> bytes:
    return p.dtensor(LOCAL, SIZE, device_mesh=p.record("torch.distributed.device_mesh", "DeviceMesh", **state))


_NESTED_KEYS = {
    "tuples": p.nested(MILLION),
    "a subclass's state": _typed(p.nested(MILLION)),
    "unreadable arguments": _unreadable(p.nested(MILLION)),
    "frozensets": b"(\x91" + b"\x85" * 5 + b"q\x010(h\x01\x91" * 20,
    "doubled tuples": p.doubled(60),
    "wide tuples": p.doubled(7, width=200),
    "a doubled state": _typed(p.doubled(60)),
    "doubled unreadable arguments": _unreadable(p.doubled(60)),
}

# All stand in a state dict beside a sound tensor.
VALUES = {
    "nested tuples": p.nested(MILLION),
    "nested lists": p.nested(MILLION, "list"),
    "nested dicts": b"}K\x01" * (MILLION // 2) + b"N" + b"s" * (MILLION // 2),
    "nested calls": (p.glob("mine", "f") + b"q\x010" + b"h\x01" * 200_000 + b")" + b"\x85R" * 200_000),
    "nested rebuilds": _typed(b"N", depth=100_000),
    "nested states": p.newobj(p.glob("mine", "C")) + b"q\x010" + (b"h\x01)\x81" * 200_000) + b"b" * 199_999,
    "doubled tuples": p.doubled(60),
    "doubled lists": p.doubled(60, "list"),
    **{f"key of {name}": _key(value) for name, value in _NESTED_KEYS.items()},
    **{f"set of {name}": b"\x8f(" + value + b"\x90" for name, value in _NESTED_KEYS.items()},
    "wide dicts": _wide_dicts(1000),
    "memo at the end": b"Nr\xff\xff\xff\xff",
    "memo far away": b"Np" + b"9" * 60 + b"\n",
    "memo that is empty": b"j\xff\xff\xff\xff",
    "memo below zero": b"Np-1\ng-1\n",
    "state on a function": p.glob("torch._utils", "_rebuild_tensor_v2") + b"}b",
    "state on a number": b"K\x01}b",
    "state on a list": b"]}b",
    "state on a tensor": LOCAL + b"}b",
    "items on a function": p.glob("mine", "f") + b"K\x01K\x01s",
    "elements on a tuple": b")K\x01a",
    "a list in itself": b"]q\x01h\x01a",
    "a record in itself": p.newobj(p.glob("mine", "C")) + b"q\x01" + p.text("self") + b"h\x01s",
    "a call of a number": b"K\x05)R",
    "arguments that are no tuple": p.glob("mine", "C") + b"K\x01R",
    "a global of numbers": b"K\x01K\x02\x93",
    "a list as key": b"}]Ns",
    "a key without value": b"}(Nu",
    "a mark too many": b"(N",
    "a mark too few": b"t",
    "a pop too many": b"0" * 50,
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "LONG4 below zero": b"\x8b\xff\xff\xff\xff",
    "BINUNICODE8": b"\x8d" + struct.pack("<Q", 1 << 63),
    "BINBYTES8": b"\x8e" + struct.pack("<Q", (1 << 64) - 1),
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 1 << 62),
    "BINSTRING": b"T\xff\xff\xff\xff",
    "FRAME": b"\x95" + struct.pack("<Q", (1 << 64) - 1) + b"N",
    "INT": b"I" + b"9" * MILLION + b"\n",
    "LONG": b"L" + b"9" * MILLION + b"L\n",
    "FLOAT": b"F" + b"9" * MILLION + b"\n",
    "no number": b"Inine\n",
    "no line end": b"I1",
    "bad UTF-8": b"X\x02\x00\x00\x00\xff\xfe",
    "bad escapes": b"V\\uZZZZ\n",
    "bad global": b"c\xff\n\xff\n",
    "protocol 200": b"\x80\xc8N",
    **{
        f"persistent id {name}": value + b"Q"
        for name, value in {
            "number": b"K\x01", "none": b"N", "text": p.text("storage"), "empty": b")",
            "short": p.tup(p.text("storage")),
            "tag": p.tup(p.text("module"), p.glob("torch", "FloatStorage"), p.text("0"), p.text("cpu"), b"K\x04"),
            "class": p.tup(p.text("storage"), p.text("FloatStorage"), p.text("0"), p.text("cpu"), b"K\x04"),
            "key": p.tup(p.text("storage"), p.glob("torch", "FloatStorage"), b"]", p.text("cpu"), b"K\x04"),
            "count": p.tup(p.text("storage"), p.glob("torch", "FloatStorage"), p.text("0"), p.text("cpu"), b"N"),
            "below zero": p.tup(
                p.text("storage"), p.glob("torch", "FloatStorage"), p.text("0"), p.text("cpu"), p.integer(-4)
            ),
            "huge": p.tup(
                p.text("storage"), p.glob("torch", "FloatStorage"), p.text("0"), p.text("cpu"), p.integer(1 << 200)
            ),
            "nested": p.nested(MILLION), "doubled": p.doubled(60),
        }.items()
    },
    "rebuild without arguments": p.call(p.glob("torch._utils", "_rebuild_tensor_v2")),
    "rebuild of numbers": p.call(p.glob("torch._utils", "_rebuild_tensor_v2"), *[b"K\x01"] * 6),
    "doubled dtype": p.call(
        p.glob("torch._utils", "_rebuild_wrapper_subclass"), b"N", p.doubled(60, "list"), SIZE
    ),
    "nested dtype": p.call(
        p.glob("torch._utils", "_rebuild_wrapper_subclass"), b"N", p.nested(MILLION, "list"), SIZE
    ),
    "doubled size": p.call(p.glob("torch", "Size"), p.doubled(60)),
    "doubled OrderedDict": p.call(p.glob("collections", "OrderedDict"), p.doubled(60)),
    "OrderedDict of numbers": p.call(p.glob("collections", "OrderedDict"), _ints(1, 2)),
    "doubled getattr": p.call(p.glob("builtins", "getattr"), p.doubled(60), p.doubled(60)),
    "shard of doubled": p.dtensor(LOCAL, SIZE, placements=p.tup(p.shard(p.doubled(60, "list")))),
    "shard of nested": p.dtensor(LOCAL, SIZE, placements=p.tup(p.shard(p.nested(MILLION, "list")))),
    "shards without end": p.dtensor(LOCAL, SIZE, placements=b"(" + b"N" * MILLION + b"t"),
    "order of doubled": p.dtensor(LOCAL, SIZE, shard_order=p.tup(p.tup(b"K\x00", p.doubled(60)))),
    "order of lists": p.dtensor(LOCAL, SIZE, shard_order=p.tup(p.tup(b"]", _ints(0)))),
    "order of text": p.dtensor(LOCAL, SIZE, shard_order=p.tup(p.tup(b"K\x00", p.tup(p.text("x"), b"K\x00")))),
    "layout of doubled": _on(_layout((p.doubled(60), p.doubled(60)))),
    "layout of nested": _on(_layout((p.nested(MILLION // 4), p.nested(MILLION // 4)))),
    "layout of millions": _on(_layout((_ints(1 << 24), _ints(1)))),
    "layout of millions squared": _on(
        _layout(*[(_ints(1 << 20), _ints(0))] * 2), _coordinate_on_dim=_ints(0, 0)
    ),
    "layout of none": _on(_layout((b"N", b"N"))),
    "layout of text": _on(p.text("layout")),
    "layout without axes": _on(p.record("torch.distributed._mesh_layout", "_MeshLayout", axes=b"N")),
    "layout below zero": _on(_layout((_ints(2), _ints(-1)))),
    "layout out of the map": _on(_layout((_ints(2), _ints(5)))),
    "coordinate out of the mesh": _on(_layout((_ints(2), _ints(1))), _coordinate_on_dim=_ints(7)),
    "coordinate of doubled": _on(_ONE_RANK, _coordinate_on_dim=p.doubled(60)),
    "rank of doubled": _on(_ONE_RANK, _rank=p.doubled(60)),
    "map of doubled": _on(_ONE_RANK, _flatten_rank_map=p.doubled(60)),
    "map of text": _on(_ONE_RANK, _flatten_rank_map=p.text("01")),
    "map in a huge tensor": _on(
        _ONE_RANK,
        _flatten_rank_map=b"N",
        _rank_map=p.tensor(p.storage("1", 2, "IntStorage"), (1 << 40,), (0,)),
    ),
    "map in floats": _on(
        _ONE_RANK, _flatten_rank_map=b"N", _rank_map=p.tensor(p.storage("0", 4), (2,), (1,))
    ),
    "map outside of its storage": _on(
        _ONE_RANK, _flatten_rank_map=b"N", _rank_map=p.tensor(p.storage("1", 2, "IntStorage"), (2,), (9,))
    ),
    "root mesh in itself": p.dtensor(
        LOCAL, SIZE, device_mesh=p.mesh(_ONE_RANK) + b"q\x55" + p.dict_of(
            _layout=_ONE_RANK, _flatten_rank_map=_ints(0, 1), _coordinate_on_dim=_ints(0), _root_mesh=b"h\x55"
        ) + b"b",
    ),
    "old mesh without ranks": _old_mesh(),
    "old mesh of no ranks": _old_mesh(mesh=p.tensor(p.storage("2", 0, "IntStorage"), (0,), (1,))),
    "old mesh of doubled": _old_mesh(
        mesh=p.tensor(p.storage("1", 2, "IntStorage"), (2,), (1,)), _flatten_mesh_list=p.doubled(60, "list")
    ),
    "old mesh of a huge size": _old_mesh(
        mesh=p.tensor(p.storage("1", 2, "IntStorage"), (1 << 40, 1 << 40), (0, 0)), _flatten_mesh_list=_ints(0)
    ),
    "sharded tensor of doubled": p.call(
        _TYPED, p.glob("torch._utils", "_rebuild_wrapper_subclass"),
        p.glob("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), p.tup(b"N", b"N", SIZE),
        p.tup(*[p.doubled(60, "list")] * 5),
    ),
}  # fmt: skip

ROOTS = {
    "empty": b"", "stop": b".", "no stop": b"\x80\x02}", "dict key of nested": b"}" + p.nested(MILLION) + LOCAL + b"s.",
    "key of a subclass": b"}" + _typed(p.doubled(60)) + LOCAL + b"s.",
    "key with a doubled text": b"}" + _typed(p.doubled(60, "list")) + LOCAL + b"s.",
    "wide dicts": _wide_dicts(1000) + b".",
    "a set at the top": b"\x8f.", "nested at the top": p.nested(MILLION) + b".",
}  # fmt: skip
NAMES = ("", "\ud800", "__metadata__", "a/../b", "nul\0", "line\nbreak", "x" * MILLION, "\u202e", "\u00e9")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("structures")
    storages = {**STORAGES, "1": struct.pack("<2i", 0, 1), "2": b""}
    folders = {"sound": write_state(root / "sound", {"w": LOCAL}, STORAGES)}
    for number, (case, value) in enumerate(VALUES.items()):
        folders[case] = write_state(root / f"v{number}", {"w": LOCAL, "odd": value}, storages)
    for number, (case, pickle) in enumerate(ROOTS.items()):
        folders[f"root: {case}"] = write_archive(root / f"r{number}", archive_of(pickle, STORAGES))
    for number, name in enumerate(NAMES):
        folders[f"name: {number}"] = write_state(root / f"n{number}", {name: LOCAL}, STORAGES)
    return read_safely(folders)


ALL = [*VALUES, *(f"root: {case}" for case in ROOTS), *(f"name: {number}" for number in range(len(NAMES)))]


def test_a_sound_one_is_accepted(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["sound"] == Outcome("", True, outcomes["sound"].text, outcomes["sound"].seconds)


@pytest.mark.parametrize("case", ALL)
def test_ends_soon_and_on_purpose(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case]
    assert outcome.expected, f"{outcome.error}: {outcome.text}"
    assert outcome.error in ("", "SourceError", "UnsafeError", "UnsupportedError")
    assert outcome.seconds < 2
    assert not outcome.events
    if outcome.error and not case.startswith("name"):
        assert "model_world_size_1_rank_0.pt" in outcome.text or "odd" in outcome.text


@pytest.mark.parametrize("case", [case for case in VALUES if case.split()[0] in ("persistent", "LONG4", "BINUNICODE8")])
def test_damage_is_refused_and_not_skipped(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error in ("SourceError", "UnsafeError")


def test_a_name_that_safetensors_reserves_is_refused(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[f"name: {NAMES.index('__metadata__')}"].error in ("SourceError", "UnsupportedError")
