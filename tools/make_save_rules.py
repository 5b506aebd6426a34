"""Write ``streammerge/families/save_rules.json``: what ``save_pretrained`` does to names and layouts.

A model's state dict holds in-memory names; ``save_pretrained`` turns them into file names with
``revert_weight_conversion`` (transformers 5.24). This tool builds every model class of the auto
mappings on the meta device from its default config, asks transformers for the conversions of that
very model, reverses them with transformers' own ``reverse_transform`` and writes them as data.

    python tools/make_save_rules.py            # write the table
    python tools/make_save_rules.py --check    # exit 1 when the table differs from the installed one
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.timm_wrapper import modeling_timm_wrapper

# Any: they are typed only in part.
conversions: Any = importlib.import_module("transformers.conversion_mapping")
loading: Any = importlib.import_module("transformers.core_model_loading")
timm_wrapper: Any = modeling_timm_wrapper

TABLE = Path(__file__).resolve().parent.parent / "streammerge" / "families" / "save_rules.json"

# In the order in which a class stands for its model type when only the type is known.
TASKS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "PRETRAINING",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
)

# By model type: values for classes whose default config describes no model. Sizes are free, since no
# rule depends on them.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAPPED_ROPE = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_FULL = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "rope_parameters": _MAPPED_ROPE}
OVERRIDES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass": {"text_config": _FULL},
    "cohere_compass_text": _FULL,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 64},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 0, "<image>": 1}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "qwen3_omni_moe": {"enable_audio_output": False},
}
# Tried one by one on classes that still fail.
COMMON_OVERRIDES: tuple[dict[str, Any], ...] = (
    {"head_dim": 64},
    {"num_key_value_heads": 8},
    {"pad_token_id": 0},
    {"is_decoder": True},
    {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
    {"prediction_length": 4},
)


def hollow_out() -> None:
    """Let wrappers of timm models, which hold no rules, be built alike with and without timm."""

    def hollow(self: Any, config: PreTrainedConfig, **_: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.timm_model = torch.nn.Identity()
        self.post_init()

    timm_wrapper.TimmWrapperModel.__init__ = hollow
    timm_wrapper.TimmWrapperForImageClassification.__init__ = hollow


def model_classes() -> dict[str, list[str]]:
    """Class name -> the model types it serves, its own first; tasks first, base models last."""
    found: dict[str, list[str]] = {}
    for mapping in (*(f"MODEL_FOR_{task}" for task in TASKS), "MODEL"):
        for model_type, names in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
            for name in _as_names(names):
                found.setdefault(name, []).append(model_type)
    return {name: sorted(set(types), key=lambda t: (t != _own_type(name), t)) for name, types in found.items()}


def _own_type(name: str) -> str | None:
    try:
        return str(getattr(transformers, name).config_class.model_type)
    except (AttributeError, ImportError):  # a class whose libraries are missing
        return None


def build(name: str, model_type: str) -> PreTrainedModel:
    """The model on the meta device, from its default config or the least change to it that works.

    Raises:
        Exception: whatever the first try raised.
    """
    cls = getattr(transformers, name)
    first: Exception | None = None
    for config_class in dict.fromkeys((CONFIG_MAPPING[model_type], cls.config_class)):
        wanted = OVERRIDES.get(config_class.model_type, {})
        for change in ({}, *COMMON_OVERRIDES):
            try:
                config = config_class(**(wanted | change))
                with torch.device("meta"), no_init_weights():
                    model: PreTrainedModel = cls(config)
                    return model
            except Exception as error:  # any model code may fail in any way
                first = first or error
    assert first is not None
    raise first


def op_data(op: Any) -> dict[str, Any]:
    """An operation as its class name and the arguments it was built with."""
    arguments = {key: value for key, value in vars(op).items() if value is not None}
    return {"op": type(op).__name__, **arguments}


def rule_data(rule: Any) -> dict[str, Any]:
    """One reversed transform as plain data, without its scope."""
    # LayerPairCollapse matches with a pattern of its own instead of the compiled sources.
    match = getattr(rule, "pattern", rule.compiled_sources).pattern
    data: dict[str, Any] = {"kind": type(rule).__name__, "match": match, "targets": rule.target_patterns}
    if isinstance(rule, loading.WeightConverter):
        data["sources"] = rule.source_patterns
        data["ops"] = [op_data(op) for op in rule.operations]
    if hasattr(rule, "offset"):
        data["offset"] = rule.offset
    return data


def reversed_rules(transforms: list[Any]) -> list[dict[str, Any]]:
    """What saving a model made from its config applies: no PrefixChange, last transform first."""
    kept = [t for t in transforms if not isinstance(t, loading.PrefixChange)]
    return [rule_data(t.reverse_transform()) for t in reversed(kept)]


def known_lists() -> dict[str, str]:
    """Content of every list in transformers' mapping -> the first identifier that has it."""
    conversions.get_checkpoint_conversion_mapping("llama")  # fills the cache
    cache = conversions._checkpoint_conversion_mapping_cache
    found: dict[str, str] = {}
    for identifier in sorted(cache):
        rules = reversed_rules(conversions.get_checkpoint_conversion_mapping(identifier))
        if rules and identifier != "legacy":
            found.setdefault(json.dumps(rules), identifier)
    return found


