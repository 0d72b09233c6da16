"""Follow a GRPOConfig through a Python file after it is made: what is written to it, by which name, and when.

A config may have several names, go through functions of the file, and be copied; the config that counts is the one that
the trainer gets. Every place where a config stands is read; one that is not understood may change any argument, and is
told as a doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers.texts.objects import Object, ObjectMap, Objects, given_config
from gspo_hpc.importers.texts.syntax import MUTATORS, Tree, When, called, shown
from gspo_hpc.importers.texts.trainers import READ_BY_DEEPSPEED, READ_IN_TRAINING, READ_WHEN_MADE

_LATE = "after the trainer is made"
ANY = "*"  # name of an argument that is not known
_METHODS = ("get_", "to_", "main_process_first", "__str__", "__repr__")
_CHANGERS = ("set_", "__")  # how attributes begin that may change a config, also where they are not called here
_HARMLESS = (ast.Compare, ast.UnaryOp, ast.FormattedValue, ast.Expr, ast.Assert, ast.Delete, ast.If, ast.While)


class Changes(NamedTuple):
    """Changes to a config after it is made."""

    values: dict[str, Any]  # argument -> its value; $(code) where only running the file would tell
    doubts: tuple[str, ...]  # places that may change any argument: "line 3: tune(args)"
    reasons: Mapping[str, str]  # a value that is $(code) -> why it is not known, where it is a literal
    left: dict[str, str]  # what is set in vain -> why


class _Write(NamedTuple):
    name: str
    value: Any
    node: ast.AST
    holder: ast.expr | None  # by what name the config was written to
    objects: Objects | None  # the configs that may be written to, None: any


def follow(tree: Tree, objects: ObjectMap, value: Callable[[ast.expr], Any], left: Callable[[Any], str]) -> Changes:
    """Return what happens to the config that the trainer gets.

    `value` evaluates an expression, and `left` returns one as $(code).
    """
    flow = _Flow(tree, objects, value, left)
    flow.read()
    values = flow.values()
    return Changes(values, tuple(dict.fromkeys(flow.doubts)), flow.reasons, flow.left_out)


class _Flow:
    def __init__(self, tree: Tree, objects: ObjectMap, value: Callable[[Any], Any], left: Callable[[Any], str]) -> None:
        self.tree, self.objects, self.value, self.left = tree, objects, value, left
        self.seeds, self.tuples = objects.seeds, objects.tuples
        self.writes: list[_Write] = []
        self.doubts: list[str] = []
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._late: list[_Write] = []  # of literals that the trainer, which is made before, may have read or not

    def is_config(self, node: ast.AST) -> bool:
        """Tell whether an expression may be a config."""
        return bool(self.objects.configs(node))

    # -- places where it stands

    def read(self) -> None:
        """Read each place where the config stands."""
        for node in self.tree.nodes:  # the module itself, as an object
            if isinstance(node, ast.Subscript) and ast.unparse(node).endswith("modules[__name__]"):
                self._doubt(node)
            elif isinstance(node, ast.Name) and self.tree.imported.get(node.id) == "__main__":
                self._doubt(node)
        for call in self.tree.calls:  # code in a text, and names as texts
            if isinstance(call.func, ast.Name) and call.func.id in ("exec", "globals", "locals"):
                self._doubt(call)
            elif isinstance(call.func, ast.Name) and call.func.id == "vars" and not call.args:
                self._doubt(call)
            elif isinstance(call.func, ast.Name) and call.func.id == "eval" and isinstance(call.args[0], ast.Constant):
                self._doubt(call)
        for node in self.tree.nodes:
            if (
                isinstance(node, ast.expr)
                and self.is_config(node)
                and not isinstance(getattr(node, "ctx", None), ast.Store)
            ):
                self._place(node)
        for call in self.objects.trainers():
            self._trainer(call)

    def _trainer(self, call: ast.Call) -> None:
        """Doubt a trainer that gets a config that is not followed, or none."""
        given = given_config(call)
        spread = any(isinstance(item, ast.Starred) for item in call.args) or any(
            keyword.arg is None for keyword in call.keywords
        )
        if given is None and not spread and not self.objects.given(call):
            self.doubts.append(f"line {call.lineno}: {called(call)} without args")
        elif given is not None and not self.objects.sure(given):
            self.doubts.append(f"line {call.lineno}: {called(call)}(args={shown(given)})")

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
        elif not isinstance(node.ctx, ast.Load) and node.attr.startswith("__"):
            self._doubt(node)
        elif not isinstance(node.ctx, ast.Load):
            given = parent.value if isinstance(parent, ast.Assign | ast.AnnAssign) else None
            self._write(node.attr, given, parent if isinstance(parent, ast.AugAssign) else node, holder)
        elif isinstance(parent, ast.Call) and parent.func is node:
            if node.attr == "__setattr__":
                self._set(parent, parent.args, holder)
            elif not node.attr.startswith(_METHODS):
                self._doubt(node)
        elif node.attr.startswith(_CHANGERS) and not self._named(node):
            self._doubt(node)
        elif isinstance(parent, ast.Assign):
            names = {self.objects.key(target) for target in parent.targets if isinstance(target, ast.Name)}
            if any(self.objects.key(item) in names and self.tree.mutated(item) for item in self.tree.nodes
                   if isinstance(item, ast.Name)):  # fmt: skip
                self._write(node.attr, None, parent, None)
        elif isinstance(parent, ast.Subscript | ast.Attribute) and not self.is_config(node):
            above = self.tree.parent(parent)
            mutates = isinstance(parent, ast.Attribute) and parent.attr in MUTATORS and isinstance(above, ast.Call)
            if mutates or not isinstance(parent.ctx, ast.Load):
                self._write(node.attr, None, parent, None)

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
        if self.objects.makes_trainer(call) or self.objects.passed_on(call, node) or call in self.seeds:
            return
        if first and self.tree.copies(call):
            self._keywords(call, call)
        elif name == "setattr" and first:
            self._set(call, call.args[1:], node)
        elif name == "delattr" and first and len(call.args) > 1:
            self._write(self._text(call.args[1]), None, call, node)
        elif name == "vars" and first:
            self._view(call, node)
        elif name == "getattr" and first:
            self._got(call)
        elif name.startswith("__") or self.tree.decorated(call):
            self._doubt(call)
        elif not any(argument is node for _, argument in self.tree.parameters(call)) and not self.tree.reads(call):
            self._doubt(call)

    def _got(self, call: ast.Call) -> None:
        """Read getattr(config, name), which may be a method that changes the config."""
        parent = self.tree.parent(call)
        name = self._text(call.args[1]) if len(call.args) > 1 else ANY
        if (isinstance(parent, ast.Call) and parent.func is call) or name.startswith(_CHANGERS):
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

    def _write(self, name: str, given: Any, node: ast.AST, holder: ast.expr | None, known: bool = False) -> None:
        """Note a write. `given`: an expression or None; with `known`, the value itself; `holder` None: any config."""
        if name == ANY:
            self._doubt(node)
            return
        value = given if known else self.value(given) if isinstance(given, ast.expr) else self.left(node)
        if not known and isinstance(given, ast.expr) and isinstance(value, str) and value.startswith("$("):
            value = self.left(given)
        self.writes.append(_Write(name, value, node, holder, None if holder is None else self.objects.configs(holder)))

    def values(self) -> dict[str, Any]:
        """Return the arguments that are written, with their values where the order of all writes is plain."""
        counted = self._counted()
        begins = [self.tree.when(call) for call in self.seeds]
        found: dict[str, Any] = {}
        timed: dict[str, list[tuple[When | None, _Write]]] = {}
        for write in self.writes:
            if counted is None or write.objects is None:
                timed.setdefault(write.name, []).append((None, write))
            elif write.objects & counted.keys():
                time, missed = self._when(write, begins, counted)
                if not missed:
                    timed.setdefault(write.name, []).append((time, write))
        for name, writes in timed.items():
            if any(time is None for time, _ in writes):
                last = writes[-1][1]
                known = isinstance(last.value, str) and last.value.startswith("$(")
                found[name] = last.value if known else self.left(last.value)
                if all(time is not None or write in self._late for time, write in writes) and not known:
                    line = getattr(last.node, "lineno", 0)
                    found[name] = self.left(f"{last.value} in line {line}")
                    self.reasons[found[name]] = f"{last.value} is set {_LATE}, which may have read it by then"
            else:
                found[name] = max(writes, key=lambda pair: pair[0] or ())[1].value
        return found

    def _counted(self) -> dict[Object, list[When | None]] | None:
        """Return the config that the trainer gets and those that it is a copy of, each with when it is read.

        None if it is not plain which these are.
        """
        calls = self.objects.trainers()
        last = frozenset[Object]().union(*map(self.objects.given, calls))
        if not last and self.objects.seed is not None:
            last = frozenset({self.objects.seed, *self.objects.copies})
        if len(last) != 1:
            return None
        (config,) = last
        found = {config: [self.tree.when(call) for call in calls]}
        while (call := self.objects.copies.get(config)) is not None:
            time, source = self.tree.when(call), self.objects.configs(call.args[0])
            if time is None or not self.tree.certain(call) or len(source) != 1 or source & found.keys():
                return None
            (config,) = source
            found[config] = [time]
        return found

    def _when(
        self, write: _Write, begins: list[When | None], counted: dict[Object, list[When | None]]
    ) -> tuple[When | None, bool]:
        """Return when a write takes effect, None if it is not plain that it does; and whether it surely does not."""
        time = self.tree.when(write.node)
        config = next(iter(write.objects or ()), None)
        if time is None or None in begins or not self.tree.certain(write.node) or config is None:
            return None, False
        if len(write.objects or ()) > 1 or self.tree.start(write.node) not in (None, *map(self.tree.start, self.seeds)):
            return None, False
        ends = [end for end in counted[config] if end is not None]
        if len(ends) != len(counted[config]):
            return None, False
        if ends and not time < min(ends):  # the trainer has read some of the arguments by then, a copy all
            if config != next(iter(counted)):
                return None, True
            return self._after_trainer(write, time, ends) if self._is_the_trainers(write.holder) else (None, False)
        if begins and time < min(begin for begin in begins if begin is not None) and write.node not in self.seeds:
            return None, False
        return (time if self._is_the_trainers(write.holder) else None), False

    def _is_the_trainers(self, holder: ast.expr | None) -> bool:
        """Tell whether a name for the config is that of no other object: an attribute may be another object's too."""
        if not isinstance(holder, ast.Attribute) or ast.unparse(holder) in self.objects.bound:
            return True
        return holder.attr == "args" and self._is_trainer(holder.value)

    def _is_trainer(self, node: ast.expr) -> bool:
        return any(item.kind == "trainer" for item in self.objects.of(node))

    def _after_trainer(self, write: _Write, time: When, ends: Sequence[When]) -> tuple[When | None, bool]:
        """Return what :meth:`_when` does for what is written to the config of a trainer that may be made by then."""
        made = zip(self.objects.trainers(), ends, strict=True)
        if not all(self._is_behind(write.node, time, call, end) for call, end in made):
            return None, False
        trains = {call: begin for call in self._methods("train") if (begin := self.tree.when(call)) is not None}
        known = bool(trains) and len(trains) == len([*self._methods("train")])
        line = getattr(write.node, "lineno", 0)
        given = f"{write.name}={write.value} (line {line})"
        if write.name in READ_WHEN_MADE:
            self.left_out[given] = f"it is set {_LATE}, which has read it by then: what is given before counts"
            return None, True
        if known and all(self._is_behind(write.node, time, call, begin) for call, begin in trains.items()):
            self.left_out[given] = "it is set after the training"
            return None, True
        early = any(self._methods("create_"))  # makes an optimizer, say
        if write.name in READ_IN_TRAINING - self._filled_in() and not early:
            if known and time < min(trains.values()):
                return time, False
        if not (isinstance(write.value, str) and write.value.startswith("$(")):
            self._late.append(write)
        return None, False

    def _is_behind(self, node: ast.AST, time: When, call: ast.Call, began: When) -> bool:
        """Tell whether a node runs when a call is over, which a function that the call calls does not."""
        above: ast.AST | None = node
        while above is not None and above is not call:
            above = self.tree.parent(above)
        return above is None and time > began and time[: len(began)] != began

    def _methods(self, begin: str) -> Iterator[ast.Call]:
        """Yield the calls of the trainer's methods whose names begin so."""
        for call in self.tree.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr.startswith(begin):
                if self._is_trainer(call.func.value):
                    yield call

    def _filled_in(self) -> frozenset[str]:
        """Return the arguments that go into DeepSpeed's JSON, if a config has one, when the config is made."""
        given = [word.value for call in self.seeds for word in call.keywords if word.arg == "deepspeed"]
        empty = all(isinstance(node, ast.Constant) and node.value is None for node in given)
        return frozenset() if empty else READ_BY_DEEPSPEED

    def _named(self, node: ast.Attribute) -> bool:
        """Tell whether only the name of a class is read: config.__class__.__name__."""
        parent = self.tree.parent(node)
        return node.attr == "__class__" and isinstance(parent, ast.Attribute) and parent.attr == "__name__"
