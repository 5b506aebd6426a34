"""The plan: output files, their headers, and where each tensor goes."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streammerge.dtypes import DType
from streammerge.plan.header import aligned_order, header_bytes
from streammerge.plan.shards import file_names, split
from streammerge.tensors.catalogue import SourceFile
from streammerge.tensors.formula import Formulas
from streammerge.tensors.virtual import Tensor, nbytes, numel

__all__ = ["ADAPTER_NAME", "INDEX_NAME", "OutputFile", "OutputTensor", "Plan", "make_plan", "with_adapter"]

INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "lora_adapter/adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor in an output file.

    Attributes:
        name: as in the header.
        tensor: where its elements come from.
        dtype: element type as written.
        offset: absolute byte offset in the file.
        size: bytes.
    """

    name: str
    tensor: Tensor
    dtype: DType
    offset: int
    size: int


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to be written.

    Attributes:
        name: file name in the folder.
        header: its first bytes.
        tensors: in the order of their offsets.
        size: bytes of the whole file.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    size: int
    _ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", [t.offset + t.size for t in self.tensors])

    def tensors_in(self, start: int, end: int) -> Iterator[OutputTensor]:
        """The tensors with bytes in ``start .. end`` of the file."""
        for tensor in self.tensors[bisect_right(self._ends, start) :]:
            if tensor.offset >= end:
                return
            yield tensor


@dataclass(frozen=True)
class Plan:
    """Everything a merge will do, before it reads a weight.

    Attributes:
        sources: the files read from, by the index that fragments use.
        files: the weight files written, in order.
        parameters: elements of all tensors written, buffers such as a router's score bias included.
        total_size: bytes of all tensors written, without headers.
        read_size: bytes of all tensors read.
        casts: (stored dtype, written dtype) pairs that occur and differ.
        formulas: the tensors that are computed.
    """

    sources: tuple[SourceFile, ...]
    files: tuple[OutputFile, ...]
    parameters: int
    total_size: int
    read_size: int
    casts: tuple[tuple[DType, DType], ...]
    formulas: Formulas = field(default_factory=Formulas)

    @property
    def weights(self) -> tuple[OutputFile, ...]:
        """The files of the model itself, without an adapter's."""
        return tuple(file for file in self.files if "/" not in file.name)

    @property
    def write_size(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(file.size for file in self.files)

    def index_bytes(self) -> bytes | None:
        """The content of ``model.safetensors.index.json``, or None for a single file."""
        if len(self.weights) < 2:
            return None
        weight_map = {tensor.name: file.name for file in self.weights for tensor in file.tensors}
        metadata = {"total_parameters": self.parameters, "total_size": self.total_size}
        index = {"metadata": metadata, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def fingerprint(self) -> str:
        """A hash of the inputs and of what will be written; the options that choose between replicas
        or shard orders are not in it."""
        digest = hashlib.sha256()
        for source in self.sources:
            place = source.origin or source.path.absolute()
            digest.update(f"{place}\0{source.size}\0{source.mtime_ns}\0{source.digest}\0".encode())
        for file in self.files:
            digest.update(f"{file.name}\0{file.size}\0".encode() + file.header)
        if self.formulas.listed:
            digest.update(self.formulas.digest().encode())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for ``--json``."""
        return {
            "fingerprint": self.fingerprint(),
            "parameters": self.parameters,
            "total_size": self.total_size,
            "read_size": self.read_size,
            "write_size": self.write_size,
            "casts": [[stored.name, written.name] for stored, written in self.casts],
            "sources": [{"path": str(source.path), "size": source.size} for source in self.sources],
            "files": [
                {"name": file.name, "size": file.size, "tensors": [_tensor_dict(t) for t in file.tensors]}
                for file in self.files
            ],
        }


def _tensor_dict(output: OutputTensor) -> dict[str, Any]:
    return {
        "name": output.name,
        "dtype": output.dtype.name,
        "stored_dtype": output.tensor.dtype.name,
        "shape": list(output.tensor.shape),
        "offset": output.offset,
        "size": output.size,
    }


def make_plan(
    tensors: Mapping[str, Tensor],
    sources: tuple[SourceFile, ...],
    rule: Callable[[str, DType], DType],
    max_shard_size: int,
    formulas: Formulas | None = None,
) -> Plan:
    """Lay out the output files.

    Args:
        tensors: output name -> tensor, in the order of the state dict.
        sources: the files that the tensors' fragments point into.
        rule: (name, stored dtype) -> written dtype.
        max_shard_size: bytes of tensors per file.
        formulas: the virtual files that fragments point into.

    Raises:
        UnsupportedError: a dtype that safetensors does not have.
    """
    dtypes = {name: rule(name, tensor.dtype) for name, tensor in tensors.items()}
    sizes = {name: numel(tensor) * dtypes[name].itemsize for name, tensor in tensors.items()}
    shards = split(sizes, max_shard_size)
    files = []
    for file_name, names in zip(file_names(len(shards)), shards, strict=True):
        order = aligned_order({name: sizes[name] for name in names})
        files.append(_output_file(file_name, [(name, tensors[name], dtypes[name], sizes[name]) for name in order]))
    return Plan(
        sources=sources,
        files=tuple(files),
        parameters=sum(numel(tensor) for tensor in tensors.values()),
        total_size=sum(sizes.values()),
        read_size=sum(nbytes(tensor) for tensor in tensors.values()),
        casts=_casts(tensors, dtypes),
        formulas=formulas or Formulas(),
    )


def with_adapter(plan: Plan, tensors: Mapping[str, Tensor]) -> Plan:
    """The plan with a PEFT adapter beside the model, its tensors in the dtypes that they are stored in."""
    sizes = {name: nbytes(tensor) for name, tensor in tensors.items()}
    members = [(name, tensors[name], tensors[name].dtype, sizes[name]) for name in aligned_order(sizes)]
    read_size = plan.read_size + sum(sizes.values())
    return replace(plan, files=(*plan.files, _output_file(ADAPTER_NAME, members)), read_size=read_size)


def _casts(tensors: Mapping[str, Tensor], dtypes: Mapping[str, DType]) -> tuple[tuple[DType, DType], ...]:
    pairs = {(tensor.dtype, dtypes[name]) for name, tensor in tensors.items() if tensor.dtype != dtypes[name]}
    return tuple(sorted(pairs, key=lambda pair: (pair[0].name, pair[1].name)))


def _output_file(name: str, members: list[tuple[str, Tensor, DType, int]]) -> OutputFile:
    header = header_bytes([(key, dtype, tensor.shape, size) for key, tensor, dtype, size in members])
    at = len(header)
    tensors = []
    for key, tensor, dtype, size in members:
        tensors.append(OutputTensor(key, tensor, dtype, at, size))
        at += size
    return OutputFile(name, header, tuple(tensors), at)
