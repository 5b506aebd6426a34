"""Whatever happens to the files of an unfinished merge: it is found out, and the result is exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reliability.harness import FULL, Case, Tree, tree
from tests.reliability.interrupted import STEPS, interrupt, journal_of, model_of
from tests.reliability.runner import Steps

CASE = Case("shards", {"max_shard_size": "60KB"}, steps=STEPS)
FIRST, SECOND = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
Damage = Callable[[Path, Path], object]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staging folder of a merge stopped in its second shard."""
    target = tmp_path_factory.mktemp("interrupted") / "merged"
    interrupt(CASE, target)
    return model_of(target).parent


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What an undisturbed merge gives."""
    target = tmp_path_factory.mktemp("expected") / "merged"
    CASE.run(target)
    found = tree(target)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def steps() -> Iterator[None]:
    """Small steps for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        STEPS.apply(patch.setattr)
        yield


def flip(name: str, place: float) -> Damage:
    """Flip a bit of a shard."""

    def damage(model: Path, journal: Path) -> None:
        content = bytearray((model / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x10
        (model / name).write_bytes(content)

    return damage


def cut(name: str, share: float) -> Damage:
    """Make a shard shorter or longer."""

    def damage(model: Path, journal: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(share * len(content))].ljust(int(share * len(content)), b"x"))

    return damage


def zeros(model: Path, journal: Path) -> None:
    """As after a power cut: the size is right, the data is not."""
    for path in model.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))


def swapped(model: Path, journal: Path) -> None:
    """Shards under each other's names."""
    one, two = (model / FIRST).read_bytes(), (model / SECOND).read_bytes()
    (model / FIRST).write_bytes(two)
    (model / SECOND).write_bytes(one)


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    """Change the journal's lines."""
    return lambda model, journal: journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))


def ranges(*added: tuple[object, object]) -> Damage:
    """Add claims to the journal, with the digest of nothing."""

    def add(model: Path, journal: Path) -> None:
        with journal.open("a") as file:
            for start, end in added:
                file.write(json.dumps({"file": FIRST, "start": start, "end": end, "digest": "0" * 32}) + "\n")

    return add


def true_ranges(*added: tuple[int, int]) -> Damage:
    """Add claims that are true, about places where no tile begins or ends."""

    def add(model: Path, journal: Path) -> None:
        import xxhash

        content = (model / FIRST).read_bytes()
        kept = journal.read_bytes().splitlines(keepends=True)[:1]
        for start, end in added:
            digest = xxhash.xxh3_128_hexdigest(content[start:end])
            kept.append(json.dumps({"file": FIRST, "start": start, "end": end, "digest": digest}).encode() + b"\n")
        journal.write_bytes(b"".join(kept))

    return add


DAMAGES: dict[str, Damage] = {
    **{f"flip-{name[9]}-{place}": flip(name, place) for name in (FIRST, SECOND) for place in (0, 0.3, 0.6, 1)},
    **{f"cut-{share}": cut(FIRST, share) for share in (0, 0.5, 0.99, 1.01)},
    "zeros": zeros,
    "swapped": swapped,
    "shard-gone": lambda model, journal: (model / FIRST).unlink(),
    "model-gone": lambda model, journal: shutil.rmtree(model),
    "journal-gone": lambda model, journal: journal.unlink(),
    "journal-empty": lambda model, journal: journal.write_bytes(b""),
    "journal-garbage": lambda model, journal: journal.write_bytes(bytes(range(256)) * 20),
    "journal-zeros": lambda model, journal: journal.write_bytes(bytes(journal.stat().st_size)),
    "journal-no-first-line": lines(lambda found: found[1:]),
    "journal-torn": lines(lambda found: [*found[:-1], found[-1][:-9]]),
    "journal-torn-first-line": lines(lambda found: [found[0][:20]]),
    "journal-garbage-inside": lines(lambda found: [*found[:2], b"\xff\xfe{]\n", b"[]\n", b"3\n", *found[2:]]),
    "journal-reversed": lines(lambda found: [found[0], *found[:0:-1]]),
    "journal-twice": lines(lambda found: found + found[1:]),
    "journal-deep": lines(lambda found: [*found, b"[" * 100_000 + b"\n"]),
    "journal-long-number": lines(lambda found: [*found, b'{"file":"a","start":' + b"9" * 9999 + b"}\n"]),
    "ranges-negative": ranges((-4096, 4096), (-8, -4)),
    "ranges-huge": ranges((0, 1 << 80), (1 << 70, 1 << 71)),
    "ranges-empty": ranges((4096, 4096), (8192, 4096)),
    "ranges-overlapping": ranges((0, 20_000), (4096, 30_000), (8192, 12_288)),
    "ranges-odd-types": ranges((None, 5), ("0", "4096"), (0.0, 4096.0), (True, 4096), ([], {})),
    "ranges-whole-file-claimed": ranges((0, 55360)),
    "ranges-not-aligned": true_ranges((1, 4097), (5000, 16_000)),
    "ranges-many-and-tiny": true_ranges(*((at, at + 1) for at in range(0, 3000, 2))),
    "other-names": lines(lambda found: [line.replace(FIRST.encode(), b"../../model/x") for line in found]),
    "probe-left": lambda model, journal: (model / ".direct-io-probe").write_bytes(b""),
    "stray-shard": lambda model, journal: (model / "model-00007-of-00009.safetensors").write_bytes(b"junk"),
    "stray-folder": lambda model, journal: (model / "sub").mkdir(),
}


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(name: str, io: str, interrupted: Path, expected: Tree, tmp_path: Path) -> None:
    shutil.copytree(interrupted, tmp_path / interrupted.name)
    DAMAGES[name](model_of(tmp_path / "merged"), journal_of(tmp_path / "merged"))
    case = Case("", {**CASE.options, "io": io})
    case.run(tmp_path / "merged")
    assert tree(tmp_path / "merged") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_only_the_damaged_part_is_done_again(interrupted: Path, expected: Tree, tmp_path: Path) -> None:
    for name in ("intact", "damaged"):
        shutil.copytree(interrupted, tmp_path / f"{name}.streammerge-partial")
    flip(FIRST, 0.5)(model_of(tmp_path / "damaged"), journal_of(tmp_path / "damaged"))
    kept = {name: CASE.run(tmp_path / name).bytes_kept for name in ("intact", "damaged")}
    assert 0 < kept["intact"] - kept["damaged"] <= STEPS.tile
    assert tree(tmp_path / "damaged") == expected


@settings(max_examples=2000 if FULL else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage(data: st.DataObject, interrupted: Path, expected: Tree, tmp_path: Path) -> None:
    """Random bytes in random places of all files at once, and other tiles."""
    folder = tmp_path / "random"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(interrupted, folder / interrupted.name)
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(found))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 40))
        content[at : at + length] = data.draw(st.binary(max_size=40))
        path.write_bytes(content)
    tile = data.draw(st.sampled_from([1 << 13, 1 << 14, 1 << 18]))
    with pytest.MonkeyPatch.context() as patch:
        Steps(tile, tile).apply(patch.setattr)
        CASE.run(folder / "merged")
    assert tree(folder / "merged") == expected
