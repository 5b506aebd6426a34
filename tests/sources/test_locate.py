"""From the path a user gives to the checkpoint, and from a file to its state dict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streammerge.errors import SourceError, UsageError
from tests.support.ranks import Cut, Mesh, junk, rank_path, write_plain, write_ranks
from tests.support.raw import of_torch
from tests.support.results import catalogued, read_all

WEIGHT = junk((4, 3), torch.float32, 1)
OTHER = junk((4, 3), torch.float32, 2)
OPTIMIZER = {"state": {0: {"exp_avg": OTHER}}, "param_groups": [{"lr": 0.1}]}


def _checkpoint(folder: Path) -> Path:
    return write_ranks(folder, {"w": WEIGHT}, Mesh((2,)), {"w": Cut({0: (0,)})})


@pytest.mark.parametrize("below", ["", "global_step_20", "global_step_20/actor"])
def test_any_level_of_a_run(below: str, tmp_path: Path) -> None:
    found = _checkpoint(tmp_path / "global_step_20" / "actor")
    assert catalogued(tmp_path / below).root == found


def test_the_tracker_names_the_newest_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _checkpoint(tmp_path / f"global_step_{step}" / "actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert catalogued(tmp_path).root == tmp_path / "global_step_20" / "actor"


def test_several_steps_without_a_tracker_are_listed(tmp_path: Path) -> None:
    folders = [_checkpoint(tmp_path / f"global_step_{step}" / "actor") for step in (10, 20)]
    with pytest.raises(UsageError) as refusal:
        catalogued(tmp_path)
    assert all(str(folder) in str(refusal.value) for folder in folders)


def test_actor_and_critic_are_both_listed(tmp_path: Path) -> None:
    folders = [_checkpoint(tmp_path / "global_step_5" / role) for role in ("actor", "critic")]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(UsageError) as refusal:
        catalogued(tmp_path)
    assert all(str(folder) in str(refusal.value) for folder in folders)
    assert catalogued(folders[1]).root == folders[1]


@pytest.mark.parametrize("text", ["40", "", "../elsewhere", "-1", "4" * 300, "\u0663"])
def test_a_tracker_that_leads_nowhere(text: str, tmp_path: Path) -> None:
    _checkpoint(tmp_path / "global_step_5" / "actor")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(SourceError, match=r"latest_checkpointed_iteration\.txt"):
        catalogued(tmp_path)


def test_files_of_an_sft_run_lie_in_the_step_itself(tmp_path: Path) -> None:
    found = _checkpoint(tmp_path / "global_step_7")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert catalogued(tmp_path).root == found


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        catalogued(tmp_path / "nothing")
    with pytest.raises(SourceError, match="no checkpoint"):
        catalogued(tmp_path)
    file = rank_path(_checkpoint(tmp_path / "ckpt"), 2, 0)
    with pytest.raises(UsageError, match="is a file"):
        catalogued(file)


def test_links_in_circles_end(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / "loop").symlink_to(tmp_path)
    with pytest.raises((SourceError, UsageError)):
        catalogued(tmp_path)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_a_wrapped_state_dict(key: str, tmp_path: Path) -> None:
    state = {key: {"w": WEIGHT}, "optimizer": OPTIMIZER, "epoch": 3, "step": torch.tensor(7)}
    assert read_all(write_plain(tmp_path, state)) == {"w": of_torch(WEIGHT)}


def test_several_sets_of_tensors_need_a_choice(tmp_path: Path) -> None:
    folder = write_plain(tmp_path, {"model": {"w": WEIGHT}, "ema": {"inner": {"w": OTHER}}})
    with pytest.raises(SourceError, match=r"'model'.*'ema\.inner'.*--subtree"):
        read_all(folder)
    assert read_all(folder, subtree="model") == {"w": of_torch(WEIGHT)}
    assert read_all(folder, subtree="ema.inner") == {"w": of_torch(OTHER)}
    with pytest.raises(UsageError, match="no tensors under 'other'"):
        read_all(folder, subtree="other")


def test_an_optimizer_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no tensors"):
        read_all(write_plain(tmp_path, OPTIMIZER))


@pytest.mark.parametrize("root", [[WEIGHT], WEIGHT, None, 5, (WEIGHT,)])
def test_a_root_that_is_no_dict(root: object, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no state dict"):
        read_all(write_plain(tmp_path, root))


def test_keys_that_become_equal_as_text(tmp_path: Path) -> None:
    """`1` and `"1"` would be one name: neither may vanish silently."""
    with pytest.raises(SourceError):
        read_all(write_plain(tmp_path, {1: WEIGHT, "1": OTHER}))
