"""Real FSDP checkpoints under tests/data: `ckpt` as a framework left it, `expected` what a merge must give."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["DATA", "MODELS", "PARTIAL", "config_folder", "copied"]

DATA = Path(__file__).parents[1] / "data"
PARTIAL = "fsdp2_w2_partial"
MODELS = sorted(
    path.name
    for path in DATA.iterdir()
    if path.name != PARTIAL and any((path / "ckpt").glob("model_world_size_*_rank_0.pt"))
)


def config_folder(name: str) -> Path:
    """The folder with the config that goes with a checkpoint."""
    own = DATA / name / "ckpt" / "huggingface"
    return own if own.is_dir() else DATA / name / "expected"


def copied(name: str, target: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(DATA / name / "ckpt", target, copy_function=shutil.copyfile))
