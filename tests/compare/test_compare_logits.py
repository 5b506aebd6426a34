"""``--logits``: the same tokens through both models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.compare.compare_support import Run, write_folder
from tests.support.data import DATA

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def with_tokenizer(save_model: Save) -> Path:
    """A model with a tokenizer of nine letters."""
    from transformers import Qwen2Tokenizer

    folder = save_model(1)
    vocabulary = {letter: number for number, letter in enumerate("abcdefghi")}
    Qwen2Tokenizer(vocab={**vocabulary, "<|endoftext|>": 9}, merges=[]).save_pretrained(folder)
    return folder


def test_equal_models(with_tokenizer: Path, save_model: Save, run: Run) -> None:
    """By text, with the first folder's tokenizer."""
    ran = run("compare", with_tokenizer, save_model(1, "1KB"), "--logits", "dea", "--json")
    assert ran.code == 0, ran
    logits = json.loads(ran.out)["logits"]
    assert logits == {"equal": True, "max_abs": 0.0, "shape": [1, 3, 10], "tokens": [3, 4, 0]}


def test_models_that_differ(save_model: Save, run: Run) -> None:
    ran = run("compare", save_model(1), save_model(2), "--logits", "1, 2,3")
    assert ran.code == 8
    assert "differ by at most" in ran.out
    assert "on 3 tokens" in ran.out


def test_other_logits_of_equal_weights(save_model: Save, run: Run) -> None:
    """The config counts too: the same weights with another base of the rotary embedding."""
    first = save_model(1)
    second = first.parent / "other_config"
    shutil.copytree(first, second)
    config = json.loads((second / "config.json").read_bytes())
    config["rms_norm_eps"] = 0.5
    (second / "config.json").write_text(json.dumps(config))
    assert run("compare", first, second).code == 0
    ran = run("compare", first, second, "--logits", "1,2,3")
    assert ran.code == 8, ran
    assert "they differ" in ran.out


def test_refused_over_the_budget(save_model: Save, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("streammerge.pipeline.compare"), "LOADING_BYTES", 1 << 50)
    ran = run("compare", save_model(1), save_model(1), "--logits", "1,2,3")
    assert ran.code == 7
    assert "takes 1024.0 TiB" in ran.err or "1.0 PiB" in ran.err, ran.err


@pytest.mark.parametrize("order", [1, -1])
def test_refused_for_other_formats(order: int, run: Run) -> None:
    folder = DATA / "fsdp2_w2_named_params"
    ran = run("compare", *[folder / "ckpt", folder / "expected"][::order], "--logits", "1,2,3")
    assert ran.code == 2
    assert "no Hugging Face folder" in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("prompt", ["some text", "1,2,99"])
def test_tokens_that_cannot_be_run(prompt: str, save_model: Save, run: Run) -> None:
    """No tokenizer to read text with; an id that is not in the vocabulary."""
    ran = run("compare", save_model(1), save_model(1), "--logits", prompt)
    assert ran.code == 4
    assert "logits could not be computed" in ran.err


def test_folders_that_transformers_cannot_load(run: Run, tmp_path: Path) -> None:
    import torch

    folder = write_folder(tmp_path / "bare", {"a": torch.ones(2)})
    assert run("compare", folder, folder, "--logits", "1").code == 4
