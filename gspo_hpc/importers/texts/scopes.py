"""Find out which variable each name of a Python file is, by Python's own rules of scopes, and where it is bound."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

Variable = tuple[int, str]  # the scope that binds it (0: the module, else the id of its node), and the name
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Scopes:
    """The variables of a file."""

    def __init__(self, module: ast.Module) -> None:
        self.bindings: dict[Variable, list[ast.AST]] = {}  # what may give a variable a value, or take it away
        self.loads: dict[Variable, list[ast.Name]] = {}
        self.stars: list[ast.ImportFrom] = []  # from x import *, which may bind any name of the module
        self._above: dict[int, int] = {}  # scope -> the one around it
        self._classes: set[int] = set()
        self._comprehensions: set[int] = set()
        self._elsewhere: dict[Variable, bool] = {}  # declared as global (True) or nonlocal (False) in a scope
        self._scopes: dict[int, int] = {}  # id of a name -> the scope that it stands in
        found: list[tuple[int, str, ast.AST]] = []
        names: list[ast.Name] = []
        left: list[tuple[ast.AST, int]] = [(module, 0)]
        while left:
            node, scope = left.pop()
            found += ((scope, name, node) for name in _bound(node))
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._elsewhere |= {(scope, name): isinstance(node, ast.Global) for name in node.names}
            elif isinstance(node, ast.Name):
                names.append(node)
                self._scopes[id(node)] = scope
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                self.stars.append(node)
            elif isinstance(node, ast.NamedExpr):  # binds outside of the comprehensions around it
                home = scope
                while home in self._comprehensions:
                    home = self._above[home]
                left += [(node.value, scope), (node.target, home)]
                continue
            left += self._children(node, scope)
        self._own = {(scope, name) for scope, name, _ in found}
        for scope, name, node in found:
            self.bindings.setdefault(self.resolve(scope, name), []).append(node)
        for item in names:
            if isinstance(item.ctx, ast.Load):
                self.loads.setdefault(self.variable(item), []).append(item)

    def variable(self, name: ast.Name) -> Variable:
        """Return which variable a name is; it is the module's if the file does not bind it."""
        return self.resolve(self._scopes.get(id(name), 0), name.id)

    def resolve(self, scope: int, name: str) -> Variable:
        """Return which variable a name is in a scope."""
        first = True
        while scope:
            declared = self._elsewhere.get((scope, name))
            if declared:
                return (0, name)
            inside = first or scope not in self._classes  # functions do not see the names of the class around them
            if declared is None and inside and (scope, name) in self._own:
                return (scope, name)
            scope, first = self._above[scope], False
        return (0, name)

    def is_class(self, variable: Variable) -> bool:
        """Tell whether a variable is bound in the body of a class."""
        return variable[0] in self._classes

    def _children(self, node: ast.AST, scope: int) -> Iterator[tuple[ast.AST, int]]:
        """Yield what a node holds, each with its scope."""
        outside: Sequence[ast.AST | None] = ()
        inside: Sequence[ast.AST] = ()
        if isinstance(node, FUNCTIONS):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            outside = [*given.defaults, *given.kw_defaults, *(item.annotation for item in every if item is not None)]
            if not isinstance(node, ast.Lambda):
                outside += [*node.decorator_list, node.returns]
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            inside = [*(item for item in every if item is not None), *getattr(node, "type_params", ()), *body]
        elif isinstance(node, ast.ClassDef):
            outside = [*node.decorator_list, *node.bases, *node.keywords]
            inside = [*getattr(node, "type_params", ()), *node.body]
            self._classes.add(id(node))
        elif isinstance(node, _COMPREHENSIONS):
            first, *more = node.generators
            outside = [first.iter]
            values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            inside = [first.target, *first.ifs, *more, *values]
            self._comprehensions.add(id(node))
        elif isinstance(node, ast.arg):
            return
        else:
            yield from ((child, scope) for child in ast.iter_child_nodes(node))
            return
        self._above[id(node)] = scope
        yield from ((child, scope) for child in outside if child is not None)
        yield from ((child, id(node)) for child in inside)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node itself binds in the scope that it stands in."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.Import(names=aliases):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
        case ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name for alias in aliases if alias.name != "*")
        case _ if type(node).__name__ in ("TypeVar", "TypeVarTuple", "ParamSpec"):
            yield node.name  # type: ignore[attr-defined]
