"""Arithmetic for a model that cannot add."""

import ast
import operator
from collections.abc import Callable
from typing import Any

Number = int | float

_MAX_CHARS = 4096
_MAX_BITS = 4096

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "max": max, "min": min, "round": round}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression: numbers, + - * / // % **, parentheses, abs, min, max and round."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are evaluated")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = number
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            result = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*(_value(arg) for arg in args))
        case _:
            raise ValueError(f"{ast.unparse(node)} is not arithmetic")
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise OverflowError(f"the number has more than {_MAX_BITS} bits")
    return result


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise OverflowError(f"the number has more than {_MAX_BITS} bits")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the power is a complex number")
    return result
