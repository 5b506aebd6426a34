"""What a source hands over: every stored tensor of the model, and the files they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streammerge.tensors.fragment import Index
from streammerge.tensors.virtual import Stored, Tensor

__all__ = ["Catalogue", "Claim", "Entry", "EqualityCheck", "PeftAdapter", "SourceFile"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that holds weights.

    Attributes:
        path: where it is.
        size: bytes, when it was indexed.
        mtime_ns: modification time in nanoseconds, when it was indexed.
        digest: hash of the file's metadata (what was read to index it).
        origin: for a temporary file, what it was made from; it stands for the path in fingerprints.
    """

    path: Path
    size: int
    mtime_ns: int
    digest: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one set of files holds of a tensor, where no placement says how the sets go together.

    Ranks outside of a tensor's device mesh claim the same region either because they hold copies
    (a norm under tensor parallelism) or because expert parallelism was applied before sharding and
    left no trace in the placements. Megatron's rank files have no placements at all. Only the model's
    config can tell, so the source reports all claims.

    Attributes:
        tensor: the whole tensor as these files hold it.
        coordinate: where the files lie on the dims of the root device mesh that the tensor's own
            mesh lacks; for Megatron's rank files (tensor, expert) parallel rank.
        axes: the sizes of those dims.
    """

    tensor: Tensor
    coordinate: Index
    axes: Index


@dataclass(frozen=True, slots=True)
class EqualityCheck:
    """Two tensors whose bytes must be equal, to be read and compared before anything is written.

    Attributes:
        name: the tensor, as the user knows it.
        first, second: what to compare; same dtype and shape.
        reason: why they have to be equal, to complete "NAME differs between A and B: REASON".
        tolerated: whether ``--allow-replica-mismatch`` turns a difference into a warning.
        kept: for a tied name, the one that is written.
    """

    name: str
    first: Tensor
    second: Tensor
    reason: str
    tolerated: bool
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state dict.

    Attributes:
        tensor: its fragments, taken from one replica.
        claims: every set of files that claims the tensor, the first included, in the order of
            their coordinates; empty when placements account for all files.
    """

    tensor: Stored
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter in a folder of its own.

    Attributes:
        label: where it is, for messages.
        entries: key -> entry.
        settings: its adapter_config.json.
    """

    label: str
    entries: Mapping[str, Entry]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Catalogue:
    """All tensors of a checkpoint, indexed from metadata only.

    Attributes:
        format: short name of the on-disk format, such as ``fsdp``.
        root: the folder (the first one, when ranks are spread over several).
        files: the files that fragments point into, by index.
        entries: state dict key -> entry, in state dict order.
        checks: replicas that must hold equal bytes.
        skipped: keys that hold no weight -> why.
        facts: lines for ``inspect``: world size, meshes, versions.
        warnings: what the user should know.
        hf_folder: folder with config and tokenizer that the checkpoint carries, if any.
        settings: what the training framework recorded of the model, under Megatron's argument
            names (``num_layers``, ``num_query_groups``, ``kv_channels``, ...); empty without.
        adapters: PEFT adapters named besides.
        fill: tensors of a base model, by their names in its files, for what the checkpoint lacks.
        lora: what is recorded of adapters in the checkpoint itself, under the names of adapter_config.json.
        scratch: keeps temporary files alive that ``files`` point into.
    """

    format: str
    root: Path
    files: tuple[SourceFile, ...]
    entries: Mapping[str, Entry]
    checks: tuple[EqualityCheck, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    hf_folder: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    adapters: tuple[PeftAdapter, ...] = ()
    fill: Mapping[str, Entry] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    scratch: object = None

    def with_adapters(self, files: tuple[SourceFile, ...], adapters: tuple[PeftAdapter, ...]) -> Catalogue:
        """The same with adapters, which lie in the last of ``files``."""
        return replace(self, files=files, adapters=adapters)

    def filled_from(self, base: Catalogue) -> Catalogue:
        """The same, with the tensors of another catalogue at hand."""
        moved = {key: Entry(_moved(entry.tensor, len(self.files))) for key, entry in base.entries.items()}
        return replace(self, files=(*self.files, *base.files), fill=moved)


def _moved(tensor: Stored, by: int) -> Stored:
    """The tensor, its files numbered from ``by`` on."""
    fragments = tuple(replace(one, file=one.file + by) for one in tensor.fragments)
    return Stored(tensor.dtype, tensor.shape, fragments)
