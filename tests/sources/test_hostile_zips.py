"""Zip archives that torch would never write: every lie is refused, never followed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from streammerge.errors import SourceError, StreammergeError, UnsafeError
from tests.support import pickles as p
from tests.support.ranks import junk, rank_path
from tests.support.raw import of_torch
from tests.support.results import read_all
from tests.support.zips import Archive, Member, archive_of, write_archive, write_bytes

FIRST, SECOND = junk((12,), torch.float32, 1), junk((12,), torch.float32, 2)
PICKLE = p.state_dict(
    {name: p.tensor(p.storage(key, 12), (12,), (1,)) for name, key in (("first", "0"), ("second", "1"))}
)
SOUND = archive_of(PICKLE, {"0": of_torch(FIRST).data, "1": of_torch(SECOND).data})
WANTED = {"first": of_torch(FIRST), "second": of_torch(SECOND)}
SATURATED = 0xFFFFFFFF


def _header(archive: Archive, name: str) -> int:
    return archive.build().index(f"model/{name}".encode()) - 30


def _squeezed() -> Archive:
    data = zlib.compress(of_torch(FIRST).data)[2:-4]
    return SOUND.changed("data/0", data=data, central={"method": 8, "size": 48}, local={"method": 8})


def _extra(*values: int) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _added(name: str, data: bytes = b"", prefix: bool = True) -> Archive:
    lie = {} if prefix else {"name": name.encode()}
    return replace(SOUND, members=[*SOUND.members, (name, Member(data, central=lie, local=lie))])


# Each archive with what must be raised; torch's own reader need not agree.
LIES: dict[str, Archive] = {
    "compressed": _squeezed(),
    "compressed, says the local header only": SOUND.changed("data/0", local={"method": 8}),
    "compressed, says the directory only": SOUND.changed("data/0", central={"method": 8}),
    "encrypted": SOUND.changed("data/0", central={"flags": 0x809}, local={"flags": 0x809}),
    "encrypted, says the local header only": SOUND.changed("data/0", local={"flags": 0x809}),
    "patched data flag": SOUND.changed("data/0", central={"flags": 0x828}),
    "two members of one name": _added("data/0", of_torch(SECOND).data),
    "two pickles": _added("data.pkl", PICKLE),
    "another data.pkl": _added("x/data.pkl", PICKLE),
    "outside of the top folder": _added("elsewhere/data/0", bytes(48), prefix=False),
    "name with ..": _added("../../etc/passwd"),
    "absolute name": _added("/etc/passwd", prefix=False),
    "name with backslash": _added("..\\x"),
    "name with nul": _added("a\0b"),
    "name that is no UTF-8": SOUND.changed("data/0", central={"name": b"model/data/\xff"}),
    "another name in the local header": SOUND.changed("data/0", local={"name": b"model/data/1"}),
    "a longer name in the local header": SOUND.changed("data/0", local={"name": b"model/data/0000"}),
    "a name that starts the same": SOUND.changed("data/0", local={"name": b"model/data/0\0"}),
    "overlapping members": SOUND.changed("data/1", central={"header": _header(SOUND, "data/0") + 8}),
    "the same place twice": SOUND.changed("data/1", central={"header": _header(SOUND, "data/0")}),
    "a member over its neighbour": SOUND.changed("data/0", central={"packed": 300, "size": 300}),
    "a member over the directory": SOUND.changed("version", central={"packed": 4000, "size": 4000}),
    "a member past the end": SOUND.changed("data/1", central={"header": 1 << 30}),
    "a header inside of a payload": SOUND.changed("data/1", central={"header": _header(SOUND, "data/1") + 1}),
    "sizes that differ": SOUND.changed("data/0", central={"packed": 47}),
    "a smaller member": SOUND.changed("data/0", central={"packed": 44, "size": 44}),
    "a larger local extra": SOUND.changed("data/0", local={"extra": b"", "extra_size": 60}),
    "a larger local extra by one": SOUND.changed(
        "data/0", local={"extra": struct.pack("<2sH", b"FB", 9) + b"Z" * 9, "extra_size": 14}
    ),
    "a smaller local extra by one": SOUND.changed(
        "data/0", local={"extra": struct.pack("<2sH", b"FB", 9) + b"Z" * 9, "extra_size": 12}
    ),
    "a local extra that lies about its length": SOUND.changed(
        "data/0", local={"extra": struct.pack("<2sH", b"FB", 99) + b"Z" * 9}
    ),
    "a local size that differs": SOUND.changed("data/0", local={"size": 44, "packed": 44}),
    "zip64 size without extra": SOUND.changed("data/0", central={"packed": SATURATED, "size": SATURATED}),
    "zip64 size, extra too short": SOUND.changed(
        "data/0", central={"packed": SATURATED, "size": SATURATED, "extra": _extra(48)}
    ),
    "zip64 size of 2^64": SOUND.changed(
        "data/0", central={"packed": SATURATED, "size": SATURATED, "extra": _extra((1 << 64) - 1, (1 << 64) - 1)}
    ),
    "zip64 sizes that differ": SOUND.changed(
        "data/0", central={"packed": SATURATED, "size": SATURATED, "extra": _extra(48, 47)}
    ),
    "zip64 offset of 2^63": SOUND.changed("data/0", central={"header": SATURATED, "extra": _extra(1 << 63)}),
    "zip64 extra cut short": SOUND.changed(
        "data/0", central={"header": SATURATED, "extra": struct.pack("<2H", 1, 8) + b"\0" * 3}
    ),
    "end64 elsewhere": replace(SOUND, end64={"place": 1 << 62}),
    "end64 at the start": replace(SOUND, end64={"place": 0}),
    "end64 with other count": replace(SOUND, end64={"count": 3}),
    "end64 with a huge count": replace(SOUND, end64={"count": 1 << 62}, end={"count": 0xFFFF}),
    "end64 with a huge size": replace(SOUND, end64={"size": 1 << 62}, end={"size": SATURATED}),
    "end64 with a huge offset": replace(SOUND, end64={"offset": 1 << 62}, end={"offset": SATURATED}),
    "end64 on two disks": replace(SOUND, end64={"disks": 2}),
    "end with other count": replace(SOUND, end={"count": 3}),
    "end with other offset": replace(SOUND, end={"offset": 8}),
    "end on another disk": replace(SOUND, end={"disk": 1}),
    "fewer entries, no end64": replace(SOUND, end64=None, end={"count": 3}),
    "more entries, no end64": replace(SOUND, end64=None, end={"count": 9}),
    "no pickle": replace(SOUND, members=SOUND.members[1:]),
    "no top folder": replace(SOUND, prefix=""),
    "no members": Archive([]),
    "a storage is missing": replace(SOUND, members=[m for m in SOUND.members if m[0] != "data/1"]),
    "a long byte order": SOUND.changed("byteorder", data=b"little" + bytes(100)),
}


def test_the_sound_one_is_read(tmp_path: Path) -> None:
    assert read_all(write_archive(tmp_path, SOUND)) == WANTED
    torch_says = torch.load(rank_path(tmp_path, 1, 0), weights_only=False)
    assert {name: of_torch(tensor) for name, tensor in torch_says.items()} == WANTED


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str, tmp_path: Path) -> None:
    with pytest.raises((SourceError, UnsafeError), match=r"model_world_size_1_rank_0\.pt"):
        read_all(write_archive(tmp_path, LIES[lie]))


@pytest.mark.parametrize(
    "archive",
    [replace(SOUND, end64=None), replace(SOUND, prefix="a b/\u00e9"), replace(SOUND, members=SOUND.members[::-1])],
    ids=["without end64", "another top folder", "members in another order"],
)
def test_unusual_but_honest(archive: Archive, tmp_path: Path) -> None:
    assert read_all(write_archive(tmp_path, archive)) == WANTED


def _second_end(content: bytes) -> bytes:
    """A whole other archive behind the first: which of the two is the checkpoint?"""
    return content + content


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "bytes after the end": lambda content: content + b"\0" * 8,
    "bytes before the start": lambda content: b"\0" * 64 + content,
    "an archive twice": _second_end,
    "a comment that holds an end record": lambda content: content + content[-22:],
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_files_are_refused(edit: str, tmp_path: Path) -> None:
    with pytest.raises((SourceError, UnsafeError), match=r"model_world_size_1_rank_0\.pt"):
        read_all(write_bytes(tmp_path, EDITS[edit](SOUND.build())))


def _boundaries(content: bytes) -> list[int]:
    marks = [b"PK\x03\x04", b"PK\x01\x02", b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"]
    starts = [at for at in range(len(content)) if content[at : at + 4] in marks]
    around = {at + shift for at in starts for shift in (-1, 0, 1, 4, 20, 30, 46, 56)}
    return sorted(at for at in around if 0 <= at < len(content))


def test_truncated_at_every_boundary(tmp_path: Path) -> None:
    content = SOUND.build()
    for length in _boundaries(content):
        with pytest.raises(StreammergeError, match=r"model_world_size_1_rank_0\.pt"):
            read_all(write_bytes(tmp_path, content[:length]))


@pytest.mark.parametrize("size", [1, 30, 64, 1000])
def test_holes_in_the_middle(size: int, tmp_path: Path) -> None:
    """A block that went missing shifts everything behind it."""
    content = SOUND.build()
    weights = content.index(of_torch(SECOND).data)
    for at in _boundaries(content[:weights]):
        with pytest.raises(StreammergeError, match=r"model_world_size_1_rank_0\.pt"):
            read_all(write_bytes(tmp_path, content[:at] + content[at + size :]))
