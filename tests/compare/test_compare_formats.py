"""Any two checkpoints in any formats: real ones of several frameworks, and the model they must become."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import streammerge as sm
from tests.support.data import DATA, PARTIAL

NAMES = sorted(path.name for path in DATA.iterdir() if path.name not in (PARTIAL, "ptcases"))


def spoiled(name: str, target: Path) -> tuple[Path, str]:
    """The expected model with the last bit of one element flipped; the folder and the tensor's name."""
    shutil.copytree(DATA / name / "expected", target, copy_function=shutil.copyfile)
    weights = load_file(target / "model.safetensors")
    chosen = max(weights, key=lambda key: (weights[key].numel(), key))
    words = weights[chosen].view(torch.int16 if weights[chosen].element_size() == 2 else torch.int32)
    words.view(-1)[-1] ^= 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, chosen


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_equals_its_model(name: str) -> None:
    weights = load_file(DATA / name / "expected" / "model.safetensors")
    for report in (
        sm.compare(DATA / name / "ckpt", DATA / name / "expected"),
        sm.compare(DATA / name / "expected", DATA / name / "ckpt"),
        sm.test(DATA / name / "ckpt", DATA / name / "expected"),
    ):
        assert report.equal, report
        assert report.compared >= len(weights)
        assert report.elements >= sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    reference, changed = spoiled(name, tmp_path / "reference")
    last = tuple(size - 1 for size in load_file(reference / "model.safetensors")[changed].shape)
    for report in (sm.compare(DATA / name / "ckpt", reference), sm.test(DATA / name / "ckpt", reference)):
        assert not report.equal
        found = {tensor.name: tensor for tensor in report.tensors}
        assert changed in found
        assert (found[changed].first, found[changed].differing) == (last, 1)
        others = set(found) - {changed}
        assert others <= {"lm_head.weight", "model.embed_tokens.weight"}  # tied to the changed one


def test_order_of_arguments(tmp_path: Path) -> None:
    """The other order gives the same findings, mirrored."""
    name = "fsdp2_w2_named_params"
    reference, changed = spoiled(name, tmp_path / "reference")
    ours = sm.compare(DATA / name / "ckpt", reference).tensors[0]
    theirs = sm.compare(reference, DATA / name / "ckpt").tensors[0]
    assert ours.values is not None and theirs.values is not None
    assert (ours.name, ours.values) == (changed, theirs.values[::-1])
    assert (ours.first, ours.max_abs) == (theirs.first, theirs.max_abs)


@pytest.mark.parametrize("shards", ["1KB", "2KB", "5GB"])
def test_two_folders_with_other_shards(save_model: Callable[..., Path], shards: str) -> None:
    first, second = save_model(1), save_model(1, shards)
    assert (len(list(second.glob("*.safetensors"))) > 1) == (shards != "5GB")
    assert sm.compare(first, second).equal
    assert not sm.compare(first, save_model(2, shards)).equal


def test_rank_files_and_dcp(tmp_path: Path) -> None:
    """The same tensors as rank files and as a DCP folder."""
    from torch.distributed.checkpoint import save

    weights = load_file(DATA / "fsdp2_w2_named_params" / "expected" / "model.safetensors")
    save(dict(weights), checkpoint_id=tmp_path / "dcp", no_dist=True)
    ranks = DATA / "fsdp2_w2_named_params" / "ckpt"
    assert sm.compare(ranks, tmp_path / "dcp").equal
    assert sm.compare(tmp_path / "dcp", ranks).equal
    weights["model.norm.weight"][3] += 1
    save(dict(weights), checkpoint_id=tmp_path / "other", no_dist=True)
    report = sm.compare(ranks, tmp_path / "other")
    assert [(tensor.name, tensor.first) for tensor in report.tensors] == [("model.norm.weight", (3,))]


@pytest.mark.parametrize("io", ["auto", "direct", "pread", "mmap"])
def test_every_route_and_number_of_workers(io: str, tmp_path: Path) -> None:
    """The same report, whoever reads and however."""
    name = "fsdp2_tp_3x2_uneven_v133"
    reference, _ = spoiled(name, tmp_path / "reference")
    first = sm.compare(DATA / name / "ckpt", reference, workers=1)
    for workers in (1, 2, 5):
        report = sm.compare(DATA / name / "ckpt", reference, workers=workers, io=io)
        assert replace(report, peak_rss=first.peak_rss).to_dict() == first.to_dict()


def test_values_that_cannot_be_merged_are_not_compared() -> None:
    with pytest.raises(sm.StreammergeError, match="Partial"):
        sm.compare(DATA / PARTIAL / "ckpt", DATA / PARTIAL / "expected")
