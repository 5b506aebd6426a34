"""Where torch's and accelerate's own tools work, they give the same tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.dcp.dcp_support import merged, raws
from tests.support.data import DATA
from tests.support.raw import read_folder

merge_fsdp_weights = pytest.importorskip("accelerate.utils").merge_fsdp_weights
FOLDERS = ["nested", "flat", "accelerate/pytorch_model_fsdp_0", "async", "fsdp1", "pipeline"]


@pytest.mark.parametrize("name", FOLDERS)
def test_dcp_to_torch_save(name: str, real_ranks: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(real_ranks / name, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)["model"]
    assert merged(real_ranks / name, tmp_path / "ours") == raws(theirs)


@pytest.mark.parametrize("name", ["accelerate/pytorch_model_fsdp_0", "fsdp1"])
def test_merge_fsdp_weights(name: str, real_ranks: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(str(real_ranks / name), str(tmp_path / "theirs"))
    theirs = read_folder(tmp_path / "theirs")
    assert merged(real_ranks / name, tmp_path / "ours") == theirs


def test_checkpoint_of_an_old_torch(tmp_path: Path) -> None:
    folder = DATA / "t212_dcp_accelerate_w2" / "ckpt" / "pytorch_model_fsdp_0"
    merge_fsdp_weights(str(folder), str(tmp_path / "theirs"))
    assert merged(folder, tmp_path / "ours") == read_folder(tmp_path / "theirs")


def test_rank_local_saves_where_torch_returns_garbage(real_ranks: Path, hf_folder: Path, tmp_path: Path) -> None:
    """torch sees the first rank's metadata only and says nothing; the merge has every row."""
    folder = Path(shutil.copytree(real_ranks / "rank_local", tmp_path / "ckpt"))
    ours = merged(folder, tmp_path / "ours")
    assert ours == read_folder(hf_folder)
    try:
        dcp_to_torch_save(folder, tmp_path / "theirs.pt")
    except Exception:  # a later torch may refuse
        return
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)["model"]
    assert theirs.keys() == ours.keys()
