"""Megatron checkpoints of a Hugging Face model, written as Megatron would have: the slow way, tensor by tensor.

Made from the description of Megatron-core's layouts, with torch's reshape and cat, and nothing of streammerge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

__all__ = ["Core", "Grid", "core_of", "write_legacy", "write_torch_dist"]

Tensors = dict[str, torch.Tensor]

_BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"


@dataclass
class Part:
    """A parameter of Megatron's: the whole tensor, and how tensor parallel ranks share it.

    Attributes:
        axis: the dim that is cut; None for copies on every rank.
        sections: rows of the parts of dim 0 of which each rank has its piece.
    """

    whole: torch.Tensor
    axis: int | None = None
    sections: Sequence[int] = ()

    def of_rank(self, rank: int, ranks: int) -> torch.Tensor:
        """What a tensor parallel rank holds."""
        if self.axis is None or ranks == 1:
            return self.whole.clone()
        parts = self.whole.split(list(self.sections), 0) if self.sections else (self.whole,)
        return torch.cat([part.chunk(ranks, self.axis)[rank] for part in parts], 0 if self.sections else self.axis)


@dataclass
class Core:
    """A model in Megatron's layout: local spec names, relative to the layer; experts by number."""

    embedding: Part
    final_norm: Part
    output: Part | None
    layers: list[dict[str, Part]] = field(default_factory=list)
    experts: list[list[dict[str, Part]]] = field(default_factory=list)
    tied: bool = False


@dataclass(frozen=True)
class Grid:
    """Parallel sizes. ``layers``: how many each chunk has, by (virtual chunk, stage)."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    layers: tuple[tuple[int, ...], ...] = ()


def core_of(model: Tensors, config: Mapping[str, Any]) -> Core:
    """Megatron's tensors of a model, from those in its files."""
    tied = bool(config.get("tie_word_embeddings"))
    head = model["score.weight"] if "score.weight" in model else model.get("lm_head.weight")
    one_row = head is not None and head.shape[0] == 1
    core = Core(
        Part(_padded(model["model.embed_tokens.weight"]), 0),
        Part(model["model.norm.weight"]),
        None if head is None else Part(head if one_row else _padded(head), None if one_row else 0),
        tied=tied,
    )
    for number in range(config["num_hidden_layers"]):
        own = {
            k.partition(f"layers.{number}.")[2]: v for k, v in model.items() if k.startswith(f"model.layers.{number}.")
        }
        core.layers.append(dict(_layer(own, config)))
        core.experts.append(list(_experts(own)))
    return core


def _padded(weight: torch.Tensor) -> torch.Tensor:
    """Rows of junk up to a multiple of 16."""
    return torch.cat([weight, torch.randn(-len(weight) % 16, weight.shape[1]).to(weight.dtype)])


