"""What becomes of a model and its adapter: fused weights, or a PEFT adapter beside the base."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from streammerge.dtypes import DType
from streammerge.errors import SourceError, UnsupportedError
from streammerge.families.adapters import Adapter, Pair, alpha_of, scaled
from streammerge.families.lora import LoraSum
from streammerge.tensors.formula import Formulas
from streammerge.tensors.reshape import reshape
from streammerge.tensors.virtual import Tensor, narrow, numel, permute, stack, strided, unbind

__all__ = ["fused", "peft_config", "peft_tensors"]

ToFiles = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

# In the order in which transformers' fused experts define them.
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
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
    to_files: ToFiles = dict,
) -> dict[str, Tensor]:
    """The base's tensors with an adapter in them.

    Args:
        tensors: base name -> tensor.
        alpha: lora_alpha as the user gives it.
        rule: (name, stored dtype) -> written dtype.
        formulas: where the computed tensors are listed.
        peft_rounding: round as PEFT's ``merge_and_unload`` does, bit for bit.
        may_lack: names that the base may be without, because it ties them to others.
        to_files: from tensors under the names in memory, which adapters go by, to those of files, which
            ``tensors`` may have.

    Raises:
        SourceError: an adapter of a module that is not there, or of another shape.
        UsageError: alpha is not known.
    """
    result = dict(tensors)
    for name, tensor in adapter.saved.items():
        own = _found(name, tensors, to_files)
        if own is None and name not in may_lack:
            raise SourceError(f"{name} was trained with the adapter, but the base has no such parameter")
        if own is not None and tensor.shape != tensors[own].shape:
            raise SourceError(f"{name} has shape {list(tensor.shape)}, but {list(tensors[own].shape)} in the base")
        result[own or name] = tensor
    for module, pair in adapter.pairs.items():
        made = _Making(module, pair, adapter, alpha, rule, formulas, peft_rounding)
        try:
            weight = _found(f"{module}.weight", result, to_files)
            if weight is not None:
                result[weight] = _sum(made, weight, result[weight])
            else:
                result |= expert_sums(made, result, to_files)
        except (SourceError, UnsupportedError) as fault:
            raise type(fault)(f"{module}: {fault}") from fault
    return result


def _found(name: str, tensors: Mapping[str, Tensor], to_files: ToFiles) -> str | None:
    """The name under which the base has a parameter: that in memory, or that in files."""
    if name in tensors:
        return name
    like = next(iter(tensors.values()))  # any tensor will do: only its name is converted
    try:
        names = list(to_files({name: like}))
    except (SourceError, UnsupportedError):
        return None
    return names[0] if len(names) == 1 and names[0] in tensors else None


def _sum(made: _Making, name: str, base: Tensor) -> Tensor:
    pair, settings = made.pair, made.adapter.settings
    a, b, flat = pair.a, pair.b, base
    if len(base.shape) > 2:  # a convolution: PEFT's A has the kernel, B is 1 x 1
        a, b = (reshape(one, (one.shape[0], numel(one) // one.shape[0])) for one in (a, b))
        flat = reshape(base, (base.shape[0], numel(base) // base.shape[0]))
    # Conv1D weights are [in, out], and an embedding's [vocabulary, dim]: the product is transposed.
    turned = pair.embedding or bool(settings.get("fan_in_fan_out"))
    left, right = (permute(a, (1, 0)), permute(b, (1, 0))) if turned else (b, a)
    magnitude = pair.parts.get("lora_magnitude_vector")
    if magnitude is not None and (len(base.shape) > 2 or (turned and not pair.embedding)):
        raise UnsupportedError("DoRA on Conv1D and convolutions is not supported")
    if magnitude is not None and settings.get("use_dora") is False:
        raise SourceError("there is a magnitude vector, but use_dora is recorded as false")
    scale = scaled(made.module, pair, settings, made.alpha)
    return reshape(made.sum_of(flat, left, right, scale, name, magnitude, rounded=pair.embedding), base.shape)


@dataclass(frozen=True)
class _Making:
    """What all sums of one module have in common."""

    module: str
    pair: Pair
    adapter: Adapter
    alpha: float | None
    rule: Callable[[str, DType], DType]
    formulas: Formulas
    exact: bool

    def sum_of(
        self,
        base: Tensor,
        left: Tensor,
        right: Tensor,
        scale: float,
        name: str,
        magnitude: Tensor | None = None,
        *,
        rounded: bool = False,
    ) -> Tensor:
        """``base + scale * left @ right``; ``rounded``: PEFT rounds the product first."""
        written = self.rule(name, base.dtype)
        formula = LoraSum(
            base,
            left,
            right,
            scale,
            written,
            magnitude=magnitude,
            by_column=self.pair.embedding,
            round_delta=self.exact and rounded and magnitude is None,
            exact=self.exact,
        )
        return self.formulas.add(formula)


def expert_sums(made: _Making, tensors: Mapping[str, Tensor], to_files: ToFiles) -> dict[str, Tensor]:
    """Fused experts with an adapter on one of their parameters (PEFT's ``target_parameters``).

    The matrices of all experts are in one: A is ``[experts * rank, in]``, expert by expert, and B
    ``[out, rank * experts]``, rank by rank (PEFT 0.21). Which parameter they are of, only the nesting
    of names says: the outermost pair is of the last one in the module's order.

    Raises:
        SourceError: there is no such parameter, or it has another shape.
        UnsupportedError: it is not known which of two dims is which.
    """
    experts_module, depth = _nesting(made.module)
    wanted = made.adapter.settings.get("target_parameters") or []
    targets = [p for p in _EXPERT_PARAMETERS if any(f".{experts_module}.{p}".endswith(f".{t}") for t in wanted)]
    if not 0 <= depth < len(targets):
        raise SourceError(f"the base has no {made.module}.weight; is it of the same model?")
    name = f"{experts_module}.{targets[-1 - depth]}"
    a, b = made.pair.a, made.pair.b
    experts = _expert_count(name, tensors, to_files)
    rank, rest = divmod(a.shape[0], experts)
    if rest or not rank or b.shape[1] != a.shape[0]:
        raise SourceError(f"A {list(a.shape)} and B {list(b.shape)} are not those of {experts} experts")
    scale = scaled(made.module, Pair({"lora_A": narrow(a, 0, 0, rank), "lora_B": b}), made.adapter.settings, made.alpha)
    lefts = [strided(b, 1, expert, experts, rank) for expert in range(experts)]
    rights = [narrow(a, 0, expert * rank, rank) for expert in range(experts)]
    if name in tensors:
        whole = tensors[name]
        sums = [
            made.sum_of(base, *_oriented(base, left, right), scale, name, rounded=True)
            for base, left, right in zip(unbind(whole), lefts, rights, strict=True)
        ]
        return {name: stack(sums)}
    # What files hold of each expert are rows of the parameter, and so of B.
    result = {}
    for own, left in to_files({name: stack(lefts)}).items():
        expert = int(re.findall(r"\.experts\.(\d+)\.", own)[0])
        result[own] = made.sum_of(tensors[own], left, rights[expert], scale, own, rounded=True)
    return result


def _nesting(module: str) -> tuple[str, int]:
    found = re.search(r"(\.base_layer)*$", module)
    nested = found[0] if found else ""
    return module[: len(module) - len(nested)], nested.count(".base_layer")


def _expert_count(name: str, tensors: Mapping[str, Tensor], to_files: ToFiles) -> int:
    if name in tensors:
        return tensors[name].shape[0]
    experts = {
        int(found[1]) for own in tensors if (found := re.match(rf"{re.escape(name.rpartition('.')[0])}\.(\d+)\.", own))
    }
    if not experts or experts != set(range(len(experts))):
        raise SourceError(f"the base has no {name}; is it of the same model?")
    return len(experts)


def _oriented(base: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The factors as the expert's weight lies: ``[out, in]``, or ``[in, out]`` as in gpt-oss and llama 4."""
    straight = base.shape == (left.shape[0], right.shape[1])
    turned = base.shape == (right.shape[1], left.shape[0])
    if straight and turned:
        raise UnsupportedError("a square expert weight does not tell which of its dims is the input")
    return (left, right) if straight else (permute(right, (1, 0)), permute(left, (1, 0)))


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
    if any("base_layer" in module.split(".") or f"{module}.weight" not in tensors for module in adapter.pairs):
        raise UnsupportedError("adapters of fused expert parameters can be fused (--lora fuse), but not extracted")
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
