"""Checkpoints of three communicating processes (gloo), each saved by the framework's own calls.

python -m tests.dcp.dcp_real_ranks HF_FOLDER OUT
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.dcp.dcp_support import module_of, stepped

__all__ = ["WORLD", "run_ranks"]

WORLD = 3
_ROOT = Path(__file__).parents[2]


def run_ranks(hf_folder: Path, out: Path) -> None:
    """Save everything in a process of its own that forks the ranks."""
    command = [sys.executable, "-m", "tests.dcp.dcp_real_ranks", str(hf_folder), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


def _fsdp2(state: dict[str, torch.Tensor], out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = module_of(state)
    fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = stepped(module)
    for name, flat in (("nested", False), ("flat", True)):
        model, optim = get_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        dcp.save({"model": model, "optimizer": optim, "step": 7}, checkpoint_id=out / name)
    model, optim = get_state_dict(module, optimizer)
    dcp.save({"model": model}, checkpoint_id=out / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optim}, checkpoint_id=out / "accelerate" / "optimizer_0")
    dcp.async_save({"model": model}, checkpoint_id=out / "async").result()
    dcp.save({"model": model}, checkpoint_id=out / "rank_local", use_collectives=False)
    dcp.save(model, storage_writer=dcp.HuggingFaceStorageWriter(str(out / "hf"), save_distributed=True))


def _fsdp1(state: dict[str, torch.Tensor], out: Path) -> None:
    """The ShardedTensors of FSDP1's SHARDED_STATE_DICT."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    module = FullyShardedDataParallel(module_of(state), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": module.state_dict()}, checkpoint_id=out / "fsdp1")
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        dcp.save({"model": module.state_dict()}, checkpoint_id=out / "fsdp1_flat")


def _pipeline(state: dict[str, torch.Tensor], out: Path) -> None:
    """Each rank holds other parameters, and one holds none."""
    stage = dist.get_rank()
    own = {name: tensor for name, tensor in state.items() if (".layers.1." in name) == (stage == 1) and stage < 2}
    dcp.save({"model": own, "empty": {}}, checkpoint_id=out / "pipeline")


def _rank(rank: int, hf_folder: Path, out: Path) -> None:
    from safetensors.torch import load_file

    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=WORLD)
    state = load_file(hf_folder / "model.safetensors")
    for save in (_fsdp2, _fsdp1, _pipeline):
        save(state, out)
    dist.barrier()
    dist.destroy_process_group()


def _main(hf_folder: Path, out: Path) -> None:
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(rank, hf_folder, out)
                code = 0
            finally:
                sys.excepthook(*sys.exc_info()) if code else None
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
