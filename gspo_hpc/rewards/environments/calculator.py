"""A calculator for the model: arithmetic, without running anything as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_MOST_CHARACTERS = 1000
_MOST_BITS = 4096  # of a whole number, so that no power takes long
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor", "ceil")},
    **{"abs": abs, "min": min, "max": max, "round": round},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as (3 + 4) * 5; also sqrt, exp, log, sin, cos, tan,
            floor, ceil, abs, min, max, round, pi and e.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, and may have {_MOST_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/"), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError):  # a thousand signs are nested as deeply
        raise ValueError("this is no arithmetic expression") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _UNARY:
            return _bounded(_UNARY[type(sign)](_value(inner)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(one) for one in args]
            try:
                return _bounded(_FUNCTIONS[name](*values))
            except TypeError as error:
                raise ValueError(f"{name} cannot be computed: {error}") from None
    raise ValueError("only numbers, + - * / // % **, parentheses and a few functions are known")


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError("the result is too large")
    return _bounded(base**exponent)


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is no finite number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the result is too large")
    found: int | float = value
    return found
