"""LoRA adapters in a state dict: which tensors they are, which weights they belong to, and how they are scaled.

Names are those of PEFT 0.21 in a model's state dict (``q_proj.lora_A.default.weight`` beside
``q_proj.base_layer.weight``) and in its adapter files (``base_model.model.…q_proj.lora_A.weight``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.tensors.virtual import Tensor

__all__ = ["Adapter", "Pair", "choose_adapter", "scaled", "split_names"]

Value = TypeVar("Value")

_PREFIX = "base_model.model."
_KINDS = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
_LORA = re.compile(rf"^(?P<module>.+)\.(?P<kind>{_KINDS})(?:\.(?P<rest>.+))?$")
_SAVED = re.compile(r"^(?P<module>.+)\.modules_to_save(?:\.(?P<name>[^.]+))?\.(?P<param>[^.]+)$")
# An adapted module keeps its own weights in there; once more for each adapted parameter of fused experts.
_WRAPPED = re.compile(r"(\.base_layer|\.original_module)+\.")
_OTHER = re.compile(r"(^|\.)(lora_\w+|token_adapter|trainable_tokens_delta|ia3_\w+|oft_\w+|vera_\w+)(\.|$)")
# Fields of adapter_config.json (PEFT 0.21) that change what an adapter means, and that cannot be fused.
_REFUSED = (
    "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "kasa_config", "arrow_config",
    "monteclora_config", "trainable_token_indices", "lora_bias",
)  # fmt: skip


@dataclass
class Pair:
    """The matrices that adapt one module.

    Attributes:
        parts: kind (``lora_A``, ``lora_B``, ...) -> tensor.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def embedding(self) -> bool:
        """Whether it adapts an embedding: A is ``[rank, vocabulary]``, B ``[dim, rank]``."""
        return "lora_embedding_A" in self.parts

    @property
    def a(self) -> Tensor:
        """``[rank, in]``."""
        return self.parts["lora_embedding_A" if self.embedding else "lora_A"]

    @property
    def b(self) -> Tensor:
        """``[out, rank]``."""
        return self.parts["lora_embedding_B" if self.embedding else "lora_B"]

    @property
    def rank(self) -> int:
        """Rank, from the tensors."""
        return self.a.shape[0]


@dataclass
class Adapter:
    """One adapter.

    Attributes:
        pairs: module -> its matrices.
        saved: parameter -> the values that were trained with the adapter, in place of the base's.
        settings: what is recorded of it: the fields of adapter_config.json, as far as they are known.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def split_names(
    values: Mapping[str, Value],
) -> tuple[dict[str, Value], dict[str, dict[str, Value]], dict[str, dict[str, Value]]]:
    """Tell base weights, adapters and modules that were trained with them apart.

    Returns:
        Base name -> value; adapter name -> ``module.kind`` -> value; adapter name -> parameter -> value.

    Raises:
        UnsupportedError: a kind of adapter that is not known.
        SourceError: two values of one name.
    """
    base: dict[str, Value] = {}
    adapters: dict[str, dict[str, Value]] = {}
    saved: dict[str, dict[str, Value]] = {}
    for key, value in values.items():
        name = key.removeprefix(_PREFIX)
        lora, trained = _LORA.match(name), _SAVED.match(name)
        if lora:
            adapter, param = _adapter_and_parameter(lora["rest"])
            if param == "bias":
                raise UnsupportedError(f"{key}: LoRA with a bias of its own (lora_bias) is not supported")
            place, target = adapters.setdefault(adapter, {}), f"{lora['module']}.{lora['kind']}"
        elif trained:
            place, target = (
                saved.setdefault(trained["name"] or "default", {}),
                f"{trained['module']}.{trained['param']}",
            )
        elif _OTHER.search(name):
            raise UnsupportedError(
                f"{key}: this kind of adapter is not supported; nothing is merged, as it would be lost"
            )
        else:
            place, target = base, _WRAPPED.sub(".", name)
        if target in place:
            raise SourceError(f"{key} occurs twice, as {target}")
        place[target] = value
    return base, adapters, saved


def _adapter_and_parameter(rest: str | None) -> tuple[str, str]:
    """``default.weight``, ``weight``, ``default`` or nothing, as PEFT's kinds of layers have it."""
    parts = (rest or "").split(".")
    param = parts.pop() if parts[-1] in ("weight", "bias") else ""
    return ".".join(parts) or "default", param


