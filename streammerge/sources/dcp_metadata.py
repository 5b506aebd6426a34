"""The ``.metadata`` pickle of a PyTorch Distributed Checkpoint (torch 2.1 to 2.14)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import xxhash

from streammerge.dtypes import DType, dtype_named
from streammerge.errors import SourceError, UnsafeError, UnsupportedError, UsageError
from streammerge.sources.pickle_reader import Folds, Functions, Global, Record, read_pickle
from streammerge.sources.torch_values import member_of
from streammerge.tensors.fragment import Box, Index

__all__ = ["Chunk", "DcpMetadata", "DcpTensor", "metadata_files", "read_metadata"]

_MAX_BYTES = 2 << 30
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor.

    Attributes:
        box: its place in the tensor, in elements.
        file: name of the file that holds it, relative to the folder.
        offset, length: bytes of the item in that file.
        transforms: what was done to the item's bytes, such as ``stream.zstd/1``.
    """

    box: Box
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(slots=True)
class DcpTensor:
    """A tensor of the checkpoint: its flat key, dtype as named, size in elements, and chunks."""

    key: str
    dtype: str
    size: Index
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What ``.metadata`` says.

    Attributes:
        tensors: key path -> tensor. The last component is the parameter's name, the ones before
            are the containers that it was saved in.
        others: key path -> place, of entries that are no tensors (a pickle each). None where they are
            stored nowhere.
        digest: hash of the file or files.
        passed_over: keys that were not wanted.
    """

    tensors: Mapping[KeyPath, DcpTensor]
    others: Mapping[KeyPath, Chunk | None]
    digest: str
    passed_over: tuple[str, ...] = ()


def metadata_files(folder: Path) -> list[Path]:
    """``.metadata``, or the ``__R.metadata`` of a save without collectives (torch >= 2.9)."""
    whole = folder / ".metadata"
    if whole.is_file():
        return [whole]
    return sorted(folder.glob("__*.metadata"))


def read_metadata(files: list[Path], unwanted: Callable[[str], bool] = lambda key: False) -> DcpMetadata:
    """Read and join metadata files. Each of a rank-local save lists its own chunks only.

    Args:
        unwanted: tells the keys of tensors to pass over, such as millions of chunks of an optimizer.

    Raises:
        SourceError: damaged, or files that contradict each other.
        UnsafeError: hostile content.
        UnsupportedError: a dtype that cannot be moved.
    """
    tensors: dict[KeyPath, DcpTensor] = {}
    others: dict[KeyPath, Chunk | None] = {}
    passed_over: dict[str, None] = {}
    digest = xxhash.xxh3_128()
    for path in files:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsafeError(f"{path} is larger than any real metadata")
        data = path.read_bytes()
        digest.update(data)
        functions, folds = _reading()
        root, _, _ = read_pickle(data, str(path), functions, folds=folds)
        if not isinstance(root, Record) or root.type_name not in ("Metadata", "MCoreMetadata"):
            raise SourceError(f"{path} is not the metadata of a distributed checkpoint")
        state = root.attributes
        passed_over |= dict.fromkeys(_drop(state, unwanted))
        _join(tensors, others, state, str(path))
    return DcpMetadata(tensors, others, digest.hexdigest(), tuple(passed_over))


def _drop(state: dict[str, Any], unwanted: Callable[[str], bool]) -> list[str]:
    """Take unwanted tensors out of the table, and out of the memory."""
    entries = state.get("state_dict_metadata")
    if not isinstance(entries, dict):
        return []
    dropped = [key for key in entries if isinstance(key, str) and _is_tensor(entries[key]) and unwanted(key)]
    for key in dropped:
        del entries[key]
    return dropped


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, Record) and entry.type_name == "TensorStorageMetadata"


def dtype_of(tensor: DcpTensor, name: str) -> DType:
    """The tensor's dtype.

    Raises:
        UnsupportedError: naming the tensor.
    """
    try:
        return dtype_named(tensor.dtype)
    except UsageError:
        raise UnsupportedError(f"{name}: dtype {tensor.dtype} is not supported") from None


def _join(
    tensors: dict[KeyPath, DcpTensor], others: dict[KeyPath, Chunk | None], state: dict[str, Any], where: str
) -> None:
    entries, storage = state.get("state_dict_metadata"), state.get("storage_data")
    paths = state.get("planner_data") or {}
    if not isinstance(entries, dict) or not isinstance(storage, dict) or not isinstance(paths, dict):
        raise SourceError(f"{where}: the metadata lacks its tables")
    places = _places(storage, entries, where)
    seen: set[KeyPath] = set()
    for key, entry in entries.items():
        path = _key_path(paths.get(key, (key,)), where)
        if not _is_tensor(entry):
            info = places.get((str(key), ()))
            others[path] = _chunk(Box((), ()), info, f"{where}: {key}") if info else None
            continue
        found = _tensor(str(key), entry.attributes, places, where)
        if path in seen:
            raise SourceError(f"{where}: {'.'.join(path)} occurs twice, once as {key}")
        seen.add(path)
        known = tensors.setdefault(path, found)
        if known is not found:
            if (known.dtype, known.size) != (found.dtype, found.size):
                raise SourceError(f"{where}: {key} has another dtype or size than in the other metadata files")
            known.chunks += found.chunks


def _key_path(path: object, where: str) -> KeyPath:
    if not isinstance(path, tuple | list) or not path or not all(isinstance(part, str | int) for part in path):
        raise SourceError(f"{where}: a malformed key path")
    return tuple(str(part) for part in path)


def _places(storage: dict[Any, Any], entries: dict[Any, Any], where: str) -> dict[tuple[str, Index], Record]:
    """(key, chunk offset) -> _StorageInfo. The index in the key is only a hint and may repeat."""
    places = {}
    for index, info in storage.items():
        key, offset = _folded(index, "MetadataIndex", 2)
        if not isinstance(key, str) or not isinstance(info, Record):
            raise SourceError(f"{where}: a malformed entry of storage_data")
        if key in entries:
            places[key, () if offset is None else _index(offset, f"{where}: {key}")] = info
    return places


def _folded(value: object, kind: str, length: int) -> tuple[Any, ...]:
    """What ``_reading`` left of an object of a class; as many None when it is of another one."""
    if isinstance(value, Record) and value.type_name == kind and isinstance(value.state, _Folded):
        return tuple(value.state)
    return (None,) * length


def _tensor(key: str, state: dict[str, Any], places: dict[tuple[str, Index], Record], where: str) -> DcpTensor:
    properties, size, chunks = state.get("properties"), state.get("size"), state.get("chunks")
    kind = properties.state if isinstance(properties, Record) else None
    # TensorProperties pickles as (dtype, layout, requires_grad, memory format, pin_memory).
    dtype = kind[0] if isinstance(kind, tuple) and kind else None
    if isinstance(kind, dict):
        dtype = kind.get("dtype")
    if not isinstance(dtype, Global) or not isinstance(chunks, list):
        raise SourceError(f"{where}: {key} is described wrongly")
    size = _index(size, f"{where}: {key}")
    tensor = DcpTensor(key, dtype.name, size)
    for chunk in chunks:
        box = _box(chunk, len(size), f"{where}: {key}")
        info = places.get((key, box.start))
        if info is None:
            if box.numel:
                raise SourceError(f"{where}: {key} at {list(box.start)} is listed, but stored nowhere")
            continue
        tensor.chunks.append(_chunk(box, info, f"{where}: {key}"))
    return tensor


def _box(chunk: object, num_dims: int, where: str) -> Box:
    offsets, sizes = _folded(chunk, "ChunkStorageMetadata", 2)
    start, sizes = _index(offsets, where), _index(sizes, where)
    if not len(start) == len(sizes) == num_dims:
        raise SourceError(f"{where}: a malformed chunk")
    return Box(start, sizes)


def _chunk(box: Box, info: Record, where: str) -> Chunk:
    file, offset, length, transforms = _folded(info, "_StorageInfo", 4)
    if not isinstance(file, str) or not isinstance(offset, int) or not isinstance(length, int):
        raise SourceError(f"{where}: a malformed place of a chunk")
    if min(offset, length) < 0 or "/" in file or "\\" in file or file in ("", ".", ".."):
        raise UnsafeError(f"{where}: the place {file!r} of a chunk leaves the folder or is negative")
    transforms = transforms or ()
    if not isinstance(transforms, list | tuple) or not all(isinstance(one, str) for one in transforms):
        raise SourceError(f"{where}: malformed transforms of a chunk")
    return Chunk(box, file, offset, length, tuple(transforms))


def _index(value: object, where: str) -> Index:
    """Sizes or offsets; also where the pickle does without ``torch.Size``, so before they are hashed."""
    # Without a loop of our own: it is asked of every index of millions of chunks.
    if not isinstance(value, tuple) or len(value) > 64 or not set(map(type, value)) <= {int}:
        raise SourceError(f"{where}: an impossible size or offset")
    if value and not 0 <= min(value) <= max(value) < 2**62:
        raise SourceError(f"{where}: an impossible size or offset")
    return value


def _ordered_dict(items: object = ()) -> dict[str, Any]:
    if not isinstance(items, list | tuple) or not all(
        isinstance(i, list | tuple) and len(i) == 2 and isinstance(i[0], str) for i in items
    ):
        raise SourceError("an OrderedDict is described wrongly")
    return dict(items)


class _Folded(tuple[Any, ...]):
    """The attributes of an object, in a known order and without their names."""

    __slots__ = ()


def _reading() -> tuple[Functions, Folds]:
    """How to read the pickle so that millions of chunks fit into memory.

    Equal indices and names become one object, and an object's state a tuple. The plans that
    Megatron-core (0.12 to 0.20) adds to the metadata repeat everything and are dropped.
    """
    known: dict[object, Any] = {}

    def size(items: object = ()) -> Index:
        index = _index(tuple(items) if isinstance(items, list) else items, "a tensor")
        return cast(Index, known.setdefault(index, index))

    def state_of(*names: str) -> Callable[[Any], object]:
        def fold(state: Any) -> object:
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
                state = state[1]  # a class with slots
            if not isinstance(state, dict):
                return state
            values = map(state.get, names)
            folded = _Folded(known.setdefault(one, one) if type(one) is str else one for one in values)
            state.clear()  # the pickle's own dict, of this object alone
            return folded

        return fold

    functions: Functions = {
        ("torch", "Size"): size,
        ("collections", "OrderedDict"): _ordered_dict,
        ("builtins", "getattr"): member_of,
    }
    folds: Folds = {
        "ChunkStorageMetadata": state_of("offsets", "sizes"),
        "MetadataIndex": state_of("fqn", "offset"),
        "_StorageInfo": state_of("relative_path", "offset", "length", "transform_descriptors"),
        **{name: lambda state: None for name in ("WriteItem", "TensorWriteData", "SavePlan", "MCoreSavePlan")},
    }
    return functions, folds
