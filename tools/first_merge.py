"""Make a small real FSDP checkpoint, merge it and show that the result is the model it came from.

A tiny Qwen2 model is sharded over 8 ranks by torch's own DTensor (a fake process group writes the
rank files of any world size from one process), merged by the ``streammerge`` command under a budget
of 512 MB, loaded with transformers, and its logits are compared with those of the model before it
was sharded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.sharding import fake_rank

WORLD_SIZE = 8


def make_model() -> PreTrainedModel:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1031,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).eval()


def save_sharded(model: PreTrainedModel, folder: Path) -> None:
    """Write the rank files that FSDP2 would write, and the config beside them, as verl does."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "huggingface")
    for rank in range(WORLD_SIZE):
        with fake_rank(rank, WORLD_SIZE):
            mesh = torch.distributed.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
            shards = {name: _shard(tensor, mesh, rank) for name, tensor in model.state_dict().items()}
            torch.save(shards, folder / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")


def _shard(tensor: torch.Tensor, mesh: torch.distributed.device_mesh.DeviceMesh, rank: int) -> DTensor:
    chunks = list(torch.chunk(tensor, WORLD_SIZE))
    empty = tensor.new_empty((0, *tensor.shape[1:]))
    local = (chunks + [empty] * WORLD_SIZE)[rank].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def main() -> None:
    """Shard, merge, load, compare."""
    model = make_model()
    tokens = torch.arange(64).reshape(2, 32)
    with tempfile.TemporaryDirectory() as scratch:
        source, merged = Path(scratch, "global_step_1", "actor"), Path(scratch, "merged")
        save_sharded(model, source)
        print(f"$ streammerge --max-ram 512M {source} {merged}", flush=True)
        subprocess.run([sys.executable, "-m", "streammerge", "--max-ram", "512M", str(source), str(merged)], check=True)
        loaded = AutoModelForCausalLM.from_pretrained(merged).eval()
        with torch.no_grad():
            before, after = model(tokens).logits, loaded(tokens).logits
    print(f"logits before sharding: {before[0, -1, :4].tolist()}")
    print(f"logits after merging:   {after[0, -1, :4].tolist()}")
    if not torch.equal(before, after):
        sys.exit("they differ")
    print("equal")


if __name__ == "__main__":
    main()
