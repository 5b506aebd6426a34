"""What a merge can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from streammerge.errors import UsageError

__all__ = ["MergeOptions"]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of ``plan`` and ``merge``.

    Attributes:
        max_ram: RAM budget in bytes, or a size such as ``16G``; None for the default.
        dtype: ``auto`` (the config's), ``keep`` (as stored) or a dtype name.
        max_shard_size: bytes of tensors per output file, or a size such as ``5GB``.
        hf_config: folder with config.json and tokenizer, instead of the checkpoint's own.
        workers: threads.
        io: ``auto``, ``direct``, ``pread`` or ``mmap``.
        overwrite: replace what an earlier merge wrote to the destination.
        check: compare with the model class: True always, False never, None when the budget allows.
        space_check: refuse when the file system has too little space.
        allow_replica_mismatch: take the first of unsharded copies that differ, with a warning.
        mesh_order: which rank order to believe on device meshes whose rows do not ascend.
        backend: ``fsdp`` or ``megatron``: what the checkpoint must be; it is found out by itself.
        subtree: which dict to take when files hold several sets of tensors.
        scan: count NaN, infinite and all-zero tensors, and warn by name.
        checksums: write SHA256SUMS of the weight files.
        tie_word_embeddings: against what the config says.
        value_model: whether the head is a value head, where the config's class does not say so.
        model_fields: sizes of the model that the config lacks, such as ``num_attention_heads``.
        lora: what to do with a LoRA adapter: ``extract``, ``fuse``, ``fuse,extract``, ``base`` (leave it out), or
            ``auto``: extract one in the checkpoint, fuse one that is named.
        adapter: PEFT adapter folders to fuse, and the name of one of several adapters in the checkpoint.
        lora_alpha: of the adapter, where it is not recorded.
        peft_rounding: compute as PEFT's ``merge_and_unload`` does, bit for bit.
        fill_from: Hugging Face model to take the tensors from that the checkpoint lacks.
        family_tables: family tables of the user's own, before the package's.
    """

    max_ram: int | str | None = None
    dtype: str = "auto"
    max_shard_size: int | str = "5GB"
    hf_config: Path | str | None = None
    workers: int = 4
    io: str = "auto"
    overwrite: bool = False
    check: bool | None = None
    space_check: bool = True
    allow_replica_mismatch: bool = False
    mesh_order: Literal["auto", "group", "coordinate"] = "auto"
    backend: Literal["fsdp", "megatron"] | None = None
    subtree: str | None = None
    scan: bool = False
    checksums: bool = False
    tie_word_embeddings: bool | None = None
    value_model: bool = False
    model_fields: Mapping[str, int] = field(default_factory=dict)
    lora: str = "auto"
    adapter: Sequence[Path | str] = ()
    lora_alpha: float | None = None
    peft_rounding: bool = False
    fill_from: Path | str | None = None
    family_tables: Sequence[Path | str] = ()

    def __post_init__(self) -> None:
        """Refuse what makes no sense whatever the source.

        Raises:
            UsageError: fewer than one worker.
        """
        if self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot do anything; use at least one")
