"""DCP's Hugging Face storage: shards per rank that say where they start, with and without consolidated files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import streammerge
from streammerge.errors import SourceError, StreammergeError
from tests.dcp.dcp_support import State, logits, merged, raws, rows_of_rank, save_ranks
from tests.support.raw import read_folder

LAST = "shard-00003-model-00001-of-00001.safetensors"


def write(state: State, folder: Path, world: int = 3, **options: object) -> Path:
    """Shards of these ranks."""

    def writer() -> dcp.HuggingFaceStorageWriter:
        return dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, **options)  # type: ignore[arg-type]

    (folder / "sharded" if options.get("enable_consolidation") else folder).mkdir(parents=True)
    return save_ranks(folder, world, rows_of_rank(state, world), writer)


@pytest.fixture
def shards(weights_of: State, tmp_path: Path) -> Path:
    """The Qwen2 model in three shards."""
    return write(weights_of, tmp_path / "ckpt")


def test_shards(shards: Path, hf_folder: Path, tmp_path: Path) -> None:
    found = merged(shards, tmp_path / "out", hf_config=hf_folder)
    assert found == read_folder(hf_folder)
    assert torch.equal(logits(tmp_path / "out"), logits(hf_folder))


def test_shards_over_several_files(weights_of: State, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write(weights_of, folder, fqn_to_index_mapping={name: 1 + i % 2 for i, name in enumerate(weights_of)})
    assert len(list(folder.iterdir())) == 6
    assert merged(folder, tmp_path / "out") == raws(weights_of)


def test_beside_consolidated_files(weights_of: State, hf_folder: Path, tmp_path: Path) -> None:
    folder = write(weights_of, tmp_path / "ckpt", enable_consolidation=True)
    assert {path.name for path in folder.iterdir()} >= {"sharded", "model.safetensors.index.json"}
    found = merged(folder, tmp_path / "out", hf_config=hf_folder)
    assert found == read_folder(hf_folder)


def test_scalars_that_torch_loses(small: State, tmp_path: Path) -> None:
    """torch's own consolidation writes 0 for 0-dim tensors (2.13); the merge does not."""
    folder = write(small, tmp_path / "ckpt", enable_consolidation=True)
    theirs = {name: t for path in folder.glob("model-*.safetensors") for name, t in load_file(path).items()}
    if torch.__version__.startswith("2.13."):
        assert theirs["model.scale"].item() == 0.0
    assert torch.equal(theirs["model.norm.weight"], small["model.norm.weight"])
    assert merged(folder, tmp_path / "out") == raws(small)


def test_missing_last_shard_is_caught_by_the_class(shards: Path, hf_folder: Path, tmp_path: Path) -> None:
    """Nothing in the other shards says that there was one more."""
    (shards / LAST).unlink()
    assert any("missing last shard" in warning for warning in streammerge.inspect(shards).warnings)
    with pytest.raises(SourceError, match="wrong shape"):
        merged(shards, tmp_path / "out", hf_config=hf_folder, check=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [1, 2])
def test_missing_earlier_shard(number: int, shards: Path, tmp_path: Path) -> None:
    (shards / f"shard-{number:05}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(SourceError, match="elements are missing"):
        merged(shards, tmp_path / "out")


def test_missing_file_of_a_shard(weights_of: State, tmp_path: Path) -> None:
    """File names say how many there are per rank; the tensors of a missing one would be left out in silence."""
    folder = tmp_path / "ckpt"
    write(weights_of, folder, fqn_to_index_mapping={name: 1 + i % 2 for i, name in enumerate(weights_of)})
    for path in folder.glob("*-model-00002-of-00002.safetensors"):
        path.unlink()
    with pytest.raises(SourceError, match="00002-of-00002"):
        merged(folder, tmp_path / "out")


def test_fused_experts_are_written_one_by_one(tmp_path: Path) -> None:
    """torch consolidates under the names in memory, which are not those of `save_pretrained`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=20, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=19, num_experts=4, num_experts_per_tok=2, dtype=torch.float32,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "wanted")
    folder = write(dict(model.state_dict()), tmp_path / "ckpt")
    names = {name for path in folder.iterdir() for name in load_file(path)}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    found = merged(folder, tmp_path / "out", hf_config=tmp_path / "wanted")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in found
    assert found == read_folder(tmp_path / "wanted")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "wanted"))


def rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """A shard with another DCP_SHARDING_INFO."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    info = json.loads(metadata["DCP_SHARDING_INFO"])
    metadata["DCP_SHARDING_INFO"] = json.dumps(change(info))
    save_file(load_file(path), path, metadata)


def _without(info: dict[str, object]) -> object:
    info.pop("model.norm.weight")
    return info


_INFOS: dict[str, Callable[[dict[str, object]], object]] = {
    "a name is missing": _without,
    "negative": lambda info: info | {"model.norm.weight": {"saved_offsets": [-1]}},
    "huge": lambda info: info | {"model.norm.weight": {"saved_offsets": [2**63]}},
    "large": lambda info: info | {"model.norm.weight": {"saved_offsets": [2**60]}},
    "too many dims": lambda info: info | {"model.norm.weight": {"saved_offsets": [0, 0]}},
    "a text": lambda info: info | {"model.norm.weight": {"saved_offsets": "0"}},
    "a float": lambda info: info | {"model.norm.weight": {"saved_offsets": [0.5]}},
    "a number": lambda info: info | {"model.norm.weight": 3},
    "a list": lambda info: [],
    "null": lambda info: None,
    "overlapping": lambda info: info | {"model.norm.weight": {"saved_offsets": [1]}},
}


@pytest.mark.parametrize("case", _INFOS)
def test_places_that_cannot_be(case: str, shards: Path, tmp_path: Path) -> None:
    rewritten(shards / LAST, _INFOS[case])
    with pytest.raises(StreammergeError, match=r"shard-00003|model\.norm\.weight"):
        merged(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_sharding_info(shards: Path, tmp_path: Path) -> None:
    save_file(load_file(shards / LAST), shards / LAST, {"format": "pt"})
    with pytest.raises(SourceError, match=r"shard-00003.*DCP_SHARDING_INFO"):
        merged(shards, tmp_path / "out")


def test_truncated_shard(shards: Path, tmp_path: Path) -> None:
    size = (shards / LAST).stat().st_size
    for length in (size - 1, size // 2, 9, 3, 0):
        os.truncate(shards / LAST, length)
        with pytest.raises(SourceError, match="shard-00003"):
            merged(shards, tmp_path / "out")
