"""Write DCP folders with torch's own planners and writers, and merge them in one call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from benchmarks.sharding import fake_rank
from tests.support.ranks import Cut, Mesh, sharded
from tests.support.raw import Raw, of_torch, read_folder
from tests.support.results import merge_tightly

__all__ = [
    "State", "chunk_of", "cut_in_rows", "edited_metadata", "logits", "merged", "module_of", "raws", "rows_of_rank",
    "save", "save_ranks", "stepped",
]  # fmt: skip

State = dict[str, torch.Tensor]


def save(state: Mapping[str, Any], folder: Path, writer: Any = None, **options: Any) -> Path:
    """`dcp.save` in this process alone; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(dict(state), checkpoint_id=None if writer else folder, storage_writer=writer, no_dist=True, **options)
    return folder


def save_ranks(folder: Path, world: int, state: Callable[[int], dict[str, Any]], writer: Callable[[], Any]) -> Path:
    """What `dcp.save` does on `world` ranks, step by step and rank by rank.

    Args:
        state: the state dict of a rank, made within its fake process group.
        writer: makes the storage writer of a rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planners, writers, plans = [DefaultSavePlanner() for _ in range(world)], [writer() for _ in range(world)], []
    for rank, (planner, storage) in enumerate(zip(planners, writers, strict=True)):
        with fake_rank(rank, world):
            planner.set_up_planner(state(rank), storage.storage_meta(), rank == 0)
            storage.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(storage.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    results = []
    for plan, planner, storage in zip(writers[0].prepare_global_plan(plans), planners, writers, strict=True):
        results.append(storage.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)
    return folder


def cut_in_rows(state: State) -> dict[str, Cut]:
    """Everything is cut along dim 0, as FSDP2 does; scalars are not."""
    return {name: Cut({0: (0,)} if tensor.dim() else {}) for name, tensor in state.items()}


def rows_of_rank(state: State, world: int) -> Callable[[int], dict[str, Any]]:
    """For `save_ranks`: the FSDP2 shards of a rank."""
    mesh, cuts = Mesh((world,)), cut_in_rows(state)
    return lambda rank: {n: sharded(t, cuts[n], mesh, mesh.build(), rank) for n, t in state.items()}


def module_of(state: State) -> torch.nn.Module:
    """A module with these parameters."""
    model = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return model


def stepped(model: torch.nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, lr: Any = 1e-3) -> Any:
    """An optimizer after one step, with whatever state it keeps."""
    optimizer = kind(model.parameters(), lr=lr, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def raws(state: Mapping[str, torch.Tensor]) -> dict[str, Raw]:
    """What a merge of the state dict has to give."""
    return {name: of_torch(tensor) for name, tensor in state.items()}


def merged(source: Path, target: Path, **options: Any) -> dict[str, Raw]:
    """Merge and read the result."""
    merge_tightly(source, target, **options)
    return read_folder(target)


def logits(folder: Path) -> torch.Tensor:
    """What transformers computes with a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    vocabulary = model.config.get_text_config().vocab_size
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(16).reshape(2, 8) * 5 % vocabulary).logits
    assert found.isfinite().all()
    return found


@contextmanager
def edited_metadata(folder: Path, name: str = ".metadata") -> Iterator[Metadata]:
    """The unpickled metadata, written back after the block."""
    metadata = pickle.loads((folder / name).read_bytes())
    yield metadata
    (folder / name).write_bytes(pickle.dumps(metadata))


def chunk_of(metadata: Metadata, key: str) -> MetadataIndex:
    """The place in `storage_data` of a tensor's first chunk."""
    return next(index for index in metadata.storage_data if index.fqn == key)
