"""Which rank files make a checkpoint: missing, truncated, renamed, doubled and spread ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from streammerge.errors import SourceError, StreammergeError, UsageError
from tests.support.canary import read_safely
from tests.support.data import copied
from tests.support.ranks import Cut, Mesh, junk, rank_path, write_plain, write_ranks
from tests.support.raw import of_torch
from tests.support.results import catalogued, read_all

TENSORS = {"a.weight": junk((7, 4), torch.float32, 1), "a.bias": junk((7,), torch.bfloat16, 2)}
WANTED = {name: of_torch(tensor) for name, tensor in TENSORS.items()}
FSDP = dict.fromkeys(TENSORS, Cut({0: (0,)}))
HSDP = dict.fromkeys(TENSORS, Cut({0: (1,)}))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three ranks of plain FSDP."""
    return write_ranks(tmp_path / "three", TENSORS, Mesh((3,)), FSDP)


@pytest.mark.parametrize("missing", [(2, 3), (0, 1), (0, 3), (1, 2)])
def test_one_replica_is_enough(missing: tuple[int, ...], tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, Mesh((2, 2)), HSDP)
    for rank in missing:
        rank_path(tmp_path, 4, rank).unlink()
    catalogue = catalogued(tmp_path)
    assert read_all(tmp_path) == WANTED
    assert any("2 of 4 rank files are absent" in warning for warning in catalogue.warnings)


def test_one_replica_is_read(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, Mesh((2, 2)), HSDP)
    for entry in catalogued(tmp_path).entries.values():
        assert {fragment.file for fragment in entry.tensor.fragments} == {0, 1}


def test_replicas_by_mesh_and_not_by_rank(tmp_path: Path) -> None:
    """On the mesh [[0, 2], [1, 3]] files 0 and 1 hold the same shard."""
    write_ranks(tmp_path, TENSORS, Mesh((2, 2), (0, 2, 1, 3)), HSDP)
    rank_path(tmp_path, 4, 1).unlink()
    rank_path(tmp_path, 4, 2).unlink()
    assert read_all(tmp_path) == WANTED


