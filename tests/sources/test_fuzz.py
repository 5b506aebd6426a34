"""Random damage to the metadata of real rank files: the right tensors come out, or a refusal, and nothing else."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from streammerge.errors import StreammergeError
from streammerge.tensors.catalogue import Catalogue
from tests.support.data import copied
from tests.support.ranks import rank_path
from tests.support.raw import Raw
from tests.support.results import catalogued, values

_CHECKPOINTS = {
    "fsdp2_w2_named_params": 2,
    "fsdp2_w4_bf16_tied": 4,
    "t2110_fsdp2_tp_2x2": 4,
    "fsdp1_w2_shardedtensor": 2,
}
_PER_CHECKPOINT = 200

Damage = Callable[[random.Random, bytearray, list[int]], bytes]


def _flip(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        content[dice.choice(free)] ^= 1 << dice.randrange(8)
    return bytes(content)


def _overwrite(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    content[dice.choice(free)] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
    return bytes(content)


def _swap(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    first, second = dice.choice(free), dice.choice(free)
    content[first], content[second] = content[second], content[first]
    return bytes(content)


def _zero(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    """A lost sector, as far as it holds no weights."""
    at = dice.randrange(len(free))
    for place in free[at : at + dice.choice((4, 16, 512))]:
        content[place] = 0
    return bytes(content)


def _truncate(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    return bytes(content[: dice.choice(free)])


_DAMAGES: tuple[Damage, ...] = (_flip, _flip, _flip, _overwrite, _swap, _zero, _truncate)


def _weightless(path: Path, catalogue: Catalogue) -> list[int]:
    """The places of the bytes that no tensor reads: pickles, headers, directory, padding."""
    number = next(i for i, file in enumerate(catalogue.files) if file.path == path)
    free = set(range(path.stat().st_size))
    for entry in catalogue.entries.values():
        for tensor in (entry.tensor, *(claim.tensor for claim in entry.claims)):
            for fragment in tensor.fragments:
                if fragment.file == number:
                    extent = fragment.extent(tensor.dtype.itemsize)
                    free.difference_update(range(fragment.offset, fragment.offset + extent))
    return sorted(free)


def _outcome(folder: Path) -> dict[str, Raw] | None:
    try:
        return values(catalogued(folder))
    except StreammergeError as refusal:
        assert str(refusal)
        return None


@pytest.mark.parametrize("name", _CHECKPOINTS)
def test_damage_is_harmless_or_refused(name: str, tmp_path: Path) -> None:
    world = _CHECKPOINTS[name]
    folder = copied(name, tmp_path / "ckpt")
    path = rank_path(folder, world, 1)
    sound = path.read_bytes()
    catalogue = catalogued(folder)
    wanted, free = values(catalogue), _weightless(path, catalogue)
    wrong, refused = [], 0
    for seed in range(_PER_CHECKPOINT):
        dice = random.Random(f"{name} {seed}")
        damage = dice.choice(_DAMAGES)
        path.write_bytes(damage(dice, bytearray(sound), free))
        found = _outcome(folder)
        refused += found is None
        if found is not None and found != wanted:
            wrong.append((seed, damage.__name__, sorted(_differing(found, wanted))[:3]))
    assert not wrong
    assert refused > _PER_CHECKPOINT // 4


def _differing(found: dict[str, Raw], wanted: dict[str, Raw]) -> set[str]:
    return {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}


def test_every_bit_of_a_small_header_matters(tmp_path: Path) -> None:
    """All single-bit flips of one storage's local header."""
    folder = copied("fsdp2_w2_named_params", tmp_path / "ckpt")
    path = rank_path(folder, 2, 0)
    sound = path.read_bytes()
    wanted = values(catalogued(folder))
    with zipfile.ZipFile(path) as archive:
        header = next(info for info in archive.infolist() if info.filename.endswith("data/3")).header_offset
    wrong = []
    for bit in range(8 * 30):
        content = bytearray(sound)
        content[header + bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        found = _outcome(folder)
        if found is not None and found != wanted:
            wrong.append((bit // 8, bit % 8))
    assert not wrong
