"""Write a verl FSDP2 checkpoint of any shape in one process, as input for benchmarks.

The rank files are written by torch itself: real DTensors under torch's fake process group. The layout is the
one of verl's FSDPCheckpointManager: OUT/latest_checkpointed_iteration.txt and, in OUT/global_step_1/actor,
`model_world_size_W_rank_R.pt`, `fsdp_config.json` and `huggingface/`.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from benchmarks.shapes import PRESETS, ModelShape, TensorSpec, model_shape, preset_config
from benchmarks.sharding import (
    Box,
    MeshKind,
    MeshShape,
    Role,
    contiguous_stride,
    device_meshes,
    fake_rank,
    local_box,
    placements,
    tensor_role,
)
from benchmarks.values import fill_range, global_tensor

__all__ = ["DTYPES", "Written", "disk_bytes", "global_tensor", "make_checkpoint", "rank_file"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Written:
    """What was made. `model_bytes` counts tied parameters and replicas once; the others sum up files."""

    actor: Path
    model_bytes: int
    file_bytes: int
    disk_bytes: int
    seconds: float


def make_checkpoint(
    out: Path,
    config: PretrainedConfig,
    *,
    world_size: int,
    dtype: torch.dtype = torch.float32,
    mesh: MeshKind = "fsdp",
    seed: int = 0,
    sparse: bool = False,
) -> Written:
    """Write a checkpoint of the model of `config` under `out`, which must hold none yet.

    RAM is bounded by about one rank's data. With `sparse`, the data of every storage is a hole in the file
    (read as zeros): neither disk blocks nor RAM are used for it, and `seed` has no effect.
    """
    started = time.monotonic()
    mesh_shape = MeshShape(mesh, world_size)
    model = model_shape(config, dtype)
    actor = out / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    for rank in range(world_size):
        _write_rank(rank_file(actor, world_size, rank), model, mesh_shape, rank, None if sparse else seed)
    _write_companions(out, actor, model.config, world_size)
    files = [path for path in out.rglob("*") if path.is_file()]
    return Written(
        actor=actor,
        model_bytes=model.nbytes,
        file_bytes=sum(path.stat().st_size for path in files),
        disk_bytes=sum(map(disk_bytes, files)),
        seconds=time.monotonic() - started,
    )


def rank_file(actor: Path, world_size: int, rank: int) -> Path:
    """Path of the model file of `rank`, named as verl names it."""
    return actor / f"model_world_size_{world_size}_rank_{rank}.pt"


def disk_bytes(path: Path) -> int:
    """Bytes of disk blocks behind `path`; less than its size if it has holes (st_blocks counts 512 bytes)."""
    return path.stat().st_blocks * 512


def _write_rank(path: Path, model: ModelShape, mesh: MeshShape, rank: int, seed: int | None) -> None:
    with fake_rank(rank, mesh.world_size):
        # copy.copy keeps the `_metadata` attribute, OrderedDict.copy drops it.
        state = copy.copy(model.template)
        state.update(_rank_entries(model, mesh, rank, seed))
        with skip_data() if seed is None else nullcontext():
            torch.save(state, path)


def _rank_entries(
    model: ModelShape, mesh: MeshShape, rank: int, seed: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    meshes = device_meshes(mesh)
    locals_by_source: dict[str, torch.Tensor] = {}
    for spec in model.specs:
        if spec.is_buffer:
            yield spec.name, _local_tensor(spec, _whole(spec), seed)
            continue
        # Tied parameters share one local tensor, hence one storage in the file, as FSDP2 leaves them.
        role = tensor_role(spec.source, mesh.kind)
        local = locals_by_source.get(spec.source)
        if local is None:
            box = local_box(spec.shape, role, mesh, rank)
            local = locals_by_source[spec.source] = _local_tensor(spec, box, seed)
        yield spec.name, _dtensor(spec, local, meshes[role], role, mesh.kind)


def _whole(spec: TensorSpec) -> Box:
    return Box(range(spec.shape[0]), None, spec.shape[0])


def _dtensor(spec: TensorSpec, local: torch.Tensor, mesh: DeviceMesh, role: Role, kind: MeshKind) -> DTensor:
    return DTensor.from_local(
        local,
        mesh,
        placements(role, kind),
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=contiguous_stride(spec.shape),
    )


def _local_tensor(spec: TensorSpec, box: Box, seed: int | None) -> torch.Tensor:
    width = spec.shape[1:] if box.columns is None else (len(box.columns), *spec.shape[2:])
    storage = torch.empty((box.padded_rows, *width), dtype=spec.dtype)
    local = storage[: len(box.rows)]
    if seed is not None:
        _fill(local, spec, box, seed)
        storage[len(box.rows) :] = 0
    return local


def _fill(local: torch.Tensor, spec: TensorSpec, box: Box, seed: int) -> None:
    start = box.rows.start * torch.Size(spec.shape[1:]).numel()
    if box.columns is None:
        fill_range(local.view(-1), spec.source, start, seed)
        return
    rows = torch.empty((len(box.rows), *spec.shape[1:]), dtype=spec.dtype)
    fill_range(rows.view(-1), spec.source, start, seed)
    local.copy_(rows[:, box.columns.start : box.columns.stop])


def _write_companions(out: Path, actor: Path, config: PretrainedConfig, world_size: int) -> None:
    (out / "latest_checkpointed_iteration.txt").write_text("1")
    fsdp_config = {"FSDP_version": 2, "world_size": world_size}
    (actor / "fsdp_config.json").write_text(json.dumps(fsdp_config, indent=4))
    folder = actor / "huggingface"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    # Bytes without merges: a word-level one is turned into an empty one by AutoTokenizer for Qwen2 models.
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast_tokenizer: Any = PreTrainedTokenizerFast
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast_tokenizer(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), required=True, help="Shape of the model.")
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Number of rank files.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32", show_default=True)
@click.option("--mesh", type=click.Choice(get_args(MeshKind)), default="fsdp", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the values.")
@click.option("--sparse", is_flag=True, help="Leave the data as holes: no disk, no RAM, all zeros.")
def main(out: Path, preset: str, world_size: int, dtype: str, mesh: MeshKind, seed: int, sparse: bool) -> None:
    """Write a verl FSDP2 checkpoint with the shape of a well-known model under OUT."""
    try:
        written = make_checkpoint(
            out,
            preset_config(preset),
            world_size=world_size,
            dtype=DTYPES[dtype],
            mesh=mesh,
            seed=seed,
            sparse=sparse,
        )
    except (ValueError, FileExistsError) as error:
        raise click.ClickException(str(error)) from error
    gigabytes = [n / 1e9 for n in (written.model_bytes, written.file_bytes, written.disk_bytes)]
    click.echo(f"{written.actor}: ", nl=False)
    click.echo("model {:.3f} GB, files {:.3f} GB, disk {:.3f} GB, ".format(*gigabytes), nl=False)
    click.echo(f"{written.seconds:.1f} s")


if __name__ == "__main__":
    main()
