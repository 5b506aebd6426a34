"""Files beside the weights: copied byte for byte, the config changed only where it must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streammerge as sm
from streammerge.errors import SourceError, UsageError
from streammerge.families.config import edited_config, read_config
from streammerge.folder.sidecars import find_sidecars

WriteCheckpoint = Callable[..., Path]
COPIED = {
    "tokenizer.json": '{"a":  1}',
    "tokenizer_config.json": "{}\n\n",
    "special_tokens_map.json": '{"\\u00e9": "é"}',
    "generation_config.json": "{}",
    "preprocessor_config.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "a b\r\n",
    "tokenizer.model": "\x00\x01\x02",
    "chat_template.jinja": "{{ messages }}",
    "modeling_custom.py": "raise SystemExit('never run')\n",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
LEFT = {
    "model.safetensors.index.json": "{}",
    "pytorch_model.bin.index.json": "{}",
    "adapter_config.json": "{}",
    "trainer_state.json": "{}",
    "requirements.txt": "torch\n",
    "model.safetensors": "weights",
    "pytorch_model.bin": "weights",
    "optimizer.pt": "weights",
    ".hidden.json": "{}",
    "additional_chat_templates/notes.md": "x",
    "sub/config.json": "{}",
}


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes files below a folder, whose names may have folders in them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


@pytest.fixture
def source(write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any]) -> Path:
    """A small checkpoint with its config."""
    return write_checkpoint(qwen2_state, qwen2_config)


def test_what_is_copied(source: Path, tmp_path: Path) -> None:
    write(source / "huggingface", COPIED | LEFT)
    report = sm.merge(source, tmp_path / "merged", check=False)
    for name, text in COPIED.items():
        assert (tmp_path / "merged" / name).read_bytes() == text.encode(), name
    assert {*COPIED, "config.json", "model.safetensors"} == set(report.files)
    found = {str(path.relative_to(tmp_path / "merged")) for path in (tmp_path / "merged").rglob("*") if path.is_file()}
    assert found == set(report.files) | {".streammerge.json"}
    assert report.missing == ()


def test_config_as_it_is(source: Path, tmp_path: Path) -> None:
    """Byte for byte, odd layout and all, when nothing in it changes."""
    odd = json.dumps(json.loads((source / "huggingface" / "config.json").read_bytes()), separators=(" ,", ":  "))
    (source / "huggingface" / "config.json").write_text(odd)
    sm.merge(source, tmp_path / "merged", check=False)
    assert (tmp_path / "merged" / "config.json").read_text() == odd


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_config_with_another_dtype(
    field: str,
    write_checkpoint: WriteCheckpoint,
    qwen2_state: dict[str, Any],
    qwen2_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        "zzz": [1e-6, "é"],
        **{k: v for k, v in qwen2_config.items() if k != "dtype"},
        field: "float32",
        "aaa": None,
    }
    sm.merge(write_checkpoint(qwen2_state, config), tmp_path / "merged", dtype="bfloat16", check=False)
    written = json.loads((tmp_path / "merged" / "config.json").read_bytes())
    assert list(written) == list(config)
    assert written == config | {field: "bfloat16"}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[" * 100_000, "\ufffe{}"])
def test_broken_json(name: str, text: str, source: Path, tmp_path: Path) -> None:
    write(source / "huggingface", {name: text})
    with pytest.raises(SourceError, match=name):
        sm.merge(source, tmp_path / "merged", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_that_is_no_object(source: Path, tmp_path: Path) -> None:
    write(source / "huggingface", {"config.json": "[1]"})
    with pytest.raises(SourceError, match=r"config\.json"):
        sm.merge(source, tmp_path / "merged", check=False)


def test_without_any_config(
    write_checkpoint: WriteCheckpoint,
    qwen2_state: dict[str, Any],
    tmp_path: Path,
    weights: Callable[[Path], dict[str, Any]],
) -> None:
    report = sm.merge(write_checkpoint(qwen2_state), tmp_path / "merged", check=False)
    assert report.files == ("model.safetensors",)
    assert report.missing == ("config.json", "tokenizer files")
    assert "config.json, tokenizer files" in repr(report)
    assert set(weights(tmp_path / "merged")) == set(qwen2_state)


def test_without_a_tokenizer(source: Path, tmp_path: Path) -> None:
    assert sm.plan(source, tmp_path / "merged").missing == ("tokenizer files",)
    assert sm.inspect(source).missing == ("tokenizer files",)


def test_hf_config_comes_first(source: Path, qwen2_config: dict[str, Any], tmp_path: Path) -> None:
    write(source / "huggingface", {"tokenizer.json": "{}"})
    base = tmp_path / "base"
    write(base, {"config.json": json.dumps(qwen2_config | {"dtype": "bfloat16"}), "vocab.json": "{}"})
    report = sm.merge(source, tmp_path / "merged", hf_config=base, check=False)
    assert set(report.files) == {"config.json", "vocab.json", "model.safetensors"}
    assert report.written_dtypes == {"bfloat16": report.tensors}
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["/not/there", "./not-there", "a/b/c"])
def test_hf_config_that_is_not_there(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        sm.merge(source, tmp_path / "merged", hf_config=name)


def test_a_linked_sidecar_becomes_a_file(source: Path, tmp_path: Path) -> None:
    """As in the cache of the Hub, where every file is a link to a blob."""
    (tmp_path / "blob").write_text("{}")
    (source / "huggingface" / "tokenizer.json").symlink_to(tmp_path / "blob")
    sm.merge(source, tmp_path / "merged", check=False)
    assert not (tmp_path / "merged" / "tokenizer.json").is_symlink()
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"


def test_size_counts_what_is_copied(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": "{}", "tokenizer.json": "[1, 2]", "model.safetensors": "weights"})
    assert find_sidecars(tmp_path).size == 8


def test_edits_reach_every_part(tmp_path: Path) -> None:
    raw = {
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "tie_word_embeddings": True, "quantization_config": {"dtype": "float32"}},
        "vision_config": {"dtype": None, "depth": 3},
        "other": {"dtype": "float32"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path / "config.json")
    edited = edited_config(config, dtype="bfloat16", untie=True)
    assert edited is not None
    assert json.loads(edited) == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "tie_word_embeddings": False, "quantization_config": {"dtype": "float32"}},
        "vision_config": {"dtype": None, "depth": 3},
        "other": {"dtype": "float32"},
        "tie_word_embeddings": False,
    }
    assert edited_config(config, dtype="float32", untie=False) is None
    assert edited_config(config, dtype=None, untie=False) is None


def test_sizes_that_the_file_lacks_are_added(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_attention_heads": 8, "num_local_experts": 4}))
    config = read_config(path, {"num_key_value_heads": 2, "num_attention_heads": 8, "num_experts": 4})
    assert json.loads(edited_config(config, dtype=None, untie=False) or b"") == {
        "num_attention_heads": 8,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
    }
    for name in ("num_attention_heads", "num_experts"):
        with pytest.raises(UsageError, match=f"{name} = "):
            read_config(path, {name: 16})


def test_sidecars_are_not_modified(source: Path, tmp_path: Path, snapshot: Callable[[Path], object]) -> None:
    base = tmp_path / "base"
    shutil.copytree(source / "huggingface", base)
    before = snapshot(base)
    sm.merge(source, tmp_path / "merged", hf_config=base, dtype="float16", check=False)
    assert snapshot(base) == before
