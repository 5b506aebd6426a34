"""Which dtype a tensor is written in."""

from __future__ import annotations

import pytest

from streammerge.dtypes import dtype_named
from streammerge.errors import UsageError
from streammerge.plan.dtypes import dtype_rule

FIXED = ("int64", "int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64")


def written(wanted: str, config: str | None, stored: str, name: str = "model.norm.weight") -> str:
    """What the rule says, in names."""
    rule = dtype_rule(wanted, config, lambda tensor: "e_score_correction_bias" in tensor)
    return rule(name, dtype_named(stored)).name


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_auto_follows_the_config(stored: str) -> None:
    assert written("auto", "bfloat16", stored) == "bfloat16"
    assert written("auto", "torch.float16", stored) == "float16"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int64"])
def test_as_stored(stored: str) -> None:
    assert written("auto", None, stored) == stored
    assert written("keep", "float16", stored) == stored


@pytest.mark.parametrize(
    ("alias", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("torch.float32", "float32")]
)
def test_a_name_beats_the_config(alias: str, name: str) -> None:
    assert written(alias, "bfloat16", "float32") == name


@pytest.mark.parametrize("stored", FIXED)
@pytest.mark.parametrize("wanted", ["bfloat16", "float32", "float16", "auto"])
def test_other_kinds_are_never_cast(stored: str, wanted: str) -> None:
    assert written(wanted, "bfloat16", stored) == stored


def test_float32_that_the_model_keeps() -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert written("bfloat16", None, "float32", bias) == "float32"
    assert written("auto", "float16", "float32", bias) == "float32"
    assert written("float32", None, "bfloat16", bias) == "float32"
    assert written("float64", None, "float32", bias) == "float64"


@pytest.mark.parametrize("wanted", ["int8", "bool", "float8_e4m3fn", "complex64", "nonsense", ""])
def test_no_dtype_for_weights(wanted: str) -> None:
    with pytest.raises(UsageError):
        dtype_rule(wanted, None, lambda name: False)
