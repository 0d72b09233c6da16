"""Evaluate the arithmetic of a shell, $(( )) and (( )): whole numbers of 64 bits, names, and the operators of C."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import NoReturn

from gspo_hpc.importers.scripts.expansion.splitting import is_open
from gspo_hpc.importers.scripts.scope import Scope, Unknown

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|[1-9]\d?#[\w@]+|\d+)(?![\w#.])|(?P<name>[A-Za-z_]\w*)|"
    r"(?P<sign>\*\*|<<=|>>=|\+\+|--|&&|\|\||[-+*/%&|^]=|<<|>>|[<>=!]=|[-+*/%<>=!~&|^?:(),\[\]]))"
)
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)(?:\s*\[.*?\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_DEEPEST = 40  # brackets, and variables whose values are expressions, within each other
_LONGEST = 2_000  # characters of an expression


def _divided(left: int, right: int) -> int:
    """Return the quotient rounded towards zero, as a shell does."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


def _power(left: int, right: int) -> int:
    if right < 0:
        raise ValueError
    return pow(left, right, 1 << 64)


def _of_base(base: int, digits: str) -> int:
    """Return the value of base#digits: up to base 36, large letters are as small ones. Raises ValueError for others."""
    signs = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
    found = 0
    for digit in digits.lower() if base <= 36 else digits:
        if not (1 < base <= len(signs) and 0 <= (worth := signs.find(digit)) < base):
            raise ValueError
        found = found * base + worth
    return found


_LEVELS: list[dict[str, Callable[[int, int], int]]] = [  # from what binds least to what binds most
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda left, right: left << (right & 63), ">>": lambda left, right: left >> (right & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divided, "%": lambda left, right: left - right * _divided(left, right)},
]
_BINARY = {sign: apply for level in _LEVELS for sign, apply in level.items()}
_ASSIGNED = {f"{sign}=" for sign in ("", "+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")}


def evaluate(text: str, scope: Scope, line: int = 0) -> int | None:
    """Return the value of an expression, or None where only running the script would tell.

    Assignments in it are made. Where its value is not known, the variables that it changes become unknown, with the
    line as the reason. A name that is not set counts as not known, since the environment may set it.
    """
    try:
        return _Expression(text, scope, 0).value()
    except (ValueError, ZeroDivisionError):
        why = Unknown(f"is computed in line {line} in a way that is not followed")
        for name in _changed(text, scope, 0):
            scope.set(name, why)
        return None


def _changed(text: str, scope: Scope, depth: int) -> set[str]:
    """Return the variables that an expression changes, or those whose texts are expressions within it."""
    found = {first or second for first, second in _CHANGED.findall(text)}
    for name in re.findall(r"[A-Za-z_]\w*", text) if depth < 4 else ():
        held = scope.get(name)
        for inner in (held,) if isinstance(held, str) else held if isinstance(held, tuple) else ():
            found |= _changed(inner, scope, depth + 1) if not inner.isdecimal() and inner != text else set()
    return found


