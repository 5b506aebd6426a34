"""Metadata of many chunks: what is remembered while it is read, and that plans are passed over."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from streammerge.errors import SourceError
from streammerge.sources.dcp_metadata import DcpMetadata, metadata_files, read_metadata
from streammerge.sources.pickle_reader import read_pickle


def _saved(folder: Path, count: int) -> Any:
    dcp.save({f"layer.{n}.weight": torch.zeros(n % 5 + 1, 3) for n in range(count)}, checkpoint_id=folder, no_dist=True)
    return dcp.FileSystemReader(folder).read_metadata()


def _with_plans(metadata: Any) -> Any:
    items = []
    for key, entry in metadata.state_dict_metadata.items():
        for chunk in entry.chunks:
            index = dcp.metadata.MetadataIndex(key, chunk.offsets, 0)
            data = TensorWriteData(chunk, entry.properties, entry.size)
            items.append(WriteItem(index, WriteItemType.TENSOR, tensor_data=data))
    metadata.all_local_plans = [SavePlan(items)]
    return metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("plans", [False, True])
def test_every_protocol_says_the_same(plans: bool, protocol: int, tmp_path: Path) -> None:
    metadata = _saved(tmp_path, 400)
    expected = read_metadata(metadata_files(tmp_path))
    if plans:
        metadata = _with_plans(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    found = read_metadata(metadata_files(tmp_path))
    assert _content(found) == _content(expected)
    assert len(found.tensors) == 400
    for (name,), tensor in found.tensors.items():
        number = int(name.split(".")[1])
        assert [chunk.box.shape for chunk in tensor.chunks] == [(number % 5 + 1, 3)]


def _content(metadata: DcpMetadata) -> object:
    return {path: (one.key, one.dtype, one.size, one.chunks) for path, one in metadata.tensors.items()}


def test_unwanted_tensors_are_passed_over(tmp_path: Path) -> None:
    _saved(tmp_path, 10)
    found = read_metadata(metadata_files(tmp_path), lambda key: key != "layer.3.weight")
    assert list(found.tensors) == [("layer.3.weight",)]
    assert len(found.passed_over) == 9


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_is_referred_to_later_is_remembered(protocol: int) -> None:
    """More entries than one byte can number, fetched in any order."""
    values = [f"value {n}" for n in range(3000)]
    data = pickle.dumps([values, [values[(n * 7919) % 3000] for n in range(3000)], values], protocol=protocol)
    root, _, _ = read_pickle(data, "here", {}, folds={})
    assert root == pickle.loads(data)


def test_a_reference_to_nothing_is_damage() -> None:
    for data in (b"\x80\x04]\x94j\xff\xff\xff\x7f.", b"\x80\x04]\x94h\x05.", b"\x80\x04]\x94j\x01"):
        with pytest.raises(SourceError, match="damaged"):
            read_pickle(data, "here", {}, folds={})
