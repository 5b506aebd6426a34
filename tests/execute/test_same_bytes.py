"""The output is the same whatever route, number of threads, budget, and however short the calls come back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streammerge as sm
from benchmarks.make_checkpoint import global_tensor
from benchmarks.shapes import model_shape, preset_config
from streammerge.execute import memory
from streammerge.execute.memory import rss

Contents = Callable[[Path], dict[str, str]]


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory, contents: Contents) -> dict[str, str]:
    """Hashes of the merged folder by one thread and ordinary calls."""
    out = tmp_path_factory.mktemp("expected") / "merged"
    sm.merge(tiny, out, io="pread", workers=1, check=False)
    return contents(out)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the smallest tile 256 KiB the only one, so that a tiny checkpoint has many of them."""
    monkeypatch.setattr(memory, "_TILE_SIZES", (1 << 18,))


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_values(tiny: Path, tmp_path: Path, weights: Callable[[Path], dict[str, Any]]) -> None:
    """The reference of this module is right: every tensor equals the one that was sharded."""
    sm.merge(tiny, tmp_path / "merged", io="pread", workers=1, check=False)
    found = weights(tmp_path / "merged")
    shape = model_shape(preset_config("tiny"), torch.float32)
    assert set(found) == {spec.name for spec in shape.specs}
    for spec in shape.specs:
        assert torch.equal(
            found[spec.name], global_tensor(spec.source, spec.shape, torch.float32, 7).to(torch.bfloat16)
        )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("io", ["auto", "direct", "pread", "mmap"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_routes(
    io: str, workers: int, tiny: Path, tmp_path: Path, expected: dict[str, str], contents: Contents
) -> None:
    sm.merge(tiny, tmp_path / "merged", io=io, workers=workers, check=False)
    assert contents(tmp_path / "merged") == expected


@pytest.mark.parametrize("room", [20, 24, 40, 400])
def test_budgets(room: int, tiny: Path, tmp_path: Path, expected: dict[str, str], contents: Contents) -> None:
    sm.merge(tiny, tmp_path / "merged", max_ram=rss() + (room << 20), workers=2, check=False)
    assert contents(tmp_path / "merged") == expected


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mesh", ["hsdp", "fsdp-tp"])
def test_meshes_give_the_same_model(
    mesh: str, make_tiny: Callable[..., Path], tmp_path: Path, expected: dict[str, str], contents: Contents
) -> None:
    sm.merge(make_tiny("tiny", 6, "fp32", mesh), tmp_path / "merged", check=False)
    assert contents(tmp_path / "merged")["model.safetensors"] == expected["model.safetensors"]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("limit", [1, 100_000, 700_000])
def test_shard_sizes(limit: int, tiny: Path, tmp_path: Path, weights: Callable[[Path], dict[str, Any]]) -> None:
    sm.merge(tiny, tmp_path / "one", check=False)
    sm.merge(tiny, tmp_path / "many", max_shard_size=limit, workers=5, check=False)
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("io", ["auto", "direct", "mmap"])
def test_on_tmpfs(io: str, tiny: Path, shm: Path, expected: dict[str, str], contents: Contents) -> None:
    shutil.copytree(tiny, shm / "source")
    sm.merge(shm / "source", shm / "merged", io=io, check=False)
    assert contents(shm / "merged") == expected


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("io", ["pread", "direct"])
def test_short_calls(
    io: str, tiny: Path, tmp_path: Path, expected: dict[str, str], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move less than it was asked to; whole pages at least on direct descriptors."""
    step = 8192 if io == "direct" else 5000
    calls = {"read": 0, "write": 0}
    preadv, pwrite, pwritev = os.preadv, os.pwrite, os.pwritev

    def short_preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        calls["read"] += 1
        return preadv(fd, [buffers[0][:step]], offset, flags)

    def short_pwrite(fd: int, data: memoryview, offset: int) -> int:
        calls["write"] += 1
        return pwrite(fd, data[:step], offset)

    def short_pwritev(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        calls["write"] += 1
        return pwritev(fd, [buffers[0][:step]], offset, flags)

    monkeypatch.setattr(os, "preadv", short_preadv)
    monkeypatch.setattr(os, "pwrite", short_pwrite)
    monkeypatch.setattr(os, "pwritev", short_pwritev)
    sm.merge(tiny, tmp_path / "merged", io=io, check=False)
    monkeypatch.undo()
    assert min(calls.values()) > 100
    assert contents(tmp_path / "merged") == expected
