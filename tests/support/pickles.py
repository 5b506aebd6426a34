"""Pickles built by hand, opcode by opcode: what no honest `torch.save` would write."""

from __future__ import annotations

import struct

__all__ = [
    "STOP", "call", "dict_of", "doubled", "dtensor", "glob", "integer", "list_of", "mesh", "nested", "newobj", "record",
    "shard", "stack_glob", "state_dict", "storage", "tensor", "text", "tup",
]  # fmt: skip

STOP = b"."
_MARK = b"("


def glob(module: str, name: str) -> bytes:
    """A global by protocol 0's text form."""
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def stack_glob(module: str, name: str) -> bytes:
    """A global by protocol 4's stack form."""
    return text(module) + text(name) + b"\x93"


def text(value: str) -> bytes:
    """A string."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """An integer of any size up to 255 bytes, and either sign."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _items(parts: tuple[bytes, ...]) -> bytes:
    return _MARK + b"".join(parts)


def tup(*parts: bytes) -> bytes:
    """A tuple."""
    return _items(parts) + b"t"


def list_of(*parts: bytes) -> bytes:
    """A list."""
    return _items(parts) + b"l"


def dict_of(**entries: bytes) -> bytes:
    """A dict with string keys."""
    return _items(tuple(text(key) + value for key, value in entries.items())) + b"d"


def state_dict(entries: dict[str, bytes]) -> bytes:
    """A dict with any strings as keys, as a whole pickle."""
    return b"\x80\x02" + _items(tuple(text(key) + value for key, value in entries.items())) + b"d" + STOP


def call(callee: bytes, *args: bytes) -> bytes:
    """`callee(*args)`."""
    return callee + tup(*args) + b"R"


def newobj(cls: bytes, *args: bytes) -> bytes:
    """`cls.__new__(cls, *args)`."""
    return cls + tup(*args) + b"\x81"


def record(module: str, name: str, **state: bytes) -> bytes:
    """An object with attributes, as pickle writes instances of plain classes."""
    return newobj(glob(module, name)) + dict_of(**state) + b"b"


def storage(key: str, numel: int, kind: str = "FloatStorage", location: str = "cpu") -> bytes:
    """A storage, by its persistent id."""
    return tup(text("storage"), glob("torch", kind), text(key), text(location), integer(numel)) + b"Q"


def tensor(
    place: bytes, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, metadata: bytes = b""
) -> bytes:
    """A tensor over a storage."""
    shape, steps = tup(*map(integer, size)), tup(*map(integer, stride))
    hooks = call(glob("collections", "OrderedDict"))
    function = glob("torch._utils", "_rebuild_tensor_v2")
    return call(function, place, integer(offset), shape, steps, b"\x89", hooks, *([metadata] if metadata else []))


def nested(depth: int, kind: str = "tuple") -> bytes:
    """Tuples or lists inside of each other."""
    if kind == "tuple":
        return b")" + b"\x85" * depth
    return b"]" * (depth + 1) + b"a" * depth


def doubled(depth: int, kind: str = "tuple", width: int = 2) -> bytes:
    """A tuple (or list) of two of a tuple of two of ...: width**depth leaves in a few bytes, through the memo."""
    close = b"t" if kind == "tuple" else b"l"
    step = b"q\x00" + b"0" + _MARK + b"h\x00" * width + close
    return b"K\x01" + step * depth


def mesh(layout: bytes, **state: bytes) -> bytes:
    """A DeviceMesh of torch 2.10 to 2.12 over ranks 0 and 1, with this layout."""
    ranks = tup(integer(0), integer(1))
    fields = {"_layout": layout, "_flatten_rank_map": ranks, "_coordinate_on_dim": tup(integer(0)), **state}
    return record("torch.distributed.device_mesh", "DeviceMesh", **fields)


def _layout(size: int) -> bytes:
    return record("torch.distributed._mesh_layout", "_MeshLayout", shape=integer(size), stride=integer(1))


def shard(dim: bytes) -> bytes:
    """A `Shard` placement."""
    return record("torch.distributed.tensor.placement_types", "Shard", dim=dim)


def dtensor(
    local: bytes, size: bytes, *, device_mesh: bytes | None = None, placements: bytes | None = None, **spec: bytes
) -> bytes:
    """A DTensor of one rank, cut along dim 0, unless told otherwise."""
    state = {
        "mesh": device_mesh or mesh(_layout(1)),
        "placements": placements or tup(shard(integer(0))),
        **spec,
    }
    described = record("torch.distributed.tensor._dtensor_spec", "DTensorSpec", **state)
    wrapper = glob("torch._utils", "_rebuild_wrapper_subclass")
    cls = glob("torch.distributed.tensor", "DTensor")
    args = tup(cls, glob("torch", "float32"), size, b")", integer(0), b"N", b"N", b"\x89")
    slots = tup(b"N", dict_of(_local_tensor=local, _spec=described))
    return call(glob("torch._tensor", "_rebuild_from_type_v2"), wrapper, cls, args, slots)
