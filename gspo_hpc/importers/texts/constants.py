"""Evaluate expressions of a Python file whose value is certain: literals, and names that the file sets once.

A list or a mapping counts only where every use of it, by whatever name, is known to leave it as it is.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from gspo_hpc.importers.texts.scopes import Variable
from gspo_hpc.importers.texts.syntax import LIBRARIES, Function, Tree, called, shown

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_MADE: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "int": int, "float": float, "str": str, "bool": bool, "len": len, "abs": abs,
    "round": round, "min": min, "max": max,
}  # fmt: skip
_LARGEST = 512  # power that is worked out
_MOST = 10_000  # numbers, or hundreds of characters, in a value
# Functions of Python that read what they are given, and that put it, or what it holds, into something else.
_READ = set("print len str repr bool isinstance type id hash any all sum int float abs round format vars dir".split())
_COPIED = set("dict list tuple set frozenset sorted min max enumerate zip reversed iter next".split())
_LOGGED = set("info warning warn debug error critical exception log".split())
_PARSED = set("parse_dict parse_args_and_config parse_args_into_dataclasses set_defaults".split())
_CHANGED = ("shuffle", "update", "init_empty", "setitem")  # functions of libraries that change what they are given
_VIEWS = ("items", "values", "get", "copy", "__getitem__")
_COUNTS = ("keys", "index", "count", "__contains__", "__len__")
_TESTS = (ast.Compare, ast.Expr, ast.Assert, ast.If, ast.While, ast.FormattedValue, ast.UnaryOp)
_MAKERS = ("__new__", "__init__", "__post_init__", "__setattr__", "__init_subclass__")


_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)


class _Unknown(Exception):
    """A value that is not certain."""


def as_code(node: Any) -> str:
    """Return an expression, or a value, as a shell's $(...): what only running the file would tell."""
    return f"$({shown(node) if isinstance(node, ast.AST) else node})"


def is_code(value: Any) -> bool:
    """Tell whether a value is one that only running the file would tell."""
    return isinstance(value, str) and value.startswith("$(")


