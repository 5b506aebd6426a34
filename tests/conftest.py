"""Shared fixtures: small real checkpoints, a way to write rank files by hand, and the command in a subprocess."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class WriteCheckpoint(Protocol):
    """Writes ``state`` as the only rank file of a checkpoint; returns its folder."""

    def __call__(self, state: Mapping[str, Any], config: Mapping[str, Any] | None = ..., name: str = ...) -> Path: ...


class RunCommand(Protocol):
    """Runs ``python -m streammerge`` in a subprocess."""

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint of a preset with torch itself, once per session; returns the folder of its rank files."""
    from benchmarks.make_checkpoint import DTYPES, make_checkpoint
    from benchmarks.shapes import preset_config

    made: dict[tuple[Any, ...], Path] = {}

    def make(preset: str = "tiny", world: int = 3, dtype: str = "fp32", mesh: Any = "fsdp") -> Path:
        key = (preset, world, dtype, mesh)
        if key not in made:
            out = tmp_path_factory.mktemp("checkpoint") / "run"
            config = preset_config(preset)
            made[key] = make_checkpoint(out, config, world_size=world, dtype=DTYPES[dtype], mesh=mesh, seed=7).actor
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_tiny: Callable[..., Path]) -> Path:
    """A Qwen2 checkpoint: float32 in three rank files, bfloat16 in the config. Not to be changed."""
    return make_tiny()


@pytest.fixture(scope="session")
def qwen2_config() -> dict[str, Any]:
    """The config of a very small Qwen2 model, float32 and untied."""
    return dict(QWEN2)


@pytest.fixture(scope="session")
def qwen2_state(qwen2_config: dict[str, Any]) -> dict[str, Any]:
    """The random weights of that model, in state dict order."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    return dict(Qwen2ForCausalLM(Qwen2Config(**qwen2_config)).state_dict())


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """See ``WriteCheckpoint``."""
    import torch

    def write(state: Mapping[str, Any], config: Mapping[str, Any] | None = None, name: str = "source") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        torch.save(dict(state), folder / "model_world_size_1_rank_0.pt")
        if config is not None:
            (folder / "huggingface").mkdir()
            (folder / "huggingface" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder

    return write


@pytest.fixture(scope="session")
def command() -> RunCommand:
    """See ``RunCommand``."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "streammerge", *map(str, arguments)]
        return subprocess.run(
            line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, Any]]:
    """Reads all tensors of a merged folder with safetensors' own reader."""
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, Any]:
        return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}

    return read


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], dict[str, tuple[str, int]]]:
    """Every file below a folder: relative name -> (hash of its bytes, modification time)."""

    def take(folder: Path) -> dict[str, tuple[str, int]]:
        return {
            str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return take


@pytest.fixture(scope="session")
def contents(snapshot: Callable[[Path], dict[str, tuple[str, int]]]) -> Callable[[Path], dict[str, str]]:
    """Every file below a folder: relative name -> hash of its bytes, the manifest left out."""

    def take(folder: Path) -> dict[str, str]:
        return {name: digest for name, (digest, _) in snapshot(folder).items() if name != ".streammerge.json"}

    return take
