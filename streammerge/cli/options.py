"""Options shared by the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "CONTEXT",
    "MODEL_FIELDS",
    "compare_options",
    "json_option",
    "merge_options",
    "model_options",
    "resource_options",
    "source_options",
]

# Dashes and underscores are the same in option names, so that verl's spelling works.
CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 100,
}

# What --num-attention-heads and the like give, where config.json lacks the field.
MODEL_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
)

Command = TypeVar("Command", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def source_options(command: Command) -> Command:
    """Options that say how to read the source."""
    for option in reversed(
        [
            click.option(
                "--src",
                "sources",
                type=_PATH,
                multiple=True,
                help="A source folder; repeat for ranks that are spread over several.",
            ),
            click.option("--local-dir", type=_PATH, help="The source, in verl's spelling."),
            click.option(
                "--backend",
                type=click.Choice(["fsdp", "megatron"]),
                help="Refuse a checkpoint that is not of this kind; which it is is found by itself.",
            ),
            click.option(
                "--mesh-order",
                type=click.Choice(["auto", "group", "coordinate"]),
                default="auto",
                help="Which rank order cut the tensors, where the device mesh does not ascend and sizes do not tell.",
            ),
            click.option(
                "--subtree", metavar="PATH", help="Which dict to take when files hold several sets of tensors."
            ),
        ]
    ):
        command = option(command)
    return command


def merge_options(command: Command) -> Command:
    """Options of ``merge`` and ``plan``."""
    for option in reversed(
        [
            click.option("--target-dir", type=_PATH, help="The destination, in verl's spelling."),
            click.option(
                "--max-ram",
                metavar="SIZE",
                help="RAM budget: 16G, 512MiB, 50%. Default: 16G, or half of the memory there is.",
            ),
            click.option(
                "--dtype",
                default="auto",
                show_default=True,
                metavar="DTYPE",
                help="auto (the config's), keep (as stored), bfloat16, float16, float32.",
            ),
            click.option(
                "--max-shard-size",
                default="5GB",
                show_default=True,
                metavar="SIZE",
                help="Most bytes of tensors per output file.",
            ),
            click.option(
                "--hf-config",
                metavar="DIR|REPO",
                help="Folder (or Hub model) with config.json and tokenizer, instead of the checkpoint's own.",
            ),
            click.option(
                "--workers",
                type=click.IntRange(1, 64),
                default=4,
                show_default=True,
                help="Threads that read, convert and write.",
            ),
            click.option(
                "--io",
                type=click.Choice(["auto", "direct", "pread", "mmap"]),
                default="auto",
                show_default=True,
                help="How to read and write.",
            ),
            click.option("--overwrite", is_flag=True, help="Replace what an earlier merge wrote to the destination."),
            click.option(
                "--check/--no-check",
                default=None,
                help="Compare names and shapes with the model class first. Default: when the budget allows.",
            ),
            click.option("--scan", is_flag=True, help="Warn of tensors with NaN or infinite values, or all zeros."),
            click.option("--checksums", is_flag=True, help="Write SHA256SUMS, for sha256sum -c."),
            click.option("--no-space-check", is_flag=True, help="Do not check for free disk space first."),
            click.option(
                "--allow-replica-mismatch",
                is_flag=True,
                help="Where ranks hold different copies of an unsharded tensor, take the first.",
            ),
        ]
    ):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """Options that say what the config does not: how to read the model's names and sizes."""
    for option in reversed(
        [
            click.option(
                "--tie-word-embedding",
                is_flag=True,
                default=None,
                help="Treat embeddings as tied, whatever the config says.",
            ),
            click.option(
                "--is-value-model",
                is_flag=True,
                help="The head is a value head, though the config's class is a language model.",
            ),
            click.option(
                "--lora",
                default="auto",
                show_default=True,
                metavar="MODE",
                help="A LoRA adapter: extract (beside the base), fuse, fuse,extract or base (leave it out). "
                "auto extracts one in the checkpoint and fuses one that is named.",
            ),
            click.option(
                "--adapter",
                multiple=True,
                metavar="DIR|NAME",
                help="A PEFT adapter to fuse (repeat for several), or which of several in the checkpoint to take.",
            ),
            click.option("--lora-alpha", type=float, help="lora_alpha, where it is not recorded."),
            click.option(
                "--peft-rounding", is_flag=True, help="Fuse bit for bit as PEFT does (whole matrices in memory)."
            ),
            click.option(
                "--fill-from",
                metavar="DIR",
                help="A Hugging Face folder to take tensors from that the checkpoint lacks, such as the layers for "
                "multi token prediction, or a vision tower.",
            ),
            click.option(
                "--family",
                "family_tables",
                type=_PATH,
                multiple=True,
                metavar="FILE",
                help="A family table of your own (TOML); see docs/add-a-family.md.",
            ),
            *(
                click.option(
                    f"--{name.replace('_', '-')}", type=click.IntRange(0), help=f"{name}, if config.json lacks it."
                )
                for name in MODEL_FIELDS
            ),
        ]
    ):
        command = option(command)
    return command


def compare_options(command: Command) -> Command:
    """Options of ``compare`` and ``test``."""
    for option in reversed(
        [
            click.option("--rtol", type=float, default=0.0, help="Relative tolerance, as torch.isclose."),
            click.option("--atol", type=float, default=0.0, help="Absolute tolerance."),
            click.option("--dtype-aware", is_flag=True, help="Cast the second side to the first side's dtype."),
            click.option("--worst", type=click.IntRange(1), default=20, show_default=True, help="Rows of the table."),
        ]
    ):
        command = option(command)
    return command


def resource_options(command: Command) -> Command:
    """Options of ``compare`` that ``test`` has from ``merge``."""
    for option in reversed(
        [
            click.option("--max-ram", metavar="SIZE", help="RAM budget: 16G, 512MiB, 50%."),
            click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Threads."),
            click.option(
                "--io", type=click.Choice(["auto", "direct", "pread", "mmap"]), default="auto", help="How to read."
            ),
        ]
    ):
        command = option(command)
    return command
