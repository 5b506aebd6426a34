"""Uploading a finished folder, and a base model's config from the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def folder_files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder except for the manifest."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found[".streammerge.json"]
    return found


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("option", ["--push-to-hub", "--hf_upload_path"])
def test_upload(
    private: bool, option: str, hub: Any, environment: dict[str, str], command: Command, tiny: Path, tmp_path: Path
) -> None:
    options = ["--private"] if private else []
    line = [
        tiny,
        tmp_path / "merged",
        option,
        "me/model",
        *options,
        "--no-check",
        "--max-shard-size",
        "300KB",
        "--json",
    ]
    done = command("merge", *line, **environment)
    assert done.returncode == 0, done.stderr
    assert hub.files == folder_files(tmp_path / "merged")
    assert len(hub.files) > 5
    assert hub.private is private
    assert hub.tokens == {"Bearer hf_secret"}
    assert json.loads(done.stdout)["uploaded"].startswith(f"{hub.url}/me/model")


def test_upload_keeps_folders(
    hub: Any, environment: dict[str, str], command: Command, write_checkpoint: Callable[..., Path], qwen2_state: Any,
    qwen2_config: Any, tmp_path: Path,
) -> None:  # fmt: skip
    source = write_checkpoint(qwen2_state, qwen2_config)
    templates = source / "huggingface" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ tools }}")
    done = command(source, tmp_path / "merged", "--push-to-hub", "me/model", "--no-check", **environment)
    assert done.returncode == 0, done.stderr
    assert hub.files["additional_chat_templates/tool.jinja"] == b"{{ tools }}"


@pytest.mark.parametrize("trouble", ["offline", "refused", "unreachable"])
def test_failed_upload(
    trouble: str, hub: Any, environment: dict[str, str], command: Command, tiny: Path, tmp_path: Path
) -> None:
    """The folder is complete all the same, and the message says so."""
    if trouble == "offline":
        environment["HF_HUB_OFFLINE"] = "1"
    elif trouble == "unreachable":
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    hub.broken = trouble == "refused"
    done = command(tiny, tmp_path / "merged", "--push-to-hub", "me/model", "--no-check", "--json", **environment)
    fault = json.loads(done.stdout)["error"]
    assert (done.returncode, fault["type"]) == (6, "StorageError"), done.stderr
    assert f"{tmp_path / 'merged'} is complete, but could not be uploaded to me/model" in fault["message"]
    assert "hf_secret" not in done.stdout + done.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert hub.files == {}


def test_config_from_the_hub(
    hub: Any, environment: dict[str, str], command: Command, write_checkpoint: Callable[..., Path], qwen2_state: Any,
    qwen2_config: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """Config and tokenizer are fetched, weights are not; a second run needs no network."""
    hub.files = {
        "config.json": json.dumps(qwen2_config).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": bytes(1000),
        "model.safetensors.index.json": b"{}",
    }
    source = write_checkpoint(qwen2_state)
    done = command(source, tmp_path / "merged", "--hf-config", "me/model", "--no-check", **environment)
    assert done.returncode == 0, done.stderr
    assert set(folder_files(tmp_path / "merged")) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (tmp_path / "merged" / "config.json").read_bytes() == hub.files["config.json"]
    fetched = {path.name for path in (tmp_path / "hf-home").rglob("*") if path.is_symlink()}
    assert fetched == {"config.json", "tokenizer.json"}
    environment["HF_HUB_OFFLINE"] = "1"
    again = command(source, tmp_path / "again", "--hf-config", "me/model", "--no-check", **environment)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("offline", ["0", "1"])
def test_config_that_cannot_be_fetched(
    offline: str, environment: dict[str, str], command: Command, tiny: Path, tmp_path: Path
) -> None:
    environment["HF_HUB_OFFLINE"] = offline
    done = command(tiny, tmp_path / "merged", "--hf-config", "nobody/nothing", "--no-check", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nobody/nothing is neither a folder nor a repository that can be fetched" in done.stderr
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("call", "option"),
    [("snapshot_download", "--hf-config=me/model"), ("HfApi.upload_folder", "--push-to-hub=me/model")],
)
def test_stopped_while_talking_to_the_hub(
    call: str, option: str, environment: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    """A signal is no failure of the network."""
    code = f"""
import os, signal, sys
import huggingface_hub
def hit(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
huggingface_hub.{call} = hit
from streammerge.cli.main import main
main(sys.argv[1:])
"""
    line = [sys.executable, "-c", code, str(tiny), str(tmp_path / "merged"), "--no-check", option]
    done = subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 75, done.stderr
