"""Arithmetic in family tables: sizes and conditions in terms of the model's config.

Tables can come from users, so nothing is executed: numbers, lists, names (``vision_config.depth`` is one),
``+ - * // %``, comparisons, ``and or not in`` and indexing are evaluated over the parsed text, and everything
else is refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from streammerge.errors import UsageError

__all__ = ["evaluate", "names_in"]

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def evaluate(text: str, lookup: Callable[[str], Any]) -> Any:
    """The value of an expression.

    Args:
        text: such as ``2 * intermediate_size``.
        lookup: name -> value; its errors pass through.

    Raises:
        UsageError: it is no expression of the allowed kind, or cannot be computed.
    """
    try:
        return _value(_parsed(text), lookup, text)
    except (TypeError, ArithmeticError, LookupError) as fault:
        raise UsageError(f"the expression {text!r} cannot be computed: {fault}") from fault


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as fault:
        raise UsageError(f"{text!r} is no expression: {fault}") from fault


@lru_cache(maxsize=4096)
def names_in(text: str) -> tuple[str, ...]:
    """The names that an expression uses, each once, in order.

    Raises:
        UsageError: it is no expression.
    """
    return tuple(dict.fromkeys(_names(_parsed(text))))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
        return
    for part in ast.iter_child_nodes(node):
        yield from _names(part)


def _value(node: ast.expr, lookup: Callable[[str], Any], text: str) -> Any:
    def of(part: ast.expr) -> Any:
        return _value(part, lookup, text)

    if isinstance(node, ast.Name | ast.Attribute):
        return lookup(ast.unparse(node))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | str | None):
        return node.value
    if isinstance(node, ast.List):
        return [of(part) for part in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](of(node.left), of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not of(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -of(node.operand)
    if isinstance(node, ast.BoolOp):
        values = map(of, node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)  # stops early, as Python does
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        sides = [of(side) for side in (node.left, *node.comparators)]
        return all(_COMPARISONS[type(op)](a, b) for op, a, b in zip(node.ops, sides[:-1], sides[1:], strict=True))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.expr):
        return of(node.value)[of(node.slice)]
    raise UsageError(f"the expression {text!r} uses something that is not allowed: {ast.unparse(node)}")
