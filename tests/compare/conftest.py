"""Fixtures of the tests of comparing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streammerge.cli.main import main
from tests.compare.compare_support import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command as its entry point does."""

    def command(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        assert "Traceback" not in streams.err + streams.out
        assert "bug in streammerge" not in streams.err
        return Ran(int(left.value.code or 0), streams.out, streams.err)

    return command


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory, qwen2_config: dict[str, Any]) -> Callable[..., Path]:
    """Saves a very small random Qwen2 model as transformers does; the same seed gives the same weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def save(seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Path:
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("saved")
        model = Qwen2ForCausalLM(Qwen2Config(**{**qwen2_config, **config}))
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save
