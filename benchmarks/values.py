"""Deterministic tensor values that cost little more than a memory copy.

Every tensor is one repeated random block read from an offset that depends on its name. The block length is
a prime, so no two rows (or experts) of a tensor start at the same place in the block, and rows that a merge
puts in the wrong order are noticed.
"""

from __future__ import annotations

import functools
import hashlib

import torch

BLOCK_ELEMENTS = 1048583
"""Length of the repeated block in elements: the first prime above 2**20."""


def global_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The whole tensor `name`; every rank file holds exact slices of it.

    For one name, shape and seed, the bf16 tensor is the fp32 tensor rounded by torch.
    """
    out = torch.empty(shape, dtype=dtype)
    fill_range(out.view(-1), name, 0, seed)
    return out


def fill_range(out: torch.Tensor, name: str, start: int, seed: int = 0) -> None:
    """Fill the 1-D `out` with elements `start` onwards of the row-major flattened tensor `name`."""
    block = _block(out.dtype, seed)
    position = (_offset(name, seed) + start) % BLOCK_ELEMENTS
    done = 0
    while done < out.numel():
        count = min(BLOCK_ELEMENTS - position, out.numel() - done)
        out[done : done + count] = block[position : position + count]
        done += count
        position = 0


@functools.lru_cache(maxsize=8)
def _block(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(BLOCK_ELEMENTS, generator=generator, dtype=torch.float32)
    return (values * 0.02).to(dtype)


def _offset(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % BLOCK_ELEMENTS
