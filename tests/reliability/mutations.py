"""Ways to damage a checkpoint: silent ones, as disks and copies do it, and crafted ones, as people do it."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["CRAFTED", "SILENT", "Checkpoint", "Mutation"]

_NUMBERS = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 70,
    1e308,
    "",
    "\0",
    "a" * 5000,
    [],
    {},
    [[]] * 50,
    {"": None},
    "../../x",
)


@dataclass
class Checkpoint:
    """Files in memory.

    Attributes:
        files: relative name -> content.
        weights: rank file -> (start, end) of its storages, in the intact file.
        edges: rank file -> where something begins or ends in it.
        touched_weights: whether a byte of a weight may have been changed.
    """

    files: dict[str, bytes]
    weights: dict[str, list[tuple[int, int]]]
    edges: dict[str, list[int]]
    touched_weights: bool = False

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The intact one."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        made = cls(files, {}, {})
        for name, content in files.items():
            if "rank" in name and zipfile.is_zipfile(io.BytesIO(content)):
                made.weights[name], made.edges[name] = _layout(content)
        return made

    def copy(self) -> Checkpoint:
        """One that may be changed."""
        return replace(self, files=dict(self.files))

    def write(self, folder: Path) -> None:
        """Put the files into a new folder."""
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def a_rank(self, rng: random.Random) -> str:
        """The name of some rank file, one that is there if any is."""
        return rng.choice([name for name in sorted(self.weights) if name in self.files] or ["model_rank_0.pt"])

    def a_sidecar(self, rng: random.Random) -> str:
        """The name of some other file."""
        return rng.choice([name for name in sorted(self.files) if name not in self.weights] or ["config.json"])

    def touch(self, name: str, start: int, end: int) -> None:
        """Note that bytes are changed."""
        self.touched_weights |= any(start < last and first < end for first, last in self.weights.get(name, ()))


Mutation = Callable[[Checkpoint, random.Random], None]


def _layout(content: bytes) -> tuple[list[tuple[int, int]], list[int]]:
    weights, edges = [], {0, len(content)}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            name_size, extra_size = struct.unpack_from("<2H", content, entry.header_offset + 26)
            start = entry.header_offset + 30 + name_size + extra_size
            edges |= {entry.header_offset, entry.header_offset + 30, start, start + entry.file_size}
            if "/data/" in entry.filename:
                weights.append((start, start + entry.file_size))
        edges |= {archive.start_dir, content.rfind(b"PK\x05\x06"), content.rfind(b"PK\x06\x06")} - {-1}
    return weights, sorted(edges)


def _place(checkpoint: Checkpoint, rng: random.Random) -> tuple[str, int]:
    """A byte of a rank file; four times of five it is none of a weight."""
    name = checkpoint.a_rank(rng)
    size = len(checkpoint.files.get(name, b""))
    at = rng.randrange(size) if size else 0
    if rng.random() < 0.8:
        for _ in range(200):
            if not any(start <= at < end for start, end in checkpoint.weights.get(name, ())):
                break
            at = rng.randrange(size)
    return name, at


def _overwrite(checkpoint: Checkpoint, name: str, at: int, data: bytes) -> None:
    content = checkpoint.files.get(name, b"")
    data = data[: max(0, len(content) - at)]
    checkpoint.files[name] = content[:at] + data + content[at + len(data) :]
    checkpoint.touch(name, at, at + len(data))


def flip_bit(checkpoint: Checkpoint, rng: random.Random) -> None:
    """One bit of a rank file."""
    name, at = _place(checkpoint, rng)
    content = checkpoint.files.get(name, b"")
    _overwrite(checkpoint, name, at, bytes([content[at] ^ (1 << rng.randrange(8))]) if content else b"")


def flip_bit_of_the_pickle(checkpoint: Checkpoint, rng: random.Random) -> None:
    """One bit of what says which tensors there are."""
    name = checkpoint.a_rank(rng)
    content = checkpoint.files.get(name, b"")
    start = content.find(b"data.pkl")
    first = checkpoint.weights.get(name) or [(len(content), 0)]
    if start < 0 or first[0][0] <= start + 10:
        return
    at = rng.randrange(start + 8, min(first[0][0], len(content)))
    _overwrite(checkpoint, name, at, bytes([content[at] ^ (1 << rng.randrange(8))]))


def swap_bytes(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Two neighbours."""
    name, at = _place(checkpoint, rng)
    _overwrite(checkpoint, name, at, checkpoint.files.get(name, b"")[at : at + 2][::-1])


def zero_page(checkpoint: Checkpoint, rng: random.Random) -> None:
    """A page that never reached the disk."""
    name, at = _place(checkpoint, rng)
    _overwrite(checkpoint, name, at - at % 4096, bytes(4096))


def truncate(checkpoint: Checkpoint, rng: random.Random) -> None:
    """At a boundary of the format, or a byte beside it, or anywhere."""
    name = checkpoint.a_rank(rng)
    content = checkpoint.files.get(name, b"")
    edges = checkpoint.edges.get(name) or [0]
    at = (
        rng.choice(edges[:-1] or [0]) + rng.choice((-1, 0, 0, 1))
        if rng.random() < 0.8
        else rng.randrange(len(content) + 1)
    )
    checkpoint.files[name] = content[: max(0, min(at, len(content) - 1))]


def remove_file(checkpoint: Checkpoint, rng: random.Random) -> None:
    """A rank that was not copied."""
    checkpoint.files.pop(checkpoint.a_rank(rng), None)


