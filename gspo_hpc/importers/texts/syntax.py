"""Ask where the nodes of a Python file's syntax tree stand: in which function, before what, and whether they run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gspo_hpc.importers.texts.scopes import FUNCTIONS, Scopes, Variable

Function = ast.FunctionDef | ast.AsyncFunctionDef
When = tuple[tuple[int, int], ...]  # (line, column) of the calls that lead to a node, and of the node
MUTATORS = {"append", "extend", "insert", "remove", "clear", "pop", "popitem", "update", "setdefault", "sort"}
_READERS = set(
    "print repr str len isinstance issubclass type id hasattr getattr bool hash asdict dir pprint pformat dumps dump "
    "info warning warn debug error critical exception log display".split()
)
# Packages whose functions read a config and leave it as it is.
LIBRARIES = set(
    "trl transformers datasets torch json yaml logging os sys pprint rich wandb accelerate peft swanlab mlflow "
    "tqdm huggingface_hub numpy random loguru typing inspect dataclasses".split()
)
PLAIN_BASES = ("object", "ABC", "Generic", "Protocol")  # base classes that bring nothing of their own
_COPIES = ("copy", "deepcopy", "replace")
_DECORATORS = ("staticmethod", "classmethod", "property", "cached_property", "wraps", "cache", "lru_cache", "record")
# Expressions that evaluate all that stands in them.
_EXPRESSIONS = (
    ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.BinOp,
    ast.UnaryOp, ast.JoinedStr, ast.FormattedValue, ast.NamedExpr, ast.Await,
)  # fmt: skip
# Context managers that stop no error.
_MANAGERS = (
    "main_process_first",
    "local_main_process_first",
    "nullcontext",
    "redirect_stdout",
    "redirect_stderr",
    "closing",
)
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
        self.scopes = Scopes(tree)
        self.nodes = [*ast.walk(tree)]
        self.parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, Function)]
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.imported = dict(self._imported())
        self.originals = {alias.asname: alias.name for node in self.nodes if isinstance(node, ast.ImportFrom)
                          for alias in node.names if alias.asname}  # fmt: skip
        self.trainers = frozenset[str]()  # names of classes of other files that are derived from a trainer
        self.named = {*self._named()}  # functions, classes and what else gets a name without an assignment
        self._uses: dict[str, list[ast.expr]] = {}  # name -> where it stands, also as an attribute
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                self._uses.setdefault(node.id if isinstance(node, ast.Name) else node.attr, []).append(node)
        self._functions: dict[str, list[Function]] = {}
        for function in self.functions:
            self._functions.setdefault(function.name, []).append(function)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return what a node stands in."""
        return self.parents.get(id(node))

    def function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the function or lambda that a node stands in, None if it stands in none."""
        above = self.parent(node)
        while above is not None and not isinstance(above, FUNCTIONS):
            above = self.parent(above)
        return above

    def variable(self, name: ast.Name) -> Variable:
        """Return which variable a name is: the scope that binds it (0: the module), and the name."""
        return self.scopes.variable(name)

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

    def behind(self, node: ast.expr, seen: frozenset[Variable] = frozenset()) -> list[ast.expr]:
        """Return what an expression may stand for, by names, conditions and parameters of the file.

        `seen`: variables that are being followed. An expression that stands for very many is returned itself.
        """
        found: list[ast.expr] = []
        match node:
            case ast.IfExp(body=yes, orelse=no):
                found = [*self.behind(yes, seen), *self.behind(no, seen)]
            case ast.BoolOp(values=parts):
                found = [one for part in parts for one in self.behind(part, seen)]
            case ast.NamedExpr(value=given):
                found = self.behind(given, seen)
            case ast.Name() if (variable := self.variable(node)) not in seen and len(seen) < _DEEPEST:
                for binding in self.scopes.bindings.get(variable, []):
                    for given in self._given(binding) or [node]:
                        found += [node] if given is node else self.behind(given, seen | {variable})
        found = [*dict.fromkeys(found)]
        return found if 0 < len(found) <= _DEEPEST else [node]

    def _given(self, binding: ast.AST) -> list[ast.expr]:
        """Return what the place that binds a name gives it, nothing if that is not plain."""
        above = self.parent(binding)
        if isinstance(binding, ast.arg):
            function = None if above is None else self.parent(above)
            calls = [call for call in self.calls if function is not None and self.defined(call)[0] is function]
            return [one for call in calls for name, one in self.parameters(call) if name == binding.arg]
        if isinstance(above, ast.AnnAssign) or (isinstance(above, ast.Assign) and binding in above.targets):
            return [above.value] if above.value is not None else []
        return []

    def certain(self, node: ast.AST) -> bool:
        """Tell whether a node is known to run, once, whenever the function runs that it stands in."""
        below, above = node, self.parent(node)
        while above is not None and not isinstance(above, FUNCTIONS):
            if not self._passes(below, above):
                return False
            below, above = above, self.parent(above)
        if isinstance(above, Function):
            return not self.generates(above) and self._reaches(above.body, below)
        return not isinstance(above, ast.Lambda) or below is above.body

    def _passes(self, below: ast.AST, above: ast.AST) -> bool:
        """Tell whether what runs a node is known to run, once, what stands directly in it."""
        match above:
            case ast.keyword() | ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Return() | ast.Delete():
                return True
            case ast.AnnAssign(annotation=annotation):
                return below is not annotation  # which Python reads only sometimes
            case ast.If(test=test, body=body):
                return below is test or (is_main(above) and self._reaches(body, below))
            case ast.IfExp(test=test):
                return below is test
            case ast.For(iter=given) | ast.AsyncFor(iter=given) | ast.comprehension(iter=given):
                return below is given
            case ast.ListComp(generators=loops) | ast.SetComp(generators=loops) | ast.DictComp(generators=loops):
                return below is loops[0]
            case ast.GeneratorExp(generators=loops):
                return below is loops[0]
            case ast.BoolOp(values=parts):
                return below is parts[0]
            case ast.Compare(left=left, comparators=others):
                return below in (left, others[0])
            case ast.Match(subject=subject):
                return below is subject
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return below in items or (not any(map(self._suppresses, items)) and self._reaches(body, below))
            case ast.withitem():
                return True
            case ast.Try(finalbody=last):
                return self._reaches(last, below)
            case ast.Module(body=body):
                return self._reaches(body, below)
        return isinstance(above, _EXPRESSIONS)

    def _reaches(self, body: list[ast.stmt], statement: ast.AST) -> bool:
        """Tell whether a body has a statement, and nothing before it that may leave the function."""
        if statement not in body:
            return False
        before = body[: body.index(statement)]  # type: ignore[arg-type]
        return not any(isinstance(part, ast.Return) for item in before for part in self._own(item))

    def _suppresses(self, item: ast.withitem) -> bool:
        """Tell whether a with statement may go on after an error in its body, which then has run in part."""
        given = item.context_expr
        if not isinstance(given, ast.Call):
            return True
        if isinstance(given.func, ast.Name) and given.func.id not in self.imported:
            return not (given.func.id == "open" and not self.scopes.bindings.get(self.variable(given.func)))
        return called(given) not in _MANAGERS and self.root(given.func) not in LIBRARIES

    def generates(self, function: Function) -> bool:
        """Tell whether a function is a generator, whose body does not run where it is called."""
        return any(isinstance(part, ast.Yield | ast.YieldFrom) for item in function.body for part in self._own(item))

    def looped(self, node: ast.AST) -> bool:
        """Tell whether a node may run several times each time that the function runs that it stands in."""
        below, above = node, self.parent(node)
        while above is not None and not isinstance(above, FUNCTIONS):
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
        if not isinstance(function, Function) or depth > _DEEPEST or self.generates(function):
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
        if not self.is_of(function, uses[0]) or (
            isinstance(function, ast.AsyncFunctionDef) and not self._awaited(call)
        ):
            return None
        before = self.when(call, depth + 1, started)
        return None if before is None else (*before, place)

    def start(self, node: ast.AST) -> ast.AST | None:
        """Return the function that the file itself does not call and that a node runs in, None if there is none."""
        function = self.function_of(node)
        for _ in range(_DEEPEST):
            if not isinstance(function, Function):
                return function
            outer = self.parent(function)
            named = outer.name if function.name == "__init__" and isinstance(outer, ast.ClassDef) else function.name
            if not (uses := self._uses.get(named)):
                return function
            function = self.function_of(uses[0])
        return function

    def is_of(self, function: Function, use: ast.expr) -> bool:
        """Tell whether a name, or an attribute, can be no other function than this one."""
        outer = self.parent(function)
        if isinstance(outer, ast.ClassDef):
            if len(self._functions[function.name]) > 1 and function.name != "__init__":
                return False
            if isinstance(use, ast.Name):  # Mine(args), which calls its __init__
                return function.name == "__init__" and self._alone(use, outer)
            return function.name == "__init__" or (isinstance(use, ast.Attribute) and self._has(use.value, outer))
        return isinstance(use, ast.Name) and self._alone(use, function)

    def _alone(self, name: ast.Name, node: ast.AST) -> bool:
        """Tell whether a name is what one node makes it: the only one that binds it, or surely the last before."""
        bindings = self.scopes.bindings.get(self.variable(name), [])
        if len(bindings) == 1 or node not in bindings:
            return node in bindings
        above = {id(self.function_of(name)), *(id(self.function_of(item)) for item in bindings)}
        places = [getattr(item, "lineno", 0) for item in bindings]
        line = getattr(node, "lineno", 0)
        plain = len(above) == 1 and self.certain(node) and not self.looped(name)
        return plain and line == max(places) < name.lineno and places.count(line) == 1

    def _has(self, holder: ast.expr, own: ast.ClassDef) -> bool:
        """Tell whether an object is of a class of the file: self in it, Mine, Mine(), or a name for these."""
        if isinstance(holder, ast.Call):
            return isinstance(holder.func, ast.Name) and self._alone(holder.func, own)
        if not isinstance(holder, ast.Name):
            return False
        if self._alone(holder, own):
            return True
        bindings = self.scopes.bindings.get(self.variable(holder), [])
        if len(bindings) != 1:
            return False
        (binding,) = bindings
        if isinstance(binding, ast.arg):  # self, where no other class of the file is derived from this one
            method = self.parent(self.parent(binding) or binding)
            first = isinstance(method, Function) and self.parent(method) is own and method.args.args[:1] == [binding]
            names = {part.id for node in self.classes.values() for base in node.bases for part in ast.walk(base)
                     if isinstance(part, ast.Name)}  # fmt: skip
            return first and own.name not in names
        given = self.parent(binding)
        return isinstance(given, ast.Assign) and given.targets == [binding] and self._has_made(given.value, own)

    def _has_made(self, given: ast.expr, own: ast.ClassDef) -> bool:
        return isinstance(given, ast.Call) and self._has(given, own)

    def _awaited(self, call: ast.Call) -> bool:
        """Tell whether what an async function returns is awaited where it is called."""
        above = self.parent(call)
        return isinstance(above, ast.Await) or (isinstance(above, ast.Call) and called(above) == "run")

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
        return called(call) in _READERS or self.root(call.func) in LIBRARIES

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
            and self.root(item) not in LIBRARIES
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

    def _own(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node and what it holds, without what stands in functions."""
        yield node
        if not isinstance(node, FUNCTIONS):
            for child in ast.iter_child_nodes(node):
                yield from self._own(child)


def base_name(base: ast.expr) -> str:
    """Return the last name of a base class or a decorator: Generic for typing.Generic[T]."""
    base = base.value if isinstance(base, ast.Subscript) else base
    return ast.unparse(base).rpartition(".")[2]