class Constants:
    """The values of a file that are certain."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.scopes = tree, tree.scopes
        self._going: set[Variable] = set()
        self._held: dict[tuple[Variable, bool], Any] = {}  # what variables hold, _Unknown where that is not certain

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, $(code) if it is not certain."""
        try:
            return self._find(node)
        except (_Unknown, *_ERRORS):
            return as_code(node)

    def mapping(self, node: ast.expr) -> dict[str, Any] | None:
        """Return a mapping whose names are certain; values that are not are $(code)."""
        try:
            found = self._find(node, True)
        except (_Unknown, *_ERRORS):
            return None
        return found if isinstance(found, dict) and all(isinstance(name, str) for name in found) else None

    # -- what an expression is

    def _find(self, node: ast.expr, part: bool = False) -> Any:
        """Return the value of an expression; with `part`, values within a mapping may be $(code)."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            pass
        match node:
            case ast.Name():
                return self._variable(self.tree.variable(node), node, part)
            case ast.NamedExpr(value=given):
                return self._find(given, part)
            case ast.Attribute():
                return self._attribute(node)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]  # type: ignore[index]
                return kind(self._items(items))
            case ast.Dict():
                return self._dict(zip(node.keys, node.values, strict=True), part)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._find(inner)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return not self._find(inner)
            case ast.BinOp():
                return self._sum(node, part)
            case ast.IfExp(test=test, body=yes, orelse=no):
                return self._find(yes if self._find(test) else no, part)
            case ast.Subscript(value=holder, slice=place) if not isinstance(place, ast.Slice):
                return self._find(holder)[self._find(place)]
            case ast.JoinedStr(values=parts):
                return "".join(map(self._text, parts))
            case ast.Call():
                return self._call(node, part)
        raise _Unknown

    def _items(self, nodes: list[ast.expr]) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self._find(node.value)
            else:
                yield self._find(node)

    def _dict(self, pairs: Iterator[tuple[ast.expr | None, ast.expr]], part: bool) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, node in pairs:
            try:
                if key is None:
                    found |= self._find(node, part)
                else:
                    found[self._find(key)] = self._find(node)
            except (_Unknown, *_ERRORS):
                if not part:
                    raise
                if key is None:  # it may give any name, also one that stands before it
                    found = {name: as_code(f"{name} in {shown(node)}") for name in found}
                    found[f"**{shown(node)}"] = as_code(node)
                else:
                    found[self._find(key)] = as_code(node)
        return found

    def _sum(self, node: ast.BinOp, part: bool) -> Any:
        one, other = self._find(node.left, part), self._find(node.right, part)
        if isinstance(node.op, ast.BitOr) and isinstance(one, dict) and isinstance(other, dict):
            if any(name.startswith("**") for name in other if isinstance(name, str)):
                raise _Unknown
            return one | other
        if type(one) in (int, float) and type(other) in (int, float) and type(node.op) in _OPERATORS:
            if not isinstance(node.op, ast.Pow) or (abs(other) <= _LARGEST and abs(one) <= _LARGEST):
                return _OPERATORS[type(node.op)](one, other)
        if isinstance(node.op, ast.Add) and type(one) is type(other) and isinstance(one, str | list | tuple):
            return one + other
        raise _Unknown

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion < 0:
            value = self._find(node.value)
            if isinstance(value, str | int | float):
                return str(value)
        raise _Unknown

    def _call(self, node: ast.Call, part: bool) -> Any:
        name, plain = called(node), not node.keywords and not any(isinstance(item, ast.Starred) for item in node.args)
        if isinstance(node.func, ast.Attribute) and name in ("copy", "get") and plain:
            holder = self._find(node.func.value, part and name == "copy")
            if isinstance(holder, dict | list):
                return getattr(holder, name)(*map(self._find, node.args))
        if self.tree.copies(node) and name in ("copy", "deepcopy") and len(node.args) == 1 and plain:
            return self._find(node.args[0], part)
        if not self._is_python(node.func):
            raise _Unknown
        if name == "dict" and len(node.args) < 2 and not any(isinstance(item, ast.Starred) for item in node.args):
            found = dict(self._find(node.args[0], part)) if node.args else {}
            keys = (None if item.arg is None else ast.Constant(item.arg) for item in node.keywords)
            more = self._dict(zip(keys, (item.value for item in node.keywords), strict=True), part)
            if any(isinstance(key, str) and key.startswith("**") for key in more):
                raise _Unknown
            return found | more
        if name in _MADE and plain and node.args:
            return _MADE[name](*map(self._find, node.args))
        raise _Unknown

    def _is_python(self, function: ast.expr) -> bool:
        """Tell whether what is called is Python's own function of this name."""
        return isinstance(function, ast.Name) and not self.scopes.bindings.get(self.tree.variable(function))

    def _attribute(self, node: ast.Attribute) -> Any:
        """Return torch.bfloat16, or what a class of the file sets once: Mine.rate."""
        if isinstance(node.value, ast.Name):
            name = node.value.id
            if node.attr in ("bfloat16", "float16", "float32") and self.tree.imported.get(name, name) == "torch":
                return node.attr
            own = self.tree.classes.get(name)
            if own is not None and self.scopes.bindings.get(self.tree.variable(node.value)) == [own]:
                plain = not (own.bases or own.keywords or own.decorator_list)
                uses = [self.tree.parent(use) for use in self.scopes.loads.get(self.tree.variable(node.value), ())]
                read = all(isinstance(use, ast.Attribute) and isinstance(use.ctx, ast.Load) for use in uses)
                if plain and read and all(isinstance(item, ast.Assign | ast.AnnAssign | ast.Expr) for item in own.body):
                    return self._variable((id(own), node.attr), None, False)
        raise _Unknown

    # -- what a name is

    def _variable(self, variable: Variable, use: ast.Name | None, part: bool) -> Any:
        bindings = self.scopes.bindings.get(variable, [])
        binding = bindings[0] if len(bindings) == 1 else None
        if not isinstance(binding, ast.Name) or variable in self._going:
            raise _Unknown
        if self.scopes.is_class(variable):  # else the name outside of the class counts
            inside = isinstance(self.tree.parent(self.tree.parent(binding) or binding), ast.ClassDef)
            if not inside or (use is not None and use.lineno <= binding.lineno):
                raise _Unknown
        if variable[0] == 0 and not all(self._after(binding, star) for star in self.scopes.stars):
            raise _Unknown
        if variable[0] == 0 and self.scopes.stars and use is not None:  # which may give it a value before
            time = self.tree.when(use)
            if time is None or not time > ((binding.lineno, binding.col_offset),):
                raise _Unknown
        if (variable, part) not in self._held:
            self._going.add(variable)
            try:
                self._held[variable, part] = self._whole(variable, binding, part)
            except (_Unknown, *_ERRORS):
                self._held[variable, part] = _Unknown
            finally:
                self._going.discard(variable)
        if self._held[variable, part] is _Unknown:
            raise _Unknown
        return self._held[variable, part]

    def _whole(self, variable: Variable, binding: ast.Name, part: bool) -> Any:
        """Return what the one assignment of a variable gives it, and nothing changes afterwards."""
        value = self._given(binding, part)
        if _large(value) or (_changeable(value) and not self._kept(variable, _deep(value), set())):
            raise _Unknown
        return value

    def _after(self, binding: ast.Name, star: ast.ImportFrom) -> bool:
        """Tell whether a name surely gets its value after a star import, which may set it too."""
        if self.tree.function_of(binding) is not None or self.tree.looped(star):
            return False
        return self.tree.certain(binding) and (star.end_lineno or 0) < binding.lineno

    def _given(self, binding: ast.Name, part: bool) -> Any:
        """Return what the one assignment of a name gives it."""
        target: ast.AST = binding
        places: list[int] = []
        above = self.tree.parent(target)
        while isinstance(above, ast.Tuple | ast.List) and not any(isinstance(item, ast.Starred) for item in above.elts):
            places.insert(0, above.elts.index(target))  # type: ignore[arg-type]
            target, above = above, self.tree.parent(above)
        if not isinstance(above, ast.Assign | ast.AnnAssign | ast.NamedExpr) or above.value is None:
            raise _Unknown
        node: ast.expr = above.value
        counts, inner = list[int](), target
        for place in places:
            counts.append(len(inner.elts))  # type: ignore[attr-defined]
            inner = inner.elts[place]  # type: ignore[attr-defined]
        while places and isinstance(node, ast.Tuple | ast.List) and len(node.elts) == counts[0]:
            if any(isinstance(item, ast.Starred) for item in node.elts):
                raise _Unknown
            node = node.elts[places.pop(0)]
            counts.pop(0)
        value = self._find(node, part and not places)
        for place, count in zip(places, counts, strict=True):
            if not isinstance(value, list | tuple) or len(value) != count or _changeable(value):
                raise _Unknown
            value = value[place]
        if isinstance(above, ast.Assign) and len(above.targets) > 1 and _changeable(value):
            raise _Unknown  # two names for one list
        return value

    # -- whether a list or a mapping stays as it is

    def _kept(self, variable: Variable, deep: bool, seen: set[tuple[Variable, bool]]) -> bool:
        """Tell whether no use of a variable changes what it holds; `deep`: there are lists or mappings in it."""
        if (variable, deep) in seen:
            return True
        seen.add((variable, deep))
        if len(self.scopes.bindings.get(variable, [])) != 1:
            return False
        uses: list[ast.expr] = [*self.scopes.loads.get(variable, ())]
        if self.scopes.is_class(variable):
            uses += [node for node in self.tree.nodes if isinstance(node, ast.Attribute) and node.attr == variable[1]]
        return all(self.harmless(use, deep, seen) for use in uses)

    def harmless(self, node: ast.expr, deep: bool, seen: set[tuple[Variable, bool]]) -> bool:
        """Tell whether a list or a mapping stays as it is where it stands."""
        parent = self.tree.parent(node)
        match parent:
            case ast.Subscript(value=holder, ctx=context):
                return isinstance(context, ast.Load) and (
                    holder is not node or not deep or self.harmless(parent, deep, seen)
                )
            case ast.Attribute(attr=name):
                call = self.tree.parent(parent)
                if not (isinstance(call, ast.Call) and call.func is parent):
                    return False
                return name in _COUNTS or (name in _VIEWS and (not deep or self.harmless(call, deep, seen)))
            case ast.keyword(arg=name):
                call = self.tree.parent(parent)
                if name is None and not deep:
                    return True
                return isinstance(call, ast.Call) and self._handed(call, node, deep, seen)
            case ast.Starred():
                above = self.tree.parent(parent)
                if isinstance(above, ast.Call):
                    return not deep or self._handed(above, parent, deep, seen)
                return isinstance(above, ast.expr) and (not deep or self.harmless(above, deep, seen))
            case ast.Call():
                return parent.func is not node and self._handed(parent, node, deep, seen)
            case ast.Dict(keys=keys, values=values):
                spread = any(key is None and value is node for key, value in zip(keys, values, strict=True))
                return (spread and not deep) or self.harmless(parent, True, seen)
            case ast.List() | ast.Tuple() | ast.Set():
                return self.harmless(parent, True, seen)
            case ast.BinOp():
                return not deep or self.harmless(parent, deep, seen)
            case ast.BoolOp() | ast.NamedExpr():
                kept = self._named(parent.target, deep, seen) if isinstance(parent, ast.NamedExpr) else True
                return kept and self.harmless(parent, deep, seen)
            case ast.IfExp(test=test):
                return node is test or self.harmless(parent, deep, seen)
            case ast.For(iter=given) | ast.comprehension(iter=given):
                return given is not node or not deep
            case ast.Assign(targets=targets):
                return all(self._named(target, deep, seen) for target in targets)
            case ast.AnnAssign(target=target):
                return self._named(target, deep, seen)
        return isinstance(parent, _TESTS)

    def _named(self, target: ast.expr, deep: bool, seen: set[tuple[Variable, bool]]) -> bool:
        """Tell whether a list or a mapping stays as it is by another name."""
        if isinstance(target, ast.Tuple | ast.List) and not deep:
            return True  # what it holds, which is no list and no mapping
        return isinstance(target, ast.Name) and self._kept(self.tree.variable(target), deep, seen)

    def _handed(self, call: ast.Call, node: ast.expr, deep: bool, seen: set[tuple[Variable, bool]]) -> bool:
        """Tell whether a call leaves a list or a mapping that it is given as it is."""
        name = called(call)
        function, _ = self.tree.defined(call)
        if function is not None:
            return self._to_own(call, function, node, deep, seen)
        if self.tree.copies(call):
            return name == "deepcopy" or not deep or self.harmless(call, deep, seen)
        if isinstance(call.func, ast.Attribute) and name in _LOGGED | _PARSED:
            return True
        if name == "update" and isinstance(call.func, ast.Attribute):
            return not deep and self._is_mapping(call.func.value)
        if self._is_python(call.func):
            if name in _COPIED:
                if any(keyword.value is node for keyword in call.keywords):  # dict(name=node)
                    return name == "dict" and self.harmless(call, True, seen)
                return not deep or (not call.keywords and self.harmless(call, deep, seen))
            return name in _READ or name.endswith(("Config", "Trainer"))
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant | ast.JoinedStr):
            return True  # ", ".join(names)
        if isinstance(call.func, ast.Name) and (own := self.tree.classes.get(name)) is not None:
            makers = any(isinstance(item, Function) and item.name in _MAKERS for item in own.body)
            return name.endswith("Config") and not makers
        if name == "cast":
            return self.harmless(call, deep, seen)
        return self.tree.root(call.func) in LIBRARIES and name not in _CHANGED

    def _to_own(
        self, call: ast.Call, function: Function, node: ast.expr, deep: bool, seen: set[tuple[Variable, bool]]
    ) -> bool:
        """Tell whether a function of the file leaves a list or a mapping that it is given as it is."""
        given = [name for name, argument in self.tree.parameters(call) if argument is node]
        alone = not function.decorator_list and self.tree.is_of(function, call.func)
        return alone and len(given) == 1 and self._kept((id(function), given[0]), deep, seen)

    def _is_mapping(self, node: ast.expr) -> bool:
        """Tell whether an expression is a mapping, as made in the file, or all attributes of an object."""
        if isinstance(node, ast.Call):
            return called(node) == "vars"
        if isinstance(node, ast.Attribute):
            return node.attr == "__dict__"
        bindings = self.scopes.bindings.get(self.tree.variable(node), []) if isinstance(node, ast.Name) else []
        given = self.tree.parent(bindings[0]) if len(bindings) == 1 else None
        return isinstance(given, ast.Assign | ast.AnnAssign) and isinstance(given.value, ast.Dict)


def _changeable(value: Any) -> bool:
    return isinstance(value, list | dict | set) or (isinstance(value, tuple) and any(map(_changeable, value)))


def _deep(value: Any) -> bool:
    """Tell whether there is a list or a mapping, or what may be one, in a list or a mapping."""
    return any(_changeable(item) or is_code(item) for item in (value.values() if isinstance(value, dict) else value))


def _large(value: Any) -> bool:
    """Tell whether a value is so large that names which double it could fill the memory."""
    left, count = [value], 0
    while left and count < _MOST:
        item = left.pop()
        count += len(item) // 100 if isinstance(item, str | bytes) else 1
        count += item.bit_length() // 10 if isinstance(item, int) else 0
        left += [*item, *item.values()] if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    return count >= _MOST
