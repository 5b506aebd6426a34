"""What a Megatron training job recorded of its model, under Megatron's argument names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError
from streammerge.sources.pickle_reader import Record

__all__ = ["settings_beside", "settings_of"]

# transformer_config.json and run_config.yaml have TransformerConfig's names for some of them.
_SAME = {"num_moe_experts": "num_experts", "moe_ffn_hidden_size": "moe_ffn_hidden_size"}
_MOST_BYTES = 16 << 20


def settings_of(args: object) -> dict[str, object]:
    """The plain values of an ``argparse.Namespace`` as it was pickled, or of a dict."""
    values = args.attributes if isinstance(args, Record) else args
    if not isinstance(values, Mapping):
        return {}
    return {
        _SAME.get(str(name), str(name)): value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str)
    }


def settings_beside(folder: Path) -> dict[str, object]:
    """From verl's ``transformer_config.json`` beside ``dist_ckpt/``, or Megatron-Bridge's ``run_config.yaml``.

    Raises:
        SourceError: such a file cannot be read.
    """
    for path in (folder / "transformer_config.json", folder.parent / "transformer_config.json"):
        if path.is_file():
            return settings_of(_parsed(path, json.loads))
    path = folder / "run_config.yaml"
    if path.is_file():
        content = _parsed(path, _yaml)
        model = content.get("model") if isinstance(content, Mapping) else None
        return settings_of(model)
    return {}


def _parsed(path: Path, parse: Any) -> Any:
    if path.stat().st_size > _MOST_BYTES:
        raise SourceError(f"{path} is larger than any real one")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise SourceError(f"{path} cannot be read: {fault}") from fault


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Makes plain data only; what a tag of Python's asks for is left out."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    try:
        return yaml.load(text, Loader)  # a subclass of SafeLoader: it constructs no objects
    except yaml.YAMLError as fault:
        raise ValueError(str(fault)) from fault
