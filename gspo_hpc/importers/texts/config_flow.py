"""Follow a GRPOConfig through a Python file after it is made: what is written to it, by which name, and when.

A config may have several names, go through functions of the file, and be copied. Every place where it stands is read;
one that is not understood may change any argument, and is told as a doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers.texts.syntax import MUTATORS, Function, Tree, called, shown

ANY = "*"  # name of an argument that is not known
_COPIES = ("copy", "deepcopy", "replace")
_METHODS = ("get_", "to_", "main_process_first", "__str__", "__repr__")
_HARMLESS = (ast.Compare, ast.UnaryOp, ast.FormattedValue, ast.Expr, ast.Assert, ast.Delete, ast.If, ast.While)
_Key = tuple[int, str]


class Changes(NamedTuple):
    """Changes to a config after it is made."""

    values: dict[str, Any]  # argument -> its value; $(code) where only running the file would tell
    doubts: tuple[str, ...]  # places that may change any argument: "line 3: tune(args)"
    trainers: tuple[ast.Call, ...]  # calls that make a trainer
    patches: dict[str, int]  # attributes that are set on trainers, or on TRL's classes -> line


class _Write(NamedTuple):
    name: str
    value: Any
    node: ast.AST
    holder: ast.expr  # by what name the config was written to


def follow(
    tree: Tree, seeds: Sequence[ast.Call], tuples: bool, value: Callable[[ast.expr], Any], left: Callable[[Any], str]
) -> Changes:
    """Return what happens to the configs that the calls `seeds` return; `tuples`: in tuples, as parsers return them.

    `value` evaluates an expression, and `left` returns one as $(code).
    """
    flow = _Flow(tree, seeds, tuples, value, left)
    flow.name()
    flow.read()
    return Changes(flow.values(), tuple(dict.fromkeys(flow.doubts)), flow.trainer_calls(), flow.patches)


class _Flow:
    def __init__(
        self,
        tree: Tree,
        seeds: Sequence[ast.Call],
        tuples: bool,
        value: Callable[[Any], Any],
        left: Callable[[Any], str],
    ) -> None:
        self.tree, self.seeds, self.tuples, self.value, self.left = tree, seeds, tuples, value, left
        self.configs: set[_Key] = set()
        self.trainers: set[_Key] = set()
        self.copies: set[_Key] = set()
        self.returning: dict[int, set[int | None]] = {}  # function -> positions in the tuple that it returns; None: all
        self.writes: list[_Write] = []
        self.doubts: list[str] = []
        self.patches: dict[str, int] = {}
        self.bound: set[str] = set()  # attributes that are set to the config: self.args

    # -- names of the config

    def name(self) -> None:
        """Find the names that the config and its trainers have, until there are no more."""
        before = -1
        while before != (now := len(self.configs) + len(self.trainers) + sum(map(len, self.returning.values()))):
            before = now
            for node in self.tree.nodes:
                match node:
                    case ast.Assign(targets=targets, value=given):
                        for target in targets:
                            self._bind(target, given)
                    case ast.AnnAssign(target=target, value=given) if given is not None:
                        self._bind(target, given)
                    case ast.NamedExpr(target=target, value=given):
                        self._bind(target, given)
                    case ast.withitem(context_expr=given, optional_vars=target) if target is not None:
                        self._bind(target, given)
                    case ast.Return(value=given) if given is not None:
                        self._returned(node, given)
                    case ast.Call():
                        for parameter, argument in self.tree.parameters(node):
                            self._mark((id(self.tree.defined(node)[0]), parameter), argument)

    def _mark(self, key: _Key, given: ast.expr) -> None:
        if self.is_config(given):
            self.configs.add(key)
        elif self.is_trainer(given):
            self.trainers.add(key)

    def _bind(self, target: ast.expr, given: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(given, ast.Tuple | ast.List) and len(given.elts) == len(target.elts):
                for one, other in zip(target.elts, given.elts, strict=True):
                    self._bind(one, other)
                return
            places = self.returning.get(id(self.tree.defined(given)[0])) if isinstance(given, ast.Call) else None
            whole = self.tuples and self.is_config(given)
            for place, one in enumerate(target.elts):
                if (whole or (places and place in places)) and (key := self._key(one)):
                    self.configs.add(key)
            return
        key = self._key(target)
        if key is None:
            return
        self._mark(key, given)
        if key in self.configs and isinstance(target, ast.Attribute):
            self.bound.add(ast.unparse(target))
        if isinstance(self.tree.parent(self.tree.parent(target) or target), ast.ClassDef):  # of the class
            self._mark((-1, key[1]), given)
        if isinstance(given, ast.Call) and called(given) in _COPIES and self.is_config(given) and given.args:
            if self._key(given.args[0]) != key:
                self.copies.add(key)

    def _returned(self, node: ast.Return, given: ast.expr) -> None:
        function = self.tree.function_of(node)
        places = self.returning.setdefault(id(function), set())
        if self.is_config(given):
            places.add(None)
            if isinstance(function, Function) and any("property" in shown(item) for item in function.decorator_list):
                self.configs.add((-1, function.name))
        elif isinstance(given, ast.Tuple):
            places |= {place for place, item in enumerate(given.elts) if self.is_config(item)}

    def _key(self, node: ast.expr) -> _Key | None:
        if isinstance(node, ast.Name):
            return self.tree.variable(node)
        return (-1, node.attr) if isinstance(node, ast.Attribute) else None  # of any object that has it

    def is_config(self, node: ast.AST) -> bool:
        """Tell whether an expression is the config."""
        match node:
            case ast.Call():
                if any(node is seed for seed in self.seeds):
                    return True
                if called(node) in _COPIES and node.args and self.is_config(node.args[0]):
                    return True
                return None in self.returning.get(id(self.tree.defined(node)[0]), ())
            case ast.Attribute(value=holder, attr="args") if self.is_trainer(holder):
                return True
            case ast.Name() | ast.Attribute():
                return self._key(node) in self.configs
            case ast.Subscript(value=holder):
                return self.tuples and self.is_config(holder)
            case ast.IfExp(body=yes, orelse=no):
                return self.is_config(yes) or self.is_config(no)
            case ast.BoolOp(values=parts):
                return any(map(self.is_config, parts))
            case ast.NamedExpr(value=given):
                return self.is_config(given)
        return False

    def is_trainer(self, node: ast.AST) -> bool:
        """Tell whether an expression is a trainer that has the config."""
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            ours = called(node) == "GRPOTrainer" or any(map(self.is_config, given))
            return called(node).endswith("Trainer") and ours or self._derived(called(node))
        return isinstance(node, ast.Name | ast.Attribute) and self._key(node) in self.trainers

    def _derived(self, name: str, depth: int = 0) -> bool:
        """Tell whether a name is that of a class of the file that is derived from TRL's trainer."""
        own = self.tree.classes.get(name)
        bases = [ast.unparse(base).rpartition(".")[2] for base in own.bases] if own and depth < 9 else []
        return any(base.endswith("GRPOTrainer") or self._derived(base, depth + 1) for base in bases)

    def trainer_calls(self) -> tuple[ast.Call, ...]:
        """Return the calls that make a trainer with the config."""
        return tuple(call for call in self.tree.calls if self.is_trainer(call))

    # -- places where it stands

    def read(self) -> None:
        """Read each place where the config stands."""
        for call in self.tree.calls:  # code in a text, and names as texts
            if isinstance(call.func, ast.Name) and call.func.id in ("exec", "globals", "locals"):
                self._doubt(call)
        for node in self.tree.nodes:
            if (
                isinstance(node, ast.expr)
                and self.is_config(node)
                and not isinstance(getattr(node, "ctx", None), ast.Store)
            ):
                self._place(node)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not self.is_config(node):
                classes = ast.unparse(node.value) in ("GRPOTrainer", "trl.GRPOTrainer")
                if classes or self.is_trainer(node.value):
                    self.patches.setdefault(node.attr, node.lineno)
                elif ast.unparse(node.value) in ("GRPOConfig", "trl.GRPOConfig"):
                    self._doubt(node)

    def _doubt(self, node: ast.AST) -> None:
        statement: ast.AST | None = node
        while isinstance(statement, ast.expr | ast.keyword) and not isinstance(statement, ast.Call):
            node, statement = statement, self.tree.parent(statement)
        best = statement if isinstance(statement, ast.Call | ast.Assign | ast.AugAssign) else node
        self.doubts.append(f"line {getattr(node, 'lineno', 0)}: {shown(best)}")

    def _place(self, node: ast.expr) -> None:
        parent = self.tree.parent(node)
        match parent:
            case ast.Attribute():
                self._attribute(parent, node)
            case ast.Call() if parent.func is not node:
                self._handed(parent, node)
            case ast.keyword():
                call = self.tree.parent(parent)
                if isinstance(call, ast.Call):
                    self._handed(call, node)
            case ast.Assign(targets=targets):
                if any(isinstance(target, ast.Subscript) for target in targets):
                    self._doubt(node)
            case ast.AnnAssign() | ast.NamedExpr() | ast.Return() | ast.withitem() | ast.IfExp() | ast.BoolOp():
                pass
            case ast.Subscript() if self.tuples:
                pass
            case ast.Tuple() | ast.List() | ast.Dict() | ast.Set() | ast.Starred():
                self._held(parent, node)
            case _ if isinstance(parent, _HARMLESS):
                pass
            case _:
                self._doubt(node)

    def _held(self, holder: ast.expr, node: ast.expr) -> None:
        """Read a config within a tuple, a list or a mapping."""
        above = self.tree.parent(holder)
        while isinstance(above, ast.Tuple | ast.List | ast.Dict | ast.Starred | ast.keyword):
            above = self.tree.parent(above)
        paired = isinstance(above, ast.Assign) and isinstance(above.value, ast.Tuple) and isinstance(holder, ast.Tuple)
        if isinstance(above, ast.Call) and self.tree.reads(above):
            return
        if not (paired or (isinstance(above, ast.Return) and isinstance(holder, ast.Tuple))):
            self._doubt(node)

    def _attribute(self, node: ast.Attribute, holder: ast.expr) -> None:
        parent = self.tree.parent(node)
        if node.attr == "__dict__":
            self._view(node, holder)
        elif not isinstance(node.ctx, ast.Load):
            given = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            self._write(node.attr, given, parent if isinstance(parent, ast.AugAssign) else node, holder)
        elif isinstance(parent, ast.Call) and parent.func is node:
            if node.attr == "__setattr__":
                self._set(parent, parent.args, holder)
            elif not node.attr.startswith(_METHODS):
                self._doubt(node)
        elif isinstance(parent, ast.Assign):
            names = {self._key(target) for target in parent.targets if isinstance(target, ast.Name)}
            if any(self._key(item) in names and self.tree.mutated(item) for item in self.tree.nodes
                   if isinstance(item, ast.Name)):  # fmt: skip
                self._write(node.attr, None, parent, holder)
        elif isinstance(parent, ast.Subscript | ast.Attribute) and not self.is_config(node):
            above = self.tree.parent(parent)
            mutates = isinstance(parent, ast.Attribute) and parent.attr in MUTATORS and isinstance(above, ast.Call)
            if mutates or not isinstance(parent.ctx, ast.Load):
                self._write(node.attr, None, parent, holder)

    def _view(self, node: ast.expr, holder: ast.expr) -> None:
        """Read what is done with the mapping of all arguments: vars(config), or config.__dict__."""
        parent = self.tree.parent(node)
        above = None if parent is None else self.tree.parent(parent)
        if isinstance(parent, ast.Attribute) and isinstance(above, ast.Call):
            if parent.attr == "update":
                self._keywords(above, holder)
                for item in above.args:
                    given = self.value(item)
                    pairs = given.items() if isinstance(given, dict) else [(ANY, None)]
                    for name, one in pairs:
                        self._write(str(name), one, above, holder, known=name != ANY)
            elif parent.attr in MUTATORS:
                self._write(self._text(above.args[0]) if above.args else ANY, None, above, holder)
        elif isinstance(parent, ast.Subscript):
            if not isinstance(parent.ctx, ast.Load):
                given = above.value if isinstance(above, ast.Assign) else None
                self._write(self._text(parent.slice), given, parent, holder)
        elif isinstance(parent, ast.Call) and parent.func is not node:
            if not self.tree.reads(parent):
                self._doubt(node)
        elif not isinstance(parent, ast.For | ast.comprehension | ast.keyword | ast.Dict) and not isinstance(
            parent, _HARMLESS
        ):
            self._doubt(node)

    def _handed(self, call: ast.Call, node: ast.expr) -> None:
        name = called(call)
        first = bool(call.args) and call.args[0] is node
        if self.is_trainer(call) or any(call is seed for seed in self.seeds):
            return
        if name in _COPIES and first:
            self._keywords(call, node)
        elif name == "setattr" and first:
            self._set(call, call.args[1:], node)
        elif name == "delattr" and first and len(call.args) > 1:
            self._write(self._text(call.args[1]), None, call, node)
        elif name == "vars" and first:
            self._view(call, node)
        elif not any(argument is node for _, argument in self.tree.parameters(call)) and not self.tree.reads(call):
            self._doubt(call)

    def _keywords(self, call: ast.Call, holder: ast.expr) -> None:
        for keyword in call.keywords:
            if keyword.arg is not None:
                self._write(keyword.arg, keyword.value, call, holder)
                continue
            given = self.value(keyword.value)
            if isinstance(given, dict):
                for name, one in given.items():
                    self._write(str(name), one, call, holder, known=True)
            else:
                self._write(ANY, None, call, holder)

    def _set(self, call: ast.Call, arguments: Sequence[ast.expr], holder: ast.expr) -> None:
        """Read setattr(config, name, value), also over the items of a mapping that stands in the file."""
        if len(arguments) != 2:
            self._doubt(call)
            return
        name, given = arguments
        statement = self.tree.parent(call)
        loop = None if statement is None else self.tree.parent(statement)
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and called(loop.iter) == "items":
            items = self.value(loop.iter.func.value) if isinstance(loop.iter.func, ast.Attribute) else None
            pair = [item.id for item in getattr(loop.target, "elts", ()) if isinstance(item, ast.Name)]
            if isinstance(items, dict) and len(pair) == 2 and isinstance(name, ast.Name) and name.id == pair[0]:
                same = isinstance(given, ast.Name) and given.id == pair[1] and loop.body == [statement]
                for key, one in items.items():
                    self._write(str(key), one if same else None, loop, holder, known=same)
                return
        self._write(self._text(name), given, call, holder)

    def _text(self, node: ast.expr) -> str:
        given = self.value(node)
        return given if isinstance(given, str) and given.isidentifier() else ANY

    # -- what it amounts to

    def _write(self, name: str, given: Any, node: ast.AST, holder: ast.expr, known: bool = False) -> None:
        """Note a write. `given`: an expression or None; with `known`, the value itself."""
        if name == ANY:
            self._doubt(node)
            return
        value = given if known else self.value(given) if isinstance(given, ast.expr) else self.left(node)
        if not known and isinstance(given, ast.expr) and isinstance(value, str) and value.startswith("$("):
            value = self.left(given)
        self.writes.append(_Write(name, value, node, holder))

    def values(self) -> dict[str, Any]:
        """Return the arguments that are written, with their values where the order of all writes is plain."""
        trainers = self.trainer_calls()
        ends = [self.tree.when(call) for call in trainers]
        begins = [self.tree.when(call) for call in self.seeds]
        found: dict[str, Any] = {}
        for name in dict.fromkeys(write.name for write in self.writes):
            timed = [(self._when(write, begins, ends, trainers), write) for write in self.writes if write.name == name]
            if any(time is None for time, _ in timed):
                last = timed[-1][1]
                known = isinstance(last.value, str) and last.value.startswith("$(")
                found[name] = last.value if known else self.left(last.value)
            else:
                found[name] = max(timed, key=lambda pair: pair[0] or ())[1].value
        return found

    def _when(self, write: _Write, begins: list[Any], ends: list[Any], trainers: Sequence[ast.Call]) -> Any:
        """Return when a write takes effect, None if it is not plain that it does."""
        time = self.tree.when(write.node)
        if time is None or None in begins or None in ends or not self.tree.certain(write.node):
            return None
        if ends and not time < min(ends):  # the trainer has read some of the arguments by then
            return None
        if begins and time < min(begins) and write.node not in self.seeds:
            return None
        holder = write.holder
        if isinstance(holder, ast.Attribute) and ast.unparse(holder) not in self.bound and not self._of_trainer(holder):
            return None  # an attribute of this name has the config, and another object may have one too
        if self.copies:
            given = {self._key(item) for call in trainers
                     for item in (*call.args, *(word.value for word in call.keywords))}  # fmt: skip
            made = isinstance(write.node, ast.Call) and self._target(write.node) in given
            if self._key(write.holder) not in given and not made:
                return None
        return time

    def _of_trainer(self, node: ast.Attribute) -> bool:
        return node.attr == "args" and self.is_trainer(node.value)

    def _target(self, node: ast.AST) -> _Key | None:
        statement = self.tree.parent(node)
        return self._key(statement.targets[0]) if isinstance(statement, ast.Assign) else None
