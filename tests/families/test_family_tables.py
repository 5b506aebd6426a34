"""Family tables: what a user writes, what is refused, and the page that shows how."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import streammerge as sm
from streammerge.errors import SourceError, UnsupportedError, UsageError
from streammerge.families import table_files
from streammerge.families.expressions import evaluate, names_in
from streammerge.families.fields import Fields
from streammerge.families.table_files import find_table, read_table
from tests.support.raw import of_torch, read_folder

_PAGE = Path(__file__).parents[2] / "docs" / "add-a-family.md"
_CONFIG = {
    "model_type": "mymodel",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def _megatron(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What Megatron would hold of such a model: q/k/v grouped, gate over up, a padded vocabulary."""
    state = {
        "embedding.word_embeddings.weight": torch.randn(64, 16),
        "decoder.final_layernorm.weight": torch.randn(16),
        "output_layer.weight": torch.randn(64, 16),
    }
    for layer in range(2):
        state |= {
            f"decoder.layers.{layer}.{name}": torch.randn(shape)
            for name, shape in {
                "self_attention.linear_qkv.weight": (32, 16),
                "self_attention.linear_qkv.layer_norm_weight": (16,),
                "self_attention.linear_proj.weight": (16, 16),
                "self_attention.q_layernorm.weight": (4,),
                "self_attention.k_layernorm.weight": (4,),
                "mlp.linear_fc1.weight": (48, 16),
                "mlp.linear_fc1.layer_norm_weight": (16,),
                "mlp.linear_fc2.weight": (16, 24),
            }.items()
        }
    state |= {name: tensor for name, tensor in changed.items() if tensor is not None}
    return {name: tensor for name, tensor in state.items() if changed.get(name, tensor) is not None}


