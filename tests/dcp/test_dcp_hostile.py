"""Metadata that no trainer writes: refused by name in little time, and nothing in it is run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import streammerge
from streammerge.errors import SourceError
from tests.dcp.dcp_support import State, merged, raws
from tests.support import pickles as p
from tests.support.canary import Outcome, read_safely

DATA = "__0_0.distcp"
DEEP = 300_000
_BASE = "torch.distributed.checkpoint"


def _item(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


ITEM = _item(torch.arange(4.0))
SYSTEM = p.call(p.glob("os", "system"), p.text("touch streammerge-was-here"))


def sizes(*values: int) -> bytes:
    """A torch.Size."""
    return p.call(p.glob("torch", "Size"), p.tup(*map(p.integer, values)))


def box(offsets: bytes, shape: bytes) -> bytes:
    """A ChunkStorageMetadata."""
    return p.record(f"{_BASE}.metadata", "ChunkStorageMetadata", offsets=offsets, sizes=shape)


WHOLE = box(sizes(0), sizes(4))
PROPERTIES = p.newobj(p.glob(f"{_BASE}.metadata", "TensorProperties")) + p.tup(p.glob("torch", "float32")) + b"b"


def described(size: bytes = sizes(4), chunks: bytes = p.list_of(WHOLE), properties: bytes = PROPERTIES) -> bytes:
    """A TensorStorageMetadata."""
    return p.record(f"{_BASE}.metadata", "TensorStorageMetadata", properties=properties, size=size, chunks=chunks)


def place(
    path: bytes = p.text(DATA), offset: bytes = p.integer(0), length: bytes = p.integer(len(ITEM)), **more: bytes
) -> bytes:
    """A _StorageInfo."""
    fields = {"relative_path": path, "offset": offset, "length": length, **more}
    return p.record(f"{_BASE}.filesystem", "_StorageInfo", **fields)


def index(offset: bytes = sizes(0), key: bytes = p.text("w")) -> bytes:
    """A MetadataIndex."""
    return p.record(f"{_BASE}.metadata", "MetadataIndex", fqn=key, offset=offset, index=p.integer(0))


def table(*pairs: bytes) -> bytes:
    """A dict of keys and values in turn."""
    return b"(" + b"".join(pairs) + b"d"


def metadata(
    entry: bytes | None = None, where: bytes | None = None, storage: bytes | None = None, **more: bytes
) -> bytes:
    """A whole metadata pickle of one tensor `w` in the data file."""
    fields = {
        "state_dict_metadata": table(p.text("w"), entry or described()),
        "storage_data": storage or table(index(), where or place()),
        **more,
    }
    return b"\x80\x04" + p.record(f"{_BASE}.metadata", "Metadata", **fields) + p.STOP


def _path(value: str) -> bytes:
    return metadata(where=place(p.text(value)))


_CALLS = {
    "os.system as the root": b"\x80\x04" + SYSTEM + p.STOP,
    "os.system as an entry": metadata(SYSTEM),
    "os.system as a size": metadata(described(SYSTEM)),
    "os.system as a path": metadata(where=place(SYSTEM)),
    "os.system as storage_meta": metadata(storage_meta=SYSTEM),
    "os.system as planner_data": metadata(planner_data=SYSTEM),
    "eval in a path": metadata(where=place(p.call(p.glob("builtins", "eval"), p.text("1")))),
    "getattr": metadata(storage_meta=p.call(p.glob("builtins", "getattr"), p.glob("os", "path"), p.text("x"))),
    "posix by STACK_GLOBAL": metadata(storage_meta=p.call(p.stack_glob("posix", "system"), p.text("true"))),
    "pathlib that writes": metadata(
        storage_meta=p.call(p.glob("pathlib", "Path.write_text"), p.text("streammerge-was-here"), p.text("x"))
    ),
    "a persistent id": metadata(storage_meta=p.text("x") + b"Q"),
}
_PATHS = {
    name: _path(name)
    for name in ("../x", "a/../x", "/etc/passwd", "sub/x", "..", ".", "", "..\\x", "/", "~/x/", "//x", "x/")
}
_NUMBERS = {
    "negative offset": metadata(where=place(offset=p.integer(-8))),
    "negative length": metadata(where=place(length=p.integer(-1))),
    "huge offset": metadata(where=place(offset=p.integer(2**63))),
    "huge length": metadata(where=place(length=p.integer(2**63))),
    "offset of 400 bits": metadata(where=place(offset=p.integer(2**400))),
    "length zero": metadata(where=place(length=p.integer(0))),
    "offset is a float": metadata(where=place(offset=b"G" + bytes(8))),
    "offset is a text": metadata(where=place(offset=p.text("0"))),
    "size of 2**63": metadata(described(sizes(2**63), p.list_of(box(sizes(0), sizes(2**63))))),
    "size of 2**61": metadata(described(sizes(2**61), p.list_of(box(sizes(0), sizes(2**61))))),
    "size larger than the chunk": metadata(described(sizes(2**61))),
    "negative size": metadata(described(sizes(-4))),
    "negative size as a plain tuple": metadata(described(p.tup(p.integer(-4)))),
    "negative chunk as a plain tuple": metadata(described(chunks=p.list_of(box(sizes(0), p.tup(p.integer(-4)))))),
    "chunk outside": metadata(
        described(chunks=p.list_of(box(sizes(1), sizes(4)))), storage=table(index(sizes(1)), place())
    ),
    "chunk before the start": metadata(
        described(chunks=p.list_of(box(p.tup(p.integer(-1)), sizes(4)))),
        storage=table(index(p.tup(p.integer(-1))), place()),
    ),
    "overlapping chunks": metadata(
        described(sizes(6), p.list_of(WHOLE, box(sizes(1), sizes(4)))),
        storage=table(index(), place(), index(sizes(1)), place()),
    ),
    "too many dims": metadata(described(sizes(*[1] * 100), p.list_of(box(sizes(*[0] * 100), sizes(*[1] * 100))))),
    "dims disagree": metadata(described(sizes(2, 2))),
    "64 dims in two chunks": metadata(
        described(
            sizes(8, *[1] * 63),
            p.list_of(box(sizes(*[0] * 64), sizes(4, *[1] * 63)), box(sizes(4, *[0] * 63), sizes(4, *[1] * 63))),
        ),
        storage=table(index(sizes(*[0] * 64)), place(), index(sizes(4, *[0] * 63)), place()),
    ),
}
_NESTED = p.nested(DEEP)
_TYPES = {
    "size holds texts": metadata(described(p.tup(p.text("4")))),
    "size holds tuples": metadata(described(p.tup(p.tup(p.integer(4))))),
    "size is nested deeply": metadata(described(p.tup(_NESTED), p.list_of(box(sizes(0), p.tup(_NESTED))))),
    "size is a number": metadata(described(p.integer(4))),
    "chunk sizes are texts": metadata(described(chunks=p.list_of(box(sizes(0), p.tup(p.text("4")))))),
    "chunk sizes are None": metadata(described(chunks=p.list_of(box(sizes(0), p.tup(b"N"))))),
    "chunk offset holds a list": metadata(described(chunks=p.list_of(box(p.tup(p.list_of()), sizes(4))))),
    "chunk offset is nested deeply": metadata(described(chunks=p.list_of(box(p.tup(_NESTED), sizes(4))))),
    "chunk offset is a float": metadata(described(chunks=p.list_of(box(p.tup(b"G" + bytes(8)), sizes(4))))),
    "index offset holds a list": metadata(storage=table(index(p.tup(p.list_of())), place())),
    "index offset is nested deeply": metadata(storage=table(index(_NESTED), place())),
    "index key is a tuple": metadata(storage=table(index(key=p.tup()), place())),
    "index is a text": metadata(storage=table(p.text("w"), place())),
    "place is a text": metadata(storage=table(index(), p.text("x"))),
    "chunks are a tuple": metadata(described(chunks=p.tup(WHOLE))),
    "chunks are numbers": metadata(described(chunks=p.list_of(p.integer(1)))),
    "chunks are nested deeply": metadata(described(chunks=p.list_of(_NESTED))),
    "dtype is a text": metadata(
        described(properties=PROPERTIES.replace(p.glob("torch", "float32"), p.text("float32")))
    ),
    "dtype of another kind": metadata(described(properties=PROPERTIES.replace(b"float32", b"Generator"))),
    "properties without a state": metadata(described(properties=b"N")),
    "transforms are a number": metadata(where=place(transform_descriptors=p.integer(3))),
    "transforms are an object": metadata(where=place(transform_descriptors=WHOLE)),
    "transforms are nested deeply": metadata(where=place(transform_descriptors=p.list_of(_NESTED))),
    "transforms are doubled": metadata(where=place(transform_descriptors=p.list_of(p.doubled(60)))),
    "planner_data is a list": metadata(planner_data=p.list_of(p.integer(1))),
    "key path is nested deeply": metadata(planner_data=table(p.text("w"), p.tup(_NESTED))),
    "key path is empty": metadata(planner_data=table(p.text("w"), p.tup())),
    "key path is a text": metadata(planner_data=table(p.text("w"), p.text("w"))),
    "key is a number": b"\x80\x04"
    + p.record(
        "m", "Metadata", state_dict_metadata=table(p.integer(1), described()), storage_data=table(index(), place())
    )
    + p.STOP,
    "key is nested": b"\x80\x04"
    + p.record("m", "Metadata", state_dict_metadata=table(_NESTED, described()), storage_data=table(index(), place()))
    + p.STOP,
    "OrderedDict with a nested key": metadata(
        storage=p.call(p.glob("collections", "OrderedDict"), p.list_of(p.tup(_NESTED, p.integer(1))))
    ),
    "OrderedDict with a doubled key": metadata(
        storage=p.call(p.glob("collections", "OrderedDict"), p.list_of(p.tup(p.doubled(60), p.integer(1))))
    ),
    "OrderedDict of numbers": metadata(storage=p.call(p.glob("collections", "OrderedDict"), p.list_of(p.integer(1)))),
    "Size of a nested tuple": metadata(described(p.call(p.glob("torch", "Size"), p.tup(_NESTED)))),
    "Size with two arguments": metadata(described(p.call(p.glob("torch", "Size"), p.tup(), p.tup()))),
    "path is bytes": metadata(where=place(b"C\x01x")),
    "path with NUL": _path("a\0b"),
    "path is too long": _path("x" * 300),
    "path is half a surrogate pair": _path("\ud800.distcp"),
    "path with a line break": _path("a\nb"),
    "tables are missing": b"\x80\x04" + p.record("m", "Metadata") + p.STOP,
    "tables are lists": b"\x80\x04" + p.record("m", "Metadata", state_dict_metadata=b"]", storage_data=b"]") + p.STOP,
    "a state of two": b"\x80\x04" + p.newobj(p.glob("m", "Metadata")) + p.tup(b"N", b"N") + b"b" + p.STOP,
    "another class": b"\x80\x04" + p.record("m", "Thing", state_dict_metadata=b"}", storage_data=b"}") + p.STOP,
    "a pickle bomb": metadata(storage_meta=p.doubled(60)),
    "nested deeply beside": metadata(storage_meta=_NESTED),
    "an endless memo": b"\x80\x04" + b"N" + b"\x94" * DEEP + p.STOP,
}
_CASES = {**_CALLS, **{f"path {name!r}": value for name, value in _PATHS.items()}, **_NUMBERS, **_TYPES}
# What lies beside the tables is ignored, so it may be anything that is inert.
_HARMLESS = {"a pickle bomb", "nested deeply beside"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("hostile")
    folders = {}
    for number, (case, content) in enumerate({"honest": metadata(), **_CASES}.items()):
        folders[case] = root / str(number)
        folders[case].mkdir()
        (folders[case] / ".metadata").write_bytes(content)
        (folders[case] / DATA).write_bytes(ITEM)
    return read_safely(folders)


def test_the_honest_one_is_accepted(outcomes: dict[str, Outcome]) -> None:
    """So the others are refused for what they change."""
    assert (outcomes["honest"].error, outcomes["honest"].events) == ("", ())


@pytest.mark.parametrize("case", _CASES)
def test_refused_quickly_and_inertly(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case]
    assert outcome.expected, (outcome.error, outcome.text)
    assert not outcome.events
    assert outcome.seconds < 2
    assert bool(outcome.error) == (case not in _HARMLESS)
    assert not Path("streammerge-was-here").exists()


@pytest.mark.parametrize("case", [case for case in _CASES if case not in _HARMLESS])
def test_the_culprit_is_named(case: str, outcomes: dict[str, Outcome]) -> None:
    """The metadata file, the data file (also one that is not there), or the tensor."""
    said = (".metadata", DATA, "w: ", "w in ", "files are missing: ", "File name too long")
    assert any(name in outcomes[case].text for name in said)


@pytest.mark.parametrize("case", _CALLS)
def test_calls_are_unsafe(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].error == "UnsafeError"


@pytest.mark.parametrize("name", _PATHS)
def test_paths_out_of_the_folder_are_unsafe(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[f"path {name!r}"].error == "UnsafeError"
    assert repr(name) in outcomes[f"path {name!r}"].text


def test_two_keys_of_one_path(tmp_path: Path) -> None:
    """Flat keys that the planner's paths make one: neither may win in silence."""
    entries = table(p.text("w"), described(), p.text("v"), described())
    paths = table(p.text("w"), p.tup(p.text("w")), p.text("v"), p.tup(p.text("w")))
    storage = table(index(), place(), index(key=p.text("v")), place(offset=p.integer(len(ITEM))))
    state = {"state_dict_metadata": entries, "storage_data": storage, "planner_data": paths}
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + p.record("m", "Metadata", **state) + p.STOP)
    (tmp_path / DATA).write_bytes(ITEM + ITEM)
    with pytest.raises(SourceError, match="w"):
        streammerge.plan(tmp_path, "never")


def test_links_to_other_storage_are_followed(saved_small: Path, small: State, tmp_path: Path) -> None:
    """Download caches and linked disks are made of links; the metadata cannot make one, only who owns the folder."""
    (tmp_path / "blobs").mkdir()
    for path in list(saved_small.iterdir()):
        blob = path.rename(tmp_path / "blobs" / f"{len(path.name)}{path.name[-3:]}")
        path.symlink_to(blob)
    assert merged(saved_small, tmp_path / "out") == raws(small)


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "nowhere", DATA])
def test_links_to_other_things_are_not_copied_out(target: str, saved_small: Path, tmp_path: Path) -> None:
    (saved_small / DATA).unlink()
    (saved_small / DATA).symlink_to(target)
    with pytest.raises(SourceError, match=DATA):
        streammerge.merge(saved_small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_file_names_in_errors_can_be_printed(saved_small: Path, command: object, tmp_path: Path) -> None:
    """A name that is no valid UTF-8 ends in an error message, not in a traceback of the command."""
    (saved_small / ".metadata").write_bytes(_path("\ud800.distcp"))
    done = command("merge", saved_small, tmp_path / "out")  # type: ignore[operator]
    assert done.returncode in (3, 5)
    assert "Traceback" not in done.stderr