SILENT: tuple[Mutation, ...] = (flip_bit, flip_bit_of_the_pickle, swap_bytes, zero_page, truncate, remove_file)


def swap_ranks(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Two rank files under each other's names."""
    one, two = checkpoint.a_rank(rng), checkpoint.a_rank(rng)
    files = checkpoint.files
    if one in files and two in files:
        files[one], files[two] = files[two], files[one]


def duplicate_rank(checkpoint: Checkpoint, rng: random.Random) -> None:
    """A rank file also in place of another, or beside them."""
    one, two = checkpoint.a_rank(rng), checkpoint.a_rank(rng)
    new = rng.choice((two, two, one.replace("rank_", "rank_9"), one.replace("size_", "size_9"), one + ".pt"))
    checkpoint.files[new] = checkpoint.files.get(one, b"")


def append_bytes(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Something after the end, or in the middle."""
    name, at = _place(checkpoint, rng)
    content = checkpoint.files.get(name, b"")
    at = rng.choice((at, len(content)))
    checkpoint.files[name] = content[:at] + rng.randbytes(rng.randrange(1, 70)) + content[at:]


def edit_zip_field(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Another number in a header of the archive."""
    name = checkpoint.a_rank(rng)
    content = checkpoint.files.get(name, b"")
    signature, size = rng.choice(
        ((b"PK\x05\x06", 22), (b"PK\x06\x06", 56), (b"PK\x06\x07", 20), (b"PK\x01\x02", 46), (b"PK\x03\x04", 30))
    )
    places = [at for at in range(len(content)) if content.startswith(signature, at)] if len(content) < 1 << 20 else []
    if places:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice((*_NUMBERS, len(content), rng.getrandbits(16))) & ((1 << 8 * width) - 1)
        at = rng.choice(places) + rng.randrange(4, size)
        _overwrite(checkpoint, name, at, number.to_bytes(width, "little"))


def _with_pickle(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with another pickle, all checksums right."""
    made = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
            for entry in old.infolist():
                data = old.read(entry)
                new.writestr(entry.filename, change(data) if entry.filename.endswith("/data.pkl") else data)
    except Exception:  # zipfile raises much for an archive that is damaged already
        return content
    return made.getvalue()


def splice_pickle(checkpoint: Checkpoint, rng: random.Random) -> None:
    """A pickle with parts changed, doubled, removed or moved."""
    name = checkpoint.a_rank(rng)

    def change(data: bytes) -> bytes:
        for _ in range(rng.choice((1, 1, 2, 5))):
            one, two = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
            piece = data[one : min(two, one + 300)]
            to = rng.randrange(len(data) + 1)
            data = rng.choice(
                (
                    data[:one] + rng.randbytes(rng.randrange(1, 9)) + data[one:],
                    data[:one] + data[one + len(piece) :],
                    data[:to] + piece + data[to:],
                    data[:one] + bytes(256)[: rng.randrange(5)] + data[one + 4 :],
                    data[:one] + rng.choice((b"2", b"0", b".", b"R", b"(", b"t", b"u", b"b", b"Q")) * 3 + data[one:],
                )
            )
        return data

    checkpoint.files[name] = _with_pickle(checkpoint.files.get(name, b""), change)


def edit_pickle_number(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Another number in the pickle: sizes, strides, offsets, ranks."""
    name = checkpoint.a_rank(rng)

    def change(data: bytes) -> bytes:
        places = [at for at in range(len(data) - 5) if data[at] in b"JKM"]
        if not places:
            return data
        at = rng.choice(places)
        width = {0x4A: 4, 0x4B: 1, 0x4D: 2}[data[at]]
        number = rng.choice((*_NUMBERS, rng.getrandbits(8))) & ((1 << 8 * width) - 1)
        return data[: at + 1] + number.to_bytes(width, "little") + data[at + 1 + width :]

    checkpoint.files[name] = _with_pickle(checkpoint.files.get(name, b""), change)


def damage_sidecar(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Bytes of a config or a tokenizer file."""
    name = checkpoint.a_sidecar(rng)
    content = bytearray(checkpoint.files.get(name, b"{}") or b"{}")
    for _ in range(rng.choice((1, 3, 30))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    checkpoint.files[name] = bytes(content[: rng.choice((len(content), len(content), len(content) // 2, 0))])


def edit_config(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Another value for a key of a JSON file, or none, or another kind of document."""
    name = rng.choice([name for name in sorted(checkpoint.files) if name.endswith("config.json")] or ["config.json"])
    try:
        document = json.loads(checkpoint.files.get(name, b"{}"))
    except (ValueError, RecursionError):
        document = {}
    if isinstance(document, dict) and document and rng.random() < 0.9:
        for key in rng.sample(sorted(document), min(len(document), rng.choice((1, 2, 9)))):
            document[key] = rng.choice(_VALUES)
            if rng.random() < 0.3:
                del document[key]
    else:
        document = rng.choice(_VALUES)
    checkpoint.files[name] = json.dumps(document).encode()


_TWICE_AS_OFTEN = (edit_zip_field, splice_pickle, edit_pickle_number)
_OTHERS = (swap_ranks, duplicate_rank, append_bytes, damage_sidecar, edit_config)
CRAFTED: tuple[Mutation, ...] = (*_OTHERS, *_TWICE_AS_OFTEN, *_TWICE_AS_OFTEN)
