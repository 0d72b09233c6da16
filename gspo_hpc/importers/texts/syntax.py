"""Ask where the nodes of a Python file's syntax tree stand: in which function, before what, and whether they run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
When = tuple[tuple[int, int], ...]  # (line, column) of the calls that lead to a node, and of the node
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MUTATORS = {"append", "extend", "insert", "remove", "clear", "pop", "popitem", "update", "setdefault", "sort"}
_READERS = set(
    "print repr str len isinstance issubclass type id hasattr getattr bool hash asdict dir pprint pformat dumps dump "
    "info warning warn debug error critical exception log display".split()
)
# Packages whose functions read a config and leave it as it is.
_LIBRARIES = set(
    "trl transformers datasets torch json yaml logging os sys pprint rich wandb accelerate peft swanlab mlflow "
    "tqdm huggingface_hub numpy random loguru typing inspect dataclasses".split()
)
_COPIES = ("copy", "deepcopy", "replace")
_DECORATORS = ("staticmethod", "classmethod", "property", "cached_property", "wraps", "cache", "lru_cache", "record")
_DEEPEST = 12  # calls within each other that are followed


def called(call: ast.Call) -> str:
    """Return the last part of the name that a call calls, "" if it has none."""
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def shown(node: ast.AST, length: int = 60) -> str:
    """Return the code of a node in one line, cut off after `length` characters."""
    return " ".join(ast.unparse(node).split())[:length]


def is_main(node: ast.If) -> bool:
    """Tell whether a statement is the main block of a file."""
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


class Tree:
    """A syntax tree whose nodes know what they stand in."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = tree
        self.nodes = [*ast.walk(tree)]
        self.parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, Function)]
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.imported = dict(self._imported())
        self.originals = {alias.asname: alias.name for node in self.nodes if isinstance(node, ast.ImportFrom)
                          for alias in node.names if alias.asname}  # fmt: skip
        self.named = {*self._named()}  # functions, classes and what else gets a name without an assignment
        self._uses: dict[str, list[ast.expr]] = {}  # name -> where it stands, also as an attribute
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                self._uses.setdefault(node.id if isinstance(node, ast.Name) else node.attr, []).append(node)
        self._functions: dict[str, list[Function]] = {}
        for function in self.functions:
            self._functions.setdefault(function.name, []).append(function)
        self._locals = {id(node): self._names_of(node) for node in self.nodes if isinstance(node, _SCOPES)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return what a node stands in."""
        return self.parents.get(id(node))

    def function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the function or lambda that a node stands in, None if it stands in none."""
        above = self.parent(node)
        while above is not None and not isinstance(above, _SCOPES):
            above = self.parent(above)
        return above

    def variable(self, name: ast.Name) -> tuple[int, str]:
        """Return which variable a name is: the scope that binds it (0: the module), and the name."""
        scope = self.function_of(name)
        while scope is not None and name.id not in self._locals[id(scope)]:
            scope = self.function_of(scope)
        return (0 if scope is None else id(scope), name.id)

    def defined(self, call: ast.Call) -> tuple[Function | None, int]:
        """Return the function of the file that a call calls, and how many parameters stand before its arguments."""
        name = called(call)
        if isinstance(call.func, ast.Name) and name in self.classes:
            inits = [item for item in self.classes[name].body if isinstance(item, Function) and item.name == "__init__"]
            return (inits[0], 1) if inits else (None, 0)
        found = self._functions.get(name, [])
        if len(found) != 1:
            return None, 0
        method = isinstance(self.parent(found[0]), ast.ClassDef)
        if method != isinstance(call.func, ast.Attribute):
            return None, 0
        static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in found[0].decorator_list)
        return found[0], int(method and not static)

    def parameters(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of a function of the file with what a call gives them."""
        function, skipped = self.defined(call)
        if function is not None:
            names = [item.arg for item in (*function.args.posonlyargs, *function.args.args)][skipped:]
            if not any(isinstance(item, ast.Starred) for item in call.args):
                yield from zip(names, call.args, strict=False)
            known = {*names, *(item.arg for item in function.args.kwonlyargs)}
            yield from ((item.arg, item.value) for item in call.keywords if item.arg in known and item.arg is not None)

    def certain(self, node: ast.AST) -> bool:
        """Tell whether a node runs, once, whenever the function runs that it stands in."""
        below, above = node, self.parent(node)
        while above is not None and not isinstance(above, _SCOPES):
            if isinstance(above, ast.If) and not (below is above.test or (is_main(above) and below in above.body)):
                return False
            if isinstance(above, ast.For | ast.AsyncFor) and below is not above.iter:
                return False
            if isinstance(above, ast.While | ast.Try | ast.Match | ast.IfExp | ast.BoolOp | ast.comprehension):
                return False
            if isinstance(above, ast.ClassDef):
                return False
            below, above = above, self.parent(above)
        before = (item for item in (above.body if isinstance(above, Function) else ()) if item.lineno < below.lineno)  # type: ignore[attr-defined]
        return not any(isinstance(part, ast.Return) for item in before for part in self._own(item))

    def looped(self, node: ast.AST) -> bool:
        """Tell whether a node may run several times each time that the function runs that it stands in."""
        below, above = node, self.parent(node)
        while above is not None and not isinstance(above, _SCOPES):
            if isinstance(above, ast.While | ast.comprehension):
                return True
            if isinstance(above, ast.For | ast.AsyncFor) and below is not above.iter:
                return True
            below, above = above, self.parent(above)
        return False

    def when(self, node: ast.AST, depth: int = 0, started: bool = False) -> When | None:
        """Return when a node runs, to be compared with another node's; None if that is not plain.

        Plain is a function that is called in one place, which runs, or in none; with `started`, not in none.
        """
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        function = self.function_of(node)
        if function is None:
            return (place,)
        if not isinstance(function, Function) or depth > _DEEPEST:
            return None
        name = function.name
        outer = self.parent(function)
        if name == "__init__" and isinstance(outer, ast.ClassDef):
            name = outer.name
        uses = self._uses.get(name, [])
        if not uses:
            return None if started else ((function.lineno, function.col_offset), place)
        call = self.parent(uses[0])
        if len(uses) > 1 or not isinstance(call, ast.Call) or call.func is not uses[0] or not self.certain(call):
            return None
        before = self.when(call, depth + 1, started)
        return None if before is None else (*before, place)

    def root(self, node: ast.expr) -> str:
        """Return the package that what is called was imported from, "" if it was not imported."""
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        return self.imported.get(node.id, "").partition(".")[0] if isinstance(node, ast.Name) else ""

    def reads(self, call: ast.Call) -> bool:
        """Tell whether a call is known to leave what it is given as it is."""
        if self.defined(call)[0] is not None:
            return False
        if isinstance(call.func, ast.Name) and call.func.id not in self.imported:
            return call.func.id in _READERS
        return called(call) in _READERS or self.root(call.func) in _LIBRARIES

    def copies(self, call: ast.Call) -> bool:
        """Tell whether a call is one of copy's or of dataclasses' functions that copy an object."""
        if isinstance(call.func, ast.Name):
            name = call.func.id
            module = "" if name in self.named else self.imported.get(name, "copy")
            return self.originals.get(name, name) in _COPIES and module in ("copy", "dataclasses")
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            module = self.imported.get(call.func.value.id, call.func.value.id)
            return call.func.attr in _COPIES and module in ("copy", "dataclasses")
        return False

    def decorated(self, call: ast.Call) -> bool:
        """Tell whether a call is of a function of the file that a decorator may have changed."""
        function, _ = self.defined(call)
        return function is not None and any(
            ast.unparse(item).rpartition("(")[0].rpartition(".")[2] not in _DECORATORS
            and ast.unparse(item).rpartition(".")[2] not in _DECORATORS
            and self.root(item) not in _LIBRARIES
            for item in function.decorator_list
        )

    def mutated(self, node: ast.Name) -> bool:
        """Tell whether a mapping or a list is changed where its name stands."""
        parent = self.parent(node)
        if isinstance(parent, ast.Subscript):
            return not isinstance(parent.ctx, ast.Load)
        return isinstance(parent, ast.Attribute) and parent.attr in MUTATORS

    def _imported(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                yield from ((alias.asname or alias.name, module) for alias in node.names)

    def _named(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                yield node.name or ""
            elif isinstance(node, Function | ast.ClassDef) and not isinstance(self.parent(node), ast.ClassDef):
                yield node.name

    def _names_of(self, scope: ast.AST) -> set[str]:
        """Return the names that a function binds."""
        given = scope.args  # type: ignore[attr-defined]
        names = {item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
                 if item is not None}  # fmt: skip
        outside: set[str] = set()
        for node in self._own(scope):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                outside |= {*node.names}
        return names - outside

    def _own(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node and what it holds, without the functions in it."""
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _SCOPES):
                yield from self._own(child)
