"""What becomes of a model and its adapter: fused weights, or a PEFT adapter beside the base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from streammerge.dtypes import DType
from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.adapters import Adapter, Pair, alpha_of, scaled
from streammerge.families.lora import LoraSum
from streammerge.tensors.formula import Formulas
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import Tensor, numel, permute

__all__ = ["fused", "peft_config", "peft_tensors"]

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForTokenClassification": "TOKEN_CLS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def fused(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    alpha: float | None,
    rule: Callable[[str, DType], DType],
    formulas: Formulas,
    *,
    peft_rounding: bool,
    may_lack: Collection[str] = (),
) -> dict[str, Tensor]:
    """The base's tensors with an adapter in them.

    Args:
        tensors: base name -> tensor.
        alpha: lora_alpha as the user gives it.
        rule: (name, stored dtype) -> written dtype.
        formulas: where the computed tensors are listed.
        peft_rounding: round as PEFT's ``merge_and_unload`` does, bit for bit.
        may_lack: names that the base may be without, because it ties them to others.

    Raises:
        SourceError: an adapter of a module that is not there, or of another shape.
        UsageError: alpha is not known.
    """
    result = dict(tensors)
    for name, tensor in adapter.saved.items():
        if name not in tensors and name not in may_lack:
            raise SourceError(f"{name} was trained with the adapter, but the base has no such parameter")
        if name in tensors and tensor.shape != tensors[name].shape:
            raise SourceError(f"{name} has shape {list(tensor.shape)}, but {list(tensors[name].shape)} in the base")
        result[name] = tensor
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        if name not in result:
            raise SourceError(f"the adapter has {module}, but the base has no {name}; is it of the same model?")
        base = result[name]
        try:
            result[name] = _sum(module, pair, base, adapter, alpha, rule(name, base.dtype), formulas, peft_rounding)
        except (SourceError, UnsupportedError) as fault:
            raise type(fault)(f"{module}: {fault}") from fault
    return result


def _sum(
    module: str,
    pair: Pair,
    base: Tensor,
    adapter: Adapter,
    alpha: float | None,
    written: DType,
    formulas: Formulas,
    exact: bool,
) -> Tensor:
    scale = scaled(module, pair, adapter.settings, alpha)
    magnitude = pair.parts.get("lora_magnitude_vector")
    a, b, flat = pair.a, pair.b, base
    if len(base.shape) > 2:  # a convolution: PEFT's A has the kernel, B is 1 x 1
        a, b = (reshape(one, (one.shape[0], numel(one) // one.shape[0])) for one in (a, b))
        flat = reshape(base, (base.shape[0], numel(base) // base.shape[0]))
    # Conv1D weights are [in, out], and an embedding's [vocabulary, dim]: the product is transposed.
    turned = pair.embedding or bool(adapter.settings.get("fan_in_fan_out"))
    left, right = (permute(a, (1, 0)), permute(b, (1, 0))) if turned else (b, a)
    if magnitude is not None and (turned or len(base.shape) > 2):
        raise UnsupportedError("DoRA on embeddings, Conv1D and convolutions is not supported")
    if magnitude is not None and adapter.settings.get("use_dora") is False:
        raise SourceError("there is a magnitude vector, but use_dora is recorded as false")
    made = formulas.add(
        LoraSum(
            flat,
            left,
            right,
            scale,
            written,
            magnitude=magnitude,
            round_delta=exact and pair.embedding,
            exact=exact,
        )
    )
    return reshape(made, base.shape)


def peft_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The content of ``adapter_model.safetensors``, sorted by name."""
    made = {}
    for module, pair in adapter.pairs.items():
        for kind, tensor in pair.parts.items():
            ending = ".weight" if kind in ("lora_A", "lora_B") else ""
            made[f"base_model.model.{module}.{kind}{ending}"] = tensor
    made |= {f"base_model.model.{name}": tensor for name, tensor in adapter.saved.items()}
    return dict(sorted(made.items()))


def peft_config(
    tensors: Mapping[str, Tensor], adapter: Adapter, alpha: float | None, architecture: str | None, base: str | None
) -> dict[str, Any]:
    """The fields of ``adapter_config.json`` that decide on the adapter.

    Args:
        tensors: the base, to find names that fit the adapted modules only.
        architecture: class name, for the task.
        base: what the base model is called.

    Raises:
        UsageError: alpha is not known.
    """
    recorded = adapter.settings
    ranks = Counter(pair.rank for pair in adapter.pairs.values())
    rank = max(ranks, key=lambda one: (ranks[one], one))
    task = next((task for ending, task in _TASKS.items() if (architecture or "").endswith(ending)), None)
    alphas = {module: alpha_of(module, recorded, alpha) for module in adapter.pairs}
    for module, pair in adapter.pairs.items():
        scaled(module, pair, recorded, alpha)
    usual = Counter(alphas.values()).most_common(1)[0][0]
    patterns: dict[str, dict[str, Any]] = {
        "rank_pattern": {f"^{module}": pair.rank for module, pair in adapter.pairs.items() if pair.rank != rank},
        "alpha_pattern": {f"^{module}": _plain(own) for module, own in alphas.items() if own != usual},
    }
    saved = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in adapter.saved})
    return {
        "base_model_name_or_path": recorded.get("base_model_name_or_path") or base,
        "task_type": recorded.get("task_type") or task,
        "r": rank,
        "lora_alpha": _plain(usual),
        "target_modules": _targets(tensors, adapter),
        "modules_to_save": saved or None,
        "use_rslora": bool(recorded.get("use_rslora")),
        "use_dora": any("lora_magnitude_vector" in pair.parts for pair in adapter.pairs.values()),
        "fan_in_fan_out": bool(recorded.get("fan_in_fan_out")),
        "inference_mode": True,
        **{name: dict(sorted(pattern.items())) for name, pattern in patterns.items()},
    }


def _targets(tensors: Mapping[str, Tensor], adapter: Adapter) -> list[str]:
    """Last parts of names where these fit adapted modules only, else whole names."""
    everywhere = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight")}
    targets = set()
    for module in adapter.pairs:
        last = module.rpartition(".")[2]
        alike = {one for one in everywhere | adapter.pairs.keys() if one == last or one.endswith(f".{last}")}
        targets.add(last if alike <= adapter.pairs.keys() else module)
    return sorted(targets)


def _plain(value: float) -> int | float:
    """PEFT's own type for a whole number."""
    return int(value) if value == int(value) else value
