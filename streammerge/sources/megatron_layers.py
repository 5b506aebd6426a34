"""Global numbers for layers and experts, which Megatron's rank files number from 0 each.

The layers of a model are spread over virtual pipeline chunks first and stages second: chunk 0 of all
stages, then chunk 1 of all stages (Megatron-core 0.8 to 0.20, for even and uneven splits and custom
layouts alike), so counting gives the numbers without any argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from streammerge.errors import SourceError

__all__ = ["count_layers", "global_expert", "layer_offsets", "local_experts", "with_layer_offset"]

_LAYER = re.compile(r"^(?P<stack>(?:.*?\.)?layers)\.(?P<number>\d+)\.")
_EXPERT = re.compile(
    r"(?P<before>\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(?P<number>\d+)(?P<after>$|\.|_)"
)

Chunk = tuple[int, int]  # (virtual pipeline chunk, pipeline stage)


def layer_offsets(names: Mapping[Chunk, Iterable[str]], where: str) -> dict[tuple[str, Chunk], int]:
    """(stack of layers, chunk) -> how many layers of the stack are in chunks before it.

    Args:
        names: the parameters of each chunk.

    Raises:
        SourceError: the layers of a chunk are not numbered from 0 on.
    """
    counts: dict[str, dict[Chunk, set[int]]] = {}
    for chunk, held in names.items():
        for name in held:
            found = _LAYER.match(name)
            if found:
                counts.setdefault(found["stack"], {}).setdefault(chunk, set()).add(int(found["number"]))
    offsets: dict[tuple[str, Chunk], int] = {}
    for stack, chunks in counts.items():
        total = 0
        for chunk in sorted(chunks):
            numbers = chunks[chunk]
            if numbers != set(range(len(numbers))):
                raise SourceError(
                    f"{where}: {stack} of pipeline stage {chunk[1]}, chunk {chunk[0]}, has the numbers "
                    f"{sorted(numbers)[:8]}, not those from 0 on; parameters are missing"
                )
            offsets[stack, chunk] = total
            total += len(numbers)
    return offsets


def count_layers(names: Iterable[str]) -> int:
    """How many layers the names are of, in the largest stack of them."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        if found:
            numbers.setdefault(found["stack"], set()).add(found["number"])
    return max(map(len, numbers.values()), default=0)


def with_layer_offset(name: str, chunk: Chunk, offsets: Mapping[tuple[str, Chunk], int]) -> str:
    """A parameter's name with its layer's number in the whole model."""
    found = _LAYER.match(name)
    if found is None:
        return name
    number = int(found["number"]) + offsets[found["stack"], chunk]
    return f"{found['stack']}.{number}{name[found.end('number') :]}"


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """Beginning of the names of a layer's experts -> how many there are in this file."""
    counts: dict[str, int] = {}
    for name in names:
        found = _EXPERT.search(name)
        if found:
            key = name[: found.start()]
            counts[key] = max(counts.get(key, 0), int(found["number"]) + 1)
    return counts


def global_expert(name: str, counts: Mapping[str, int], rank: int) -> str:
    """A parameter's name with its expert's number in the whole model; ``rank``: expert parallel rank."""
    found = _EXPERT.search(name)
    if found is None:
        return name
    number = rank * counts[name[: found.start()]] + int(found["number"])
    return f"{name[: found.start('number')]}{number}{name[found.end('number') :]}"
