"""A merge in a process of its own never uses more memory than it was given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
# A small process in between: what a child may have used counts from the fork, and pytest is large.
LAUNCHER = """
import json, os, resource, subprocess, sys
group, *line = sys.argv[1:]
if group:
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
done = subprocess.run(line, capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"code": done.returncode, "peak": peak, "out": done.stdout, "err": done.stderr}))
"""


@dataclass(frozen=True)
class Run:
    """A finished merge: exit code, most RSS of the process in bytes, its JSON and its stderr."""

    code: int
    peak: int
    report: dict[str, Any]
    err: str


def merge(source: Path, destination: Path, *options: str, group: Path | str = "") -> Run:
    """Runs ``streammerge merge --json`` and measures it from outside."""
    line = [sys.executable, "-m", "streammerge", "merge", "--json", str(source), str(destination), *options]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(group), *line], capture_output=True, text=True, check=True, timeout=200
    )
    seen = json.loads(done.stdout)
    return Run(seen["code"], seen["peak"], json.loads(seen["out"]), seen["err"])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1.1 GB in two files of holes, which take no room on disk."""
    import torch
    from transformers import Qwen2Config

    from benchmarks.make_checkpoint import make_checkpoint

    config = Qwen2Config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=11,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=48_000,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    out = tmp_path_factory.mktemp("large") / "run"
    made = make_checkpoint(out, config, world_size=2, sparse=True)
    assert made.file_bytes > 1_000_000_000
    return made.actor


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """Where to merge to; removed at once, because it is large."""
    yield tmp_path / "merged"
    subprocess.run(["rm", "-rf", tmp_path / "merged"], check=True)


@pytest.mark.parametrize(
    ("dtype", "io"), [("keep", "auto"), ("keep", "pread"), ("bfloat16", "auto"), ("bfloat16", "mmap")]
)
def test_copy_and_usual_cast(dtype: str, io: str, large: Path, destination: Path) -> None:
    run = merge(large, destination, "--max-ram", "256M", "--dtype", dtype, "--io", io)
    assert run.code == 0, run.err
    assert run.report["bytes_read"] > 1_000_000_000
    assert run.report["peak_rss"] <= 256 * MIB
    assert run.peak <= 256 * MIB
    assert abs(run.peak - run.report["peak_rss"]) < 4 * MIB


def test_cast_by_torch(large: Path, destination: Path) -> None:
    """The least that it asks for, torch included, is what it keeps to."""
    refused = merge(large, destination, "--max-ram", "60M", "--dtype", "float16")
    assert refused.code == 7
    assert not destination.exists()
    least = re.search(r"the least that works is (\d+)M", refused.report["error"]["message"])
    assert least is not None
    run = merge(large, destination, "--max-ram", f"{least[1]}M", "--dtype", "float16")
    assert run.code == 0, run.err
    assert max(run.peak, run.report["peak_rss"]) <= int(least[1]) * MIB


def test_the_least_really_works(large: Path, destination: Path) -> None:
    refused = merge(large, destination, "--max-ram", "1M")
    least = int(re.findall(r"(\d+)M", refused.report["error"]["message"])[-1])
    assert (refused.code, least < 128) == (7, True)
    run = merge(large, destination, "--max-ram", f"{least}M", "--dtype", "bfloat16")
    assert run.code == 0, run.err
    assert max(run.peak, run.report["peak_rss"]) <= least * MIB


def test_the_least_counts_the_whole_merge(tmp_path: Path) -> None:
    """Also where something is compared first and torch is needed only later."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=10, tie_word_embeddings=True, dtype=torch.float32, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    state = {name: value.clone() for name, value in Qwen2ForCausalLM(config).state_dict().items()}
    torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    config.save_pretrained(tmp_path / "huggingface")
    refused = merge(tmp_path, tmp_path / "merged", "--max-ram", "1M", "--dtype", "float16")
    least = re.findall(r"(\d+)M", refused.report["error"]["message"])[-1]
    run = merge(tmp_path, tmp_path / "merged", "--max-ram", f"{least}M", "--dtype", "float16")
    assert run.code == 0, run.err


def test_large_tokenizer(make_tiny: Any, tmp_path: Path) -> None:
    """Checking that a tokenizer of Gemma's size (33 MB) is JSON does not break the budget."""
    import shutil

    source = tmp_path / "source"
    shutil.copytree(make_tiny(), source)
    vocabulary = {f"token{i:07d}": i for i in range(262_144)}
    merges = [[f"tok{i}", f"en{i}"] for i in range(514_906)]
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    (source / "huggingface" / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    run = merge(source, tmp_path / "merged", "--max-ram", "256M")
    assert run.code == 0, run.err
    assert run.peak <= 256 * MIB


def own_group() -> Path:
    """The cgroup below which a limit can be set; skips the test where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup/memory" if "memory" in controllers.split(",") else "/sys/fs/cgroup")
        if controllers and root.name != "memory":
            continue
        group = root / path.lstrip("/")
        enabled = group / "cgroup.subtree_control"
        usable = controllers or (enabled.is_file() and "memory" in enabled.read_text().split())
        if usable and os.access(group, os.W_OK):
            return group
    pytest.skip("there is no writable cgroup with a memory controller")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup of 256 MiB, page cache included and without swap."""
    group = own_group() / f"streammerge-test-{os.getpid()}"
    try:
        group.mkdir()
        names = ("memory.max", "memory.limit_in_bytes")
        limit = next(group / name for name in names if (group / name).exists())
        limit.write_text(str(256 * MIB))
    except (OSError, StopIteration):
        pytest.skip("a cgroup with a memory limit cannot be made here")
    yield group
    group.rmdir()


@pytest.mark.parametrize("io", ["auto", "pread", "mmap"])
def test_under_a_real_limit(io: str, limited: Path, large: Path, destination: Path) -> None:
    """The kernel would kill the process; the budget equals its limit."""
    run = merge(large, destination, "--max-ram", "100%", "--io", io, "--dtype", "bfloat16", group=limited)
    assert run.code == 0, run.err
    assert run.report["max_ram"] == 256 * MIB
    assert run.peak <= 256 * MIB


def test_default_under_a_real_limit(limited: Path, make_tiny: Any, tmp_path: Path) -> None:
    run = merge(make_tiny(), tmp_path / "merged", group=limited)
    assert run.code == 0, run.err
    assert run.report["max_ram"] == 128 * MIB
