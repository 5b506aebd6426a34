"""The files beside the weights: config, tokenizer, processor, chat template, custom code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from streammerge.errors import SourceError, UsageError
from streammerge.files import io_errors

__all__ = ["Sidecars", "find_sidecars"]

_MAX_BYTES = 1 << 30
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".spm", ".bpe", ".vocab"}
# Loaders act on these, and they describe something other than the merged model.
_NEVER = {"adapter_config.json", "trainer_state.json", "requirements.txt", "fqn_to_file_index_mapping.json"}
_FOLDERS = {"additional_chat_templates"}


@dataclass(frozen=True, slots=True)
class Sidecars:
    """Files to copy byte for byte.

    Attributes:
        folder: where they are, or None.
        files: paths below it, relative.
        config: path of config.json, or None.
        missing: names without which the folder cannot be loaded or used for text.
    """

    folder: Path | None
    files: tuple[Path, ...]
    config: Path | None
    missing: tuple[str, ...]

    def paths(self) -> dict[Path, Path]:
        """Relative path -> where it is."""
        return {file: self.folder / file for file in self.files} if self.folder else {}

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(path.stat().st_size for path in self.paths().values())


def find_sidecars(folder: Path | None) -> Sidecars:
    """Choose what to copy from a checkpoint's ``huggingface`` folder or a base model.

    Raises:
        UsageError: the folder does not exist.
        SourceError: a JSON file among them is broken.
    """
    if folder is None:
        return Sidecars(None, (), None, ("config.json", "tokenizer files"))
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; it should hold config.json and the tokenizer")
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and _wanted(path)]
    for name in sorted(_FOLDERS):
        found += [path for path in sorted((folder / name).glob("*.jinja")) if path.is_file()]
    for path in found:
        _check(path)
    names = {path.name for path in found}
    missing = [] if "config.json" in names else ["config.json"]
    if not any(name.startswith("tokenizer") or name.endswith((".model", ".tiktoken")) for name in names):
        missing.append("tokenizer files")
    config = folder / "config.json" if "config.json" in names else None
    return Sidecars(folder, tuple(path.relative_to(folder) for path in found), config, tuple(missing))


def _wanted(path: Path) -> bool:
    name = path.name
    return (
        path.suffix in _SUFFIXES
        and name not in _NEVER
        and not name.endswith(".index.json")
        and not name.startswith(".")
    )


def _check(path: Path) -> None:
    with io_errors("read", path):
        size = path.stat().st_size
    if size > _MAX_BYTES:
        raise SourceError(f"{path} is too large for a file beside the weights")
    if path.suffix != ".json":
        return
    try:
        with io_errors("read", path):
            text = path.read_text(encoding="utf-8-sig")  # not bytes: json would hold both while it parses
        json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise SourceError(
            f"{path} is not valid JSON ({fault}); repair it or name another folder with --hf-config"
        ) from fault
