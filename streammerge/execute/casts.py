"""Conversion of elements between dtypes, vectorised, with the results of ``torch.Tensor.to``.

The common casts between float32 and bfloat16 are done by ml_dtypes, bit for bit as torch does them
but without torch's 200 MB of memory and 1.5 s of import; all others are done by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from streammerge.dtypes import DType

__all__ = ["Kernel", "kernel", "needs_torch"]

Kernel = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]

# Elements per step, so that the temporaries stay in a core's L2 cache.
_STEP = 1 << 16
# What torch 2.13 writes for every NaN, whatever its sign and payload.
_BFLOAT16_NAN = 0xFFFF


@cache
def kernel(stored: DType, written: DType) -> Kernel:
    """A function (source, target) that converts elements; both arrays have the same shape.

    The arrays hold the dtypes' numpy stand-ins (``DType.numpy``).
    """
    if stored == written:
        return _copy
    own = _LIGHT_KERNELS.get((stored.name, written.name))
    return own if own is not None else _torch_kernel(stored, written)


def needs_torch(casts: Iterable[tuple[DType, DType]]) -> bool:
    """Whether any of these (stored, written) casts is done by torch."""
    return any((stored.name, written.name) not in _LIGHT_KERNELS for stored, written in casts)


def _copy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    np.copyto(target, source)


def _float32_to_bfloat16(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    for part, out in _steps(source, target):
        with np.errstate(invalid="ignore"):  # signalling NaN
            np.copyto(out.view(ml_dtypes.bfloat16), part, casting="unsafe")
        nan = np.isnan(part)
        if nan.any():
            out[nan] = _BFLOAT16_NAN  # ml_dtypes keeps the sign


def _bfloat16_to_float32(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    np.copyto(target, source.view(ml_dtypes.bfloat16))


def _steps(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Cut both arrays along their first dims into parts of about ``_STEP`` elements."""
    if source.size <= _STEP or source.ndim == 0:
        if source.size:
            yield source, target
        return
    inner = source.size // source.shape[0]
    if inner > _STEP:
        for index in range(source.shape[0]):
            yield from _steps(source[index], target[index])
        return
    rows = max(1, _STEP // inner)
    for start in range(0, source.shape[0], rows):
        yield source[start : start + rows], target[start : start + rows]


def _torch_kernel(stored: DType, written: DType) -> Kernel:
    import torch

    torch.set_num_threads(1)  # the workers are the parallelism
    source_dtype, target_dtype = getattr(torch, stored.name), getattr(torch, written.name)

    def convert(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        # torch writes other NaN bits for strided data, and at the end of contiguous data, than for the
        # rest of it; what is written must not depend on how the ranks cut a tensor.
        for part, out in _steps(source, target):
            values = torch.from_numpy(part if part.flags.c_contiguous else part.copy()).view(source_dtype)
            torch.from_numpy(out).view(target_dtype).copy_(values.to(target_dtype))
            if written.name == "bfloat16":
                out[np.isnan(part)] = _BFLOAT16_NAN

    return convert


_LIGHT_KERNELS: dict[tuple[str, str], Kernel] = {
    ("float32", "bfloat16"): _float32_to_bfloat16,
    ("bfloat16", "float32"): _bfloat16_to_float32,
}
