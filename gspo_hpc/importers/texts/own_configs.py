"""Read the classes that a Python file derives from GRPOConfig: the defaults of the one that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gspo_hpc.importers import tables
from gspo_hpc.importers.texts.constants import Constants, as_code
from gspo_hpc.importers.texts.objects import CONFIG
from gspo_hpc.importers.texts.syntax import PLAIN_BASES, Function, Tree, base_name, called, shown

# Methods that decide what a config is, or what its arguments are.
_MAKERS = ("__new__", "__init__", "__post_init__", "__setattr__", "__getattr__", "__getattribute__")
_TRLS = f"trl.{CONFIG}"
_PACKAGES = ("trl", "transformers", "typing", "abc", "typing_extensions")
_METHODS = ("staticmethod", "classmethod", "abstractmethod")
_DEEPEST = 20  # names that stand for each other
_OPTIONS = ("repr", "eq", "order", "frozen", "kw_only", "slots", "match_args", "unsafe_hash")  # none sets a default


class _Fields(NamedTuple):
    """The defaults that a class has as a dataclass, of the arguments that the file sets."""

    whole: bool  # it has all arguments of GRPOConfig, and those that are not named have GRPOConfig's default
    values: dict[str, Any]


class OwnConfigs:
    """GRPOConfig and the classes that are derived from it in a file."""

    def __init__(self, tree: Tree, known: Constants) -> None:
        self.tree, self.known = tree, known
        self.names = {CONFIG, _TRLS, *(name for name, original in tree.originals.items() if original == CONFIG)}
        before = 0
        while before != len(self.names):
            before = len(self.names)
            self.names |= {name for name, node in tree.classes.items() if {*self._bases(node)} & self.names}
        self._doubts: list[str] = []

    def defaults(self, made: Sequence[ast.Call]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the defaults of the class that a file makes or parses, and what makes its arguments uncertain."""
        used = [*dict.fromkeys(called(call) for call in made)] or self._parsed()
        found = [self._fields(name).values for name in used]
        fields = found[0] if found else {}
        if len(used) > 1:
            fields = {
                name: as_code(f"{name} of {' or '.join(used)}") for name in dict.fromkeys(sum(map(list, found), []))
            }
        if (module := self.module(made)) != "trl":
            self._doubts.append(f"a {CONFIG} of {module}'s own")
        return fields, tuple(dict.fromkeys(self._doubts))

    def module(self, made: Sequence[ast.Call]) -> str:
        """Return the module whose GRPOConfig a file makes, "trl" also where the file does not tell."""
        heads = [ast.unparse(call.func).partition(".")[0] for call in made if isinstance(call.func, ast.Attribute)]
        found = next((self.tree.imported[name] for name in (*self.names, *heads) if name in self.tree.imported), "trl")
        return "trl" if found.partition(".")[0] == "trl" or CONFIG in self.tree.classes else found

    def _parsed(self) -> list[str]:
        """Return the configs that a parser is given; all of the file if that cannot be seen."""
        found = [node.id for node in self.tree.nodes if isinstance(node, ast.Name) and node.id in self.names
                 and isinstance(node.ctx, ast.Load) and self._to_parser(node)]  # fmt: skip
        return [*dict.fromkeys(found)] or [CONFIG, *sorted(self.names & self.tree.classes.keys())]

    # -- dataclasses that are parsed beside them

    def parsed_beside(self) -> list[str]:
        """Return the dataclasses of the file that a parser is given, GRPOConfig's own ones among them."""
        names = {node.id for node in self.tree.nodes if isinstance(node, ast.Name) and node.id in self.tree.classes
                 and isinstance(node.ctx, ast.Load) and self._to_parser(node)}  # fmt: skip
        left, found = sorted(names), list[str]()
        while left:
            name = left.pop(0)
            if name in self.tree.classes and name not in found:
                found.append(name)
                left += map(base_name, self.tree.classes[name].bases)
        return found

    def fields(self, name: str) -> list[str]:
        """Return the fields of a dataclass of the file, without those of its bases."""
        own = self.tree.classes[name]
        made = any(base_name(item.func if isinstance(item, ast.Call) else item) == "dataclass"
                   for item in own.decorator_list)  # fmt: skip
        return [*dict.fromkeys(self._annotated(own))] if made else []

    def own_default(self, name: str, field: str) -> ast.expr | str | None:
        """Return the default of a field of a class of the file, $(code) if it is not certain, None if it has none."""
        return self._default(self.tree.classes[name], field)

    def keeps(self, name: str) -> bool:
        """Tell whether the objects of a class keep the values of their fields as a parser gives them."""
        own = self.tree.classes.get(name)
        if own is None:
            return self.tree.imported.get(name, "").partition(".")[0] in ("trl", "transformers")
        plain = not any(isinstance(item, Function) and item.name in (*_MAKERS, *self.fields(name)) for item in own.body)
        bases = [base for base in self._bases(own) if base not in PLAIN_BASES]
        return plain and all(map(self.keeps, bases))

    def _to_parser(self, node: ast.Name, depth: int = 0) -> bool:
        """Tell whether a parser is given what a name stands for, or what it stands in."""
        above: ast.AST | None = self.tree.parent(node)
        while isinstance(above, ast.expr | ast.keyword) and not isinstance(above, ast.Call):
            above = self.tree.parent(above)
        if isinstance(above, ast.Call):
            return "arser" in called(above)  # TrlParser(types), subparsers.add_parser("grpo", dataclass_types=types)
        if not isinstance(above, ast.Assign) or depth > _DEEPEST:
            return False
        names = {self.tree.variable(target) for target in above.targets if isinstance(target, ast.Name)}
        uses = [use for name in names for use in self.tree.scopes.loads.get(name, ())]
        return any(self._to_parser(use, depth + 1) for use in uses if use is not node)

    # -- what Python makes of the classes

    def _bases(self, own: ast.ClassDef) -> list[str]:
        """Return the names of the bases of a class; one that has the name of TRL's is derived from that."""
        theirs = [isinstance(base, ast.Attribute) and base.attr == own.name == CONFIG and self.tree.root(base) == "trl"
                  for base in own.bases]  # fmt: skip
        return [_TRLS if of_trl else base_name(base) for base, of_trl in zip(own.bases, theirs, strict=True)]

    def _fields(self, name: str, depth: int = 0) -> _Fields:
        """Return the defaults of a class, as its generated __init__ has them."""
        own = self.tree.classes.get(name)
        if own is None:
            self._outside(name)
            return _Fields(name in self.names, {})
        order = self._order(name)
        if order is None or depth > len(self.tree.classes):
            self._doubts.append(f"line {own.lineno}: class {name}")
            return _Fields(True, {})
        self._read_body(own)
        if not self._is_dataclass(own):  # its __init__ is the one of the next dataclass
            above = next((base for base in order[1:] if base in self.names or self._counts(base)), None)
            for base in order[1:]:
                if base in self.tree.classes:
                    self._read_body(self.tree.classes[base])
                else:
                    self._outside(base)
            return _Fields(False, {}) if above is None else self._fields(above, depth + 1)
        whole, values = False, dict[str, Any]()
        for base in reversed(order[1:]):
            given = self._fields(base, depth + 1)
            if given.whole:
                whole, values = True, {}
            values |= given.values
        for field in self._annotated(own):
            default = self._default(own, field)
            values.pop(field, None)
            if default is not None:
                values[field] = self.known.value(default) if isinstance(default, ast.expr) else default
            elif any((id(self.tree.classes.get(base)), field) in self.tree.scopes.bindings for base in order[1:]):
                values[field] = as_code(f"{name}.{field}")
        return _Fields(whole, values)

    def _counts(self, name: str) -> bool:
        return name in self.tree.classes and self._is_dataclass(self.tree.classes[name])

    def _outside(self, name: str) -> None:
        """Doubt a class that the file does not define, unless it is one of TRL's or gives no argument."""
        if name not in self.names and name not in PLAIN_BASES:
            if self.tree.imported.get(name, "").partition(".")[0] not in _PACKAGES:
                self._doubts.append(f"class {name}")

    def _order(self, name: str, depth: int = 0) -> list[str] | None:
        """Return the order in which Python looks for what a class has, None if that is not plain."""
        own = self.tree.classes.get(name)
        if own is None:
            return [name]
        bound = [variable for variable, nodes in self.tree.scopes.bindings.items() if own in nodes]
        if depth > len(self.tree.classes) or any(len(self.tree.scopes.bindings[variable]) > 1 for variable in bound):
            return None
        bases = self._bases(own)
        orders = [self._order(base, depth + 1) for base in bases]
        left = [list(order) for order in orders if order is not None]
        if len(left) < len(orders):
            return None
        left.append(bases)
        found = [name]
        while left := [order for order in left if order]:
            heads = [order[0] for order in left if not any(order[0] in other[1:] for other in left)]
            if not heads:
                return None
            found.append(heads[0])
            left = [[item for item in order if item != heads[0]] for order in left]
        return found

    def _is_dataclass(self, own: ast.ClassDef) -> bool:
        """Tell whether a class is a dataclass, whose annotations are fields."""
        found = False
        for item in own.decorator_list:
            name = base_name(item.func if isinstance(item, ast.Call) else item)
            module = self.tree.imported.get(name, "dataclasses")
            options = [option.arg for option in item.keywords] if isinstance(item, ast.Call) else []
            if name == "dataclass" and module == "dataclasses" and all(option in _OPTIONS for option in options):
                found = True
            else:
                self._doubts.append(f"line {own.lineno}: @{shown(item)} class {own.name}")
        return found

    def _read_body(self, own: ast.ClassDef) -> None:
        """Doubt what may change the arguments beside the defaults of fields."""
        arguments = tables.load("trl").known
        for item in own.body:
            if isinstance(item, Function):
                kinds = {base_name(node) for node in item.decorator_list} - {*_METHODS}
                if item.name in _MAKERS or (kinds and (item.name in arguments or not kinds <= {"property"})):
                    self._doubts.append(f"line {item.lineno}: {own.name}.{item.name}")
            elif isinstance(item, ast.Assign) and any(
                isinstance(part, ast.Name) and part.id in (*arguments, *_MAKERS)
                for target in item.targets for part in ast.walk(target)
            ):  # fmt: skip
                value = self.known.value(item.value)
                if isinstance(value, str) and value.startswith("$("):  # a property, say
                    self._doubts.append(f"line {item.lineno}: {own.name}: {shown(item)}")
        if own.keywords:
            self._doubts.append(f"line {own.lineno}: class {own.name}")

    def _annotated(self, own: ast.ClassDef) -> Iterator[str]:
        """Yield the fields of a class, in whichever statement of its body they stand."""
        left: list[ast.AST] = [*reversed(own.body)]
        while left:
            node = left.pop()
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.stmt) and not isinstance(node, Function | ast.ClassDef):
                left += reversed([*ast.iter_child_nodes(node)])
            elif isinstance(node, ast.ExceptHandler | ast.match_case):
                left += reversed(node.body)

    def _default(self, own: ast.ClassDef, name: str) -> ast.expr | str | None:
        """Return the default of a field, $(code) if it is not certain, None if the class gives it none."""
        bindings = [node for node in self.tree.scopes.bindings.get((id(own), name), ()) if self._given(node)]
        if not bindings:
            return None
        above = self.tree.parent(bindings[0])
        if len(bindings) > 1 or above not in own.body or not isinstance(above, ast.Assign | ast.AnnAssign):
            return as_code(f"{own.name}.{name}")
        given = above.value
        if isinstance(above, ast.Assign) and bindings[0] not in above.targets:
            return as_code(above)
        if not (isinstance(given, ast.Call) and called(given) == "field"):
            return given
        words = {word.arg: word.value for word in given.keywords}
        factory = words.get("default_factory")
        if isinstance(factory, ast.Lambda) and not ast.unparse(factory.args):
            return factory.body
        if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
            return ast.List([], ast.Load()) if factory.id == "list" else ast.Dict([], [])
        return words.get("default", as_code(given))

    def _given(self, node: ast.AST) -> bool:
        """Tell whether a place where a name is bound gives it a value, and not only a type."""
        above = self.tree.parent(node)
        return not (isinstance(above, ast.AnnAssign) and above.value is None)
