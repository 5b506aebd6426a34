"""torch_dist and zarr folders as sources: what is a weight, what was interrupted, what is damaged."""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from streammerge.errors import SourceError, StreammergeError, UnsafeError, UnsupportedError
from streammerge.sources.open import open_source
from streammerge.sources.torch_dist import skip_reason
from tests.support.raw import materialise, of_torch

WEIGHTS = {
    "decoder.layers.self_attention.linear_qkv.weight": torch.arange(24.0).reshape(2, 4, 3),
    "decoder.final_layernorm.weight": torch.arange(3.0),
}
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
STATE: dict[str, Any] = {
    BUCKET: torch.zeros(7),
    "chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(3),
    "rng_state/shard_0_1": [None],
    "rerun_state_machine_state/shard_0.0_1.1": [None],
    "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": [None],
}


def _save(folder: Path, state: dict[str, Any], *, common: Any = None, finished: bool = True) -> Path:
    # Megatron's planner does not flatten: an object is stored whole, under its key.
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    if common is not None:
        torch.save(common, folder / "common.pt")
    if finished:
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


@pytest.mark.parametrize("generation", ["common.pt", "common_state"])
def test_weights_settings_and_what_is_skipped(generation: str, tmp_path: Path) -> None:
    common = {"args": Namespace(num_layers=2, kv_channels=None, swiglu=True), "iteration": 3}
    more = {"common_state/shard_0_1": [common]} if generation == "common_state" else {}
    folder = _save(
        tmp_path / "iter_0000003", {**WEIGHTS, **STATE, **more}, common=common if generation == "common.pt" else None
    )
    catalogue = open_source([tmp_path])
    paths = [file.path for file in catalogue.files]
    assert catalogue.format == "torch_dist"
    assert catalogue.root == folder
    assert {key: materialise(entry.tensor, paths) for key, entry in catalogue.entries.items()} == {
        key: of_torch(value) for key, value in WEIGHTS.items()
    }
    assert not any(entry.claims for entry in catalogue.entries.values())
    assert set(catalogue.skipped) == {*STATE, *more}
    assert catalogue.settings == {"num_layers": 2, "swiglu": True}


@pytest.mark.parametrize(
    "key",
    ["decoder.layers.0.optimizer_state.weight", "my_rng_state.weight", "extra_state_proj.weight", "optimizers.weight"],
)
def test_keys_are_skipped_by_structure_not_by_substring(key: str) -> None:
    assert skip_reason(key) is None


@pytest.mark.parametrize("left", ["nothing", "half a metadata.json"])
@pytest.mark.parametrize("generation", ["common.pt", "common_state"])
def test_interrupted_saves(generation: str, left: str, tmp_path: Path) -> None:
    common = {"iteration": 3}
    more = {"common_state/shard_0_1": [common]} if generation == "common_state" else {}
    folder = _save(tmp_path, {**WEIGHTS, **more}, common=None if more else common, finished=False)
    if left != "nothing":
        (folder / "metadata.json").write_text('{"sharded_back')
    with pytest.raises(SourceError, match=r"metadata\.json"):
        open_source([tmp_path])


def test_plain_dcp_stays_plain(tmp_path: Path) -> None:
    dcp.save({"model": dict(WEIGHTS)}, checkpoint_id=tmp_path, no_dist=True)
    assert open_source([tmp_path]).format == "dcp"


def test_no_byte_of_the_optimizer_is_needed(tmp_path: Path) -> None:
    """Its file may be lost: only the weights' files are looked at."""
    folder = _save(tmp_path, {**WEIGHTS, **STATE})
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for index, info in list(metadata.storage_data.items()):
        if index.fqn.startswith(("optimizer.", "chained_0.")):
            info.relative_path = "__9_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    assert set(open_source([tmp_path]).entries) == set(WEIGHTS)


