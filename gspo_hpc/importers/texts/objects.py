"""Find out which objects the expressions of a Python file may be: configs, their copies, trainers, and TRL's classes.

A name is bound to objects, and a copy is an object of its own. Where the order of all bindings of a name is plain, a
name is what the last of them gave it; else it may be what any of them gave it. An attribute may be what any object has
under its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gspo_hpc.importers.texts.syntax import Function, Tree, When, called, shown

_DEEPEST = 20  # names that stand for each other
_MOST = 100  # times that a file is read
_TOO_DEEP = "its GRPOConfig goes through more names and functions than are followed"
CONFIG, TRAINER = "GRPOConfig", "GRPOTrainer"
_Key = tuple[int, str]


class Object(NamedTuple):
    """One object that is followed."""

    kind: str  # config, trainer, or class
    made: int | str  # the call that makes it, or the name of the class

    @property
    def of_trainer(self) -> bool:
        """Tell whether it is TRL's trainer or a class of it."""
        return self.kind == "trainer" or (self.kind == "class" and self.made == TRAINER)


Objects = frozenset[Object]
NONE: Objects = frozenset()
_CLASSES = {name: frozenset({Object("class", name)}) for name in (CONFIG, TRAINER)}
_TRAINER: Objects = frozenset({Object("trainer", 0)})


class _Binding(NamedTuple):
    """A place where a variable is given a value."""

    target: ast.Name
    given: ast.expr | None  # None: a loop, a with statement ...
    place: int | None  # in the tuple that is given
    end: tuple[int, int]  # from here on the variable has the value
    plain: bool  # it is given once, whenever the function runs


