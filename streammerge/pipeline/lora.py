"""What is done with LoRA adapters: which mode applies, and what the user is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.execute.compare import all_zero
from streammerge.execute.memory import divide
from streammerge.execute.routes import read_route
from streammerge.families.adapters import Adapter
from streammerge.options import MergeOptions
from streammerge.sources.peft_folder import is_peft_folder
from streammerge.tensors.catalogue import Catalogue

__all__ = ["Mode", "check_effect", "lora_mode", "named_adapters"]

_MODES = {"extract", "fuse", "base"}


@dataclass(frozen=True, slots=True)
class Mode:
    """What becomes of the adapters.

    Attributes:
        fuse: the weights written are the base's with the adapter in them.
        extract: the adapter is written beside the weights, for PEFT.
        line: says so, in the summary.
    """

    fuse: bool = False
    extract: bool = False
    line: str = ""


def named_adapters(options: MergeOptions) -> tuple[list[Path], str | None]:
    """``--adapter``: folders of PEFT adapters, and the name of one in the checkpoint.

    Raises:
        UsageError: several names, or something that looks like a path and leads to no adapter.
    """
    folders = [Path(one) for one in options.adapter if is_peft_folder(Path(one))]
    names = [str(one) for one in options.adapter if not is_peft_folder(Path(one))]
    for name in names:
        if "/" in name or Path(name).exists():
            raise UsageError(f"--adapter {name}: there is no adapter_config.json in it")
    if len(names) > 1:
        raise UsageError(f"--adapter: only one of the adapters in a checkpoint can be taken, not {', '.join(names)}")
    return folders, next(iter(names), None)


def lora_mode(options: MergeOptions, adapters: Sequence[Adapter], folders: Sequence[Path]) -> Mode:
    """What the options ask for.

    Raises:
        UsageError: an unknown mode, or one that makes no sense without an adapter.
        UnsupportedError: several adapters cannot be extracted into one.
    """
    wanted = set(options.lora.split(",")) - {""}
    if wanted == {"auto"}:
        wanted = {"fuse" if folders else "extract"} if adapters else set()
    elif not wanted or wanted - _MODES or ("base" in wanted and len(wanted) > 1):
        raise UsageError(f"--lora {options.lora}: it is extract, fuse, fuse,extract, base or auto")
    elif not adapters:
        raise UsageError(f"--lora {options.lora}, but there is no LoRA adapter; leave the option out")
    if not wanted:
        return Mode()
    if wanted == {"base"}:
        return Mode(line="left out: the weights are the BASE model's, without what was trained (--lora base)")
    if "extract" in wanted and len(adapters) > 1:
        raise UnsupportedError("several adapters cannot be extracted as one; fuse them with --lora fuse")
    beside = "the adapter for PEFT is in lora_adapter/"
    if wanted == {"extract"}:
        return Mode(False, True, f"NOT fused: the weights are the base model's, and {beside} (--lora fuse merges them)")
    if wanted == {"fuse"}:
        return Mode(True, False, "fused into the weights")
    return Mode(True, True, f"fused into the weights; {beside} as well, and must not be applied again")


def check_effect(adapters: Sequence[Adapter], mode: Mode, catalogue: Catalogue, io: str, max_ram: int) -> list[str]:
    """Refuse to fuse adapters that change nothing; returns what to warn of when they are only extracted.

    Raises:
        SourceError: every product B A is zero, as before training.
    """
    buffers = divide(max_ram, 1, torch_needed=False)
    route = read_route(io, catalogue.files)
    for adapter in adapters:
        zero = [
            all_zero(pair.b, catalogue.files, buffers, route) or all_zero(pair.a, catalogue.files, buffers, route)
            for pair in adapter.pairs.values()
        ]
        if all(zero) and not adapter.saved:
            what = "every lora_B (or lora_A) of the adapter is zero, so it changes nothing"
            if mode.fuse:
                raise SourceError(f"{what}: the result would be the base model; was the adapter saved before training?")
            return [f"{what}; was it saved before training?"]
    return []
