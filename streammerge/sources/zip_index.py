"""A strict index of the zip archives that ``torch.save`` writes.

Only what torch writes is accepted: stored members, one top folder, one end record, and central and
local headers that agree. Everything else (compressed or encrypted members, duplicate or overlapping
ones, offsets past the end) has no business in a checkpoint and is refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from streammerge.errors import SourceError, UnsafeError

__all__ = ["Member", "ZipIndex", "read_zip_index"]

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_CENTRAL_BYTES = 64 << 20  # a million members; the largest real rank files hold thousands
_FLAG_DESCRIPTOR, _FLAG_UTF8 = 0x0008, 0x0800  # the two flags that torch sets
_SATURATED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """A member: byte offset of its local header, size of its payload in bytes, and its checksum (0: none).

    ``end`` is where the next member's header, or the directory, begins.
    """

    header: int
    size: int
    crc: int
    end: int


@dataclass(frozen=True, slots=True)
class ZipIndex:
    """The members of an archive that spans ``start .. start + length`` of an open file.

    Attributes:
        fd: open file descriptor.
        where: the file's name for messages.
        start, length: the archive's place in the file, in bytes.
        members: name without the top folder -> member.
        prefix: the top folder; torch derives it from the file's name at save time, so it may
            differ from the name of today.
    """

    fd: int
    where: str
    start: int
    length: int
    members: dict[str, Member]
    prefix: str

    def payload_offset(self, name: str) -> int:
        """Absolute byte offset of a member's payload.

        torch pads the *local* extra field so that payloads are aligned, and leaves the central
        one empty (torch 2.1 to 2.14): the offset has to come from the local header.
        """
        member = self.members[name]
        full = f"{self.prefix}/{name}".encode()
        fixed = _LOCAL.size + len(full)
        # One read mostly gets the extra field as well, which pads to 64 bytes.
        raw = os.pread(self.fd, fixed + 128, self.start + member.header)
        if len(raw) < fixed:
            raise SourceError(f"{self.where}: truncated in the local header of {name!r}")
        signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack_from(raw)
        if (signature, name_length, raw[_LOCAL.size : fixed], method) != (b"PK\x03\x04", len(full), full, 0):
            raise UnsafeError(f"{self.where}: the local header of {name!r} contradicts the archive's directory")
        if flags & ~(_FLAG_DESCRIPTOR | _FLAG_UTF8):
            raise UnsafeError(f"{self.where}: member {name!r} has unusual zip flags {flags:#x}")
        # torch (2.1 to 2.14) leaves checksum and sizes 0 here and states them in the directory.
        if crc not in (0, member.crc) or any(n not in (0, _SATURATED, member.size) for n in (packed, size)):
            raise UnsafeError(f"{self.where}: the local header of {name!r} contradicts the archive's directory")
        extra = raw[fixed : fixed + extra_length]
        if len(extra) < extra_length:
            extra = _pread(self, member.header + fixed, extra_length)
        _check_extra(self, name, extra)
        offset = member.header + fixed + extra_length
        # Between the payload and what follows lies only a data descriptor: 16 bytes, or 24 in zip64 form.
        gap = member.end - offset - member.size
        if gap not in ((16, 24) if flags & _FLAG_DESCRIPTOR else (0,)):
            raise SourceError(f"{self.where}: member {name!r} is not where its header says; the file is damaged")
        return self.start + int(offset)

    def read(self, name: str, limit: int) -> bytes:
        """The payload of a small member.

        Raises:
            SourceError: it is absent.
            UnsafeError: it is larger than ``limit`` bytes.
        """
        member = self.members.get(name)
        if member is None:
            raise SourceError(f"{self.where}: no {name!r} in the archive; is this a torch.save file?")
        if member.size > limit:
            raise UnsafeError(f"{self.where}: {name!r} has {member.size} bytes, more than any real checkpoint")
        raw = _pread(self, self.payload_offset(name) - self.start, member.size)
        # torch.serialization.set_crc32_options(False) writes 0 (torch 2.13).
        if member.crc and zlib.crc32(raw) != member.crc:
            raise SourceError(f"{self.where}: {name!r} is damaged: its checksum is wrong")
        return raw


def _check_extra(index: ZipIndex, name: str, raw: bytes) -> None:
    """The local extra field moves the payload, so its records must add up to its length."""
    at = 0
    while at + 4 <= len(raw):
        at += 4 + struct.unpack_from("<H", raw, at + 2)[0]
    if at != len(raw):
        raise UnsafeError(f"{index.where}: the local header of {name!r} is damaged")


def _pread(index: ZipIndex, offset: int, size: int) -> bytes:
    raw = os.pread(index.fd, size, index.start + offset)
    if len(raw) != size:
        raise SourceError(f"{index.where}: truncated: expected {size} bytes at {index.start + offset}")
    return raw


def read_zip_index(fd: int, where: str, start: int, length: int) -> ZipIndex:
    """Index the archive at ``start .. start + length`` of the file.

    Raises:
        SourceError: truncated, or not a zip archive.
        UnsafeError: an archive that torch would never write.
    """
    index = ZipIndex(fd, where, start, length, {}, "")
    count, size, offset = _directory_place(index)
    if size > _MAX_CENTRAL_BYTES or offset + size > length:
        raise UnsafeError(f"{where}: the archive's directory claims {size} bytes at {offset}")
    found = _central_entries(index, _pread(index, offset, size), count)
    found = _with_ends(where, found, offset)
    prefix = _top_folder(where, found)
    members = {name[len(prefix) + 1 :]: member for name, member in found.items()}
    return ZipIndex(fd, where, start, length, members, prefix)


def _directory_place(index: ZipIndex) -> tuple[int, int, int]:
    """Entries, bytes and offset of the central directory, from the end records."""
    if index.length < _END.size:
        raise SourceError(f"{index.where}: only {index.length} bytes; it is empty or truncated")
    tail = _pread(index, index.length - _END.size, _END.size)
    if not tail.startswith(b"PK\x05\x06"):  # a comment follows the record; torch writes none
        tail_size = min(index.length, _END.size + 0xFFFF)
        tail = _pread(index, index.length - tail_size, tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise SourceError(
            f"{index.where}: no end-of-archive record; the file is truncated (quota, killed job) or not a zip archive"
        )
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail) or disk or first_disk or here != count:
        raise UnsafeError(f"{index.where}: malformed end-of-archive record")
    end = index.length - len(tail) + at
    if end >= _END64_LOCATOR.size:
        raw = _pread(index, end - _END64_LOCATOR.size, _END64_LOCATOR.size)
        signature, _, place, disks = _END64_LOCATOR.unpack(raw)
        if signature == b"PK\x06\x07":
            if place + _END64.size != end - _END64_LOCATOR.size:
                raise UnsafeError(f"{index.where}: malformed zip64 locator")
            return _directory_place_64(index, place, disks, (count, size, offset))
    if offset + size != end:
        raise UnsafeError(f"{index.where}: the archive's directory does not end where its end record begins")
    return count, size, offset


def _directory_place_64(index: ZipIndex, place: int, disks: int, small: tuple[int, int, int]) -> tuple[int, int, int]:
    if place + _END64.size > index.length or disks != 1:
        raise UnsafeError(f"{index.where}: malformed zip64 locator")
    signature, *_, here, count, size, offset = _END64.unpack(_pread(index, place, _END64.size))
    if signature != b"PK\x06\x06" or here != count:
        raise UnsafeError(f"{index.where}: malformed zip64 end record")
    if offset + size != place:
        raise UnsafeError(f"{index.where}: the archive's directory does not end where its end record begins")
    # torch always writes both records; an unsaturated field that differs is a trick on other readers.
    for value, large, limit in zip(small, (count, size, offset), (0xFFFF, _SATURATED, _SATURATED), strict=True):
        if value not in (large, limit):
            raise UnsafeError(f"{index.where}: the two end-of-archive records contradict each other")
    return count, size, offset


def _central_entries(index: ZipIndex, raw: bytes, count: int) -> dict[str, Member]:
    found: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(raw):
            raise SourceError(f"{index.where}: the archive's directory is cut short")
        fields = _CENTRAL.unpack_from(raw, at)
        signature, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, note_size = fields[:13]
        header = fields[-1]
        body = at + _CENTRAL.size
        at = body + name_size + extra_size + note_size
        if signature != b"PK\x01\x02" or at > len(raw):
            raise SourceError(f"{index.where}: the archive's directory is damaged")
        name = _member_name(index.where, raw[body : body + name_size])
        extra = raw[body + name_size : body + name_size + extra_size]
        size, packed, header = _saturated_fields(index.where, name, extra, size, packed, header)
        if method != 0 or packed != size:
            raise UnsafeError(f"{index.where}: member {name!r} is compressed, as torch never does; re-save the file")
        if flags & ~(_FLAG_DESCRIPTOR | _FLAG_UTF8):
            raise UnsafeError(f"{index.where}: member {name!r} has unusual zip flags {flags:#x} (encrypted?)")
        if name in found:
            raise UnsafeError(f"{index.where}: member {name!r} occurs twice in the archive")
        found[name] = Member(header, size, crc, 0)
    if at != len(raw):
        raise UnsafeError(f"{index.where}: the archive's directory holds more than its entries")
    return found


def _member_name(where: str, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UnsafeError(f"{where}: a member name is not UTF-8") from None
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in name.split("/"):
        raise UnsafeError(f"{where}: member name {name!r} is not acceptable")
    return name


def _saturated_fields(where: str, name: str, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Take saturated 32-bit fields from the zip64 extra, which holds those fields only."""
    values = [size, packed, header]
    if _SATURATED not in values:
        return size, packed, header
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wide = list(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            for i, value in enumerate(values):
                if value == _SATURATED and wide:
                    values[i] = wide.pop(0)
            break
        at += 4 + length
    if _SATURATED in values:
        raise UnsafeError(f"{where}: member {name!r} lacks its zip64 sizes")
    return values[0], values[1], values[2]


def _with_ends(where: str, found: dict[str, Member], directory: int) -> dict[str, Member]:
    previous_end, previous = 0, ""
    ordered = sorted(found.items(), key=lambda item: item[1].header)
    for name, member in ordered:
        if member.header < previous_end:
            raise UnsafeError(f"{where}: members {previous!r} and {name!r} overlap")
        previous_end = member.header + _LOCAL.size + len(name.encode()) + member.size
        previous = name
    if previous_end > directory:
        raise UnsafeError(f"{where}: member {previous!r} reaches into the archive's directory")
    ends = [member.header for _, member in ordered[1:]] + [directory]
    return {name: Member(m.header, m.size, m.crc, end) for (name, m), end in zip(ordered, ends, strict=False)}


def _top_folder(where: str, found: dict[str, Member]) -> str:
    pickles = [name for name in found if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1 or "/" not in pickles[0]:
        raise SourceError(f"{where}: no data.pkl in the archive; this is not a torch.save file")
    prefix = pickles[0].removesuffix("/data.pkl")
    for name in found:
        if not name.startswith(prefix + "/"):
            raise UnsafeError(f"{where}: member {name!r} lies outside of {prefix!r}")
    return prefix