def segments(model: PreTrainedModel, names: dict[str, str], lists: dict[str, Any]) -> list[dict[str, str]]:
    """The model's reversed rules as ``{"rules": list name, "at": scope}``, in order of application."""
    transforms = conversions.get_model_conversion_mapping(model, add_legacy=False)
    result = []
    for scope, group in groupby(transforms, key=lambda t: t.scope_prefix):
        rules = reversed_rules(list(group))
        if rules:
            name = names.setdefault(json.dumps(rules), type(model).__name__)
            lists[name] = rules
            result.append({"rules": name} if scope is None else {"rules": name, "at": scope})
    return result[::-1]


def submodels(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """All pretrained models within the model, itself first under the name ``""``."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield name, module


def config_key(config: PreTrainedConfig, model: PreTrainedModel) -> str | None:
    """The key of the sub-config that a sub-model was built from, ``""`` for the config itself."""
    if type(model.config) is type(config):
        return ""
    keys = [
        key
        for key in config.sub_configs
        if getattr(getattr(config, key, None), "model_type", None) == model.config.model_type
    ]
    return keys[0] if len(keys) == 1 else None


def parts(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Sub-models that the config chooses: config key -> path, class and model type of the default."""
    chosen = {key for key, kind in model.config.sub_configs.items() if kind is AutoConfig}
    found: dict[str, dict[str, str]] = {}
    for path, module in submodels(model):
        key = config_key(model.config, module)
        if key is not None and key in chosen and key not in found:
            found[key] = {"path": path, "class": type(module).__name__, "type": module.config.model_type}
    return found


def ties(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Declared ties of the model and of the models in it, with the config flag that switches them."""
    found = []
    for path, module in submodels(model):
        declared = getattr(module, "_tied_weights_keys", None)
        if not declared:
            continue
        tie: dict[str, Any] = {"keys": dict(declared)}
        if getattr(module.config, "tie_word_embeddings", False):
            tie["default"] = True
        if "_tied_weights_keys" in vars(module):  # made in __init__ from the config at hand
            tie["dynamic"] = True
        if path:
            tie |= {"at": path, "config": config_key(model.config, module)}
        found.append(tie)
    return found


def tie_source(config: PreTrainedConfig) -> str | None:
    """The sub-config whose ``tie_word_embeddings`` switches ties on although the top level says no."""
    plain = config.to_dict() | {"tie_word_embeddings": False}
    for key in sorted(config.sub_configs):
        if not isinstance(plain.get(key), dict):
            continue
        changed = plain | {key: plain[key] | {"tie_word_embeddings": True}}
        try:
            after = type(config).from_dict(changed)
        except Exception:  # a sub-config that takes no such key
            continue
        if getattr(after, "tie_word_embeddings", False):
            return str(key)
    return None


def path_shapes(name: str) -> list[str]:
    """All leading paths of a name, shortest first, with ``*`` for numbers: ``a``, ``a.*``, ``a.*.b``."""
    shape = ["*" if part.isdigit() else part for part in name.split(".")]
    return [".".join(shape[: i + 1]) for i in range(len(shape))]


def one_per_shape(state: Mapping[str, Any]) -> dict[str, Any]:
    """The first tensor of each name that differs in more than numbers."""
    found: dict[str, tuple[str, Any]] = {}
    for name in sorted(state, key=loading.dot_natural_key):
        if isinstance(state[name], torch.Tensor):
            found.setdefault(path_shapes(name)[-1], (name, state[name]))
    return dict(found.values())


def would_change(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """The names among file names that saving would take for names in memory and rename."""
    transforms = conversions.get_model_conversion_mapping(model, add_legacy=False)
    kept = [t.reverse_transform() for t in transforms[::-1] if not isinstance(t, loading.PrefixChange)]
    converters = [t for t in kept if isinstance(t, loading.WeightConverter)]
    renamings = [t for t in kept if isinstance(t, loading.WeightRenaming)]
    for name in sorted(names, key=loading.dot_natural_key):
        renamed, pattern = loading.apply_converters(name, converters)
        if (renamed if pattern else loading.apply_renamings(name, renamings)) != name:
            yield name


def file_paths(model: PreTrainedModel) -> list[str]:
    """Leading paths that only names in files have, where the rules would rename such names again."""
    in_memory = one_per_shape(model.state_dict())
    known = {shape for name in in_memory for shape in path_shapes(name)}
    in_files = loading.revert_weight_conversion(model, dict(in_memory))
    found = set()
    for name in would_change(model, in_files):
        found.update([shape for shape in path_shapes(name) if shape not in known][:1])
    return sorted(found)


def architecture(model: PreTrainedModel, names: dict[str, str], lists: dict[str, Any]) -> dict[str, Any]:
    """The table's entry for one class; empty fields are left out."""
    rules = segments(model, names, lists)
    entry = {
        "type": model.config.model_type,
        "rules": rules,
        "prefix": model.base_model_prefix if any("at" in r for r in rules) or parts(model) else "",
        "parts": parts(model),
        "ties": ties(model),
        "tie_from": tie_source(model.config),
        "fp32": sorted(model._keep_in_fp32_modules or ()),
        "fp32_strict": sorted(model._keep_in_fp32_modules_strict or ()),
        "file_paths": file_paths(model) if rules else [],
        "not_saved": sorted(model._keys_to_ignore_on_save or ()),
    }
    return {key: value for key, value in entry.items() if value}


def reason(error: Exception) -> str:
    """One line on why a class could not be built, free of addresses and paths."""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {re.sub(r' at 0x[0-9a-f]+', '', line)[:120]}"


def make_table() -> dict[str, Any]:
    """Build the whole table.

    A class that serves several model types has one entry for its own and, where they differ, others
    named ``Class@type``. ``types`` and ``bases`` name the entry that stands for a model type, with a
    head and without.
    """
    hollow_out()
    names = known_lists()
    lists: dict[str, Any] = {}
    architectures: dict[str, dict[str, Any]] = {}
    skipped, types, bases = (dict[str, str]() for _ in range(3))
    for name, model_types in model_classes().items():
        for model_type in model_types:
            try:
                entry = architecture(build(name, model_type), names, lists)
            except Exception as error:  # reported in the table instead
                skipped.setdefault(name, reason(error))
                continue
            own = architectures.setdefault(name, entry)
            key = name if own | {"type": entry["type"]} == entry else f"{name}@{entry['type']}"
            architectures.setdefault(key, entry)
            types.setdefault(entry["type"], key)
            if name in _as_names(modeling_auto.MODEL_MAPPING_NAMES.get(model_type)):
                bases.setdefault(entry["type"], key)
    return {
        "transformers": transformers.__version__,
        "lists": lists,
        "architectures": architectures,
        "skipped": skipped,
        "types": types,
        "bases": bases,
    }


def _as_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def render(table: Mapping[str, Any]) -> str:
    """JSON with one line per class and one per rule, sorted, so that versions can be compared."""
    sections = []
    for key in sorted(table):
        value = table[key]
        if isinstance(value, dict):
            lines = (f"{json.dumps(name)}:{_entry(value[name])}" for name in sorted(value))
            sections.append(f'"{key}":{{\n' + ",\n".join(lines) + "\n}")
        else:
            sections.append(f'"{key}":{json.dumps(value)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _entry(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(_entry(item) for item in value) + "\n]"
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def main() -> int:
    """Write or check the table; the exit code."""
    parser = argparse.ArgumentParser(description="Write the table of save rules from transformers.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a difference")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    text = render(make_table())
    if not options.check:
        TABLE.write_text(text)
        return 0
    old = TABLE.read_text().splitlines() if TABLE.exists() else []
    new = text.splitlines()
    difference = list(difflib.unified_diff(old, new, "committed", "installed", n=0, lineterm=""))
    print("\n".join(line[:200] for line in difference[:50]), end="\n" if difference else "")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
