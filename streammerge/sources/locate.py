"""Find the checkpoint behind the path that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streammerge.errors import SourceError, UsageError

__all__ = ["config_beside", "locate"]

_MAX_DEPTH = 4
# Megatron's temporary saves, and dumps of gradients that look like saves of weights.
_PASSED_OVER = {"non_persistent", "wgrads", "dgrads"}
_TRACKER = "latest_checkpointed_iteration.txt"  # verl and Megatron write the newest step into it


def locate(path: Path, holds: Callable[[Path], bool]) -> Path:
    """The folder at or below ``path`` that holds a checkpoint, when there is just one.

    A run's root leads to its newest step by the tracker file. Otherwise every folder below is
    looked at, to a depth of four.

    Args:
        holds: whether a folder itself is a checkpoint.

    Raises:
        UsageError: the path does not exist, or leads to several checkpoints (they are listed).
        SourceError: it holds none, or the tracker names a step that is not there.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if not path.is_dir():
        raise UsageError(f"{path} is a file; name the folder that holds the checkpoint")
    top = path
    if not holds(path) and (path / _TRACKER).is_file():
        top = _newest(path)
    # Links such as LATEST lead to folders that are listed themselves.
    found = list({one.resolve(): one for one in reversed(_below(top, holds, 0))}.values())[::-1]
    if len(found) == 1:
        return found[0]
    if not found:
        raise _nothing(top)
    listed = "\n  ".join(str(one) for one in found[:20])
    raise UsageError(f"{path} holds several checkpoints; name one of them:\n  {listed}")


def _newest(path: Path) -> Path:
    text = (path / _TRACKER).read_text(errors="replace").strip()
    if text == "release" and (path / text).is_dir():  # what Megatron's own converters write
        return path / text
    for name in (f"global_step_{text}", f"iter_{text.zfill(7)}"):
        if text.isdecimal() and text.isascii() and len(text) < 20 and (path / name).is_dir():
            return path / name
    raise SourceError(f"{path / _TRACKER} names step {text[:40]!r}, but its folder is not there; name a step's folder")


def _below(folder: Path, holds: Callable[[Path], bool], depth: int) -> list[Path]:
    if holds(folder):
        return [folder]
    if depth == _MAX_DEPTH:
        return []
    folders = sorted(
        one
        for one in folder.iterdir()
        if one.is_dir() and not one.name.startswith(".") and one.name not in _PASSED_OVER
    )
    return [found for one in folders for found in _below(one, holds, depth + 1)]


def _nothing(folder: Path) -> SourceError:
    return SourceError(
        f"{folder} holds no checkpoint that streammerge knows (looked for model_world_size_*_rank_*.pt, "
        "mp_rank_*/model_optim_rng.pt, .metadata and metadata.json)"
    )


def config_beside(folder: Path) -> Path | None:
    """The folder with config.json that a trainer left in, or one level above, a checkpoint's folder."""
    for place in (
        folder,
        folder / "huggingface",
        folder / "consolidated",
        folder / ".hf_metadata",
        folder.parent,
        folder.parent / "huggingface",
    ):
        if (place / "config.json").is_file():
            return place
    return None
