"""Arithmetic is computed as bash computes it, and what it assigns is assigned."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.importers.scripts.arithmetic import evaluate
from gspo_hpc.importers.scripts.scope import Scope, Unknown

NAMES = ("A", "B", "C")
BINARY = "* / % + - << >> < <= > >= == != & ^ | && ||".split()
ASSIGNED = "= += -= *= /= %= <<= >>= &= ^= |=".split()


def _more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    name = st.sampled_from(NAMES)
    return st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(BINARY), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(BINARY), inner),
        st.builds("({} ** {})".format, inner, st.integers(0, 9)),
        st.builds("{} {}".format, st.sampled_from("-+!~"), inner),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
        st.builds("({} {} {})".format, name, st.sampled_from(ASSIGNED), inner),
        st.builds("({} , {})".format, inner, inner),
        st.builds("({}++)".format, name),
        st.builds("(--{})".format, name),
    )


LEAVES = st.one_of(st.integers(0, 9).map(str), st.sampled_from((*NAMES, "0x1f", "017", "4294967296")))
EXPRESSIONS = st.recursive(LEAVES, _more, max_leaves=8)


@given(st.lists(EXPRESSIONS, min_size=8, max_size=30))
@settings(max_examples=40, deadline=None)
def test_expressions_have_the_value_that_bash_gives_them(expressions: list[str]) -> None:
    lines = [f'(A=7 B=-3 C=0; X=$(( {text} )); echo "$X $A $B $C") 2>/dev/null || echo error' for text in expressions]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout.splitlines()
    assert len(told) == len(expressions)
    for text, expected in zip(expressions, told, strict=True):
        scope = Scope({"A": "7", "B": "-3", "C": "0"})
        value = evaluate(text, scope)
        found = "error" if value is None else " ".join([str(value), *(str(scope.values[name]) for name in NAMES)])
        assert found == expected, text


@pytest.mark.parametrize("text", ["N + 1", "A[0]", "A +", "(A", "1 / 0", "2 ** -1", "08", "1.5", "A ? 2", "${#A[@]}"])
def test_what_is_not_known_has_no_value(text: str) -> None:
    assert evaluate(text, Scope({"A": "7"})) is None


def test_a_variable_that_an_unknown_expression_changes_is_unknown() -> None:
    scope = Scope({"A": "7", "B": "1"})
    assert evaluate("A = N + 1, B == 1, ++C", scope, 3) is None
    assert scope.values["A"] == scope.values["C"] == Unknown("is computed in line 3 in a way that is not followed")
    assert scope.values["B"] == "1"


def test_expressions_in_variables_are_evaluated_and_those_without_end_are_not() -> None:
    assert evaluate("A * 2", Scope({"A": "1 + 2"})) == 6
    assert evaluate("A", Scope({"A": "A"})) is None
    assert evaluate("(" * 500 + "1" + ")" * 500, Scope()) is None