def test_bridge_folders(tmp_path: Path) -> None:
    folder = _save(tmp_path / "iter_0000003", dict(WEIGHTS))
    (folder / "run_config.yaml").write_text(
        "model:\n  _target_: megatron.bridge.models.Llama\n  num_layers: 2\n  num_moe_experts: null\n"
        "  layernorm_zero_centered_gamma: true\n  share_embeddings_and_output_weights: false\n"
        "  init_method: !!python/object/apply:os.system ['touch HOSTILE']\n"
        "  activation_func: !!python/name:torch.nn.functional.silu ''\n"
    )
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    catalogue = open_source([tmp_path])
    assert catalogue.settings == {
        "_target_": "megatron.bridge.models.Llama",
        "num_layers": 2,
        "apply_layernorm_1p": True,
        "untie_embeddings_and_output_weights": True,
    }
    assert catalogue.hf_folder == folder / "hf"
    assert any("finished export" in warning for warning in catalogue.warnings)
    assert not Path("HOSTILE").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: !!timestamp x", "a: !!int ''", "a: !!float ''", "a: !!bool x", "a: [", "? [1]\n: 2", "!!set {a, b}: 1",
        "[" * 5000, "model: !!binary '*'", "model: !!omap [1]", "model: !!pairs x",
    ],
)  # fmt: skip
def test_malformed_yaml_is_an_error_of_the_file(text: str, tmp_path: Path) -> None:
    folder = _save(tmp_path, dict(WEIGHTS))
    (folder / "run_config.yaml").write_text(text)
    try:
        open_source([tmp_path])
    except StreammergeError as fault:
        assert "run_config.yaml" in str(fault)


def test_merge_keys_of_yaml_do_not_grow(tmp_path: Path) -> None:
    folder = _save(tmp_path, dict(WEIGHTS))
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 30)]
    (folder / "run_config.yaml").write_text("\n".join([*lines, "model: {num_layers: 2}"]))
    assert open_source([tmp_path]).settings == {"num_layers": 2}


class _Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch HOSTILE",)


@pytest.mark.parametrize("generation", ["common.pt", "common_state"])
def test_hostile_settings(generation: str, tmp_path: Path) -> None:
    common = {"args": Namespace(num_layers=_Hostile())}
    more = {"common_state/shard_0_1": [common]} if generation == "common_state" else {}
    _save(tmp_path, {**WEIGHTS, **more}, common=None if more else common)
    with pytest.raises(UnsafeError, match="system"):
        open_source([tmp_path])
    assert not Path("HOSTILE").exists()


def test_another_backend_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path, dict(WEIGHTS))
    (folder / "metadata.json").write_text('{"sharded_backend": "cloud"}')
    with pytest.raises(UnsupportedError, match="'cloud'"):
        open_source([tmp_path])


def test_damaged_archives_of_the_settings(tmp_path: Path) -> None:
    folder = _save(tmp_path, dict(WEIGHTS), common={"args": Namespace(num_layers=2)})
    whole = (folder / "common.pt").read_bytes()
    for size in (0, 1, 100, len(whole) - 1):
        (folder / "common.pt").write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"common\.pt"):
            open_source([tmp_path])


# zarr


