"""Read what a Python file does to TRL's trainer, to its class and to the class of its config.

What sets an attribute of the trainer is a patch. A place that is not understood, such as a call of a function outside
the file, may change anything of what it is given, and is told with its line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from gspo_hpc.importers.texts.objects import CONFIG, TRAINER, Object, ObjectMap
from gspo_hpc.importers.texts.syntax import Function, Tree, called, shown

_QUIET = (
    ast.Compare, ast.UnaryOp, ast.FormattedValue, ast.Expr, ast.Assert, ast.Delete, ast.If, ast.While, ast.Await,
    ast.AnnAssign, ast.NamedExpr, ast.Return, ast.withitem, ast.IfExp, ast.BoolOp, ast.ClassDef, ast.arg, Function,
)  # fmt: skip
_HOLDERS = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.keyword)
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__", "__init__", "__class__")  # which are mostly read
_TYPES = ("type", "Type", "Optional", "Union", "List", "list", "tuple", "Tuple", "Annotated", "Callable")
_MAKERS = ("make_dataclass", "new_class")
_READERS = ("super", "get_type_hints", "signature", "fields", "cast")
_UNREAD = "the trainer is handed to code that is not read: what that changes is not known"
_RESUME = "resume_from_checkpoint"
_CALLBACK = "callbacks have no counterpart here"
_OF_TRL = "it changes TRL itself: what that changes of the run is not known"


class Escapes:
    """The places of a file where the trainer, its class and the class of its config go."""

    def __init__(self, tree: Tree, objects: ObjectMap, value: Callable[[ast.expr], Any]) -> None:
        self.tree, self.objects, self.value = tree, objects, value
        self.patches: dict[str, int] = {}  # attributes that are set on trainers, or on TRL's class -> line
        self.doubts: list[str] = []  # places that may change the class of the config, and so any argument
        self.left: dict[str, str] = {}  # places that may change the trainer -> why it is not carried over
        self.given: dict[str, Any] = {}  # arguments of TRL that the trainer's methods are given
        for name, item in objects.replaced():
            self._tell(name, item)
        for node in tree.nodes:
            if isinstance(node, ast.Name | ast.Attribute | ast.Call) and not isinstance(
                getattr(node, "ctx", None), ast.Store
            ):
                for item in sorted(objects.of(node), key=str):
                    if item.kind != "config":
                        self._place(node, item)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                self._of_package(node)

    def _tell(self, node: ast.AST, item: Object) -> None:
        statement = node
        while (above := self.tree.parent(statement)) is not None and not isinstance(statement, ast.stmt | ast.Call):
            statement = above
        text = f"line {getattr(node, 'lineno', 0)}: {shown(statement)}"
        if item.of_trainer:
            self.left[text] = _UNREAD
        else:
            self.doubts.append(text)

    def _set(self, name: Any, node: ast.AST, item: Object) -> None:
        """Note an attribute that is set; `name`: None if it is not known which."""
        if item.of_trainer and isinstance(name, str) and name.isidentifier():
            self.patches.setdefault(name, getattr(node, "lineno", 0))
        else:
            self._tell(node, item)

    def _place(self, node: ast.expr, item: Object) -> None:
        parent = self.tree.parent(node)
        if isinstance(parent, ast.Attribute):
            self._attribute(parent, item)
        elif isinstance(parent, ast.Call):
            if parent.func is not node:
                self._handed(parent, node, item)
        elif isinstance(parent, _HOLDERS):
            self._contained(parent, node, item)
        elif isinstance(parent, ast.Assign):
            if any(isinstance(target, ast.Subscript) for target in parent.targets):
                self._tell(node, item)
        elif isinstance(parent, ast.Subscript) and parent.slice is node:
            if ast.unparse(parent.value).rpartition(".")[2] not in _TYPES:
                self._tell(node, item)
        elif isinstance(parent, ast.BinOp):
            if not isinstance(parent.op, ast.BitOr):
                self._tell(node, item)
        elif not isinstance(parent, _QUIET):
            self._tell(node, item)

    def _contained(self, holder: ast.AST, node: ast.expr, item: Object) -> None:
        """Read what stands in a tuple, a list or a mapping."""
        above = self.tree.parent(holder)
        while isinstance(above, _HOLDERS):
            holder, above = above, self.tree.parent(above)
        if isinstance(above, ast.Call):
            self._handed(above, node, item)
        elif isinstance(above, ast.Subscript) or (isinstance(holder, ast.Tuple) and isinstance(above, ast.Return)):
            pass  # types in brackets; what functions return is followed
        elif (
            isinstance(holder, ast.Tuple) and isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Tuple)
        ):
            pass  # a, b = c, d
        elif isinstance(above, ast.Assign) and item.kind == "class" and isinstance(holder, ast.Tuple):
            self._bundled(above, node, item)
        elif not isinstance(above, ast.Compare | ast.ClassDef | ast.Expr):
            self._tell(node, item)

    def _bundled(self, given: ast.Assign, node: ast.expr, item: Object) -> None:
        """Read types = (GRPOConfig, ModelConfig), by what is done with the name."""
        for target in given.targets:
            if not isinstance(target, ast.Name):
                self._tell(node, item)
                continue
            for use in self.tree.scopes.loads.get(self.tree.variable(target), ()):
                parent = self.tree.parent(use)
                call = self.tree.parent(parent) if isinstance(parent, ast.keyword) else parent
                if isinstance(call, ast.Call) and call.func is not use:
                    self._handed(call, use, item)
                else:
                    self._tell(node, item)

    def _attribute(self, node: ast.Attribute, item: Object) -> None:
        """Read trainer.name, and what is done with it."""
        parent = self.tree.parent(node)
        if item.kind == "trainer" and node.attr == "args":
            if not isinstance(node.ctx, ast.Load):
                self.doubts.append(f"line {node.lineno}: {shown(self.tree.parent(node) or node)}")
        elif not isinstance(node.ctx, ast.Load):
            self._set(node.attr, node, item)
        elif node.attr == "__dict__":
            self._view(node, item)
        elif isinstance(parent, ast.Call) and parent.func is node:
            if node.attr in ("__setattr__", "__delattr__"):
                names = parent.args[len(parent.args) > 2 :] if item.kind == "class" else parent.args
                self._set(self.value(names[0]) if names else None, parent, item)
            elif item.kind == "trainer":
                self._method(node.attr, parent)
        elif node.attr.startswith("__") and node.attr not in _NAMES:
            if not (isinstance(parent, ast.Call) and self.tree.reads(parent)) and not isinstance(parent, ast.Compare):
                self._tell(node, item)
        else:
            self._beneath(node, item)

    def _method(self, name: str, call: ast.Call) -> None:
        """Read what a method of the trainer is given that changes the run."""
        if name == "add_callback":
            self.left[shown(call)] = _CALLBACK
        elif name == "train":
            named = [keyword.value for keyword in call.keywords if keyword.arg == _RESUME]
            for value in map(self.value, [*named, *call.args[:1]]):
                if value not in (None, False):
                    self.given[_RESUME] = value

    def _beneath(self, node: ast.expr, item: Object) -> None:
        """Tell a value that is set further below: trainer.optimizer.param_groups[0]["lr"] = 1."""
        below: ast.expr = node
        above = self.tree.parent(node)
        while isinstance(above, ast.Attribute | ast.Subscript) and above.value is below:
            below, above = above, self.tree.parent(above)
        if below is not node and not isinstance(getattr(below, "ctx", None), ast.Load):
            self._tell(node, item)

    def _view(self, node: ast.expr, item: Object) -> None:
        """Read what is done with the mapping of all attributes."""
        parent = self.tree.parent(node)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            if not isinstance(parent.ctx, ast.Load):
                self._set(self.value(parent.slice), parent, item)
            else:
                self._beneath(parent, item)
        elif isinstance(parent, ast.Call) and parent.func is not node:
            if not self.tree.reads(parent):
                self._tell(node, item)
        elif not isinstance(parent, ast.For | ast.comprehension | ast.Compare):
            self._tell(node, item)

    def _handed(self, call: ast.Call, node: ast.expr, item: Object) -> None:
        name = called(call)
        first = bool(call.args) and call.args[0] is node
        texts = [value for given in call.args if isinstance(value := self.value(given), str) and value.isidentifier()]
        if name in ("setattr", "delattr") and first:
            self._set(self.value(call.args[1]) if len(call.args) > 1 else None, call, item)
        elif name == "vars" and first:
            self._view(call, item)
        elif name in ("__setattr__", "__delattr__"):
            self._set(texts[0] if texts else None, call, item)
        elif name == "type" and len(call.args) == 3 or name in _MAKERS:
            self._new_class(call, node, item)
        elif name == "getattr" and first and len(texts) and texts[0].startswith("__"):
            self._tell(call, item)
        elif name in _READERS or name.startswith("__") or (item.kind == "class" and "arser" in name):
            pass
        elif any(given is node for _, given in self.tree.parameters(call)) and not self.tree.decorated(call):
            pass  # a function of the file, which is read itself
        elif not self.tree.reads(call) and not self.objects.makes_trainer(call):
            if texts and item.of_trainer:  # patch.object(GRPOTrainer, "compute_loss", mine)
                self._set(texts[0], call, item)
            self._tell(call, item)

    def _new_class(self, call: ast.Call, node: ast.expr, item: Object) -> None:
        """Read type("Mine", (GRPOTrainer,), {"name": value})."""
        last = call.args[-1] if call.args else None
        if item.of_trainer and isinstance(last, ast.Dict):
            for key in last.keys:
                name = None if key is None else self.value(key)
                if isinstance(name, str) and not name.startswith("__"):
                    self._set(name, call, item)
        self._tell(node, item)

    def _of_package(self, node: ast.Attribute) -> None:
        """Tell what is set in TRL's own modules and classes, and in the trainers that its own are derived from."""
        root = self.tree.root(node.value)
        ours = root == "trl" or (root == "transformers" and "Train" in shown(node)) or node.attr in (CONFIG, TRAINER)
        if self.objects.of(node.value) or not ours:
            return
        text = f"line {node.lineno}: {shown(self.tree.parent(node) or node)}"
        if node.attr == CONFIG:
            self.doubts.append(text)
        else:
            self.left[text] = _OF_TRL
