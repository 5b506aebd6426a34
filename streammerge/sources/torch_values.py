"""What torch's rebuild functions describe: storages, tensors and tensor subclasses, as plain data.

The functions stand in for torch's own of the same name (torch 2.1 to 2.14) while a pickle is read.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from streammerge.dtypes import DType, dtype_named, storage_dtype
from streammerge.errors import SourceError, UnsafeError, UnsupportedError, UsageError
from streammerge.sources.pickle_reader import Functions, Global, Record

__all__ = [
    "FUNCTIONS",
    "StorageRef",
    "TensorRef",
    "TypedRef",
    "UnreadableRef",
    "WrapperRef",
    "member_of",
    "storage_ref",
]

_MAX_DIMS = 64
_ENUM_MEMBER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of the file.

    Attributes:
        key: its name under ``data/``.
        dtype: element type, or None when it is untyped.
        nbytes: size in bytes, as the pickle states it.
    """

    key: str
    dtype: DType | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor over a storage. Offset and stride are in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrapperRef:
    """The outside of a tensor subclass without data of its own; ``size`` is the global size."""

    dtype: str
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)  # by identity: the contents may be nested without end
class TypedRef:
    """A tensor subclass, or a tensor that had Python attributes: the inner value and its state."""

    type: Global
    inner: object = field(repr=False)
    state: Any = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)  # by identity: the contents may be nested without end
class UnreadableRef:
    """A tensor that cannot be turned into bytes, and why; an error only when it is needed."""

    why: str
    children: tuple[object, ...] = field(default=(), repr=False)


def storage_ref(pid: object) -> StorageRef | UnreadableRef:
    """Make a storage of the persistent id ``('storage', class, key, location, numel)``.

    The location (``cuda:3``, ``npu:0``, ``meta``) says where the tensor lived and is ignored.

    Raises:
        SourceError: it is not of that form.
    """
    if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
        raise SourceError("a persistent id is not a storage")
    kind, key, numel = pid[1], pid[2], pid[4]
    if len(pid) == 6 and pid[5] is not None:  # torch < 0.4
        raise UnsupportedError("a storage is a view of another one, as very old torch versions wrote; re-save the file")
    if not (isinstance(kind, Global) and isinstance(key, str | int) and _count(numel)):
        raise SourceError("a storage is described wrongly")
    try:
        dtype = storage_dtype(kind.name)
    except UnsupportedError as unknown:
        return UnreadableRef(str(unknown))
    # For typed storages numel counts elements; for UntypedStorage (newer dtypes) it counts bytes.
    return StorageRef(str(key), dtype, numel * (dtype.itemsize if dtype else 1))


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS or not all(map(_count, value)):
        raise SourceError(f"a tensor has an impossible {what}")
    return value


def _dtype(value: object) -> DType:
    if not isinstance(value, Global) or value.module != "torch":
        raise SourceError("a tensor's dtype is not a torch dtype")
    try:
        return dtype_named(value.name)
    except UsageError:
        raise UnsupportedError(f"dtype {value} is not supported") from None


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> object:
    return _tensor(storage, offset, size, stride, None, None)


def _rebuild_tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    return _tensor(storage, offset, size, stride, None, metadata)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    try:
        found = _dtype(dtype)
    except UnsupportedError as unknown:
        return UnreadableRef(str(unknown))
    return _tensor(storage, offset, size, stride, found, metadata)


