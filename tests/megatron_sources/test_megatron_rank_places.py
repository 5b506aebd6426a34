"""Rank files of Megatron's torch format: what the folder names mean, and what is missing or does not belong."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from streammerge.errors import SourceError, UnsafeError, UnsupportedError
from streammerge.sources.open import open_source
from streammerge.tensors.catalogue import Catalogue
from tests.support.raw import materialise, of_torch

EMBEDDING = "embedding.word_embeddings.weight"


def _layers(count: int, value: float = 0.0) -> dict[str, Any]:
    return {f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.full((2, 3), value + n) for n in range(count)}


def _save(root: Path, label: str, model: Any, *, args: Mapping[str, object] | None = None, **more: Any) -> Path:
    path = root / "iter_0000007" / label / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    content = {"checkpoint_version": 3.0, "iteration": 7, "model": model, **more}
    if args is not None:
        content["args"] = Namespace(**args)
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return path


def _sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1, **more: object) -> dict[str, object]:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    return {**dict(zip(names, (tensor, pipeline, expert), strict=True)), **more}


def _open(root: Path) -> Catalogue:
    return open_source([root])


def _coordinates(catalogue: Catalogue, key: str) -> list[tuple[int, ...]]:
    return [claim.coordinate for claim in catalogue.entries[key].claims]


def test_every_entry_has_a_claim_with_the_bytes_of_its_file(tmp_path: Path) -> None:
    held = [_layers(1, 10.0 * rank) for rank in range(2)]
    for rank, model in enumerate(held):
        _save(tmp_path, f"mp_rank_{rank:02}", model, args=_sizes(2))
    catalogue = _open(tmp_path)
    (key,) = held[0]
    assert catalogue.format == "megatron"
    paths = [file.path for file in catalogue.files]
    for claim, model in zip(catalogue.entries[key].claims, held, strict=True):
        assert claim.axes == (2, 1)
        assert materialise(claim.tensor, paths) == of_torch(model[key])
    assert catalogue.settings["tensor_model_parallel_size"] == 2


@pytest.mark.parametrize("told_by", ["args", "contents"])
@pytest.mark.parametrize("kind", ["pipeline", "expert"])
def test_a_second_number_is_a_stage_or_an_expert_rank(kind: str, told_by: str, tmp_path: Path) -> None:
    args = _sizes(**{kind: 2}) if told_by == "args" else None
    for number in range(2):
        model = _layers(2, 10.0 * number)
        if kind == "expert" or number == 0:
            model[EMBEDDING] = torch.ones(4, 3)
        _save(tmp_path, f"mp_rank_00_{number:03}", model, args=args)
    catalogue = _open(tmp_path)
    numbers = sorted(int(key.split(".")[2]) for key in catalogue.entries if key.startswith("decoder"))
    assert numbers == (list(range(4)) if kind == "pipeline" else list(range(2)))
    expected = [(0, 0)] if kind == "pipeline" else [(0, 0), (0, 1)]
    assert _coordinates(catalogue, EMBEDDING) == expected


@pytest.mark.parametrize(("layers", "kind"), [(4, "pipeline"), (2, "expert"), (3, None), (None, None)])
def test_adapters_have_no_embedding_so_the_config_tells(layers: int | None, kind: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "actor" / "adapter_checkpoint"
    folder.mkdir(parents=True)
    for number in range(2):
        name = "decoder.layers.{}.mlp.linear_fc2.adapter.linear_in.weight"
        state = {name.format(n): torch.full((2, 3), 10.0 * number + n) for n in range(2)}
        torch.save({"adapter_state_dict": state}, folder / f"mp_rank_00_{number:03}_adapter.pt")
    if layers is not None:
        (tmp_path / "actor" / "huggingface").mkdir()
        (tmp_path / "actor" / "huggingface" / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    if kind is None:
        with pytest.raises(UnsupportedError, match="pipeline stage or an expert parallel rank"):
            _open(tmp_path / "actor")
        return
    catalogue = _open(tmp_path / "actor")
    assert len(catalogue.entries) == (4 if kind == "pipeline" else 2)
    assert catalogue.format == "megatron"


def test_adapters_of_virtual_stages_are_lost(tmp_path: Path) -> None:
    folder = tmp_path / "adapter_checkpoint"
    folder.mkdir()
    torch.save({"adapter_state_dict": _layers(1)}, folder / "mp_rank_00_adapter.pt")
    (tmp_path / "transformer_config.json").write_text(json.dumps({"virtual_pipeline_model_parallel_size": 2}))
    with pytest.raises(SourceError, match="first virtual pipeline chunk only"):
        _open(tmp_path)


@pytest.mark.parametrize("lost", ["mp_rank_00_000_001", "mp_rank_01_001_001"])
def test_with_a_known_expert_tensor_size_every_pair_is_needed(lost: str, tmp_path: Path) -> None:
    for tensor, stage, expert in [(t, p, e) for t in range(2) for p in range(2) for e in range(2)]:
        label = f"mp_rank_{tensor:02}_{stage:03}_{expert:03}"
        if label != lost:
            _save(tmp_path, label, _layers(1), args=_sizes(2, 2, 2, expert_tensor_parallel_size=2))
    with pytest.raises(SourceError, match=f"missing: {lost}"):
        _open(tmp_path)


def test_with_expert_tensor_size_one_the_grids_share_their_ranks(tmp_path: Path) -> None:
    for label in ("mp_rank_00_000", "mp_rank_01_001"):
        model = {**_layers(1), "decoder.layers.0.mlp.experts.linear_fc1.weight0": torch.ones(2, 2)}
        _save(tmp_path, label, model, args=_sizes(2, 1, 2, expert_tensor_parallel_size=1))
    catalogue = _open(tmp_path)
    assert _coordinates(catalogue, "decoder.layers.0.mlp.linear_fc2.weight") == [(0, 0), (1, 1)]
    assert _coordinates(catalogue, "decoder.layers.0.mlp.experts.linear_fc1.weight1") == [(1, 1)]


def test_gaps_in_the_numbers_are_missing_files(tmp_path: Path) -> None:
    for label in ("mp_rank_00", "mp_rank_02"):
        _save(tmp_path, label, {EMBEDDING: torch.ones(2, 2)})
    with pytest.raises(SourceError, match="mp_rank_01"):
        _open(tmp_path)


def test_an_empty_rank_folder_is_a_lost_file(tmp_path: Path) -> None:
    _save(tmp_path, "mp_rank_00", {EMBEDDING: torch.ones(2, 2)})
    (tmp_path / "iter_0000007" / "mp_rank_01").mkdir()
    (tmp_path / "iter_0000007" / "mp_rank_01" / "distrib_optim.pt").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"no model_optim_rng\.pt in mp_rank_01"):
        _open(tmp_path)


@pytest.mark.parametrize("second", ["mp_rank_000", "mp_rank_0"])
def test_two_folders_of_one_rank(second: str, tmp_path: Path) -> None:
    _save(tmp_path, "mp_rank_00", {EMBEDDING: torch.ones(2, 2)})
    _save(tmp_path, second, {EMBEDDING: torch.zeros(2, 2)})
    if second == "mp_rank_0":  # no name that Megatron gives
        assert len(_open(tmp_path).files) == 1
        return
    with pytest.raises(SourceError, match="of the same rank"):
        _open(tmp_path)


def test_names_of_two_kinds(tmp_path: Path) -> None:
    _save(tmp_path, "mp_rank_00", {EMBEDDING: torch.ones(2, 2)})
    _save(tmp_path, "mp_rank_01_000", {EMBEDDING: torch.ones(2, 2)})
    with pytest.raises(SourceError, match="two kinds"):
        _open(tmp_path)


def test_files_of_two_saves(tmp_path: Path) -> None:
    _save(tmp_path, "mp_rank_00", {EMBEDDING: torch.ones(2, 2)})
    _save(tmp_path, "mp_rank_01", {EMBEDDING: torch.ones(2, 2)}, iteration=8)
    with pytest.raises(SourceError, match="iteration 7, but mp_rank_01 of 8"):
        _open(tmp_path)


def test_ranks_with_different_numbers_of_experts(tmp_path: Path) -> None:
    for rank, count in enumerate((2, 1)):
        experts = {f"decoder.layers.0.mlp.experts.linear_fc1.weight{j}": torch.ones(2, 2) for j in range(count)}
        _save(tmp_path, f"mp_rank_00_{rank:03}", experts, args=_sizes(expert=2))
    with pytest.raises(SourceError, match="different numbers of experts"):
        _open(tmp_path)


def test_names_and_numbers_of_a_whole_grid(tmp_path: Path) -> None:
    """Two virtual chunks of uneven stages, one of them empty; local experts in both spellings; wrappers stripped."""
    counts = {(0, 0): 1, (0, 1): 3, (1, 0): 0, (1, 1): 2}
    at = 0
    expected: dict[str, float] = {}
    chunks: dict[tuple[int, int], dict[str, Any]] = {}
    for place, count in sorted(counts.items()):
        chunks[place] = {}
        for n in range(count):
            chunks[place][f"module.module.decoder.layers.{n}.input_layernorm.weight"] = torch.full((2,), float(at))
            expected[f"decoder.layers.{at}.input_layernorm.weight"] = float(at)
            at += 1
    chunks[1, 1] |= {f"mtp.layers.{k}.enorm.weight": torch.full((2,), 50.0 + k) for k in range(2)}
    expected |= {f"mtp.layers.{k}.enorm.weight": 50.0 + k for k in range(2)}
    for stage in range(2):
        models = {f"model{v}": chunks[v, stage] for v in range(2)}
        _save(tmp_path, f"mp_rank_00_{stage:03}", None, args=_sizes(pipeline=2), **models)
    catalogue = _open(tmp_path)
    paths = [file.path for file in catalogue.files]
    found = {key: materialise(entry.tensor, paths) for key, entry in catalogue.entries.items()}
    assert found == {key: of_torch(torch.full((2,), value)) for key, value in expected.items()}


@pytest.mark.parametrize("form", ["experts.local_experts.{}.linear_fc1.weight", "experts.linear_fc1.bias{}"])
def test_experts_get_global_numbers(form: str, tmp_path: Path) -> None:
    key = "language_model.decoder.layers.0.mlp." + form
    for rank in range(3):
        model = {key.format(j): torch.full((2,), 10.0 * rank + j) for j in range(2)}
        _save(tmp_path, f"mp_rank_00_{rank:03}", model, args=_sizes(expert=3))
    catalogue = _open(tmp_path)
    paths = [file.path for file in catalogue.files]
    for number in range(6):
        entry = catalogue.entries[key.format(number)]
        assert [claim.coordinate for claim in entry.claims] == [(0, number // 2)]
        assert materialise(entry.tensor, paths) == of_torch(torch.full((2,), 10.0 * (number // 2) + number % 2))


def test_a_later_stages_copy_is_compared(tmp_path: Path) -> None:
    for tensor in range(2):
        for stage in range(2):
            model = {EMBEDDING: torch.full((2, 2), float(tensor)), **_layers(1)}
            _save(tmp_path, f"mp_rank_{tensor:02}_{stage:03}", model, args=_sizes(2, 2))
    catalogue = _open(tmp_path)
    assert _coordinates(catalogue, EMBEDDING) == [(0, 0), (1, 0)]
    checks = [check for check in catalogue.checks if check.name == EMBEDDING]
    assert len(checks) == 2
    assert all(check.tolerated for check in checks)


def test_extra_state_optimizer_and_rng_are_left_alone(tmp_path: Path) -> None:
    model = {
        **_layers(1),
        "decoder.layers.0.self_attention.core_attention._extra_state": None,
        "decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(3, dtype=torch.uint8),
        "decoder.layers.0.mlp.experts.linear_fc1._extra_state1": io.BytesIO(b"x"),
    }
    path = _save(tmp_path, "mp_rank_00", model, optimizer={"state": {0: torch.zeros(9)}}, rng_state=[{"cuda": None}])
    (path.parent / "distrib_optim.pt").write_bytes(b"no archive")
    (tmp_path / "non_persistent" / "iter_0000009" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "non_persistent" / "iter_0000009" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"no archive")
    catalogue = _open(tmp_path)
    assert list(catalogue.entries) == list(_layers(1))
    assert len(catalogue.skipped) == 3


def test_the_release_folder_and_nested_dicts_of_old_versions(tmp_path: Path) -> None:
    layer = OrderedDict({"layers.0.self_attention.query_key_value.weight": torch.ones(6, 2)})
    nested = {"language_model": {"embedding": {"word_embeddings": {"weight": torch.ones(4, 2)}}, "encoder": layer}}
    path = tmp_path / "release" / "mp_rank_00" / "model_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"model": nested, "checkpoint_version": 2.0}, path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert set(_open(tmp_path).entries) == {
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.layers.0.self_attention.query_key_value.weight",
    }


@pytest.mark.parametrize("version", [None, 0, 1.0, "3"])
def test_old_orders_of_rows_are_refused(version: object, tmp_path: Path) -> None:
    model = {"language_model": {"encoder": {"layers.0.attention.query_key_value.weight": torch.ones(6, 2)}}}
    _save(tmp_path, "mp_rank_00", model, checkpoint_version=version)
    with pytest.raises(UnsupportedError, match="orders q, k and v in another way"):
        _open(tmp_path)


def test_verls_own_models_are_refused_in_any_stage(tmp_path: Path) -> None:
    folder = tmp_path / "actor" / "model"
    for stage, names in enumerate(([EMBEDDING], ["model.layers.0.self_attn.qkv_proj.weight"])):
        path = folder / f"mp_rank_00_{stage:03}" / "model.pt"
        path.parent.mkdir(parents=True)
        torch.save([{name: torch.ones(2, 2) for name in names}], path)
    with pytest.raises(UnsupportedError, match="qkv_proj"):
        _open(tmp_path)


class _Enum:
    """Pickled as Python 3.11.2 pickles a member of an enum: ``getattr(class, name)``."""

    def __init__(self, owner: type, name: str) -> None:
        self._made = (getattr, (owner, name))

    def __reduce__(self) -> Any:
        return self._made


class AttnBackend:
    """Stands for Megatron's enum of that name."""

    auto = 1


def test_enums_in_args_are_plain_data(tmp_path: Path) -> None:
    args: dict[str, Any] = {**_sizes(), "attention_backend": _Enum(AttnBackend, "auto"), "num_layers": 1}
    _save(tmp_path, "mp_rank_00", _layers(1), args=args)
    assert _open(tmp_path).settings["num_layers"] == 1


@pytest.mark.parametrize("owner", [io.BytesIO, Path])
def test_members_of_the_standard_library_are_not(owner: type, tmp_path: Path) -> None:
    args: dict[str, Any] = {**_sizes(), "attention_backend": _Enum(owner, "read")}
    _save(tmp_path, "mp_rank_00", _layers(1), args=args)
    with pytest.raises(UnsafeError, match="getattr"):
        _open(tmp_path)
