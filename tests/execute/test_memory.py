"""How much memory there is, and how a budget is divided."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streammerge as sm
from streammerge.errors import BudgetError
from streammerge.execute import memory
from streammerge.execute.memory import allowed_memory, default_budget, divide, peak_rss, rss

MIB = 1 << 20


@pytest.fixture
def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``memory`` look for /proc and /sys below a folder, on a machine with 64 GiB free."""
    monkeypatch.setattr(memory, "Path", lambda path: Path(f"{tmp_path}{path}"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": 64 << 30}))
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    """Writes files below a folder, by absolute name."""
    for name, text in files.items():
        path = Path(f"{root}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V1 = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 << 30),
        ({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "max\n"}, 64 << 30),
        ({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": f"{3 << 30}\n"}, 3 << 30),
        ({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.high": f"{2 << 30}\n"}, 2 << 30),
        ({"/proc/self/cgroup": "0::/a/b/c\n", f"{V2}/a/b/c/memory.max": "max", f"{V2}/a/memory.max": "1000"}, 1000),
        ({"/proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "2000", f"{V2}/a/memory.max": "9000"}, 2000),
        ({"/proc/self/cgroup": "0::/not/visible\n", f"{V2}/memory.max": "5000"}, 5000),
        ({"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "5000"}, 5000),
        ({"/proc/self/cgroup": "4:memory:/job\n", f"{V1}/job/memory.limit_in_bytes": "7000"}, 7000),
        ({"/proc/self/cgroup": "4:cpu,memory:/job\n", f"{V1}/memory.limit_in_bytes": "7000"}, 7000),
        ({"/proc/self/cgroup": "4:cpu:/job\n", f"{V1}/memory.limit_in_bytes": "7000"}, 64 << 30),
        ({"/proc/self/cgroup": "4:memory:/job\n", f"{V1}/job/memory.limit_in_bytes": "9223372036854771712"}, 64 << 30),
        (
            {
                "/proc/self/cgroup": "4:memory:/job\n0::/job\n",
                f"{V1}/job/memory.limit_in_bytes": "7000",
                f"{V2}/memory.max": "6000",
            },
            6000,
        ),
        ({"/proc/self/cgroup": "0::/with:colon\n", f"{V2}/with:colon/memory.max": "4000"}, 4000),
    ],
)
def test_cgroup_limits(fake_root: Path, files: dict[str, str], expected: int) -> None:
    write(fake_root, files)
    assert allowed_memory() == expected


def test_default_is_half_of_it_and_16_gib_at_most(fake_root: Path) -> None:
    assert default_budget() == 16 << 30
    write(fake_root, {"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 << 30}"})
    assert default_budget() == 4 << 30


def test_a_percentage_is_of_what_is_allowed(fake_root: Path, tiny: Path, tmp_path: Path) -> None:
    """The same in the API as in the command, on a machine with more than 32 GiB too."""
    assert sm.plan(tiny, tmp_path / "merged", max_ram="50%").max_ram == 32 << 30
    write(fake_root, {"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 << 30}"})
    assert sm.plan(tiny, tmp_path / "merged", max_ram="50%").max_ram == 4 << 30


@given(st.integers(1, 600), st.integers(1, 9))
def test_buffers_fit(room: int, workers: int) -> None:
    budget = rss() + room * MIB
    try:
        buffers = divide(budget, workers, torch_needed=False)
    except BudgetError as fault:
        assert room < 20
        assert budget < fault.least
        return
    assert buffers.estimate <= budget
    assert rss() + buffers.workers * (buffers.tile + buffers.window) < budget
    assert 1 <= buffers.workers <= workers
    assert buffers.tile % 4096 == 0
    assert 1 << 18 <= buffers.tile <= 1 << 23


def test_more_room_gives_larger_buffers() -> None:
    rooms = [divide(rss() + room * MIB, 2, torch_needed=False) for room in (18, 25, 60, 500)]
    sizes = [buffers.workers * buffers.tile for buffers in rooms]
    assert sizes == sorted(sizes)
    assert (rooms[-1].workers, rooms[-1].tile) == (2, 4 * MIB)


@pytest.mark.parametrize("workers", [1, 2, 40])
def test_the_least_is_enough(workers: int) -> None:
    with pytest.raises(BudgetError, match="the least that works is") as caught:
        divide(1, workers, torch_needed=False)
    assert f" {caught.value.least // MIB}M" in str(caught.value)
    assert caught.value.least % MIB == 0
    assert divide(caught.value.least, workers, torch_needed=False).workers >= 1


def test_torch_counts_when_it_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    without, with_torch = (divide(8 << 30, 1, torch_needed=needed).estimate for needed in (False, True))
    assert with_torch - without > 200 * MIB


def test_no_threads_is_no_matter_of_budget(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(sm.StreammergeError) as caught:
        sm.merge(tiny, tmp_path / "merged", workers=0, check=False)
    assert caught.value.exit_code == 2


def test_memory_of_this_process() -> None:
    block = bytearray(os.urandom(64)) * (1 << 20)
    assert rss() > len(block)
    assert peak_rss() >= rss() - MIB