def _tensor(
    storage: object, offset: object, size: object, stride: object, dtype: DType | None, metadata: object
) -> object:
    if isinstance(storage, UnreadableRef):
        return storage
    if not isinstance(storage, StorageRef) or not isinstance(offset, int) or not _count(offset):
        raise SourceError("a tensor has no storage or an impossible offset")
    sizes, strides = _sizes(size, "size"), _sizes(stride, "stride")
    if len(sizes) != len(strides):
        raise SourceError("a tensor's size and stride have different lengths")
    # conj and neg bits mean that the stored bytes are not the values.
    if isinstance(metadata, dict) and any(metadata.get(bit) for bit in ("conj", "neg")):
        return UnreadableRef("it was saved lazily conjugated or negated (call resolve_conj/resolve_neg before saving)")
    element = dtype or storage.dtype
    if element is None:
        raise SourceError("a tensor over an untyped storage has no dtype")
    return TensorRef(storage, element, offset, sizes, strides)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type_v2(function: object, kind: object, args: object, state: object) -> object:
    if not isinstance(kind, Global) or not isinstance(args, tuple) or not isinstance(function, Global):
        raise SourceError("a tensor subclass is described wrongly")
    rebuild = FUNCTIONS.get((function.module, function.name))
    if rebuild is None:
        return UnreadableRef(f"it is rebuilt by {function}, which is unknown", (args, state))
    inner = rebuild(*args)
    if kind.module == "torch" and kind.name == "Tensor":
        return inner
    return TypedRef(kind, inner, state)


def _rebuild_wrapper_subclass(kind: object, dtype: object, size: object, *_: object) -> object:
    return WrapperRef(dtype.name if isinstance(dtype, Global) else "unknown", _sizes(size, "size"))


def _unreadable(why: str) -> Any:
    return lambda *args: UnreadableRef(why, args)


def _ordered_dict(items: object = ()) -> dict[Any, Any]:
    if not isinstance(items, list | tuple):
        raise SourceError("an OrderedDict is described wrongly")
    made: dict[Any, Any] = {}
    for item in items:
        key, value = item
        if not isinstance(key, str):
            raise SourceError("an OrderedDict has a key that is no string")
        made[key] = value
    return made


def _encode(value: object, encoding: object) -> bytes:
    # Protocol 2 has no bytes: pickle spells them so.
    if not isinstance(value, str) or encoding != "latin1":
        raise UnsafeError("the pickle wants to call _codecs.encode with another encoding than latin1; nothing was run")
    return value.encode("latin1")


def _torch_size(items: object = ()) -> tuple[int, ...]:
    return _sizes(items, "size")


def member_of(owner: object, name: object) -> object:
    """Stands in for ``getattr``, as far as honest pickles use it; every other use is an attack.

    Raises:
        UnsafeError: for such a use.
    """
    # FSDP1 pickles a nested class this way, under protocol 2.
    if isinstance(owner, Global) and (owner.name, name) == ("ShardedTensor", "ProcessGroupState"):
        return Global(owner.module, f"{owner.name}.{name}")
    # Python 3.11.2 pickles a member of an enum so (3.10, 3.11.7 and later call the class with the value).
    if isinstance(owner, Global) and isinstance(name, str) and _ENUM_MEMBER.fullmatch(name):
        top = owner.module.partition(".")[0]
        if top not in sys.stdlib_module_names or (owner.module, owner.name) == ("signal", "Signals"):
            return Record(owner, (name,))
    shown = f"{owner if isinstance(owner, Global) else '...'}, {name!r}" if isinstance(name, str) else "..."
    raise UnsafeError(f"the pickle wants to call builtins.getattr({shown}), which no checkpoint needs; nothing was run")


FUNCTIONS: Functions = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._utils", "_rebuild_wrapper_subclass"): _rebuild_wrapper_subclass,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _unreadable("a meta tensor: the file holds no data for it"),
    ("torch._utils", "_rebuild_qtensor"): _unreadable("quantized tensors are not supported"),
    ("torch._utils", "_rebuild_sparse_tensor"): _unreadable("sparse tensors are not supported"),
    ("torch._utils", "_rebuild_nested_tensor"): _unreadable("nested tensors are not supported"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _unreadable("tensors of this device are not supported"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type_v2,
    ("torch", "Size"): _torch_size,
    ("collections", "OrderedDict"): _ordered_dict,
    ("builtins", "getattr"): member_of,
    ("_codecs", "encode"): _encode,
}