class _Expression:
    """The tokens of one expression, and how far they are read."""

    def __init__(self, text: str, scope: Scope, depth: int) -> None:
        if depth > _DEEPEST or len(text) > _LONGEST:
            raise ValueError
        self._scope, self._depth = scope, depth
        self._tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError
            self._tokens.append(match[0].strip())
            at = match.end()
        self._at = 0

    def value(self) -> int:
        """Return the value of the whole expression; an empty one is 0. Raises ValueError where it is not known."""
        if not self._tokens:
            return 0
        value = self._comma(True)
        return value if self._at == len(self._tokens) else self._lost()

    def _lost(self) -> NoReturn:
        raise ValueError

    def _take(self, *signs: str) -> str:
        """Return the next token if it is one of these, and go on; else an empty text."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if token not in signs:
            return ""
        self._at += 1
        return token

    # `live`: the part is evaluated; the other side of ?: && || is only read

    def _comma(self, live: bool) -> int:
        value = self._assignment(live)
        while self._take(","):
            value = self._assignment(live)
        return value

    def _assignment(self, live: bool) -> int:
        tokens = self._tokens[self._at : self._at + 2]
        if len(tokens) == 2 and tokens[0].isidentifier() and tokens[1] == "[":
            return self._element(live)
        if len(tokens) == 2 and tokens[0].isidentifier() and tokens[1] in _ASSIGNED:
            self._at += 2
            held = self._held(tokens[0]) if live and tokens[1] != "=" else 0  # before what stands on the right
            value = self._assignment(live)
            if live and tokens[1] != "=":
                value = int(_BINARY[tokens[1][:-1]](held, value))
            return self._set(tokens[0], value, live)
        condition = self._or(live)
        if not self._take("?"):
            return condition
        yes = self._assignment(live and condition != 0)
        if not self._take(":"):
            self._lost()
        no = self._assignment(live and condition == 0)
        return yes if condition else no

    def _element(self, live: bool) -> int:
        """Return the value of an assignment to array[index]; other uses of elements are not followed further."""
        name = self._name()
        self._take("[")
        index = self._comma(live)
        sign = self._take(*_ASSIGNED) if self._take("]") else ""
        held = self._scope.get(name)
        if not sign or not live or not isinstance(held, tuple | str | None) or self._scope.mark("integer", name):
            self._lost()
        items = [*held] if isinstance(held, tuple) else [] if held is None else [held]
        if not 0 <= index <= len(items) or is_open(items[: index + 1]):
            self._lost()
        before = items[index] if index < len(items) else "0"
        old = 0 if sign == "=" else _Expression(before, self._scope, self._depth + 1).value()
        value = self._assignment(live)
        value = _wrapped(value if sign == "=" else int(_BINARY[sign[:-1]](old, value)))
        self._scope.set(name, (*items[:index], str(value), *items[index + 1 :]))
        return value

    def _or(self, live: bool) -> int:
        value = self._and(live)
        while self._take("||"):
            other = self._and(live and not value)
            value = int(bool(value or other))
        return value

    def _and(self, live: bool) -> int:
        value = self._binary(0, live)
        while self._take("&&"):
            other = self._binary(0, live and bool(value))
            value = int(bool(value and other))
        return value

    def _binary(self, level: int, live: bool) -> int:
        if level == len(_LEVELS):
            base = self._unary(live)
            if not self._take("**"):
                return base
            exponent = self._binary(level, live)
            return _wrapped(_power(base, exponent)) if live else 0
        value = self._binary(level + 1, live)
        while sign := self._take(*_LEVELS[level]):
            other = self._binary(level + 1, live)
            value = _wrapped(int(_LEVELS[level][sign](value, other))) if live else 0
        return value

    def _unary(self, live: bool) -> int:
        if sign := self._take("++", "--"):
            name = self._name()
            return self._set(name, self._held(name) + (1 if sign == "++" else -1), live) if live else 0
        if sign := self._take("-", "+", "!", "~"):
            value = self._unary(live)
            return _wrapped({"-": -value, "+": value, "!": int(not value), "~": ~value}[sign])
        if self._take("("):
            self._depth += 1
            value = self._comma(live) if self._depth <= _DEEPEST else self._lost()
            self._depth -= 1
            return value if self._take(")") else self._lost()
        token = self._tokens[self._at] if self._at < len(self._tokens) else self._lost()
        if token[0].isdecimal():
            self._at += 1
            base, sign, digits = token.partition("#")
            if sign:
                return _wrapped(_of_base(int(base), digits))
            return _wrapped(int(token, 16 if token[:2].lower() == "0x" else 8 if token[0] == "0" else 10))
        name = self._name()
        value = self._held(name) if live else 0
        if sign := self._take("++", "--"):
            self._set(name, value + (1 if sign == "++" else -1), live)
        return value

    def _name(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token.isidentifier():
            self._lost()
        self._at += 1
        return token

    def _held(self, name: str) -> int:
        """Return the number in a variable, whose text is an expression of its own."""
        held = self._scope.get(name)
        held = held[0] if isinstance(held, tuple) and held else held
        return _Expression(held, self._scope, self._depth + 1).value() if isinstance(held, str) else self._lost()

    def _set(self, name: str, value: int, live: bool) -> int:
        if live:
            self._scope.set(name, str(_wrapped(value)))
        return _wrapped(value)


def _wrapped(value: int) -> int:
    """Return a number as 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