def _expected(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"][:50],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"][:50],
    }
    for layer in range(2):
        own = {name.partition(f"layers.{layer}.")[2]: tensor for name, tensor in state.items()}
        groups = own["self_attention.linear_qkv.weight"].view(2, 4, 4, 16)  # group, (q, q, k, v), head dim, hidden
        names |= {
            f"model.layers.{layer}.{name}": tensor.contiguous()
            for name, tensor in {
                "self_attn.q_proj.weight": groups[:, :2].reshape(16, 16),
                "self_attn.k_proj.weight": groups[:, 2].reshape(8, 16),
                "self_attn.v_proj.weight": groups[:, 3].reshape(8, 16),
                "self_attn.o_proj.weight": own["self_attention.linear_proj.weight"],
                "self_attn.q_norm.weight": own["self_attention.q_layernorm.weight"],
                "self_attn.k_norm.weight": own["self_attention.k_layernorm.weight"],
                "mlp.gate_proj.weight": own["mlp.linear_fc1.weight"][:24],
                "mlp.up_proj.weight": own["mlp.linear_fc1.weight"][24:],
                "mlp.down_proj.weight": own["mlp.linear_fc2.weight"],
                "input_layernorm.weight": own["self_attention.linear_qkv.layer_norm_weight"],
                "ffn_norm.weight": own["mlp.linear_fc1.layer_norm_weight"],
            }.items()
        }
    return names


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The table that the page shows first."""
    path = tmp_path / "mymodel.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", _PAGE.read_text(), re.DOTALL)[0])
    return path


def _save(folder: Path, state: Mapping[str, Any], **config: object) -> Path:
    dcp.save(dict(state), checkpoint_id=folder / "ckpt", no_dist=True)
    (folder / "hf").mkdir(exist_ok=True)
    (folder / "hf" / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    return folder / "ckpt"


def test_the_page_in_ten_minutes(table: Path, tmp_path: Path) -> None:
    state = _megatron()
    sm.merge(_save(tmp_path, state), tmp_path / "out", hf_config=tmp_path / "hf", family_tables=[table], check=False)
    expected = {name: of_torch(tensor) for name, tensor in _expected(state).items()}
    assert read_folder(tmp_path / "out") == expected


def test_without_the_table_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'mymodel'.*--family"):
        sm.plan(_save(tmp_path, _megatron()), tmp_path / "out", hf_config=tmp_path / "hf")


def test_a_plugin_needs_no_option(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        """As importlib.metadata finds it."""

        def load(self) -> Path:
            return table

    monkeypatch.setattr(table_files.metadata, "entry_points", lambda group: [Point()])
    table_files._installed.cache_clear()
    try:
        assert find_table("megatron", "mymodel").origin == str(table)
    finally:
        table_files._installed.cache_clear()


def test_the_page_lists_every_layout_and_key() -> None:
    page = _PAGE.read_text()
    wanted = {*table_files.LAYOUTS, *table_files._ROW, *(table_files._TOP - {"block"}), *table_files._BLOCK}
    assert {name for name in wanted if f"`{name}`" not in page and f"`[{name}]`" not in page} == set()


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("decoder.layers.1.mlp.extra.weight", torch.ones(3), UnsupportedError, "mlp.extra.weight.*would be lost"),
        ("decoder.layers.1.self_attention.q_layernorm.weight", None, SourceError, "q_layernorm.weight is missing"),
        ("decoder.layers.1.self_attention.linear_qkv.bias", torch.ones(32), SourceError, "attention_bias"),
        ("decoder.layers.2.mlp.linear_fc2.weight", torch.ones(16, 24), SourceError, "num_hidden_layers = 2"),
        ("decoder.layers.1.input_layernorm.weight", torch.ones(16), SourceError, "two spellings"),
        ("decoder.layers.0.mlp.linear_fc2.weight", torch.ones(16, 23), SourceError, "intermediate_size = 24"),
        ("decoder.layers.0.mlp.linear_fc1.weight_w", torch.ones(24, 16), SourceError, "two forms"),
        ("embedding.word_embeddings.weight", torch.ones(49, 16), SourceError, "vocab_size = 50"),
        ("embedding.word_embeddings.weight", torch.ones(5000, 16), SourceError, "more than padding explains"),
    ],
)
def test_every_parameter_has_to_fit(
    table: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, error: type[Exception], message: str
) -> None:
    source = _save(tmp_path, _megatron(**{name: tensor}))
    with pytest.raises(error, match=message):
        sm.merge(source, tmp_path / "out", hf_config=tmp_path / "hf", family_tables=[table], check=False)
    assert not (tmp_path / "out").exists()


def test_gate_and_up_stored_one_by_one(table: Path, tmp_path: Path) -> None:
    state = _megatron()
    parts = {name: tensor for name, tensor in state.items() if "linear_fc1.weight" not in name}
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        parts[f"{name}_w"], parts[f"{name}_v"] = state[name][:24].clone(), state[name][24:].clone()
    sm.merge(_save(tmp_path, parts), tmp_path / "out", hf_config=tmp_path / "hf", family_tables=[table], check=False)
    assert read_folder(tmp_path / "out") == {name: of_torch(tensor) for name, tensor in _expected(state).items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot be read"),
        ("extends = 'nowhere'", "extends nowhere"),
        ("extends = 'mine'", "extends mine"),
        ("extends = 3", "extends names one table"),
        ("layer = 3", "layer is no list"),
        ("[[block]]\nfrom = 'a'", "a block has from, to, count"),
        ("[[tensor]]\nfrom = 'a'\nshapes = ['1']\nto = 'b'", "a row needs from"),
        ("[[tensor]]\nto = 'b'", "a row needs from"),
        ("[[tensor]]\nfrom = 'a'", "a target"),
        ("[[tensor]]\nfrom = 'a'\nto = 'b'\ndrop = 'c'", "a target"),
        ("[[tensor]]\nfrom = 'a'\nto = 'b'\nlayout = 'mirrored'", "'mirrored'; there are copy"),
        ("[[tensor]]\nfrom = 'a'\nto = 'b'\nshape = ['2 *']", "no expression"),
        ("[fields]\nx = '2 *'", "no expression"),
        ("[[block]]\nfrom = 'a'\nto = 'b'\ncount = ')'", "no expression"),
    ],
)
def test_tables_without_sense(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(tmp_path / "mine.toml")


def test_every_table_of_the_package_can_be_read() -> None:
    tables = [read_table(path) for path in sorted(table_files._OWN.glob("*.toml"))]
    assert {"llama", "qwen3_moe", "deepseek_v3", "gpt_oss"} <= {name for one in tables for name in one.model_types}
    for one in tables:
        known = [name for other in tables if other.framework == one.framework for name in other.model_types]
        assert len(known) == len(set(known)), "two tables for one model type"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * a + b // 2 - a % 3", 9),
        ("not a", False),
        ("a in [1, 4] and b > 3", True),
        ("a not in c", False),
        ("1 < a <= 4 != b", True),
        ("d.e + c[0]", 11),
        ("-a or b", True),
        ("kind == 'full'", True),
    ],
)
def test_expressions(text: str, value: object) -> None:
    names = {"a": 4, "b": 5, "c": [4], "d.e": 7, "kind": "full"}
    assert evaluate(text, names.__getitem__) == value


@pytest.mark.parametrize(
    "text",
    [
        "a()",
        "__import__('os')",
        "[x for x in a]",
        "a if b else c",
        "lambda: 1",
        "a ** b",
        "f'{a}'",
        "1.5",
        "a @ b",
        "",
        "a b",
    ],
)
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(UsageError):
        evaluate(text, lambda name: 1)


@pytest.mark.parametrize("text", ["a // 0", "a + 'x'", "a[0]", "c[9]"])
def test_what_cannot_be_computed(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be computed"):
        evaluate(text, {"a": 1, "c": [1]}.__getitem__)


def test_names_in_an_expression() -> None:
    assert names_in("a + b.c * a - layer_types[layer]") == ("a", "b.c", "layer_types", "layer")


def test_fields_take_the_first_definition_that_has_values() -> None:
    definitions = {"size": ["size", "wide // heads"], "moe": ["layer >= first"], "first": ["first", "3"]}
    fields = Fields({"wide": 12, "heads": 3, "size": None}, definitions)
    assert fields.size("2 * size") == 8
    assert fields.describe("size") == "wide = 12, heads = 3"
    assert [fields.evaluate("moe", layer=layer) for layer in (2, 3)] == [False, True]
    assert Fields({"size": 5}, definitions).size("size") == 5
    with pytest.raises(SourceError, match="lacks heads"):
        Fields({"wide": 12}, {}).size("wide // heads")
    with pytest.raises(SourceError, match=r"no size.*wide = -1"):
        Fields({"wide": -1}, {}).size("wide")
