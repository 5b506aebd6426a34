"""How tensors are divided into files, as ``save_pretrained`` does it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["file_names", "split"]


def split(sizes: Mapping[str, int], max_shard_size: int) -> list[list[str]]:
    """Divide tensors into shards, in order.

    A tensor larger than the limit gets a shard of its own, which is numbered at once, before the
    one still being filled (huggingface_hub 2.4, ``split_state_dict_into_shards_factory``).

    Args:
        sizes: tensor name -> bytes, in the order of the state dict.
        max_shard_size: bytes of tensors per file.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if filled + size > max_shard_size:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    return shards


def file_names(count: int) -> list[str]:
    """``model.safetensors`` for one shard, else ``model-00001-of-0000N.safetensors`` and so on."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
