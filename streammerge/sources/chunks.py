"""Put chunks with explicit places together: one copy of each, tiling the tensor exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streammerge.dtypes import DType
from streammerge.errors import SourceError
from streammerge.tensors.catalogue import EqualityCheck, SourceFile
from streammerge.tensors.fragment import Box, Fragment, Index
from streammerge.tensors.tiling import tiling_fault
from streammerge.tensors.virtual import Stored

__all__ = ["join_chunks"]


def join_chunks(
    name: str, dtype: DType, size: Index, fragments: Sequence[Fragment], sources: Sequence[SourceFile]
) -> tuple[Stored, list[EqualityCheck]]:
    """The tensor of ``size`` that the fragments make up.

    Ranks that saved by themselves may each have stored a replicated chunk: one is taken, and the
    others have to be compared with it.

    Raises:
        SourceError: the chunks do not tile the tensor.
    """
    chosen: dict[Box, Fragment] = {}
    checks = []
    for fragment in sorted(fragments, key=lambda one: (one.file, one.offset)):
        first = chosen.setdefault(Box(fragment.start, fragment.shape), fragment)
        if first is not fragment:
            pair = [Stored(dtype, one.shape, (replace(one, start=(0,) * len(one.shape)),)) for one in (first, fragment)]
            names = [sources[one.file].path.name for one in (first, fragment)]
            reason = f"{names[0]} and {names[1]} hold different copies of the same chunk"
            checks.append(EqualityCheck(name, pair[0], pair[1], reason, tolerated=True))
    fault = tiling_fault(size, list(chosen))
    if fault is not None:
        raise SourceError(f"{name}: {fault} by the chunks of the checkpoint; was it saved by all ranks?")
    return Stored(dtype, size, tuple(chosen.values())), checks
