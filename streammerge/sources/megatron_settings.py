"""What a Megatron training job recorded of its model, under Megatron's argument names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streammerge.errors import SourceError
from streammerge.sources.pickle_reader import Record

__all__ = ["parallel_facts", "settings_beside", "settings_of"]

# transformer_config.json and run_config.yaml have TransformerConfig's names for some (core 0.16 arguments.py).
_SAME = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_OPPOSITE = {"share_embeddings_and_output_weights": "untie_embeddings_and_output_weights"}
_FACTS = {
    "tensor_model_parallel_size": "tensor parallel",
    "pipeline_model_parallel_size": "pipeline parallel",
    "virtual_pipeline_model_parallel_size": "virtual pipeline chunks",
    "expert_model_parallel_size": "expert parallel",
    "expert_tensor_parallel_size": "expert tensor parallel",
}
_MOST_BYTES = 4 << 20


def settings_of(args: object) -> dict[str, object]:
    """The plain values of an ``argparse.Namespace`` as it was pickled, or of a dict."""
    values = args.attributes if isinstance(args, Record) else args
    if not isinstance(values, Mapping):
        return {}
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, bool | int | float | str):
            opposite = _OPPOSITE.get(str(name)) if isinstance(value, bool) else None
            if opposite is not None:
                found.setdefault(opposite, not value)
            elif str(name) in _SAME:
                found.setdefault(_SAME[str(name)], value)
            else:
                found[str(name)] = value
    return found


def parallel_facts(settings: Mapping[str, object]) -> dict[str, str]:
    """Lines for ``inspect``: the sizes that the job ran with."""
    return {fact: str(settings[name]) for name, fact in _FACTS.items() if name in settings}


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
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as fault:
        # All that a parser of JSON or YAML makes of malformed values (PyYAML 6.0).
        raise SourceError(f"{path} cannot be read: {fault}") from fault


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Makes plain data only; what a tag of Python's asks for is left out."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Leaves merge keys alone: nested ones grow without bound."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    try:
        return yaml.load(text, Loader)  # a subclass of SafeLoader: it constructs no objects
    except yaml.YAMLError as fault:
        raise ValueError(str(fault)) from fault
