"""--overwrite replaces what streammerge wrote and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streammerge import files
from streammerge.errors import DestinationError
from streammerge.folder.staging import MANIFEST_NAME
from tests.folder.merging import At, quick

Contents = Callable[[Path], dict[str, str]]


def test_overwrite_replaces_only_its_own(
    tiny: Path, make_tiny: Callable[..., Path], tmp_path: Path, contents: Contents
) -> None:
    target = tmp_path / "merged"
    quick(tiny, target, max_shard_size=300_000)
    (target / "README.md").write_text("mine")
    (target / "plots").mkdir()
    (target / "plots" / "loss.png").write_bytes(b"\x89PNG")
    quick(make_tiny("tiny-moe"), target, overwrite=True)
    quick(make_tiny("tiny-moe"), tmp_path / "fresh")
    found = contents(target)
    assert (target / "README.md").read_text() == "mine"
    assert (target / "plots" / "loss.png").read_bytes() == b"\x89PNG"
    assert {name: found[name] for name in found if name not in ("README.md", "plots/loss.png")} == contents(
        tmp_path / "fresh"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "merged"]
    assert "README.md" not in json.loads((target / MANIFEST_NAME).read_bytes())["files"]


def test_overwrite_again_keeps_foreign_files(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    quick(tiny, target)
    (target / "run.sh").write_text("#!/bin/sh\n")
    (target / "run.sh").chmod(0o755)
    (target / "latest").symlink_to("run.sh")
    for _ in range(2):
        quick(tiny, target, overwrite=True)
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "latest").is_symlink()


def test_overwrite_keeps_a_dangling_link(tiny: Path, tmp_path: Path) -> None:
    quick(tiny, tmp_path / "merged")
    (tmp_path / "merged" / "gone").symlink_to("nowhere")
    quick(tiny, tmp_path / "merged", overwrite=True)
    assert (tmp_path / "merged" / "gone").is_symlink()


def test_files_that_appear_during_the_merge_are_kept(tiny: Path, tmp_path: Path) -> None:
    """A merge may take hours; notes written meanwhile are foreign files too."""
    quick(tiny, tmp_path / "merged")
    note = tmp_path / "merged" / "notes.md"
    quick(tiny, tmp_path / "merged", overwrite=True, observer=At("merging", lambda: note.write_text("mine")))
    assert note.read_text() == "mine"


def test_destination_that_appears_during_the_merge_is_kept(tiny: Path, tmp_path: Path) -> None:
    """Without --overwrite nothing is replaced, whenever it came."""
    note = tmp_path / "merged" / "notes.md"

    def meddle() -> None:
        note.parent.mkdir()
        note.write_text("mine")

    with pytest.raises(DestinationError):
        quick(tiny, tmp_path / "merged", observer=At("merging", meddle))
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["other.safetensors", "pytorch_model.bin", "sub/model.pt", "pytorch_model.bin.index.json"]
)
def test_foreign_weights_are_not_mixed_in(name: str, tiny: Path, tmp_path: Path, contents: Contents) -> None:
    target = tmp_path / "merged"
    quick(tiny, target)
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_bytes(b"{}")
    before = contents(target)
    with pytest.raises(DestinationError, match=name):
        quick(tiny, target, overwrite=True)
    assert contents(target) == before


def test_without_an_atomic_exchange(
    tiny: Path, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(tiny, tmp_path / "merged")
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "merged")
    monkeypatch.setattr(files, "exchange", lambda first, second: False)
    quick(tiny, tmp_path / "merged", overwrite=True)
    assert contents(tmp_path / "merged") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
