"""Which variable a name is, held against Python's own tables of symbols."""

from __future__ import annotations

import ast
import symtable
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.importers.texts.scopes import Scopes

_Table = tuple[str, frozenset[str]]  # the name of a scope, and the names that it binds
_LIBRARY = Path(ast.__file__).parent
_FILES = ("dataclasses", "argparse", "typing", "enum", "inspect", "functools", "logging/__init__", "asyncio/events")


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _of_python(text: str) -> Counter[_Table]:
    """Return each scope with the names that it binds; the module's with those that functions give it."""
    found: Counter[_Table] = Counter()
    tables = [*_tables(symtable.symtable(text, "text", "exec"))]
    given = {item.get_name() for table in tables for item in table.get_symbols()
             if item.is_declared_global() and (item.is_assigned() or item.is_imported())}  # fmt: skip
    for table in tables:
        own = {item.get_name() for item in table.get_symbols()
               if (item.is_assigned() or item.is_parameter() or item.is_imported() or item.is_annotated())
               and not item.is_declared_global() and (item.is_local() or table is tables[0])
               and not item.get_name().startswith(".")}  # fmt: skip
        if table is tables[0]:
            found["", frozenset(own | given)] += 1
        else:
            found[table.get_name(), frozenset(own)] += 1
    return found


def _of_ours(text: str) -> Counter[_Table]:
    module = ast.parse(text)
    scopes = Scopes(module)
    names: dict[int, set[str]] = {}
    for scope, name in scopes.bindings:
        names.setdefault(scope, set()).add(name)
    kinds = {ast.ListComp: "listcomp", ast.SetComp: "setcomp", ast.DictComp: "dictcomp", ast.GeneratorExp: "genexpr",
             ast.Lambda: "lambda"}  # fmt: skip
    found: Counter[_Table] = Counter([("", frozenset(names.get(0, ())))])
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name, frozenset(names.get(id(node), ()))] += 1
        elif type(node) in kinds:
            found[kinds[type(node)], frozenset(names.get(id(node), ()))] += 1
    return found


@pytest.mark.parametrize("name", _FILES)
def test_the_scopes_of_the_standard_library_are_those_of_python(name: str) -> None:
    text = (_LIBRARY / f"{name}.py").read_text()
    assert _of_ours(text) == _of_python(text)


CASES = """
import a.b, c as d
from e import f as g, h
x = 1
class C(y := object):
    x = 2
    z = [x for x in range(3) if (w := x)] if 0 else x
    def m(self, k=x):
        global p
        p = x
        def n():
            nonlocal k
            k, self = 1, 2
            return [(q := j, k) for j in self for _ in j]
        return lambda k, *r, s=k: (k, r, s)
match x:
    case {"a": va, **rest} | [va, *rest]:
        pass
    case C() as ca:
        del x
try:
    for i, (l, *o) in d: ...
except E as ex:
    with d as (t, u), d as v[0]: x += 1
async def co():
    async for i in d: yield i
"""


def test_every_way_to_bind_a_name_is_known() -> None:
    text = CASES.replace(" if (w := x)", "")  # which Python refuses in a class
    assert _of_ours(text) == _of_python(text)
