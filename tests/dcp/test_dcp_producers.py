"""The folders that trainers leave: all of them give the model and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import streammerge
from streammerge.errors import UnsupportedError, UsageError
from tests.dcp.dcp_support import (
    State,
    logits,
    merged,
    module_of,
    raws,
    rows_of_rank,
    save,
    save_ranks,
    stepped,
)
from tests.support.raw import read_folder

Writer = Callable[[Path], Any]
_REAL = ["nested", "flat", "accelerate", "async", "rank_local", "hf", "fsdp1", "pipeline"]


@pytest.mark.parametrize("name", _REAL)
def test_saved_by_three_processes(name: str, real_ranks: Path, hf_folder: Path, tmp_path: Path) -> None:
    assert len({path.name.split("_")[2] for path in (real_ranks / name).rglob("__*_*.distcp")}) in (0, 2, 3)
    found = merged(real_ranks / name, tmp_path / "out", hf_config=hf_folder)
    assert found == read_folder(hf_folder)
    assert torch.equal(logits(tmp_path / "out"), logits(hf_folder))


def test_flat_parameters_are_refused(real_ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="_flat_param"):
        streammerge.merge(real_ranks / "fsdp1_flat", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_accelerate_model_folder_itself(real_ranks: Path, hf_folder: Path, tmp_path: Path) -> None:
    folder = real_ranks / "accelerate" / "pytorch_model_fsdp_0"
    assert merged(folder, tmp_path / "out", hf_config=hf_folder) == read_folder(hf_folder)


def test_optimizer_folder_alone_is_no_model(real_ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(streammerge.errors.SourceError, match="holds no"):
        streammerge.merge(real_ranks / "accelerate" / "optimizer_0", tmp_path / "out")


_OPTIMIZERS = {
    "adamw": {},
    "without state": {"kind": torch.optim.SGD},
    "lr is a tensor": {"lr": torch.tensor(1e-3)},
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", _OPTIMIZERS)
def test_accelerate_with_any_optimizer(case: str, flat: bool, small: State, tmp_path: Path) -> None:
    """The optimizer's folder beside the model's is never taken for a model."""
    model = module_of(small)
    optimizer = stepped(model, **_OPTIMIZERS[case])  # type: ignore[arg-type]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states, optim = get_state_dict(model, optimizer, options=options)
    save({"model": states}, tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0")
    save({"optimizer": optim}, tmp_path / "checkpoint-5" / "optimizer_0")
    assert merged(tmp_path / "checkpoint-5", tmp_path / "out") == raws(states)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", _OPTIMIZERS)
def test_optimizer_in_the_same_folder(case: str, flat: bool, small: State, tmp_path: Path) -> None:
    model = module_of(small)
    optimizer = stepped(model, **_OPTIMIZERS[case])  # type: ignore[arg-type]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states, optim = get_state_dict(model, optimizer, options=options)
    assert merged(save({"model": states, "optimizer": optim}, tmp_path / "ckpt"), tmp_path / "out") == raws(states)


def test_torch_optimizers_own_state_dict(small: State, tmp_path: Path) -> None:
    """Parameters numbered, as `optimizer.state_dict()` gives them."""
    optim = stepped(module_of(small)).state_dict()
    folder = save({"app": {"model": small, "optim": optim}, "extra": [1, {"a": "b"}]}, tmp_path / "ckpt")
    assert merged(folder, tmp_path / "out") == raws(small)


@pytest.mark.parametrize("flat", [False, True])
def test_torchtitan_layout(flat: bool, small: State, tmp_path: Path) -> None:
    """Model names at the root, everything else in containers."""
    model = module_of(small)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states, optim = get_state_dict(model, stepped(model), options=options)
    others = {
        "optimizer": optim,
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "dataloader": {"dp_rank_0": b"pickled", "world_size": 1},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(9), "global_avg_losses": b""},
    }
    folder = save({**states, **others}, tmp_path / "outputs" / "checkpoint" / "step-3")
    report = streammerge.inspect(tmp_path / "outputs" / "checkpoint")
    assert set(report.tensors) == set(small)
    assert report.path == str(folder)
    assert merged(folder, tmp_path / "out") == raws(states)


@pytest.mark.parametrize("prefix", ["", "model.", "model.model.", "net.model."])
@pytest.mark.parametrize("container", ["model", "state_dict"])
def test_lightning(container: str, prefix: str, small: State, tmp_path: Path) -> None:
    """A `.ckpt` folder with `meta.pt`; the LightningModule's own attributes come before the model's names."""
    states = {prefix + name: tensor for name, tensor in small.items()}
    optim = stepped(module_of(states)).state_dict()
    folder = save({container: states, "optimizer_0": optim}, tmp_path / "epoch=0-step=1.ckpt")
    torch.save({"epoch": 0, "loops": {}}, folder / "meta.pt")
    assert merged(folder, tmp_path / "out") == raws(small)


def test_automodel(small: State, tmp_path: Path) -> None:
    """`model/` and `optim/` of each step, and links to the newest."""
    for step in (5, 9):
        folder = tmp_path / "run" / f"epoch_0_step_{step}"
        save({"model": {name: tensor * step for name, tensor in small.items()}}, folder / "model")
        save({"optim": stepped(module_of(small)).state_dict()}, folder / "optim")
        torch.save({"rng": 1}, folder / "dataloader.pt")
    (tmp_path / "run" / "LATEST").symlink_to("epoch_0_step_9")
    wanted = raws({name: tensor * 9 for name, tensor in small.items()})
    assert merged(tmp_path / "run" / "LATEST", tmp_path / "linked") == wanted
    assert merged(tmp_path / "run" / "epoch_0_step_9", tmp_path / "named") == wanted
    with pytest.raises(UsageError, match=r"epoch_0_step_5/model\n.*(LATEST|epoch_0_step_9)/model$"):
        streammerge.merge(tmp_path / "run", tmp_path / "both")


def test_automodel_config_beside_the_shards(hf_folder: Path, weights_of: State, tmp_path: Path) -> None:
    """Its config and tokenizer lie in `model/consolidated/`, or in `model/.hf_metadata/` without consolidation."""
    for place in ("consolidated", ".hf_metadata"):
        folder = tmp_path / place / "model"
        save(weights_of, folder, dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
        (folder / place).mkdir()
        (folder / place / "config.json").write_bytes((hf_folder / "config.json").read_bytes())
        assert streammerge.inspect(folder).architecture == "Qwen2ForCausalLM", place


_WRITERS: dict[str, Writer] = {
    "one file per item": lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False),
    "two threads": lambda path: dcp.FileSystemWriter(path, thread_count=2),
    "both": lambda path: dcp.FileSystemWriter(path, thread_count=2, single_file_per_rank=False),
}


@pytest.mark.parametrize("name", _WRITERS)
def test_many_files(name: str, small: State, tmp_path: Path) -> None:
    source = tmp_path / "ckpt"
    save_ranks(source, 3, rows_of_rank(small, 3), lambda: _WRITERS[name](source))
    assert len(list(source.glob("*.distcp"))) > 4
    assert merged(source, tmp_path / "out") == raws(small)


@pytest.mark.parametrize("world", [1, 2, 5, 9])
def test_any_number_of_ranks(world: int, small: State, tmp_path: Path) -> None:
    """Late ranks are short or empty."""
    source = tmp_path / "ckpt"
    save_ranks(source, world, rows_of_rank(small, world), lambda: dcp.FileSystemWriter(source))
    assert merged(source, tmp_path / "out") == raws(small)


def test_odd_tensors(tmp_path: Path) -> None:
    """Empty, transposed and expanded ones, views, and dtypes that numpy lacks."""
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "model.embed_tokens.weight": base.t(),
        "model.empty": torch.empty(0, 3),
        "model.view": base[1:3, 2:5],
        "model.expanded": torch.tensor([3.0]).expand(5, 4),
        "model.nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "model.float8": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "model.flag": torch.tensor(True),
        "model.count": torch.arange(3),
    }
    assert merged(save({"model": state}, tmp_path / "ckpt"), tmp_path / "out") == raws(state)
