"""Layout rules: how the elements of a framework's tensors become those of Hugging Face's.

Each is a function from whole virtual tensors (one per source of the row) to one tensor per target.
Nothing is read or computed; all of them are re-indexings. Row orders as Megatron-core 0.8 to 0.20
writes them were checked against real checkpoints by the logits that result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streammerge.errors import SourceError
from streammerge.families.fields import Fields
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import Tensor, concat, narrow, permute, select, stack, strided, unbind

__all__ = ["LAYOUTS", "Layout"]

Tensors = Sequence[Tensor]
# (source tensors, the config's sizes, rows of each section) -> target tensors
Layout = Callable[[Tensors, Fields, Sequence[int]], list[Tensor]]


def _copy(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """As it is."""
    return list(tensors)


def _split(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """One target for each section, in order: ``[gate; up]``."""
    return _cut(tensors[0], sections)


def _vocab(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """Without the rows that pad the vocabulary; they hold junk and are at the end."""
    return [narrow(tensors[0], 0, 0, fields.size("vocab_size"))]


def _row(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """``[1, n]`` as ``[n]``."""
    return [select(tensors[0], 0, 0)]


def _transpose(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """The last two dims swapped."""
    return [_swapped(tensors[0])]


def _grouped_qkv(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """Rows in groups, one for each key head: ``[its query heads; the key head; the value head]``."""
    heads, groups, size = _heads(fields)
    queries, keys, values = _grouped(tensors[0], groups, [heads // groups * size, size, size])
    return [concat(queries, 0), concat(keys, 0), concat(values, 0)]


def _grouped_qkv_joined(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """As ``grouped_qkv``, into one tensor of all queries, all keys, all values."""
    return [concat(_grouped_qkv(tensors, fields, sections), 0)]


def _gated_qkv(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """Groups of ``[query heads; a gate for each; key; value]``; the query target has each head and its gate."""
    heads, groups, size = _heads(fields)
    each = heads // groups
    queries, gates, keys, values = _grouped(tensors[0], groups, [each * size, each * size, size, size])
    paired = [
        narrow(part, 0, head * size, size)
        for query, gate in zip(queries, gates, strict=True)
        for head in range(each)
        for part in (query, gate)
    ]
    return [concat(paired, 0), concat(keys, 0), concat(values, 0)]


def _by_key_head(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """Sections cut into one part per key head of linear attention: a head's parts of all sections together."""
    heads = fields.size("linear_num_key_heads")
    parts = []
    for section in _cut(tensors[0], sections):
        if section.shape[0] % heads:
            raise SourceError(f"{section.shape[0]} rows do not divide into linear_num_key_heads = {heads}")
        parts.append(_cut(section, [section.shape[0] // heads] * heads))
    return [concat([part for head in zip(*parts, strict=True) for part in head], 0)]


def _gdn_in_proj(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """``[query; key; value; z; beta; alpha]`` -> qkvz and ba, each ordered by key head."""
    edge = sum(sections[:4])
    whole = tensors[0]
    qkvz = narrow(whole, 0, 0, edge)
    ba = narrow(whole, 0, edge, whole.shape[0] - edge)
    return _by_key_head([qkvz], fields, sections[:4]) + _by_key_head([ba], fields, sections[4:])


def _interleave(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """A stack (or one) of ``[gate; up]`` with gate and up taking turns along the last dim, which was the rows.

    ``[2F, H]`` becomes ``[H, 2F]`` and a bias ``[2F]`` stays ``[2F]``, as gpt-oss has them.
    """
    made = []
    for tensor in tensors:
        gate, up = _cut(tensor, sections)
        pair = stack([gate, up])  # [2, F, ...]
        order = (*range(2, len(pair.shape)), 1, 0)  # [..., F, 2]
        turned = permute(pair, order)
        made.append(reshape(turned, (*turned.shape[:-2], turned.shape[-2] * 2)))
    return made


def _experts(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """A stack of all experts, one by one."""
    return unbind(tensors[0])


def _gate_up_stack(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
    """Stacks of gates ``[E, F, H]`` and of ups -> ``[E, H, 2F]``, all gates first."""
    gate, up = map(_swapped, tensors)
    return [concat([gate, up], 2)]


def _rope_halves(heads_field: str) -> Layout:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves: all first of a pair, then all second."""

    def layout(tensors: Tensors, fields: Fields, sections: Sequence[int]) -> list[Tensor]:
        tensor, heads = tensors[0], fields.size(heads_field)
        rows = tensor.shape[0] if tensor.shape else 1
        if heads <= 0 or rows % (2 * heads):
            raise SourceError(f"{rows} rows are not a whole number of pairs for {heads_field} = {heads}")
        size = rows // heads
        halves = [strided(tensor, 0, head * size + first, 2, size // 2) for head in range(heads) for first in (0, 1)]
        return [concat(halves, 0)]

    return layout


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key heads, and rows of a head."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, groups, size = (fields.size(name) for name in names)
    if groups < 1 or heads % groups:
        raise SourceError(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {groups}")
    return heads, groups, size


def _grouped(tensor: Tensor, groups: int, sizes: Sequence[int]) -> list[list[Tensor]]:
    """Cut rows into ``groups`` groups of parts of ``sizes`` rows; returns the parts of each kind."""
    parts = _cut(tensor, list(sizes) * groups)
    return [parts[kind :: len(sizes)] for kind in range(len(sizes))]


def _cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    if sum(sizes) != tensor.shape[0]:
        raise SourceError(f"{tensor.shape[0]} rows cannot be cut into {' + '.join(map(str, sizes[:8]))}")
    parts, at = [], 0
    for size in sizes:
        parts.append(narrow(tensor, 0, at, size))
        at += size
    return parts


def _swapped(tensor: Tensor) -> Tensor:
    dims = len(tensor.shape)
    return permute(tensor, (*range(dims - 2), dims - 1, dims - 2))


LAYOUTS: dict[str, Layout] = {
    "copy": _copy,
    "split": _split,
    "vocab": _vocab,
    "row": _row,
    "transpose": _transpose,
    "grouped_qkv": _grouped_qkv,
    "grouped_qkv_joined": _grouped_qkv_joined,
    "gated_qkv": _gated_qkv,
    "gdn_in_proj": _gdn_in_proj,
    "interleave": _interleave,
    "experts": _experts,
    "gate_up_stack": _gate_up_stack,
    "rope_q": _rope_halves("num_attention_heads"),
    "rope_k": _rope_halves("num_key_value_heads"),
}
