"""Random damage to the metadata and the item headers of a real folder: the right tensors, or a refusal."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from streammerge.errors import StreammergeError
from streammerge.tensors.catalogue import Catalogue
from tests.dcp.dcp_support import State, raws, rows_of_rank, save_ranks
from tests.support.raw import Raw
from tests.support.results import catalogued, values

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
    at = dice.randrange(len(free))
    for place in free[at : at + dice.choice((4, 16, 512))]:
        content[place] = 0
    return bytes(content)


def _truncate(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    return bytes(content[: dice.choice(free)])


def _remove(dice: random.Random, content: bytearray, free: list[int]) -> bytes:
    at = dice.choice(free)
    del content[at : at + dice.choice((1, 1, 2, 30))]
    return bytes(content)


_DAMAGES: tuple[Damage, ...] = (_flip, _flip, _flip, _overwrite, _swap, _zero, _truncate, _remove)


def _weightless(path: Path, catalogue: Catalogue) -> list[int]:
    """The places of the bytes that no tensor reads."""
    number = next((i for i, file in enumerate(catalogue.files) if file.path == path), None)
    free = set(range(path.stat().st_size))
    for entry in catalogue.entries.values():
        for fragment in entry.tensor.fragments:
            if fragment.file == number:
                end = fragment.offset + fragment.extent(entry.tensor.dtype.itemsize)
                free.difference_update(range(fragment.offset, end))
    return sorted(free)


@pytest.fixture(scope="module")
def sharded_small(small: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small state on two ranks, with bytes entries beside it."""
    folder = tmp_path_factory.mktemp("fuzz") / "ckpt"
    rows = rows_of_rank(small, 2)
    return save_ranks(folder, 2, lambda rank: {"model": rows(rank), "step": 3}, lambda: dcp.FileSystemWriter(folder))


def _outcome(folder: Path) -> dict[str, Raw] | None:
    try:
        return values(catalogued(folder))
    except StreammergeError as refusal:
        assert str(refusal)
        return None


def _sound(found: dict[str, Raw], wanted: dict[str, Raw], renamed: bool) -> bool:
    """Whether the result is right. Damage to a key's own letters renames a tensor: its values must still be right."""
    if not renamed:
        return found == wanted
    values_of = [(raw.dtype, raw.shape, raw.data) for raw in wanted.values()]
    return all((raw.dtype, raw.shape, raw.data) in values_of for raw in found.values())


@pytest.mark.parametrize(("name", "count"), [(".metadata", 600), ("__0_0.distcp", 200), ("__1_0.distcp", 200)])
def test_damage_is_harmless_or_refused(name: str, count: int, sharded_small: Path, small: State) -> None:
    path = sharded_small / name
    whole = path.read_bytes()
    wanted = raws(small)
    catalogue = catalogued(sharded_small)
    assert values(catalogue) == wanted
    free = _weightless(path, catalogue)
    wrong, refused = [], 0
    try:
        for seed in range(count):
            dice = random.Random(f"{name} {seed}")
            damage = dice.choice(_DAMAGES)
            path.write_bytes(damage(dice, bytearray(whole), free if damage is not _remove else free[:-1]))
            found = _outcome(sharded_small)
            refused += found is None
            if found is not None and not _sound(found, wanted, name == ".metadata"):
                wrong.append((seed, damage.__name__, sorted(n for n in found if found[n] != wanted.get(n))[:3]))
    finally:
        path.write_bytes(whole)
    assert not wrong
    assert refused > count // 4


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 0.5, float("nan"), "", "x", "../x", b"x", (), (0,), (-1,), (2**63,),
    ("x",), (None,), ((0,),), ([],), [], [0], [None], [[]], {}, {"x": 1}, {0: 0}, frozenset(), torch.Size([2]),
    torch.float32, ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), BytesStorageMetadata(),
)  # fmt: skip


def _places_in(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every (owner, key or attribute) of the metadata that can be given another value."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner, keys = list(value.values()), list(value)
    elif isinstance(value, list):
        inner, keys = value, list(range(len(value)))
    elif hasattr(value, "__dict__") and depth < 6:
        inner, keys = list(vars(value).values()), list(vars(value))
        value = vars(value)
    else:
        return found
    for key, one in zip(keys, inner, strict=True):
        if key != "memory_format":  # torch itself cannot pickle another one
            found += [(value, key), *_places_in(one, depth + 1)]
    return found


def test_other_values_in_the_metadata(tmp_path: Path) -> None:
    """Well-formed pickles with one wrong value: each of these, in each place."""
    state = {"norm.weight": torch.randn(4)}
    rows, wanted = rows_of_rank(state, 2), raws(state)
    folder = save_ranks(tmp_path, 2, lambda rank: {"model": rows(rank)}, lambda: dcp.FileSystemWriter(tmp_path))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        vars(info)["transform_descriptors"] = None
    wrong, refused = [], 0
    for owner, key in _places_in(metadata):
        honest = owner[key]
        for value in _VALUES:
            owner[key] = value
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
            try:
                found = _outcome(folder)
            except Exception as fault:
                wrong.append(f"{key} = {value!r}: {type(fault).__name__}: {fault}")
                continue
            refused += found is None
            if found is not None and not _sound(found, wanted, renamed=True):
                wrong.append(f"{key} = {value!r}: {found}")
        owner[key] = honest
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:12])
    assert refused > 300
