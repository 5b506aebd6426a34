"""The harness: what it measures of a known command, what it reads from /proc and cgroup files, the direct copy."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cgroups import MemoryGroup, find_hierarchy, fresh_group
from benchmarks.direct_copy import BLOCK, direct_copy
from benchmarks.machine import describe_machine, mount_of, versions
from benchmarks.measure import first_byte_seconds, measure, parse_io
from benchmarks.memory_samples import Sampler, parse_status, thinned, tree_memory


def _hierarchy_v1(mount: Path) -> Path:
    root = mount / "memory"
    root.mkdir(parents=True)
    (root / "memory.limit_in_bytes").write_text("9223372036854771712")
    return root


class TestMeasure:
    def test_known_command(self, tmp_path: Path) -> None:
        code = "import sys, time; data = bytearray(60 << 20); time.sleep(0.3); print('done')"
        run = measure([sys.executable, "-c", code], tmp_path)
        assert run.exit_code == 0
        assert run.stdout == "done\n"
        assert 0.3 <= run.seconds < 20
        assert 60 << 20 < run.peak_rss < 200 << 20
        assert run.timeline and run.timeline[-1][0] <= run.seconds
        assert (run.cgroup_peak is None) == (run.cgroup_note is not None)

    def test_memory_and_time_of_children_count(self, tmp_path: Path) -> None:
        child = (
            "data = bytearray(60 << 20); import time; t = time.process_time()\nwhile time.process_time() < t + .3: 0"
        )
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        run = measure([sys.executable, "-c", code], tmp_path)
        assert run.peak_rss > 60 << 20
        assert run.user_seconds + run.system_seconds > 0.3

    def test_failure_is_recorded(self, tmp_path: Path) -> None:
        run = measure([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path)
        assert run.exit_code == 1
        assert run.to_dict()["stderr_tail"] == "no such thing\n"

    def test_timeout_kills(self, tmp_path: Path) -> None:
        run = measure([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, timeout=0.3)
        assert run.exit_code == -9
        assert run.seconds < 20

    def test_first_byte(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        code = f"import os, time; time.sleep(.2); f = open({str(path)!r}, 'wb'); f.write(b'x' * 8192); f.flush()"
        code += "; os.fsync(f.fileno()); time.sleep(.2)"
        assert 0.2 <= first_byte_seconds([sys.executable, "-c", code], [tmp_path / "gone", tmp_path]) < 20

    def test_no_byte(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="no byte was written; exit code 3"):
            first_byte_seconds([sys.executable, "-c", "raise SystemExit(3)"], [tmp_path])


class TestReaders:
    def test_io(self) -> None:
        assert parse_io("rchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n") == (4096, 8192)
        assert parse_io("") == (0, 0)

    def test_status(self) -> None:
        text = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t1\n"
        assert parse_status(text) == {"VmHWM": 2 << 20, "VmRSS": 1 << 20}

    def test_tree(self, tmp_path: Path) -> None:
        root, child = tmp_path / "1", tmp_path / "2"
        (root / "task" / "1").mkdir(parents=True)
        (root / "task" / "1" / "children").write_text("2 ")
        (root / "status").write_text("VmHWM:\t9 kB\nVmRSS:\t4 kB\n")
        child.mkdir()
        (child / "status").write_text("VmRSS:\t100 kB\nRssAnon:\t3 kB\nRssFile:\t96 kB\nRssShmem:\t1 kB\n")
        assert tree_memory(1, tmp_path) == (8 << 10, 9 << 10)
        assert tree_memory(7, tmp_path) == (0, 0)

    def test_sampler(self) -> None:
        sampler = Sampler(os.getpid(), time.monotonic())
        sampler.start()
        time.sleep(0.15)
        sampler.stop()
        assert len(sampler.timeline) >= 2
        assert sampler.peak >= max(size for _, size in sampler.timeline) > 0

    def test_thinned_keeps_the_peak(self) -> None:
        timeline = [(float(i), 1000 if i == 123 else i) for i in range(500)]
        kept = thinned(timeline, 50)
        assert len(kept) == 50
        assert (123.0, 1000) in kept
        assert thinned(timeline[:20], 50) == timeline[:20]

    def test_machine(self, tmp_path: Path) -> None:
        mounts = "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\n/dev/c /data/deep tmpfs rw 0 0\n"
        assert mount_of(Path("/data/x"), mounts) == ("/dev/b", "xfs")
        assert mount_of(Path("/database"), mounts) == ("/dev/a", "ext4")
        machine = describe_machine(tmp_path)
        assert machine["cores"] >= 1 and machine["ram"] > 1 << 28
        assert versions()["python"].startswith("3.")


class TestCgroups:
    def test_version_1(self, tmp_path: Path) -> None:
        _hierarchy_v1(tmp_path)
        hierarchy = find_hierarchy(tmp_path)
        assert hierarchy is not None and hierarchy.version == 1
        folder = hierarchy.root / "group"
        folder.mkdir()
        (folder / "memory.max_usage_in_bytes").write_text("12345\n")
        assert MemoryGroup(folder, hierarchy).peak() == 12345

    def test_version_2(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup.subtree_control").write_text("cpu io memory\n")
        hierarchy = find_hierarchy(tmp_path)
        assert hierarchy is not None and hierarchy.version == 2
        group = MemoryGroup(tmp_path, hierarchy)
        assert group.peak() is None  # before Linux 5.19 there is no memory.peak
        (tmp_path / "memory.peak").write_text("77\n")
        assert group.peak() == 77

    def test_none(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
        with fresh_group(mount=tmp_path) as group:
            assert group.folder is None
            assert group.reason == "no memory cgroup hierarchy"
            assert group.wrapped(["true"]) == ["true"]
            assert group.peak() is None

    def test_limit_and_join(self, tmp_path: Path) -> None:
        _hierarchy_v1(tmp_path)
        with fresh_group(1 << 30, tmp_path) as group:
            assert group.folder is not None
            assert (group.folder / "memory.limit_in_bytes").read_text() == str(1 << 30)
            assert measure(group.wrapped(["true"]), tmp_path).exit_code == 0
            assert (group.folder / "cgroup.procs").read_text().strip().isdigit()
            for path in group.folder.iterdir():  # a real cgroup's files go with it
                path.unlink()
        assert not list((tmp_path / "memory").glob("streammerge-bench-*"))


class TestDirectCopy:
    @pytest.mark.parametrize("size", [0, 1, 4096, 5000, BLOCK, BLOCK + 4097, 2 * BLOCK + 3])
    def test_equal_bytes(self, tmp_path: Path, size: int) -> None:
        source = tmp_path / "a.pt"
        source.write_bytes(os.urandom(size))
        try:
            written = direct_copy([source], tmp_path / "out")
        except OSError as fault:
            pytest.skip(f"no direct I/O here: {fault}")
        assert written == size
        assert (tmp_path / "out" / "a.pt").read_bytes() == source.read_bytes()

    def test_several_files(self, tmp_path: Path) -> None:
        sources = [tmp_path / f"{i}.pt" for i in range(5)]
        for i, source in enumerate(sources):
            source.write_bytes(os.urandom(3000 * i + 7))
        try:
            direct_copy(sources, tmp_path / "out", workers=3)
        except OSError as fault:
            pytest.skip(f"no direct I/O here: {fault}")
        assert all((tmp_path / "out" / s.name).read_bytes() == s.read_bytes() for s in sources)

    def test_half(self, tmp_path: Path) -> None:
        source = tmp_path / "a.pt"
        source.write_bytes(b"x" * (2 * BLOCK + 4096))
        try:
            written = direct_copy([source], tmp_path / "out", written=0.5)
        except OSError as fault:
            pytest.skip(f"no direct I/O here: {fault}")
        assert written == BLOCK + 2048 == (tmp_path / "out" / "a.pt").stat().st_size
