"""The zip archives of `torch.save`, written by hand so that every field can lie."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.pickles import state_dict
from tests.support.ranks import rank_path

__all__ = ["Archive", "Member", "archive_of", "write_archive", "write_bytes", "write_state"]

_FLAGS = 0x0808
_SATURATED = 0xFFFFFFFF


@dataclass(frozen=True)
class Member:
    """A member and the lies in its two headers; None means the truth.

    Attributes:
        data: what is stored.
        central, local: header field -> value. Fields: name, flags, method, crc, packed, size, extra, and for the
            central one header (the offset of the local one).
    """

    data: bytes
    central: Mapping[str, bytes | int] = field(default_factory=dict)
    local: Mapping[str, bytes | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Archive:
    """An archive: members in order (names without the top folder), and lies in the end records."""

    members: Sequence[tuple[str, Member]]
    prefix: str = "model"
    end: Mapping[str, int] = field(default_factory=dict)
    end64: Mapping[str, int] | None = field(default_factory=dict)
    comment: bytes = b""

    def build(self) -> bytes:
        """The file's bytes."""
        out = bytearray()
        central = bytearray()
        for name, member in self.members:
            header = len(out)
            out += _local(f"{self.prefix}/{name}" if self.prefix else name, member, header)
            out += member.data + _descriptor(member)
            central += _central(f"{self.prefix}/{name}" if self.prefix else name, member, header)
        start = len(out)
        out += central
        truth = {"count": len(self.members), "size": len(central), "offset": start}
        if self.end64 is not None:
            out += _end64({**truth, "place": len(out), **self.end64})
        wanted = {**truth, "disk": 0, **self.end}
        out += struct.pack(
            "<4s4H2LH", b"PK\x05\x06", wanted["disk"], 0, wanted["count"], wanted["count"], wanted["size"],
            wanted["offset"], len(self.comment),
        )  # fmt: skip
        return bytes(out + self.comment)

    def changed(self, name: str, **changes: object) -> Archive:
        """The same with one member changed."""
        members = [(n, replace(m, **changes) if n == name else m) for n, m in self.members]  # type: ignore[arg-type]
        return replace(self, members=members)


def _local(name: str, member: Member, header: int) -> bytes:
    lie = member.local
    raw = lie.get("name", name.encode())
    extra = lie.get("extra")
    assert isinstance(raw, bytes)
    if extra is None:
        padding = -(header + 30 + len(raw) + 4) % 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    assert isinstance(extra, bytes)
    return struct.pack(
        "<4s5H3L2H", b"PK\x03\x04", 20, lie.get("flags", _FLAGS), lie.get("method", 0), 0, 0, lie.get("crc", 0),
        lie.get("packed", 0), lie.get("size", 0), len(raw), lie.get("extra_size", len(extra)),
    ) + raw + extra  # fmt: skip


def _descriptor(member: Member) -> bytes:
    """What follows a payload, as flag 3 promises."""
    size = len(member.data)
    return struct.pack("<4s3L", b"PK\x07\x08", zlib.crc32(member.data), size, size)


def _central(name: str, member: Member, header: int) -> bytes:
    lie = member.central
    raw, extra = lie.get("name", name.encode()), lie.get("extra", b"")
    assert isinstance(raw, bytes)
    assert isinstance(extra, bytes)
    size = len(member.data)
    return struct.pack(
        "<4s6H3L5H2L", b"PK\x01\x02", 20, 20, lie.get("flags", _FLAGS), lie.get("method", 0), 0, 0,
        lie.get("crc", zlib.crc32(member.data)), lie.get("packed", size), lie.get("size", size), len(raw), len(extra),
        0, 0, 0, 0, lie.get("header", header),
    ) + raw + extra  # fmt: skip


def _end64(fields: Mapping[str, int]) -> bytes:
    record = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 20, 20, 0, 0, fields["count"], fields["count"], fields["size"],
        fields["offset"],
    )  # fmt: skip
    return record + struct.pack("<4sLQL", b"PK\x06\x07", 0, fields["place"], fields.get("disks", 1))


def archive_of(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> Archive:
    """The members that `torch.save` writes."""
    members = [("data.pkl", Member(pickle)), ("byteorder", Member(b"little"))]
    members += [(f"data/{key}", Member(data)) for key, data in (storages or {}).items()]
    return Archive([*members, ("version", Member(b"3\n"))])


def write_bytes(folder: Path, content: bytes) -> Path:
    """A folder with one rank file of this content."""
    folder.mkdir(parents=True, exist_ok=True)
    rank_path(folder, 1, 0).write_bytes(content)
    return folder


def write_archive(folder: Path, archive: Archive) -> Path:
    """A folder with one rank file, this archive."""
    return write_bytes(folder, archive.build())


def write_state(folder: Path, entries: dict[str, bytes], storages: Mapping[str, bytes] | None = None) -> Path:
    """A folder with one rank file that holds these pickled values."""
    return write_archive(folder, archive_of(state_dict(entries), storages))
