"""The command line in-process: spelling, output and exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streammerge.cli.main import main
from streammerge.execute.memory import allowed_memory, rss

Weights = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command as its entry point does."""

    def command(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        assert "Traceback" not in streams.err + streams.out
        return Ran(int(left.value.code or 0), streams.out, streams.err)

    return command


def test_bare_command_merges(run: Run, tiny: Path, tmp_path: Path, weights: Weights) -> None:
    ran = run(tiny, tmp_path / "merged", "--no-check")
    assert ran.code == 0
    assert ran.out.startswith(f"wrote           {tmp_path / 'merged'}")
    assert "RAM budget" in ran.err
    assert len(weights(tmp_path / "merged")) == 27


@pytest.mark.parametrize("spelling", [["merge"], [], ["--no-check"], ["--workers", "1"], ["--dtype=keep"]])
def test_merge_with_options_anywhere(spelling: list[str], run: Run, tiny: Path, tmp_path: Path) -> None:
    assert run(*spelling, tiny, tmp_path / "merged", "--no-check", "-q").code == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", [["merge"], []])
@pytest.mark.parametrize("separator", ["_", "-"])
def test_spelling_of_verl(command: list[str], separator: str, run: Run, tiny: Path, tmp_path: Path) -> None:
    options = [
        name.replace("_", separator) for name in ("--local_dir", "--target_dir", "--no_check", "--is_value_model")
    ]
    ran = run(*command, "--backend", "fsdp", options[0], tiny, options[1], tmp_path / "merged", *options[2:])
    assert ran.code == 0, ran.err
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_underscores_are_dashes(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run(
        "merge",
        tiny,
        tmp_path / "merged",
        "--max_shard_size",
        "300KB",
        "--max-ram=2G",
        "--no_space_check",
        "--no_check",
    )
    assert ran.code == 0
    assert (tmp_path / "merged" / "model.safetensors.index.json").is_file()


def test_tie_word_embedding_of_verl(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run(tiny, tmp_path / "merged", "--tie_word_embedding", "--no-check", "--json")
    assert ran.code == 0
    assert "lm_head.weight" in json.loads(ran.out)["warnings"][0]


@pytest.mark.parametrize("named", ["positions", "src", "both"])
def test_several_sources(
    named: str, run: Run, tiny: Path, tmp_path: Path, contents: Callable[[Path], dict[str, str]]
) -> None:
    """Ranks that were left on the disks of two nodes."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    shutil.copytree(tiny, nodes[0])
    nodes[1].mkdir()
    (nodes[0] / "model_world_size_3_rank_1.pt").rename(nodes[1] / "model_world_size_3_rank_1.pt")
    spellings: dict[str, list[Any]] = {
        "positions": nodes,
        "src": ["--src", nodes[0], "--src", nodes[1]],
        "both": ["--src", nodes[0], nodes[1]],
    }
    spelled = spellings[named]
    assert run(*spelled, tmp_path / "merged", "--no-check").code == 0
    assert run(tiny, tmp_path / "whole", "--no-check").code == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert run("inspect", *spelled).code == 0


def test_json_is_one_object(run: Run, tiny: Path, tmp_path: Path) -> None:
    merged = run("merge", tiny, tmp_path / "merged", "--no-check", "--json")
    assert json.loads(merged.out)["tensors"] == 27
    assert "merging" in merged.err
    assert json.loads(run("inspect", tiny, "--json", "--tensors").out)["facts"]["world size"] == "3"
    assert json.loads(run("plan", tiny, tmp_path / "other", "--json").out)["plan"]["parameters"] == 865_190


def test_json_of_a_failure(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run("merge", tmp_path / "nowhere", tmp_path / "merged", "--json")
    assert json.loads(ran.out)["error"] == {
        "type": "UsageError",
        "message": f"{tmp_path / 'nowhere'} does not exist",
        "exit_code": ran.code,
    }
    assert json.loads(run("merge", "--json", "--frobnicate").out)["error"]["exit_code"] == 2


def test_quiet(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run(tiny, tmp_path / "merged", "--no-check", "-q")
    assert ran.err == ""


def test_inspect(run: Run, tiny: Path) -> None:
    ran = run("inspect", tiny, "--tensors")
    assert ran.code == 0
    assert "model           Qwen2ForCausalLM" in ran.out
    assert "model.norm.weight  float32  [130]  3 fragments" in ran.out
    assert run("inspect", "--local_dir", tiny).out.startswith("format          fsdp")


def test_plan_writes_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run("plan", tiny, tmp_path / "merged", "--dtype", "float16")
    assert ran.code == 0
    assert "float32 -> float16" in ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("1G", 1 << 30),
        ("1GiB", 1 << 30),
        ("1GB", 10**9),
        ("1.5g", 3 << 29),
        ("2000MiB", 2000 << 20),
        (str(1 << 30), 1 << 30),
    ],
)
def test_sizes(given: str, budget: int, run: Run, tiny: Path, tmp_path: Path) -> None:
    assert json.loads(run("plan", tiny, tmp_path / "x", "--max-ram", given, "--json").out)["max_ram"] == budget


@pytest.mark.parametrize("command", ["merge", "plan"])
def test_percentage(command: str, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what may be used, for every command alike."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    monkeypatch.setattr("streammerge.execute.memory._cgroup_limits", list)
    ran = run(command, tiny, tmp_path / "merged", "--max-ram", "50%", "--json", "--no-check")
    assert json.loads(ran.out)["max_ram"] == 32 << 30


def test_default_budget(run: Run, tiny: Path, tmp_path: Path) -> None:
    budget = json.loads(run("plan", tiny, tmp_path / "x", "--json").out)["max_ram"]
    assert budget <= 16 << 30
    assert budget == 16 << 30 or abs(budget - allowed_memory() // 2) < 1 << 30


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge"],
        ["merge", "{source}"],
        ["inspect"],
        ["plan", "{source}"],
        ["{source}", "{out}", "--frobnicate"],
        ["{source}", "{out}", "--max-ram", "lots"],
        ["{source}", "{out}", "--max-ram", "0"],
        ["{source}", "{out}", "--max-ram", "101%"],
        ["{source}", "{out}", "--max-shard-size", "50%"],
        ["{source}", "{out}", "--dtype", "int8"],
        ["{source}", "{out}", "--dtype", "floaty"],
        ["{source}", "{out}", "--io", "magic"],
        ["{source}", "{out}", "--workers", "0"],
        ["{source}", "{out}", "--backend", "megatron"],
        ["{source}", "{out}", "--hf-config", "./nowhere"],
        ["{source}", "{out}", "--mesh-order", "random"],
        ["{out}/nowhere", "{out}"],
        ["inspect", "{source}/fsdp_config.json"],
    ],
)
def test_wrong_usage(arguments: list[str], run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    ran = run(*(part.format(source=tiny, out=out) for part in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert not out.exists()


def test_no_arguments_show_the_help(run: Run) -> None:
    ran = run()
    assert ran.code in (0, 2)
    assert "streammerge [merge] SRC... DST" in ran.out + ran.err
    assert "error: Usage" not in ran.err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["merge", "--help"], ["plan", "-h"], ["inspect", "--help"]])
def test_help(arguments: list[str], run: Run) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Usage: streammerge")


def test_version(run: Run) -> None:
    from streammerge import __version__

    assert __version__ in run("--version").out


def test_exit_codes(run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failure of every kind that a merge can meet; 75 has a test of its own."""
    import torch

    empty, flat = tmp_path / "empty", tmp_path / "flat"
    empty.mkdir()
    flat.mkdir()
    torch.save({"a._flat_param": torch.zeros(1)}, flat / "model_world_size_1_rank_0.pt")
    out = tmp_path / "merged"
    assert run(empty, out).code == 3
    assert run(flat, out).code == 4
    assert run(tiny, out, "--max-ram", "1M", "--no-check").code == 7
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run(tiny, tmp_path / "full").code == 9

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert run(tiny, out, "--no-check").code == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "flat", "full", "merged.streammerge-partial"]


def test_unsafe_content(run: Run, tmp_path: Path) -> None:
    """A pickle that asks for os.system is refused and never run."""
    import torch

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/pwned",)

    (tmp_path / "source").mkdir()
    torch.save({"weight": torch.zeros(1), "evil": Evil()}, tmp_path / "source" / "model_world_size_1_rank_0.pt")
    ran = run("inspect", tmp_path / "source")
    assert ran.code == 5
    assert not (tmp_path / "pwned").exists()


def test_unexpected_errors_are_named(run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("streammerge.pipeline.merge", broken)
    ran = run(tiny, tmp_path / "merged", "--json")
    assert (ran.code, json.loads(ran.out)["error"]["type"]) == (1, "ZeroDivisionError")
    assert "STREAMMERGE_DEBUG=1" in ran.err
    monkeypatch.setenv("STREAMMERGE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main([str(tiny), str(tmp_path / "merged")])


def test_warnings_go_to_stderr(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run(tiny, tmp_path / "merged", "--tie-word-embedding", "--no-check", "-q")
    assert "warning: lm_head.weight" in ran.err
    assert "warning:" not in ran.out


def test_check_says_why_not(run: Run, tiny: Path, tmp_path: Path) -> None:
    ran = run(tiny, tmp_path / "merged", "--max-ram", str(rss() + (50 << 20)))
    assert "not checked (it needs a budget of" in ran.out
