"""A ``torch_dist`` checkpoint of the shape of a 671B mixture of experts, whose weights are holes.

    python -m benchmarks.make_torch_dist FOLDER

61 layers (3 of them dense), 256 experts, as tensor parallel 8, pipeline 16 and expert parallel 32 ranks would save it:
one chunk per expert's gate, up and down, one per tensor parallel rank of everything else, in 128 files; the optimizer's
chunks are in ``.metadata`` too, as they are in real ones. Each chunk is a true torch.save archive with a hole for data.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

LAYERS, DENSE, EXPERTS, TP, FILES = 61, 3, 256, 8, 128
H, F, MOE, HEADS, VOCAB = 7168, 18432, 2048, 128, 129280
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": H, "intermediate_size": F,
    "moe_intermediate_size": MOE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": DENSE,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": VOCAB, "n_group": 8, "topk_group": 4, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
Box = tuple[tuple[int, ...], tuple[int, ...]]


def _rows(rows: int, columns: int, parts: int) -> list[Box]:
    return [((part * rows // parts, 0), (rows // parts, columns)) for part in range(parts)]


def _columns(rows: int, columns: int) -> list[Box]:
    return [((0, part * columns // TP), (rows, columns // TP)) for part in range(TP)]


def _whole(*shape: int) -> list[Box]:
    return [((0,) * len(shape), shape)]


def _tensors() -> Iterator[tuple[str, tuple[int, ...], list[Box]]]:
    yield "embedding.word_embeddings.weight", (VOCAB, H), _rows(VOCAB, H, TP)
    yield "output_layer.weight", (VOCAB, H), _rows(VOCAB, H, TP)
    yield "decoder.final_layernorm.weight", (H,), _whole(H)
    for layer in range(LAYERS):
        for name, shape, boxes in _layer(layer >= DENSE):
            yield f"decoder.layers.{layer}.{name}", shape, boxes


def _layer(moe: bool) -> Iterator[tuple[str, tuple[int, ...], list[Box]]]:
    attention = "self_attention."
    for name, rows, columns in (
        ("linear_q_down_proj", 1536, H),
        ("linear_kv_down_proj", 576, H),
        ("linear_q_up_proj", HEADS * 192, 1536),
        ("linear_kv_up_proj", HEADS * 256, 512),
    ):
        yield f"{attention}{name}.weight", (rows, columns), _rows(rows, columns, TP)
    yield f"{attention}linear_proj.weight", (H, HEADS * 128), _columns(H, HEADS * 128)
    for name, size in (("input", H), ("pre_mlp", H), (f"{attention}q", 1536), (f"{attention}kv", 512)):
        yield f"{name}_layernorm.weight", (size,), _whole(size)
    inner, before = (MOE, "mlp.shared_experts.") if moe else (F, "mlp.")
    yield f"{before}linear_fc1.weight", (2 * inner, H), _rows(2 * inner, H, 2 * TP)
    yield f"{before}linear_fc2.weight", (H, inner), _columns(H, inner)
    if moe:
        yield "mlp.router.weight", (EXPERTS, H), _whole(EXPERTS, H)
        yield "mlp.router.expert_bias", (EXPERTS,), _whole(EXPERTS)
        gates = [((e, half * MOE, 0), (1, MOE, H)) for e in range(EXPERTS) for half in (0, 1)]
        yield "mlp.experts.experts.linear_fc1.weight", (EXPERTS, 2 * MOE, H), gates
        downs = [((e, 0, 0), (1, H, MOE)) for e in range(EXPERTS)]
        yield "mlp.experts.experts.linear_fc2.weight", (EXPERTS, H, MOE), downs


class _Writer:
    """Files of archives in a row; an archive's bytes around its data are made once for each shape."""

    def __init__(self, folder: Path) -> None:
        self._files = [(folder / f"__{n}_0.distcp").open("wb") for n in range(FILES)]
        self._ends = [0] * FILES
        self._made: dict[tuple[object, ...], tuple[bytes, bytes, int]] = {}
        self._next = 0

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> _StorageInfo:
        """Write an archive with a hole for a tensor."""
        if (shape, dtype) not in self._made:
            self._made[shape, dtype] = _archive(shape, dtype)
        head, tail, hole = self._made[shape, dtype]
        number, self._next = self._next, (self._next + 1) % FILES
        start, file = self._ends[number], self._files[number]
        file.seek(start)
        file.write(head)
        file.seek(start + len(head) + hole)
        file.write(tail)
        length = len(head) + hole + len(tail)
        self._ends[number] = start + length
        return _StorageInfo(f"__{number}_0.distcp", start, length)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def _archive(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """What is before and after the data of a saved tensor, and the data's size in bytes."""
    buffer = io.BytesIO()
    torch.save(torch.empty(shape, dtype=dtype), buffer)
    content = buffer.getbuffer()
    with zipfile.ZipFile(buffer) as archive:
        member = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
        names = int.from_bytes(content[member.header_offset + 26 : member.header_offset + 28], "little")
        extra = int.from_bytes(content[member.header_offset + 28 : member.header_offset + 30], "little")
    begin = member.header_offset + 30 + names + extra
    return bytes(content[:begin]), bytes(content[begin + member.file_size :]), member.file_size


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Write the checkpoint into FOLDER."""
    place = folder / "iter_0000001"
    place.mkdir(parents=True)
    writer = _Writer(place)
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, shape, boxes in _tensors():
        dtype = torch.float32 if name.endswith("expert_bias") else torch.bfloat16
        chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for start, size in boxes:
            storage[MetadataIndex(name, torch.Size(start))] = writer.add(size, dtype)
        for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):  # never read, so they are stored nowhere
            key = f"optimizer.state.{kind}.{name}"
            entries[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
            for start, _ in boxes:
                storage[MetadataIndex(key, torch.Size(start))] = _StorageInfo("__0_0.distcp", 0, 0)
    writer.close()
    (place / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {}, storage), protocol=4))
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"iteration": 1}, place / "common.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    click.echo(f"{len(storage)} chunks, {(place / '.metadata').stat().st_size / 1e6:.0f} MB of metadata")


if __name__ == "__main__":
    main()
