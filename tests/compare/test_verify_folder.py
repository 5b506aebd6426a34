"""``verify``: what makes a merged folder not whole, and what is only worth a warning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import streammerge as sm
from tests.compare.compare_support import Run, write_folder
from tests.conftest import WriteCheckpoint

INF, NAN = float("inf"), float("nan")
NORM = "model.norm.weight"
Merged = Callable[..., Path]


@pytest.fixture
def merged(
    write_checkpoint: WriteCheckpoint, qwen2_state: dict[str, Any], qwen2_config: dict[str, Any], tmp_path: Path
) -> Merged:
    """Merges a very small Qwen2 model, in several shards and with checksums."""

    def merge(**options: Any) -> Path:
        source = write_checkpoint(qwen2_state, qwen2_config)
        sm.merge(source, tmp_path / "merged", check=False, checksums=True, max_shard_size="1KB", **options)
        return tmp_path / "merged"

    return merge


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check against the model class, which takes seconds and has its own tests."""
    monkeypatch.setattr(import_module("streammerge.pipeline.verify"), "CHECK_BYTES", 1 << 60)


def rewritten(folder: Path, change: Mapping[str, torch.Tensor | None]) -> Path:
    """Change or remove weights of a folder, with an index that agrees; no trace of the merge is left."""
    weights = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    for path in [*folder.glob("*.safetensors*"), folder / "SHA256SUMS", folder / ".streammerge.json"]:
        path.unlink(missing_ok=True)
    weights.update({name: value for name, value in change.items() if value is not None})
    kept = {name: value for name, value in weights.items() if name not in change or change[name] is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_merged_folder_is_whole(merged: Merged, run: Run, qwen2_state: dict[str, Any]) -> None:
    folder = merged()
    report = sm.verify(folder)
    assert report.whole, report
    assert report.tensors == len(qwen2_state)
    assert report.parameters == sum(tensor.numel() for tensor in qwen2_state.values())
    assert report.bytes == 4 * report.parameters
    text = "\n".join(report.checked)
    for words in ("headers", "that the merge wrote", "against Qwen2ForCausalLM", "values", "SHA256SUMS"):
        assert words in text
    ran = run("verify", folder, "--json")
    assert (ran.code, json.loads(ran.out)["whole"]) == (0, True)


@pytest.mark.parametrize("io", ["auto", "direct", "pread", "mmap"])
@pytest.mark.usefixtures("quick")
def test_every_route(merged: Merged, io: str) -> None:
    report = sm.verify(merged(), io=io)
    assert report.whole
    assert any("budget is too small" in warning for warning in report.warnings)


@pytest.mark.parametrize("pattern", ["config.json", "*-00002-of-*.safetensors"])
@pytest.mark.usefixtures("quick")
def test_a_file_that_is_gone(merged: Merged, run: Run, pattern: str) -> None:
    folder = merged()
    (gone,) = folder.glob(pattern)
    gone.unlink()
    ran = run("verify", folder)
    assert ran.code == 8
    assert gone.name in ran.out
    assert "not whole" in ran.out


@pytest.mark.parametrize("place", [9, -1])
@pytest.mark.usefixtures("quick")
def test_a_flipped_byte(merged: Merged, place: int) -> None:
    """Within the values nothing but the checksum tells."""
    folder = merged()
    path = max(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    report = sm.verify(folder)
    assert not report.whole
    assert any(path.name in problem for problem in report.problems)


@pytest.mark.parametrize("line", ["0" * 64 + "  nothing.safetensors", "0" * 64 + "  ../secret", "nonsense"])
@pytest.mark.usefixtures("quick")
def test_checksums_of_files_that_are_not_there(merged: Merged, line: str) -> None:
    folder = merged()
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(line + "\n")
    assert not sm.verify(folder).whole


@pytest.mark.parametrize("change", [None, torch.ones(2, 4)])
def test_missing_weight_and_wrong_shape(merged: Merged, run: Run, change: torch.Tensor | None) -> None:
    ran = run("verify", rewritten(merged(), {NORM: change}))
    assert ran.code == 8
    said = f"{NORM} is missing" if change is None else f"{NORM} has shape {list(change.shape)}"
    assert said in ran.out


def test_a_weight_that_the_class_does_not_know(merged: Merged) -> None:
    report = sm.verify(rewritten(merged(), {"model.ghost.weight": torch.ones(1)}))
    assert report.whole
    assert "Qwen2ForCausalLM does not know model.ghost.weight" in report.warnings


def test_an_index_with_ghosts(merged: Merged, run: Run) -> None:
    folder = merged()
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"]["ghost"] = index["weight_map"][NORM]
    path.write_text(json.dumps(index))
    ran = run("verify", folder)
    assert (ran.code, "ghost" in ran.out) == (8, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_worth_a_warning(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {
        "sound": torch.tensor([0.0, 1.0]),
        "nan": torch.tensor([NAN, 1.0, NAN]),
        "infinite": torch.tensor([INF, -INF, 0.0]),
        "both": torch.tensor([NAN, INF]),
        "zeros": torch.zeros(5),
        "negative_zeros": -torch.zeros(5),
    }
    report = sm.verify(write_folder(tmp_path / "folder", {name: value.to(dtype) for name, value in weights.items()}))
    assert report.whole
    assert set(report.warnings) >= {
        "nan holds 2 NaN and 0 infinite values",
        "infinite holds 0 NaN and 2 infinite values",
        "both holds 1 NaN and 1 infinite values",
        "zeros is all zeros",
        "negative_zeros is all zeros",
    }
    assert not any("sound" in warning for warning in report.warnings)


def test_values_of_a_tensor_of_many_tiles(tmp_path: Path) -> None:
    """The last value of many, and a tensor that is zero in all its tiles but one."""
    spoiled, sparse = torch.ones(5_000_000), torch.zeros(5_000_000)
    spoiled[-1], sparse[4_000_000] = NAN, 1
    report = sm.verify(write_folder(tmp_path / "folder", {"spoiled": spoiled, "sparse": sparse}))
    assert "spoiled holds 1 NaN and 0 infinite values" in report.warnings
    assert not any("sparse" in warning for warning in report.warnings)


def test_what_is_no_folder_of_weights(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path).code == 2
    assert run("verify", tmp_path / "nowhere").code == 2
