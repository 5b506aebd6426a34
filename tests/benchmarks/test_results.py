"""Results: medians, ratios, digests, tables, pictures, and small runs of both benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from benchmarks import compare_peers, report, scale
from benchmarks.contenders import contenders, rank_files
from benchmarks.digests import file_digest, tensor_digest
from benchmarks.holes import punch
from benchmarks.peer import peer_command
from benchmarks.results import dump, load, medians, place_names, ratio, scrubbed, spread


def _run(seconds: float, **more: Any) -> dict[str, Any]:
    run: dict[str, Any] = {
        "seconds": seconds,
        "sync_seconds": 0.5,
        "user_seconds": 1.0,
        "system_seconds": 0.25,
        "peak_rss": 80_000_000,
        "cgroup_peak": None,
        "read_bytes": 10**9,
        "write_bytes": 10**9,
        "exit_code": 0,
        "timeline": {"seconds": [0.0, seconds], "rss_mb": [30.0, 80.0]},
    }
    return run | more


def _contender(name: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "title": name.upper(), "medians": medians(runs), "runs": list(runs)}


def _peers() -> dict[str, Any]:
    failed = {"exit_code": 1, "stderr_tail": "Traceback\nValueError: no\n"}
    found = [
        _contender("streammerge-keep", _run(2.0)),
        _contender("direct-keep", _run(1.5)),
        _contender("verl", failed),
    ]
    return {
        "kind": "peers",
        "date": "2026-01-02T03:04+00:00",
        "command": "python -m benchmarks.compare_peers SOURCE WORK --rounds 1",
        "machine": {"cpu": "X", "cores": 2, "ram": 2 << 30, "kernel": "6.1", "file_system": "ext4", "disk": "D"},
        "versions": {"python": "3.11"},
        "peer": {"failure": "not asked for"},
        "input": {"files": 8, "bytes": 5 * 10**9},
        "max_ram": 1 << 30,
        "cold_cache": True,
        "ratios": compare_peers.ratios({one["name"]: one["medians"] for one in found}),
        "checks": {"the same": True, "equal": False},
        "first_byte": {"seconds": [0.4], "median": 0.4},
        "contenders": found,
    }


def _scale() -> dict[str, Any]:
    merges: list[dict[str, Any]] = [
        {"model": f"m-{size}b", "ranks": 8, "dtype": dtype, "parameters": 1, "bytes_read": size * 10**9}
        | {"bytes_written": size * 10**9, "bytes_per_second": 5e8, "medians": medians([_run(size * 2.0)]), "runs": []}
        for size in (1, 70)
        for dtype in ("keep", "bfloat16")
    ]
    plans = [{"model": "m-70b", "ranks": 64, "bytes": 10**12, "medians": medians([_run(3.0)]), "runs": []}]
    kept = {
        key: value for key, value in _peers().items() if key in ("date", "command", "machine", "versions", "max_ram")
    }
    return {"kind": "scale", **kept, "merges": merges, "plans": plans, "checks": scale.checks(merges)}


class TestNumbers:
    def test_medians(self) -> None:
        found = medians([_run(1.0), _run(9.0), _run(2.0), _run(0.1, exit_code=1)])
        assert found["seconds"] == 2.0
        assert found["durable_seconds"] == 2.5
        assert found["cpu_seconds"] == 1.25
        assert found["cgroup_peak"] is None
        assert medians([{"exit_code": 1}])["seconds"] is None

    def test_ratio(self) -> None:
        assert ratio(3.0, 2.0) == 1.5
        assert ratio(None, 2.0) is None
        assert ratio(1.0, 0.0) is None
        assert spread([2.0, 3.0]) == 1.5
        assert spread([]) is None

    def test_ratios_of_pairs_that_took_part(self) -> None:
        found = {"streammerge-keep": medians([_run(2.5)]), "direct-keep": medians([_run(1.5)])}
        assert compare_peers.ratios(found) == [{"first": "streammerge-keep", "second": "direct-keep", "ratio": 1.5}]

    def test_checks_of_scale(self) -> None:
        assert _scale()["checks"]["keep"] == {"rss_spread": 1.0, "rate_spread": 1.0}

    def test_case(self) -> None:
        assert scale.Case.parse("qwen2.5-7b:8") == scale.Case("qwen2.5-7b", 8)
        with pytest.raises(ValueError, match="PRESET:RANKS"):
            scale.Case.parse("qwen2.5-7b")


class TestFiles:
    def test_dump_keeps_lists_of_numbers_on_a_line(self, tmp_path: Path) -> None:
        data = {"a": [1, 2.5, -3e-07], "b": [{"c": []}, None], "d": ["x", "y"], "e": [[1, 2], [3, 4]]}
        dump(data, tmp_path / "new" / "r.json")
        assert load(tmp_path / "new" / "r.json") == data
        assert '"a": [1, 2.5, -3e-07]' in (tmp_path / "new" / "r.json").read_text()

    def test_scrubbed(self, tmp_path: Path) -> None:
        names = place_names(WORK=tmp_path, SOURCE=tmp_path / "in", PEER=None)
        assert scrubbed(f"{tmp_path}/in/a {tmp_path}/out {Path.cwd()}/x", names) == "SOURCE/a WORK/out REPO/x"

    def test_digests(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        two.mkdir()
        a, b = np.arange(6.0).reshape(2, 3), np.arange(4)
        save_file({"a": a, "b": b, "none": np.zeros((0, 3))}, one / "m.safetensors")
        save_file({"a": a, "none": np.zeros((0, 3))}, two / "m-1.safetensors")
        save_file({"b": b}, two / "m-2.safetensors")
        assert tensor_digest(one) == tensor_digest(two)
        assert file_digest(one) != file_digest(two)
        save_file({"b": b + 1}, two / "m-2.safetensors")
        assert tensor_digest(one) != tensor_digest(two)

    def test_digest_checks(self) -> None:
        runs: dict[str, list[dict[str, Any]]] = {
            "streammerge-bf16": [{"digests": {"file": "f", "tensor": "t"}}, {"digests": {"file": "f", "tensor": "t"}}],
            "verl": [{"digests": {"tensor": "t"}}, {"exit_code": 1}],
        }
        assert list(compare_peers.digest_checks(runs).values()) == [True, True, True]
        runs["verl"].append({"digests": {"tensor": "other"}})
        assert list(compare_peers.digest_checks(runs).values()) == [True, False, False]

    def test_punched_zeros_are_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        save_file({"a": np.zeros(1 << 20, np.float32)}, path)
        before, blocks = path.read_bytes(), path.stat().st_blocks
        try:
            punch(path)
        except OSError as fault:
            pytest.skip(f"no holes here: {fault}")
        assert path.read_bytes() == before
        assert path.stat().st_blocks < blocks


class TestCommands:
    def test_all_take_part(self, make_tiny: Callable[..., Path], tmp_path: Path) -> None:
        actor = make_tiny()
        commands = {one.name: one.command(actor, tmp_path) for one in contenders(0.5, Path("env/bin/python"))}
        assert commands["verl"] == peer_command(Path("env/bin/python"), actor, tmp_path)
        assert commands["streammerge-bf16"][6:8] == ["--dtype", "bfloat16"]
        assert commands["direct-bf16"][-2:] == ["--written", "0.5"]
        assert len(rank_files(actor.parents[1])) == 3
        with pytest.raises(FileNotFoundError):
            rank_files(tmp_path)

    def test_compare_and_report(
        self, make_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compare_peers, "drop_caches", lambda: False)
        monkeypatch.setattr(compare_peers, "first_byte", lambda work, rounds: {"seconds": [0.4], "median": 0.4})
        output, page = tmp_path / "r.json", tmp_path / "page.md"
        only = ["--only", "streammerge-keep", "--only", "cp", "--rounds", "1", "--no-peer", "--output", str(output)]
        arguments = [str(make_tiny()), str(tmp_path / "work"), *only]
        done = CliRunner().invoke(compare_peers.main, arguments, catch_exceptions=False)
        assert done.exit_code == 0
        result = load(output)
        assert [one["runs"][0]["exit_code"] for one in result["contenders"]] == [0, 0]
        assert result["checks"] == {"streammerge-keep: the same in every round": True}
        assert result["cold_cache"] is False
        assert str(tmp_path) not in output.read_text()
        assert not list((tmp_path / "work" / "out").iterdir())
        page.write_text("# Page\n<!-- begin peers -->old<!-- end peers -->\nrest\n")
        CliRunner().invoke(report.main, [str(output), "--page", str(page)], catch_exceptions=False)
        assert ">old<" not in page.read_text() and "| cp of the rank files, and sync |" in page.read_text()

    def test_scale(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scale, "drop_caches", lambda: False)
        output = tmp_path / "r.json"
        arguments = [str(tmp_path / "work"), "--merge", "tiny:2", "--no-plan", "--output", str(output)]
        CliRunner().invoke(scale.main, arguments, catch_exceptions=False)
        merges = load(output)["merges"]
        assert [row["dtype"] for row in merges] == ["bfloat16", "keep"]
        assert merges[0]["bytes_written"] * 2 == pytest.approx(merges[1]["bytes_written"], rel=0.1)
        assert not list((tmp_path / "work").iterdir())


class TestReport:
    def test_peers(self) -> None:
        text = report.peers_section(_peers())
        assert "| STREAMMERGE-KEEP | 2.5 | 2.5 to 2.5 | 2.00 | 1.2 | 80 | n/a | 1.00 | 1.00 |" in text
        assert "| VERL | n/a | failed |" in text
        assert "* STREAMMERGE-KEEP: 1.25 times the time of: DIRECT-KEEP" in text
        assert "* equal: **no**" in text
        assert "* VERL failed in 1 of 1 runs, exit code 1: `ValueError: no`" in text

    def test_scale(self) -> None:
        text = report.scale_section(_scale())
        assert "| m-70b x 8 | keep | 70.0 | 70.0 | 140.0 | 0.50 | 80 | n/a |" in text
        assert "| m-70b x 64 | 1,000 | 3.0 | 80 |" in text

    def test_insert(self) -> None:
        page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb"
        new = report.insert(page, "x", "new")
        assert new == "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb"
        assert report.insert(new, "x", "new") == new
        with pytest.raises(ValueError, match="begin y"):
            report.insert(page, "y", "new")

    def test_page_has_the_markers(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
        assert report.insert(page, "peers", "x") != report.insert(page, "scale", "x")


class TestPlots:
    def test_small_svgs(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        from benchmarks import plots

        files = []
        for result in (_peers(), _scale()):
            files.append(tmp_path / f"{result['kind']}.json")
            files[-1].write_text(json.dumps(result))
        done = CliRunner().invoke(plots.main, [*map(str, files), "--folder", str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0
        for name in ("memory", "throughput", "scale"):
            assert 1000 < (tmp_path / f"{name}.svg").stat().st_size < 200_000

    def test_median_run(self) -> None:
        pytest.importorskip("matplotlib")
        from benchmarks.plots import median_run

        runs = [_run(3.0), _run(1.0), _run(2.0), _run(0.1, exit_code=1)]
        assert median_run({"runs": runs}) == runs[2]
        assert median_run({"runs": runs[3:]}) is None