@pytest.mark.parametrize("missing", [(0, 2), (1, 3), (0, 1, 2)])
def test_a_shard_that_no_replica_holds(missing: tuple[int, ...], tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, Mesh((2, 2)), HSDP)
    for rank in missing:
        rank_path(tmp_path, 4, rank).unlink()
    with pytest.raises(SourceError, match=f"model_world_size_4_rank_{missing[0]}.pt"):
        read_all(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named(rank: int, three: Path) -> None:
    rank_path(three, 3, rank).unlink()
    with pytest.raises(SourceError, match=rf"1 of 3 .*model_world_size_3_rank_{rank}\.pt"):
        read_all(three)


def test_a_missing_rank_whose_shards_are_empty_is_still_missing(tmp_path: Path) -> None:
    """It may hold tensors that the others do not know of."""
    write_ranks(tmp_path, {"head": junk((1, 4), torch.float32, 3)}, Mesh((2,)), {"head": Cut({0: (0,)})})
    rank_path(tmp_path, 2, 1).unlink()
    with pytest.raises(SourceError, match="rank_1"):
        read_all(tmp_path)


def test_truncation_at_any_length(three: Path) -> None:
    path = rank_path(three, 3, 1)
    content = path.read_bytes()
    lengths = [0, 1, 4, 14, 22, 30, 64, *range(97, len(content), 97), len(content) - 22, len(content) - 1]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(StreammergeError, match=r"model_world_size_3_rank_1\.pt"):
            read_all(three)
    path.write_bytes(content)
    assert read_all(three) == WANTED


def test_truncation_of_a_legacy_file(tmp_path: Path) -> None:
    write_plain(tmp_path, TENSORS, _use_new_zipfile_serialization=False)
    path = rank_path(tmp_path, 1, 0)
    content = path.read_bytes()
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        with pytest.raises(StreammergeError, match=r"model_world_size_1_rank_0\.pt"):
            read_all(tmp_path)


def test_two_world_sizes(three: Path) -> None:
    shutil.copyfile(rank_path(three, 3, 0), rank_path(three, 4, 0))
    with pytest.raises(SourceError, match=r"two world sizes.*model_world_size_3.*model_world_size_4"):
        read_all(three)


def test_ranks_beyond_the_world(three: Path) -> None:
    shutil.copyfile(rank_path(three, 3, 0), rank_path(three, 3, 3))
    with pytest.raises(SourceError, match="rank 3 of a world of 3"):
        read_all(three)


def test_without_fsdp_config(three: Path) -> None:
    (three / "fsdp_config.json").unlink()
    assert read_all(three) == WANTED


@pytest.mark.parametrize("content", ['{"world_size": 4}', "{", "[]", "\xff", '{"world_size": "3"}', "[" * 100_000])
def test_a_wrong_fsdp_config(content: str, three: Path) -> None:
    (three / "fsdp_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(SourceError, match=r"fsdp_config\.json"):
        read_all(three)


def test_ranks_spread_over_two_folders(three: Path, tmp_path: Path) -> None:
    other = tmp_path / "node1"
    other.mkdir()
    shutil.copyfile(three / "fsdp_config.json", other / "fsdp_config.json")
    shutil.move(rank_path(three, 3, 2), rank_path(other, 3, 2))
    assert read_all([three, other]) == read_all([other, three]) == WANTED
    with pytest.raises(SourceError, match=r"model_world_size_3_rank_2\.pt"):
        read_all(three)


def test_a_rank_in_two_folders(three: Path, tmp_path: Path) -> None:
    other = tmp_path / "node1"
    shutil.copytree(three, other)
    with pytest.raises(SourceError, match="rank 0 occurs twice"):
        read_all([three, other])


def test_the_same_folder_twice(three: Path) -> None:
    assert read_all([three, three]) == WANTED


def test_a_folder_of_another_run(three: Path, tmp_path: Path) -> None:
    other = write_ranks(tmp_path / "other", TENSORS, Mesh((2,)), FSDP)
    with pytest.raises(SourceError, match="two world sizes"):
        read_all([three, other])


@pytest.mark.parametrize("name", ["fsdp2_w4_bf16_tied", "t2110_fsdp2_tp_2x2", "t212_dtensor_2x2"])
def test_swapped_rank_files(name: str, tmp_path: Path) -> None:
    """All shards of the two fit each other's places: only the meshes inside tell."""
    folder = copied(name, tmp_path / "ckpt")
    first, second = rank_path(folder, 4, 1), rank_path(folder, 4, 2)
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(SourceError, match=r"rank_1\.pt.*renamed or swapped"):
        read_all(folder)


def test_swapped_files_of_sharded_tensors(tmp_path: Path) -> None:
    """Their offsets are explicit, so the names of the files do not matter, or the swap is noticed."""
    folder = copied("fsdp1_w2_shardedtensor", tmp_path / "ckpt")
    wanted = read_all(folder)
    rank_path(folder, 2, 0).rename(tmp_path / "kept")
    rank_path(folder, 2, 1).rename(rank_path(folder, 2, 0))
    (tmp_path / "kept").rename(rank_path(folder, 2, 1))
    try:
        found = read_all(folder)
    except SourceError as refusal:
        assert "swapped" in str(refusal)
    else:
        assert found == wanted


def test_a_rank_file_of_another_step(three: Path, tmp_path: Path) -> None:
    """Of another model, in fact: the shapes betray it."""
    changed = {**TENSORS, "a.weight": junk((7, 5), torch.float32, 9)}
    write_ranks(tmp_path / "other", changed, Mesh((3,)), FSDP)
    shutil.copyfile(rank_path(tmp_path / "other", 3, 1), rank_path(three, 3, 1))
    with pytest.raises(SourceError, match=r"a\.weight.*\[7, 4\].*rank_0.*\[7, 5\].*rank_1"):
        read_all(three)


def test_dtypes_that_differ_between_ranks(three: Path, tmp_path: Path) -> None:
    changed = {**TENSORS, "a.bias": TENSORS["a.bias"].view(torch.float16)}
    write_ranks(tmp_path / "other", changed, Mesh((3,)), FSDP)
    shutil.copyfile(rank_path(tmp_path / "other", 3, 2), rank_path(three, 3, 2))
    with pytest.raises(SourceError, match=r"a\.bias.*bfloat16.*rank_0.*float16.*rank_2"):
        read_all(three)


def test_plain_in_one_file_and_sharded_in_another(three: Path) -> None:
    torch.save(TENSORS, rank_path(three, 3, 1))
    with pytest.raises(SourceError, match=r"a\.weight.*sharded.*rank_0.*plain.*rank_1"):
        read_all(three)


def test_a_key_that_one_rank_lacks(three: Path, tmp_path: Path) -> None:
    write_ranks(tmp_path / "other", {"a.bias": TENSORS["a.bias"]}, Mesh((3,)), FSDP)
    shutil.copyfile(rank_path(tmp_path / "other", 3, 1), rank_path(three, 3, 1))
    with pytest.raises(SourceError, match=r"a\.weight: 12 of 28 elements are missing; the parts of rank 1"):
        read_all(three)


def test_pipeline_ranks_hold_other_keys(tmp_path: Path) -> None:
    """The union of all files' keys is the model, and a rank may hold nothing at all."""
    states = ({"layers.0": TENSORS["a.weight"]}, {"layers.1": TENSORS["a.bias"]}, {})
    wanted = {"layers.0": WANTED["a.weight"], "layers.1": WANTED["a.bias"]}
    assert read_all(write_plain(tmp_path, *states)) == wanted


def test_entries_with_odd_names_are_no_rank_files(three: Path) -> None:
    for name in ("optim_world_size_3_rank_0.pt", "model_world_size_3_rank_0.pt.tmp", "model_world_size_9_rank_x.pt"):
        (three / name).write_bytes(b"junk")
    assert read_all(three) == WANTED


def test_a_dangling_link(three: Path) -> None:
    rank_path(three, 3, 1).unlink()
    rank_path(three, 3, 1).symlink_to(three / "gone")
    with pytest.raises(StreammergeError, match=r"model_world_size_3_rank_1\.pt"):
        read_all(three)


def test_a_folder_named_like_a_rank_file(three: Path) -> None:
    rank_path(three, 3, 1).unlink()
    rank_path(three, 3, 1).mkdir()
    with pytest.raises(StreammergeError, match=r"model_world_size_3_rank_1\.pt"):
        read_all(three)


def test_files_that_are_none(three: Path, tmp_path: Path) -> None:
    """A pipe would be waited for forever; a name may speak of more ranks than can be counted."""
    rank_path(three, 3, 1).unlink()
    os.mkfifo(rank_path(three, 3, 1))
    many = write_plain(tmp_path / "many", TENSORS)
    rank_path(many, 1, 0).rename(rank_path(many, 10**15, 0))
    sound = write_plain(tmp_path / "sound", TENSORS)
    outcomes = read_safely({"sound": sound, "pipe": three, "many": many})
    assert not outcomes["sound"].error
    for case in ("pipe", "many"):
        assert outcomes[case].expected, outcomes[case]
        assert outcomes[case].error


def test_links_to_rank_files_are_followed(three: Path, tmp_path: Path) -> None:
    rank_path(three, 3, 1).rename(tmp_path / "elsewhere")
    rank_path(three, 3, 1).symlink_to(tmp_path / "elsewhere")
    assert read_all(three) == WANTED


def test_sizes_given_in_json_are_not_trusted_alone(three: Path) -> None:
    (three / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2}))
    assert read_all(three) == WANTED


def test_no_source_at_all() -> None:
    with pytest.raises(UsageError, match="no source"):
        read_all([])
