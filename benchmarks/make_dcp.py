"""Turn rank files into a PyTorch DCP folder of the same tensors, saved by as many gloo processes as there are ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.contenders import rank_files

__all__ = ["make_dcp"]


def make_dcp(source: Path, out: Path) -> None:
    """Save the checkpoint ``source`` (rank files on a 1-D mesh) as accelerate would: ``{"model": state dict}``."""
    files = rank_files(source)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_save, args=(files, out, port), nprocs=len(files))  # type: ignore[no-untyped-call]


def _save(rank: int, files: list[Path], out: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(len(files)))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (len(files),), mesh_dim_names=("fsdp",))
    path = next(file for file in files if file.name.endswith(f"_rank_{rank}.pt"))
    stored = torch.load(path, weights_only=False, mmap=True)
    state = {name: _on_mesh(value, mesh) for name, value in stored.items()}
    dcp.save({"model": state}, checkpoint_id=out)
    dist.destroy_process_group()


def _on_mesh(value: torch.Tensor, mesh: dist.device_mesh.DeviceMesh) -> torch.Tensor:
    """The same shard on a mesh of this process group; the one that was loaded belongs to none."""
    if not isinstance(value, DTensor):
        return value
    return DTensor.from_local(
        value._local_tensor, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
def main(source: Path, out: Path) -> None:
    """Save the rank files below SOURCE as a DCP folder OUT."""
    make_dcp(source, out)
    click.echo(f"{sum(path.stat().st_size for path in out.iterdir())} bytes in {out}")


if __name__ == "__main__":
    main()
