"""verl's own merger, as installed from the package index, in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["PEER_PACKAGES", "PEER_STEPS", "peer_command", "peer_environment"]

# verl's metadata asks for packages of training (wandb, datasets, hydra, ...) that merging never imports. These
# are what `python -m verl.model_merger` does import, in versions that its metadata allows.
PEER_STEPS = (
    ("torch==2.13.0",),
    (
        "transformers==5.10.4",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "tensordict==0.10.0",
        "ray==2.60.0",
        "omegaconf==2.4.0",
        "pandas==3.1.1",
        "numpy==2.4.6",
    ),
    ("--no-deps", "verl==0.9.1"),
)
PEER_PACKAGES = ("verl", "torch", "transformers", "safetensors", "tensordict", "ray")


def peer_environment(folder: Path) -> Path:
    """Make the environment under ``folder`` (1.5 GB), unless it is there; returns its interpreter.

    Raises:
        RuntimeError: a package could not be installed, or verl cannot be imported; says why.
    """
    python = folder / "bin" / "python"
    stamp = folder / "recipe.json"
    recipe = json.dumps(PEER_STEPS)
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    _checked([sys.executable, "-m", "venv", "--clear", str(folder)])
    for step in PEER_STEPS:
        _checked([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step])
    _checked([str(python), "-m", "verl.model_merger", "--help"])
    stamp.write_text(recipe)
    return python


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def peer_command(python: Path, actor: Path, target: Path) -> list[str]:
    """The command that merges the rank files in ``actor`` into ``target``."""
    merger = [str(python), "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    return [*merger, "--local_dir", str(actor), "--target_dir", str(target)]