def _layer(own: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, Part]]:
    gemma = "pre_feedforward_layernorm.weight" in own
    yield "input_layernorm.weight", Part(own["input_layernorm.weight"])
    name = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    yield "pre_mlp_layernorm.weight", Part(own[f"{name}.weight"])
    if gemma:
        yield "self_attention.linear_proj.post_layernorm.weight", Part(own["post_attention_layernorm.weight"])
        yield "mlp.linear_fc2.post_layernorm.weight", Part(own["post_feedforward_layernorm.weight"])
    yield from _attention(own, config)
    if "mlp.down_proj.weight" in own:
        gate, up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
        yield "mlp.linear_fc1.weight", Part(torch.cat([gate, up]), 0, (len(gate), len(up)))
        yield "mlp.linear_fc2.weight", Part(own["mlp.down_proj.weight"], 1)
    for old, new in (
        ("mlp.gate.weight", "mlp.router.weight"),
        ("block_sparse_moe.gate.weight", "mlp.router.weight"),
        ("mlp.router.weight", "mlp.router.weight"),
        ("mlp.router.bias", "mlp.router.bias"),
        ("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
        ("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight"),
    ):
        if old in own:
            yield new, Part(own[old])
    for shared in ("mlp.shared_expert.", "mlp.shared_experts."):
        if f"{shared}gate_proj.weight" in own:
            gate, up = own[f"{shared}gate_proj.weight"], own[f"{shared}up_proj.weight"]
            yield "mlp.shared_experts.linear_fc1.weight", Part(torch.cat([gate, up]), 0, (len(gate), len(up)))
            yield "mlp.shared_experts.linear_fc2.weight", Part(own[f"{shared}down_proj.weight"], 1)


def _attention(own: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, Part]]:
    yield "self_attention.linear_proj.weight", Part(own["self_attn.o_proj.weight"], 1)
    if "self_attn.o_proj.bias" in own:
        yield "self_attention.linear_proj.bias", Part(own["self_attn.o_proj.bias"])
    if "self_attn.sinks" in own:
        yield "self_attention.core_attention.softmax_offset", Part(own["self_attn.sinks"], 0)
    for old, new in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
        if f"self_attn.{old}.weight" in own:
            yield f"self_attention.{new}.weight", Part(own[f"self_attn.{old}.weight"])
    latent = {
        "q_proj": ("linear_q_proj", 0), "q_a_proj": ("linear_q_down_proj", None),
        "q_a_layernorm": ("q_layernorm", None),
        "q_b_proj": ("linear_q_up_proj", 0), "kv_a_proj_with_mqa": ("linear_kv_down_proj", 0),
        "kv_a_layernorm": ("kv_layernorm", None), "kv_b_proj": ("linear_kv_up_proj", 0),
    }  # fmt: skip
    if "self_attn.kv_b_proj.weight" in own:
        for old, (new, axis) in latent.items():
            if f"self_attn.{old}.weight" in own:
                yield f"self_attention.{new}.weight", Part(own[f"self_attn.{old}.weight"], axis)
        return
    groups = config["num_key_value_heads"]
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q, k, v = (own[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            rest = q.shape[1:]
            grouped = [part.reshape(groups, -1, *rest) for part in (q, k, v)]
            yield f"self_attention.linear_qkv.{kind}", Part(torch.cat(grouped, 1).reshape(-1, *rest), 0)


def _experts(own: Tensors) -> Iterator[dict[str, Part]]:
    if "mlp.experts.gate_up_proj" in own:  # gpt-oss: [E, H, 2F], gate and up in turn
        for e in range(len(own["mlp.experts.gate_up_proj"])):
            both = own["mlp.experts.gate_up_proj"][e].T
            bias = own["mlp.experts.gate_up_proj_bias"][e]
            half = len(bias) // 2
            yield {
                "linear_fc1.weight": Part(torch.cat([both[0::2], both[1::2]]), 0, (half, half)),
                "linear_fc1.bias": Part(torch.cat([bias[0::2], bias[1::2]]), 0, (half, half)),
                "linear_fc2.weight": Part(own["mlp.experts.down_proj"][e].T.contiguous(), 1),
                "linear_fc2.bias": Part(own["mlp.experts.down_proj_bias"][e]),
            }
        return
    names = ("gate_proj", "up_proj", "down_proj")
    before = "mlp.experts."
    if "block_sparse_moe.experts.0.w1.weight" in own:
        before, names = "block_sparse_moe.experts.", ("w1", "w3", "w2")
    e = 0
    while f"{before}{e}.{names[0]}.weight" in own:
        gate, up, down = (own[f"{before}{e}.{name}.weight"] for name in names)
        yield {
            "linear_fc1.weight": Part(torch.cat([gate, up]), 0, (len(gate), len(up))),
            "linear_fc2.weight": Part(down, 1),
        }
        e += 1


def _transformer_engine(name: str, moe: bool, latent: bool) -> str:
    if name.startswith("input_layernorm.") and not latent:
        return name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if name.startswith("pre_mlp_layernorm.") and not moe:
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if latent:
        name = name.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_")
        return name.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
    return name


def _expert_tensors(experts: Sequence[Mapping[str, Part]], grid: Grid, tp: int, ep: int, spelling: str) -> Tensors:
    """An expert parallel rank's experts, numbered from 0."""
    local = len(experts) // grid.ep
    etp = grid.etp or grid.tp
    mine = [
        {name: part.of_rank(tp % etp, etp) for name, part in expert.items()}
        for expert in experts[ep * local : (ep + 1) * local]
    ]
    if spelling == "grouped":
        first = torch.stack([one["linear_fc1.weight"].T for one in mine])  # [experts, H, 2F]
        second = torch.stack([one["linear_fc2.weight"].T for one in mine])  # [experts, F, H]
        return {
            "mlp.experts.weight1": first.reshape(first.shape[1], -1),
            "mlp.experts.weight2": second.reshape(-1, second.shape[2]),
        }
    made = {}
    for number, one in enumerate(mine):
        for name, tensor in one.items():
            linear, kind = name.rsplit(".", 1)
            te = f"mlp.experts.{linear}.{kind}{number}"
            made[te if spelling == "te" else f"mlp.experts.local_experts.{number}.{name}"] = tensor
    return made


def write_legacy(folder: Path, core: Core, grid: Grid, spelling: str = "local", *, args: bool = True) -> Path:
    """``iter_0000100/mp_rank_*/model_optim_rng.pt``; ``spelling``: local, te or grouped (experts)."""
    virtual = len(grid.layers)
    settings = argparse.Namespace(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        expert_model_parallel_size=grid.ep,
        num_layers=len(core.layers),
    )
    for tp in range(grid.tp):
        for pp in range(grid.pp):
            for ep in range(grid.ep):
                name = f"mp_rank_{tp:02}" + (f"_{pp:03}" if grid.pp > 1 else "") + (f"_{ep:03}" if grid.ep > 1 else "")
                chunks = [_chunk(core, grid, v, tp, pp, ep, spelling) for v in range(virtual)]
                keys = ["model"] if virtual == 1 else [f"model{v}" for v in range(virtual)]
                content: dict[str, Any] = {
                    "checkpoint_version": 3.0,
                    "iteration": 100,
                    **dict(zip(keys, chunks, strict=True)),
                }
                content["optimizer"] = {"state": {0: {"exp_avg": torch.randn(5)}}, "param_groups": [{}]}
                if args:
                    content["args"] = settings
                place = folder / "iter_0000100" / name
                place.mkdir(parents=True)
                torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _chunk(core: Core, grid: Grid, v: int, tp: int, pp: int, ep: int, spelling: str) -> dict[str, Any]:
    order = [(a, b) for a in range(len(grid.layers)) for b in range(grid.pp)]
    first = sum(grid.layers[a][b] for a, b in order[: order.index((v, pp))])
    made: dict[str, Any] = {}
    if (v, pp) == order[0]:
        made["embedding.word_embeddings.weight"] = core.embedding.of_rank(tp, grid.tp)
    for local in range(grid.layers[v][pp]):
        layer, experts = core.layers[first + local], core.experts[first + local]
        latent = "self_attention.linear_kv_up_proj.weight" in layer
        for name, part in layer.items():
            own = _transformer_engine(name, bool(experts), latent) if spelling == "te" else name
            made[f"decoder.layers.{local}.{own}"] = part.of_rank(tp, grid.tp)
        if spelling == "te":
            made[f"decoder.layers.{local}.self_attention.linear_proj._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        for name, tensor in (_expert_tensors(experts, grid, tp, ep, spelling) if experts else {}).items():
            made[f"decoder.layers.{local}.{name}"] = tensor
    if (v, pp) == order[-1]:
        made["decoder.final_layernorm.weight"] = core.final_norm.of_rank(tp, grid.tp)
        if core.output is not None:
            made["output_layer.weight"] = core.output.of_rank(tp, grid.tp)
        elif core.tied and grid.pp > 1:
            made["output_layer.weight"] = core.embedding.of_rank(tp, grid.tp)
    return made


def write_torch_dist(folder: Path, core: Core, form: str = "stacked") -> Path:
    """A ``torch_dist`` save; ``form``: stacked (layers and experts), layers (numbered) or singleton."""
    state: dict[str, torch.Tensor] = {
        "embedding.word_embeddings.weight": core.embedding.whole,
        "decoder.final_layernorm.weight": core.final_norm.whole,
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.randn(4),
        f"{_BUCKET}.param": torch.ones(3),
    }
    if core.output is not None:
        state["output_layer.weight"] = core.output.whole
    per_layer: list[Tensors] = []
    for layer, experts in zip(core.layers, core.experts, strict=True):
        latent = "self_attention.linear_kv_up_proj.weight" in layer
        made: Tensors = {}
        for name, part in layer.items():
            # The local spec renames on save, in layers with experts as well; latent attention does not.
            _put(made, name if latent else _transformer_engine(name, False, False), part, form)
        for kind in experts[0] if experts else ():
            if form == "singleton":
                for e, expert in enumerate(experts):
                    _put(made, f"mlp.experts.experts.{e}.{kind}", expert[kind], form)
            else:
                made[f"mlp.experts.experts.{kind}"] = torch.stack([expert[kind].whole for expert in experts])
        per_layer.append(made)
    if form == "stacked":
        state |= {f"decoder.layers.{n}": torch.stack([one[n] for one in per_layer]) for n in per_layer[0]}
    else:
        state |= {f"decoder.layers.{i}.{n}": t for i, one in enumerate(per_layer) for n, t in one.items()}
    place = folder / "iter_0000100"
    dcp.save(dict(state), checkpoint_id=place, no_dist=True)
    torch.save({"args": argparse.Namespace(num_layers=len(core.layers)), "iteration": 100}, place / "common.pt")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _put(made: Tensors, name: str, part: Part, form: str) -> None:
    if form == "singleton" and part.sections and name.endswith("linear_fc1.weight"):
        made[f"{name}_w"], made[f"{name}_v"] = (one.clone() for one in part.whole.split(list(part.sections)))
    else:
        made[name] = part.whole