class ObjectMap:
    """The objects of a file.

    `seeds` are the calls that make its config; `tuples`: in tuples, as parsers return them.
    """

    def __init__(self, tree: Tree, seeds: Sequence[ast.Call], tuples: bool) -> None:
        self.tree, self.seeds, self.tuples = tree, seeds, tuples
        self.seed = Object("config", id(seeds[0])) if seeds else None
        self.copies: dict[Object, ast.Call] = {}
        self.bound: set[str] = set()  # attributes that are set to the config: self.args
        self._seeds = {id(call) for call in seeds}
        self._classes = dict(_derived(tree))
        self._held: dict[_Key, Objects] = {}  # parameters and attributes
        self._returned: dict[tuple[int, int | None], Objects] = {}  # function and place in the tuple that it returns
        self._known: dict[int, Objects] = {}
        self._before: dict[int, Objects] = {}  # what was known before this pass
        self._reached: dict[int, tuple[list[_Binding], bool]] = {}
        self._bindings: dict[_Key, list[_Binding]] = {}
        for binding in _bindings(tree):
            self._bindings.setdefault(tree.variable(binding.target), []).append(binding)
        try:
            self._settle()
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None

    def of(self, node: ast.AST) -> Objects:
        """Return the objects that an expression may be."""
        if not isinstance(node, ast.expr):
            return NONE
        if id(node) not in self._known:
            self._known[id(node)] = self._before.get(id(node), NONE)  # for a value that is made of itself
            self._known[id(node)] = self._find(node)
        return self._known[id(node)]

    def configs(self, node: ast.AST) -> Objects:
        """Return the configs among the objects that an expression may be."""
        return frozenset(item for item in self.of(node) if item.kind == "config")

    def sure(self, node: ast.AST, depth: int = 0) -> bool:
        """Tell whether an expression is one of the configs that are followed, and nothing else."""
        if depth > _DEEPEST or not self.configs(node):
            return False
        match node:
            case ast.IfExp(body=yes, orelse=no):
                return self.sure(yes, depth + 1) and self.sure(no, depth + 1)
            case ast.BoolOp(values=parts):
                return all(self.sure(part, depth + 1) for part in parts)
            case ast.NamedExpr(value=given):
                return self.sure(given, depth + 1)
            case ast.Name():
                if node.id in self.tree.imported or node.id in self.tree.named:
                    return False
                bindings, _ = self._reaching(node, self.tree.variable(node))
                return all(item.given is not None and (item.place is not None or self.sure(item.given, depth + 1))
                           for item in bindings)  # fmt: skip
        return True

    def trainers(self) -> tuple[ast.Call, ...]:
        """Return the calls that make a trainer."""
        return tuple(call for call in self.tree.calls if self.makes_trainer(call))

    def given(self, trainer: ast.Call) -> Objects:
        """Return the configs that a trainer may be given."""
        config = given_config(trainer)
        return NONE.union(*map(self.configs, arguments(trainer) if config is None else [config]))

    def replaced(self) -> Iterator[tuple[ast.Name, Object]]:
        """Yield the places where a name of TRL's classes is given to something else."""
        for name, (item,) in _CLASSES.items():
            for binding in (one for (_, of), held in self._bindings.items() if of == name for one in held):
                empty = isinstance(binding.given, ast.Constant) and binding.given.value is None
                if not empty and (binding.given is None or item not in self._placed(binding.given, binding.place)):
                    yield binding.target, item

    def passed_on(self, call: ast.Call, node: ast.expr) -> bool:
        """Tell whether a trainer of the file's own hands TRL's the config that it is given itself."""
        function = self.tree.function_of(call)
        own = None if function is None else self.tree.parent(function)
        if called(call) != "__init__" or not (isinstance(own, ast.ClassDef) and self._classes.get(own.name) == TRAINER):
            return False
        return isinstance(node, ast.Name) and self._reaching(node, self.tree.variable(node)) == ([], True)

    def makes_trainer(self, node: ast.AST) -> bool:
        """Tell whether an expression is a call that makes a trainer."""
        if not isinstance(node, ast.Call):
            return False
        name = called(node)
        if name == TRAINER or _CLASSES[TRAINER] & self.of(node.func):
            return True
        return names_trainer(name) and any(map(self.configs, arguments(node)))

    def key(self, node: ast.AST) -> _Key | None:
        """Return the variable or the attribute that an expression is, None if it is neither."""
        if isinstance(node, ast.Name):
            return self.tree.variable(node)
        return (-1, node.attr) if isinstance(node, ast.Attribute) else None  # of any object that has it

    # -- inside

    def _settle(self) -> None:
        """Read the file until nothing more is found. Raises ValueError where that takes absurdly long."""
        before = -1
        for _ in range(_MOST):
            self._before, self._known = self._known, {}
            self._pass()
            now = sum(map(len, [*self._held.values(), *self._returned.values(), *self._known.values()]))
            if now == before:
                return
            before = now
        raise ValueError(_TOO_DEEP)

    def _pass(self) -> None:
        """Note once more what parameters, attributes and functions may be."""
        for node in self.tree.nodes:
            match node:
                case ast.Assign(targets=targets, value=given):
                    for target in targets:
                        self._attributes(target, given)
                case ast.AnnAssign(target=target, value=given) if given is not None:
                    self._attributes(target, given)
                case ast.withitem(context_expr=given, optional_vars=ast.Attribute() as target):
                    self._attributes(target, given)
                case ast.Return(value=given) if given is not None:
                    self._return(node, given)
                case ast.Call():
                    function = id(self.tree.defined(node)[0])
                    for parameter, argument in self.tree.parameters(node):
                        self._hold((function, parameter), self.of(argument))
                case ast.Name():
                    self.of(node)

    def _hold(self, key: _Key, objects: Objects) -> None:
        if objects:
            self._held[key] = self._held.get(key, NONE) | objects

    def _attributes(self, target: ast.expr, given: ast.expr) -> None:
        for one, value, place in _pairs(target, given):
            objects = self._placed(value, place)
            if isinstance(one, ast.Attribute):
                self._hold((-1, one.attr), objects)
                if any(item.kind == "config" for item in objects):
                    self.bound.add(ast.unparse(one))
            elif isinstance(one, ast.Name) and isinstance(self.tree.parent(self.tree.parent(one) or one), ast.ClassDef):
                self._hold((-1, one.id), objects)

    def _return(self, node: ast.Return, given: ast.expr) -> None:
        function = self.tree.function_of(node)
        values: list[tuple[int | None, ast.expr]] = [(None, given)]
        values += enumerate(given.elts) if isinstance(given, ast.Tuple) else []
        for place, value in values:
            if objects := self.of(value):
                key = (id(function), place)
                self._returned[key] = self._returned.get(key, NONE) | objects
                if place is None and isinstance(function, Function):
                    if any("property" in shown(item) for item in function.decorator_list):
                        self._hold((-1, function.name), objects)

    def _placed(self, given: ast.expr, place: int | None) -> Objects:
        """Return what stands at a place of a tuple that is given, or what is given."""
        if place is None:
            return self.of(given)
        if isinstance(given, ast.Call) and (found := self._returned.get((id(self.tree.defined(given)[0]), place))):
            return found
        return self.configs(given) if self.tuples else NONE

    def _find(self, node: ast.expr) -> Objects:
        match node:
            case ast.Call():
                return self._call(node)
            case ast.Attribute(value=holder, attr=name):
                return self._attribute(holder, name)
            case ast.Name():
                return self._name(node)
            case ast.Subscript(value=holder):
                return self.configs(holder) if self.tuples else NONE
            case ast.IfExp(body=yes, orelse=no):
                return self.of(yes) | self.of(no)
            case ast.BoolOp(values=parts):
                return NONE.union(*map(self.of, parts))
            case ast.NamedExpr(value=given):
                return self.of(given)
        return NONE

    def _attribute(self, holder: ast.expr, name: str) -> Objects:
        if name == "args" and self.of(holder) & _TRAINER:
            return NONE.union(*map(self.given, self.trainers()))
        return _CLASSES.get(name, NONE) | self._held.get((-1, name), NONE)

    def _call(self, node: ast.Call) -> Objects:
        if id(node) in self._seeds and self.seed is not None:
            return frozenset({self.seed})
        if node.args and self.tree.copies(node) and self.configs(node.args[0]):
            copy = Object("config", id(node))
            self.copies[copy] = node
            return frozenset({copy})
        if called(node) == "cast" and len(node.args) == 2:  # of typing: the object itself
            return self.of(node.args[1])
        if called(node) == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self._attribute(node.args[0], str(node.args[1].value))
        if found := self._returned.get((id(self.tree.defined(node)[0]), None)):
            return found
        return _TRAINER if self.makes_trainer(node) else NONE

    def _name(self, node: ast.Name) -> Objects:
        key = self.tree.variable(node)
        if not isinstance(node.ctx, ast.Store) and key not in self._bindings:
            own = self._classes.get(node.id) or (node.id if node.id in _CLASSES else None)
            if own is not None and key not in self._held:
                return _CLASSES[own]
        bindings, first = self._reaching(node, key)
        found = self._held.get(key, NONE) if first else NONE
        return found.union(*(self._placed(item.given, item.place) for item in bindings if item.given is not None))

    def _reaching(self, node: ast.Name, key: _Key) -> tuple[list[_Binding], bool]:
        """Return the bindings that may hold where a name is read, and whether it may be what the function was given."""
        if id(node) not in self._reached:
            self._reached[id(node)] = self._last(node, self._bindings.get(key, []))
        return self._reached[id(node)]

    def _last(self, node: ast.Name, bindings: list[_Binding]) -> tuple[list[_Binding], bool]:
        if isinstance(node.ctx, ast.Store):
            return [item for item in bindings if item.target is node], False
        scope = self.tree.function_of(node)
        if all(self.tree.function_of(item.target) is scope for item in bindings):
            now: When | None = ((node.lineno, node.col_offset),)
            times: list[When | None] = [(item.end,) for item in bindings]
        else:
            now = self.tree.when(node, started=True)
            before = [self.tree.when(item.target, started=True) for item in bindings]
            times = [None if time is None else (*time[:-1], item.end)
                     for time, item in zip(before, bindings, strict=True)]  # fmt: skip
        if (
            now is None
            or any(time is None for time in times)
            or any(self.tree.looped(item.target) for item in bindings)
        ):
            return bindings, True
        found: list[_Binding] = []
        ordered = sorted(zip(times, range(len(bindings)), strict=True), reverse=True)
        for time, number in ordered:
            if time is not None and time <= now:
                found.append(bindings[number])
                if bindings[number].plain:
                    return found, False
        return found, True


