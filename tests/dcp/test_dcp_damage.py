"""Incomplete, truncated and contradicting DCP folders: named in an error, before anything is written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties

import streammerge
from streammerge.errors import SourceError, StreammergeError, UnsupportedError
from tests.dcp.dcp_support import State, chunk_of, edited_metadata, merged, raws, rows_of_rank, save, save_ranks

NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def refused(folder: Path, kind: type[StreammergeError], pattern: str) -> None:
    """Merging is refused with this message, and nothing is left of it."""
    target = folder.parent / "refused"
    with pytest.raises(kind, match=pattern):
        streammerge.merge(folder, target, check=False)
    assert not list(folder.parent.glob("*refused*"))


def test_missing_file_is_named(saved_small: Path, small: State, tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    save_ranks(source, 3, rows_of_rank(small, 3), lambda: dcp.FileSystemWriter(source))
    (source / "__1_0.distcp").unlink()
    refused(source, SourceError, r"1 of 3 files are missing: __1_0\.distcp$")
    (saved_small / "__0_0.distcp").unlink()
    refused(saved_small, SourceError, r"__0_0\.distcp")


def test_missing_optimizer_files_do_not_matter(small: State, tmp_path: Path) -> None:
    """Only what holds the model is needed."""
    source = tmp_path / "ckpt"
    state = {"model": small, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}}
    save(state, source, dcp.FileSystemWriter(source, single_file_per_rank=False))
    with edited_metadata(source) as metadata:
        keys = {info.relative_path: index.fqn for index, info in metadata.storage_data.items()}
    for name in [name for name, key in keys.items() if key.startswith("optimizer")]:
        (source / name).unlink()
    assert merged(source, tmp_path / "out") == raws(small)


def test_no_metadata(saved_small: Path) -> None:
    (saved_small / ".metadata").unlink()
    refused(saved_small, SourceError, r"no \.metadata; the save was interrupted")


def test_interrupted_save(saved_small: Path) -> None:
    (saved_small / ".metadata").rename(saved_small / ".metadata.tmp")
    refused(saved_small, SourceError, r"\.metadata\.tmp is left of it")


def test_old_attempt_beside_a_complete_save(saved_small: Path, small: State, tmp_path: Path) -> None:
    """The temporary file of a crash is of no interest once the save was repeated."""
    (saved_small / ".metadata.tmp").write_bytes(b"half")
    assert merged(saved_small, tmp_path / "out") == raws(small)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_local_save_without_a_ranks_metadata(rank: int, real_ranks: Path, tmp_path: Path) -> None:
    """torch and accelerate return uninitialised memory here."""
    folder = Path(shutil.copytree(real_ranks / "rank_local", tmp_path / "ckpt"))
    (folder / f"__{rank}.metadata").unlink()
    refused(folder, SourceError, rf"elements are missing by the chunks|__{rank}\.metadata")
    (folder / f"__{rank}_0.distcp").unlink()
    refused(folder, SourceError, "elements are missing by the chunks")


def test_rank_local_save_of_whole_tensors_without_a_ranks_metadata(small: State, tmp_path: Path) -> None:
    """Data files of a rank whose metadata is missing: its tensors would be left out without a word."""
    names = list(small)
    for rank, own in enumerate((names[:2], names[2:])):
        save({name: small[name] for name in own}, tmp_path / str(rank), use_collectives=False)
    folder = tmp_path / "1"
    shutil.move(tmp_path / "0" / "__0_0.distcp", folder / "__7_0.distcp")
    refused(folder, SourceError, "__7")


def test_rank_local_copies_that_differ(small: State, tmp_path: Path) -> None:
    folder = save(small, tmp_path / "ckpt", use_collectives=False)
    other = save({**small, NORM: small[NORM] + 1}, tmp_path / "other", use_collectives=False)
    with edited_metadata(other, "__0.metadata") as metadata:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, relative_path="__1_0.distcp")
    shutil.move(other / "__0_0.distcp", folder / "__1_0.distcp")
    shutil.move(other / "__0.metadata", folder / "__1.metadata")
    refused(folder, SourceError, rf"{NORM}: __0_0\.distcp and __1_0\.distcp hold different copies")
    found = merged(folder, tmp_path / "out", allow_replica_mismatch=True)
    assert found == raws(small)


def test_truncated_data_anywhere(saved_small: Path) -> None:
    path = saved_small / "__0_0.distcp"
    content = path.read_bytes()
    for size in (0, 1, 8, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        refused(saved_small, SourceError, r"__0_0\.distcp")


def test_truncated_metadata_anywhere(saved_small: Path) -> None:
    path = saved_small / ".metadata"
    content = path.read_bytes()
    for size in (*range(0, len(content) - 1, 37), len(content) - 1):
        path.write_bytes(content[:size])
        refused(saved_small, SourceError, r"\.metadata")


@pytest.mark.parametrize(
    "content", [b"garbage" * 50, bytes(200), b"\xff" * 200, b"PK\x03\x04" + bytes(99), b"N.", b"}."]
)
def test_other_content_in_the_metadata(content: bytes, saved_small: Path) -> None:
    (saved_small / ".metadata").write_bytes(content)
    refused(saved_small, StreammergeError, r"\.metadata")


def _another_dtype(folder: Path) -> None:
    with edited_metadata(folder) as metadata:
        entry = metadata.state_dict_metadata[NORM]
        entry.properties = TensorProperties.create_from_tensor(torch.empty(1, dtype=torch.int32))


def _another_shape(folder: Path) -> None:
    with edited_metadata(folder) as metadata:
        entry = metadata.state_dict_metadata[NORM]
        entry.size, entry.chunks = torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]


def _another_item(folder: Path) -> None:
    with edited_metadata(folder) as metadata:
        places = metadata.storage_data
        places[chunk_of(metadata, NORM)] = places[chunk_of(metadata, "lm_head.weight")]


def _bytes_item(folder: Path) -> None:
    with edited_metadata(folder) as metadata:
        places = metadata.storage_data
        places[chunk_of(metadata, NORM)] = places[chunk_of(metadata, "note")]


def _shifted(folder: Path) -> None:
    with edited_metadata(folder) as metadata:
        index = chunk_of(metadata, NORM)
        metadata.storage_data[index] = replace(metadata.storage_data[index], offset=5)


@pytest.mark.parametrize("change", [_another_dtype, _another_shape, _another_item, _bytes_item, _shifted])
def test_item_that_contradicts_the_metadata(change: Callable[[Path], None], small: State, tmp_path: Path) -> None:
    folder = save({**small, "note": "text"}, tmp_path / "ckpt")
    change(folder)
    refused(folder, StreammergeError, rf"{NORM} in .*__0_0\.distcp")


def test_chunk_that_is_stored_nowhere(saved_small: Path) -> None:
    with edited_metadata(saved_small) as metadata:
        del metadata.storage_data[chunk_of(metadata, GATE)]
    refused(saved_small, SourceError, rf"{GATE} at \[0, 0\] is listed, but stored nowhere")


@pytest.mark.parametrize("fault", ["hole", "overlap", "outside"])
def test_chunks_that_do_not_tile(fault: str, small: State, tmp_path: Path) -> None:
    source = tmp_path / "ckpt"
    save_ranks(source, 2, rows_of_rank(small, 2), lambda: dcp.FileSystemWriter(source))
    with edited_metadata(source) as metadata:
        first, second = metadata.state_dict_metadata[GATE].chunks
        index = next(i for i in metadata.storage_data if i.fqn == GATE and i.offset == second.offsets)
        place = metadata.storage_data.pop(index)
        moved = torch.Size([{"hole": 0, "overlap": 2, "outside": 4}[fault], 0])
        if fault == "hole":
            metadata.state_dict_metadata[GATE].chunks = [first]
        else:
            metadata.state_dict_metadata[GATE].chunks = [first, ChunkStorageMetadata(moved, second.sizes)]
            metadata.storage_data[replace(index, offset=moved)] = place
    refused(source, SourceError, rf"{GATE}: .*chunks of the checkpoint")


def test_flat_parameter(small: State, tmp_path: Path) -> None:
    refused(
        save({"model": {**small, "model._flat_param": torch.ones(3)}}, tmp_path / "c"), UnsupportedError, "_flat_param"
    )


def test_unknown_transform_is_named(saved_small: Path) -> None:
    with edited_metadata(saved_small) as metadata:
        index = chunk_of(metadata, NORM)
        metadata.storage_data[index] = replace(metadata.storage_data[index], transform_descriptors=["stream.lz4/9"])
    refused(saved_small, UnsupportedError, rf"{NORM} .*stream\.lz4/9")


def test_dtype_without_a_home(tmp_path: Path, small: State) -> None:
    folder = save({**small, "model.odd": torch.ones(2, dtype=torch.complex128)}, tmp_path / "ckpt")
    refused(folder, UnsupportedError, r"model\.odd.*complex128")


@pytest.fixture
def compressed(small: State, tmp_path: Path) -> Path:
    """The small state, each item a zstd stream."""
    source = tmp_path / "ckpt"
    return save(small, source, dcp.FileSystemWriter(source, _extensions=[ZStandard()]))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_compressed_items(compressed: Path, small: State, temporary: Path, tmp_path: Path) -> None:
    assert (compressed / "__0_0.distcp").read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert merged(compressed, tmp_path / "out") == raws(small)
    assert not list(temporary.iterdir())


def test_unfinished_merge_of_compressed_items_can_go_on(compressed: Path, temporary: Path) -> None:
    """The plan, by which an unfinished merge is recognised, does not depend on the temporary files of one run."""
    first, second = (streammerge.plan(compressed, "never").plan["fingerprint"] for _ in range(2))
    assert first == second
    (compressed / "__0_0.distcp").touch()
    assert streammerge.plan(compressed, "never").plan["fingerprint"] != first


def test_damaged_compressed_items(compressed: Path, temporary: Path) -> None:
    """Refused, and no temporary file stays."""
    path = compressed / "__0_0.distcp"
    content = path.read_bytes()
    with edited_metadata(compressed) as metadata:
        info = metadata.storage_data[chunk_of(metadata, NORM)]
    for damage in (bytes(8), content[info.offset : info.offset + 8], b"\x28\xb5\x2f\xfd\xff\xff\xff\xff"):
        place = slice(info.offset + info.length - 8, info.offset + info.length)
        changed = bytearray(content)
        changed[place] = damage
        changed[info.offset : info.offset + 8] = damage
        path.write_bytes(changed)
        refused(compressed, SourceError, rf"{NORM} in .*__0_0\.distcp")
        assert not list(temporary.iterdir())


def test_cut_compressed_item(compressed: Path, temporary: Path) -> None:
    with edited_metadata(compressed) as metadata:
        index = chunk_of(metadata, NORM)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(info, length=info.length - 9)
    refused(compressed, SourceError, rf"{NORM} in .*__0_0\.distcp")
    assert not list(temporary.iterdir())