def _write_array(folder: Path, key: str, values: np.ndarray[Any, Any], chunks: tuple[int, ...], **changed: Any) -> Path:
    """As zarr 2 does: a chunk at the edge has full size, with junk behind the array's end."""
    place = folder / key
    place.mkdir(parents=True)
    said = {
        "zarr_format": 2, "shape": list(values.shape), "chunks": list(chunks), "dtype": values.dtype.str,
        "compressor": None, "filters": None, "order": "C", "fill_value": None,
    }  # fmt: skip
    (place / ".zarray").write_text(json.dumps({**said, **changed}))
    for index in np.ndindex(*(-(-n // c) for n, c in zip(values.shape, chunks, strict=True))):
        full = np.full(chunks, 99, dtype=values.dtype)
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))]
        full[tuple(slice(0, n) for n in part.shape)] = part
        (place / (changed.get("dimension_separator", ".").join(map(str, index)))).write_bytes(full.tobytes())
    return place


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    torch.save({"args": Namespace(num_layers=2)}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return folder


VALUES = np.arange(35, dtype="<f4").reshape(5, 7)


def test_zarr_arrays_with_edges(zarr: Path, tmp_path: Path) -> None:
    _write_array(zarr, "decoder.final_layernorm.weight", VALUES, (2, 3))
    _write_array(zarr, "output_layer.weight", VALUES.astype("<i2"), (5, 4), dtype="bfloat16")
    _write_array(zarr, "optimizer.state.exp_avg.output_layer.weight", VALUES, (5, 7), compressor={"id": "zlib"})
    catalogue = open_source([tmp_path])
    paths = [file.path for file in catalogue.files]
    assert catalogue.format == "zarr"
    assert catalogue.settings == {"num_layers": 2}
    found = {key: materialise(entry.tensor, paths) for key, entry in catalogue.entries.items()}
    assert set(found) == {"decoder.final_layernorm.weight", "output_layer.weight"}
    assert found["decoder.final_layernorm.weight"] == of_torch(torch.from_numpy(VALUES))
    assert found["output_layer.weight"] == of_torch(torch.from_numpy(VALUES.astype("<i2")).view(torch.bfloat16))


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"compressor": {"id": "blosc"}}, UnsupportedError, "compressor"),
        ({"filters": [{"id": "delta"}]}, UnsupportedError, "filters"),
        ({"order": "F"}, UnsupportedError, "order"),
        ({"zarr_format": 3}, UnsupportedError, "zarr format 3"),
        ({"dtype": ">f4"}, UnsupportedError, "dtype"),
        ({"dtype": [["a", "<f4"]]}, UnsupportedError, "dtype"),
        ({"dtype": None}, UnsupportedError, "dtype"),
        ({"shape": [5, -7]}, SourceError, "sizes"),
        ({"shape": [5]}, SourceError, "sizes"),
        ({"shape": [5, 7.0]}, SourceError, "sizes"),
        ({"shape": {"a": 1}}, SourceError, "sizes"),
        ({"chunks": [0, 7]}, SourceError, "sizes"),
        ({"shape": [1 << 60, 1 << 60]}, SourceError, "more than any"),
        ({"shape": [7, 7], "chunks": [5, 7]}, SourceError, "1.0 is missing"),
        ({"dtype": "<f8"}, SourceError, "bytes where"),
    ],
)
def test_zarr_arrays_that_cannot_be_read(
    changed: dict[str, Any], error: type[Exception], match: str, zarr: Path, tmp_path: Path
) -> None:
    place = _write_array(zarr, "output_layer.weight", VALUES, (5, 7))
    said = json.loads((place / ".zarray").read_text())
    (place / ".zarray").write_text(json.dumps({**said, **changed}))
    with pytest.raises(error, match=match):
        open_source([tmp_path])


@pytest.mark.parametrize("content", ["", "[]", "1", '{"shape": 1}', "{" * 9999, "\xff"])
def test_zarr_metadata_that_is_none(content: str, zarr: Path, tmp_path: Path) -> None:
    place = _write_array(zarr, "output_layer.weight", VALUES, (5, 7))
    (place / ".zarray").write_text(content)
    with pytest.raises(SourceError, match=r"\.zarray"):
        open_source([tmp_path])


def test_a_hole_is_never_filled(zarr: Path, tmp_path: Path) -> None:
    place = _write_array(zarr, "output_layer.weight", VALUES, (2, 3), fill_value=0)
    (place / "1.1").unlink()
    with pytest.raises(SourceError, match=r"output_layer\.weight/1\.1 is missing"):
        open_source([tmp_path])


def test_a_zarr_save_that_was_interrupted(zarr: Path, tmp_path: Path) -> None:
    _write_array(zarr, "output_layer.weight", VALUES, (5, 7))
    (zarr / "metadata.json").unlink()
    with pytest.raises(SourceError, match=r"metadata\.json, which is written last"):
        open_source([tmp_path])
