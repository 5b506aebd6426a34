"""The element types a checkpoint can hold, in one table: torch's, safetensors' and numpy's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from streammerge.errors import UnsupportedError, UsageError

__all__ = ["DType", "dtype_named", "safetensors_dtype", "storage_dtype"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name, as in ``torch.bfloat16``.
        itemsize: bytes per element.
        kind: ``float``, ``float8``, ``int``, ``bool`` or ``complex``.
        safetensors: the name in a safetensors header, or None where the format has none
            (safetensors 0.8).
        numpy: numpy type that moves such elements without looking at them; equal to the real
            type where numpy has one.
    """

    name: str
    itemsize: int
    kind: str
    safetensors: str | None
    numpy: str

    def __str__(self) -> str:
        return self.name

    @property
    def castable(self) -> bool:
        """Whether ``--dtype`` may change it: ordinary floating point only.

        float8 values mean nothing without their scales, so casting them alone would be wrong.
        """
        return self.kind == "float"


_TABLE = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, "float", "F64", "<f8"),
        DType("float32", 4, "float", "F32", "<f4"),
        DType("float16", 2, "float", "F16", "<f2"),
        DType("bfloat16", 2, "float", "BF16", "<u2"),
        DType("float8_e4m3fn", 1, "float8", "F8_E4M3", "u1"),
        DType("float8_e5m2", 1, "float8", "F8_E5M2", "u1"),
        DType("float8_e4m3fnuz", 1, "float8", "F8_E4M3FNUZ", "u1"),
        DType("float8_e5m2fnuz", 1, "float8", "F8_E5M2FNUZ", "u1"),
        DType("float8_e8m0fnu", 1, "float8", "F8_E8M0", "u1"),
        DType("int64", 8, "int", "I64", "<i8"),
        DType("int32", 4, "int", "I32", "<i4"),
        DType("int16", 2, "int", "I16", "<i2"),
        DType("int8", 1, "int", "I8", "i1"),
        DType("uint64", 8, "int", "U64", "<u8"),
        DType("uint32", 4, "int", "U32", "<u4"),
        DType("uint16", 2, "int", "U16", "<u2"),
        DType("uint8", 1, "int", "U8", "u1"),
        DType("bool", 1, "bool", "BOOL", "u1"),
        DType("complex64", 8, "complex", "C64", "<u8"),
        DType("complex128", 16, "complex", None, "V16"),
        DType("complex32", 4, "complex", None, "<u4"),
    )
}
_ALIASES = {
    "float": "float32", "fp32": "float32", "double": "float64", "fp64": "float64", "half": "float16",
    "fp16": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip
# torch 2.1 to 2.14: a typed storage class in the pickle gives the dtype of its elements.
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE.values() if dtype.safetensors}


def dtype_named(name: str) -> DType:
    """Look up a dtype by torch's name or a common alias (``bf16``, ``half``, ``torch.float32``).

    Raises:
        UsageError: there is no such dtype.
    """
    key = name.removeprefix("torch.")
    found = _TABLE.get(_ALIASES.get(key, key))
    if found is None:
        raise UsageError(f"unknown dtype {name!r}; use one of {', '.join(_TABLE)}")
    return found


def storage_dtype(class_name: str) -> DType | None:
    """The dtype of a torch storage class, or None for ``UntypedStorage`` (sizes in bytes).

    Raises:
        UnsupportedError: a storage class of elements we cannot move (quantized types).
    """
    if class_name == "UntypedStorage":
        return None
    if class_name not in _STORAGES:
        raise UnsupportedError(f"storages of class torch.{class_name} are not supported")
    return _TABLE[_STORAGES[class_name]]


def safetensors_dtype(name: str) -> DType | None:
    """The dtype of a safetensors header name such as ``BF16``, or None."""
    return _SAFETENSORS.get(name)