def _derived(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the names of the file for TRL's config and trainer, and for classes derived from them -> which it is."""
    known = {CONFIG: CONFIG, TRAINER: TRAINER}
    known |= {name: original for name, original in tree.originals.items() if original in known}
    known |= dict.fromkeys(tree.trainers, TRAINER)
    yield from known.items()
    for name, node in tree.classes.items():
        for base in node.bases:
            if (last := ast.unparse(base).rpartition(".")[2]) in known:
                known[name] = known[last]
                yield name, known[last]


def _bindings(tree: Tree) -> Iterator[_Binding]:
    """Yield the places where the file gives variables values."""
    told: set[int] = set()
    for node in tree.nodes:
        targets: Iterable[ast.expr] = ()
        given: ast.expr | None = None
        if isinstance(node, ast.Assign):
            targets, given = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets, given = [node.target], node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets, given = [node.optional_vars], node.context_expr
        if given is None:
            continue
        end = (given.end_lineno or given.lineno, given.end_col_offset or 0)
        for target in targets:
            for one, value, place in _pairs(target, given):
                if isinstance(one, ast.Name):
                    told.add(id(one))
                    yield _Binding(one, value, place, end, tree.certain(one))
    for node in tree.nodes:  # loops, augmented assignments and so on
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in told:
            yield _Binding(node, None, None, (node.lineno, node.col_offset), False)


def _pairs(target: ast.expr, given: ast.expr) -> Iterator[tuple[ast.expr, ast.expr, int | None]]:
    """Yield each single target of an assignment with what it is given, and its place in that."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, given, None
    elif isinstance(given, ast.Tuple | ast.List) and len(given.elts) == len(target.elts):
        for one, other in zip(target.elts, given.elts, strict=True):
            yield from _pairs(one, other)
    else:
        for place, one in enumerate(target.elts):
            yield one, given, place


def names_trainer(name: str) -> bool:
    """Tell whether a name is that of a trainer's class, also with the number of a version behind it."""
    return re.search(r"Trainer(_?[vV]?\d+)?$", name) is not None


def arguments(call: ast.Call) -> list[ast.expr]:
    """Return everything that a call is given."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def given_config(call: ast.Call) -> ast.expr | None:
    """Return what a trainer is given as its config, None if that cannot be told apart from the rest."""
    for keyword in call.keywords:
        if keyword.arg == "args":
            return keyword.value
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            named: Mapping[str, ast.expr] = {
                str(getattr(key, "value", "")): value
                for key, value in zip(keyword.value.keys, keyword.value.values, strict=True)
            }
            if "args" in named:
                return named["args"]
    plain = len(call.args) > 2 and not any(isinstance(item, ast.Starred) for item in call.args[:3])
    return call.args[2] if plain else None