def choose_adapter(
    adapters: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    name: str | None,
) -> Adapter | None:
    """The adapter of a name, or the only one; None when there is none.

    Raises:
        UsageError: there are several, or none of that name.
        SourceError: one of A and B is missing.
        UnsupportedError: the settings ask for something that is not known.
    """
    if not adapters:
        if saved:
            raise SourceError(
                f"{next(iter(next(iter(saved.values()))))} was trained with an adapter, but there is none"
            )
        if name is not None:
            raise UsageError(f"--adapter {name}: the checkpoint holds no adapter, and there is no such folder")
        return None
    if name is None and len(adapters) > 1:
        raise UsageError(f"there are several adapters; choose one with --adapter: {', '.join(adapters)}")
    chosen = name or next(iter(adapters))
    if chosen not in adapters:
        raise UsageError(f"--adapter {chosen}: there is none of that name; there are {', '.join(adapters)}")
    refuse_settings(settings)
    made = Adapter(saved=dict(saved.get(chosen, {})), settings=settings)
    for key, tensor in adapters[chosen].items():
        module, _, kind = key.rpartition(".")
        made.pairs.setdefault(module, Pair()).parts[kind] = tensor
    for module, pair in made.pairs.items():
        _check_pair(module, pair)
    return made


def refuse_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what changes an adapter's meaning and is not known here.

    Raises:
        UnsupportedError: naming the field.
    """
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"adapters of type {kind} are not supported, only LORA")
    for name in _REFUSED:
        if settings.get(name):
            raise UnsupportedError(f"an adapter with {name} is not supported")


def _check_pair(module: str, pair: Pair) -> None:
    for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        for have, lack in ((one, other), (other, one)):
            if have in pair.parts and lack not in pair.parts:
                raise SourceError(f"{module}.{have} has no {lack} beside it; the adapter is incomplete")
    if not {"lora_A", "lora_embedding_A"} & pair.parts.keys():
        raise SourceError(f"{module} has a magnitude vector, but no lora_A and lora_B")
    if pair.a.shape[0] != pair.b.shape[1] or len(pair.a.shape) != len(pair.b.shape):
        raise SourceError(f"{module}: A {list(pair.a.shape)} and B {list(pair.b.shape)} do not go together")


def alpha_of(module: str, settings: Mapping[str, Any], given: float | None) -> float:
    """lora_alpha of a module.

    Raises:
        UsageError: it is recorded nowhere, or as 0.
    """
    alpha = given
    if alpha is None:
        alpha = _by_pattern(module, settings.get("alpha_pattern")) or settings.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha == 0:
        raise UsageError(
            f"lora_alpha of the adapter is recorded nowhere{' (it is 0, which is none)' if alpha == 0 else ''}, and it "
            "cannot be guessed; give the one of the training with --lora-alpha"
        )
    return float(alpha)


def scaled(module: str, pair: Pair, settings: Mapping[str, Any], given: float | None) -> float:
    """What ``B @ A`` is multiplied by.

    Raises:
        UsageError: alpha is not known.
        SourceError: the recorded rank is not that of the tensors.
    """
    alpha = alpha_of(module, settings, given)
    recorded = _by_pattern(module, settings.get("rank_pattern")) or settings.get("r")
    if isinstance(recorded, int) and recorded and recorded != pair.rank:
        raise SourceError(
            f"{module}: lora_A has rank {pair.rank}, but rank {recorded} is recorded; is it the same adapter?"
        )
    return alpha / math.sqrt(pair.rank) if settings.get("use_rslora") else alpha / pair.rank


def _by_pattern(module: str, patterns: object) -> Any:
    """The value of the first pattern that fits, as PEFT's ``get_pattern_key`` finds it."""
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as fault:
                raise SourceError(f"the adapter's pattern {pattern!r} is none: {fault}") from fault
    return None
