"""Read the dataclasses of a Python file that its parser is given beside GRPOConfig: their fields, and where they go."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gspo_hpc.importers.texts.constants import Constants, is_code
from gspo_hpc.importers.texts.own_configs import OwnConfigs
from gspo_hpc.importers.texts.syntax import Tree, called

_TYPES = "dataclass_types"  # the parameter of a parser that takes the classes
# Functions of TRL that are given the whole object and read it only.
_READERS = ("get_peft_config", "get_quantization_config", "get_kbit_device_map", "get_dataset")


class OwnFields(NamedTuple):
    """The fields of the dataclasses that a file parses beside GRPOConfig."""

    names: frozenset[str] = frozenset()  # those of classes that the file defines
    defaults: Mapping[str, Any] = {}  # of those, where they are plain
    uses: Mapping[str, str] = {}  # code that stands for the value of a field, as script_args.name -> the field

    def filled(self, values: Mapping[str, Any], command: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of which those that are such a field have the value that the command gives the field."""
        fields = {name: self._field(value) for name, value in values.items()}
        return {name: command.get(field, self.defaults.get(field, values[name])) for name, field in fields.items()}

    def reason(self, field: str, file: str, values: Mapping[str, Any]) -> str:
        """Return what becomes of a field of a file's own; `values`: arguments as the file gives them."""
        given = [name for name, value in values.items() if self._field(value) == field]
        does = f"which hands it on as {', '.join(given)}" if given else "and what that does with it is not read"
        return f"an argument of {file} itself, {does}"

    def _field(self, value: Any) -> str:
        return self.uses.get(value[2:-1], "") if isinstance(value, str) and is_code(value) else ""


def read(tree: Tree, known: Constants, configs: OwnConfigs) -> OwnFields:
    """Return the fields of a file that parses its command line."""
    classes = configs.parsed_beside()
    fields = {name: configs.own_default(given, name) for given in classes for name in configs.fields(given)}
    plain = {name: known.value(node) for name, node in fields.items() if isinstance(node, ast.expr)}
    defaults = {name: value for name, value in plain.items() if not is_code(value)}
    return OwnFields(frozenset(fields), defaults, dict(_uses(tree, configs)))


def _uses(tree: Tree, configs: OwnConfigs) -> Iterator[tuple[str, str]]:
    """Yield the code that surely stands for a field of what a parser returns, and the field."""
    nodes: dict[str, list[ast.Attribute]] = {}
    stored, unsure = set[str](), set[str]()
    for node in tree.nodes:
        if isinstance(node, ast.Attribute):
            nodes.setdefault(ast.unparse(node), []).append(node)
            if not isinstance(node.ctx, ast.Load):
                stored.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and _escapes(tree, node):
            unsure |= {node.id, *(one.id for one in tree.behind(node) if isinstance(one, ast.Name))}
    for text, places in nodes.items():
        names = {one.id for node in places for one in (*tree.behind(node.value), node.value)
                 if isinstance(one, ast.Name)}  # fmt: skip
        sure = places[0].attr not in stored and not names & unsure
        if sure and all(_is_parsed(tree, node.value, configs) for node in places):
            yield text, places[0].attr


def _escapes(tree: Tree, node: ast.Name) -> bool:
    """Tell whether an object goes as a whole to where it may be changed."""
    above = tree.parent(node)
    call = tree.parent(above) if isinstance(above, ast.keyword | ast.Starred) else above
    if isinstance(call, ast.Attribute):
        return call.attr == "__dict__"
    if not isinstance(call, ast.Call) or call.func is node:
        return not isinstance(call, ast.FormattedValue)
    if tree.defined(call)[0] is not None or called(call) in _READERS:
        return False
    return called(call) in ("setattr", "vars") or not tree.reads(call)


def _is_parsed(tree: Tree, node: ast.expr, configs: OwnConfigs) -> bool:
    """Tell whether an expression is an object that a parser returns, of a class that keeps what it is given."""
    found = tree.behind(node)
    if len(found) != 1 or not isinstance(name := found[0], ast.Name):
        return False
    bindings = tree.scopes.bindings.get(tree.variable(name), [])
    target = tree.parent(bindings[0]) if len(bindings) == 1 else None
    assign = tree.parent(target) if isinstance(target, ast.Tuple | ast.List) else None
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(assign, ast.Assign) or assign.targets != [target]:
        return False
    made = assign.value
    if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and "parse_args" in called(made)):
        return False
    types = _types(tree, made.func.value)
    at = next((place for place, item in enumerate(target.elts) if item is bindings[0]), -1)
    whole = len(types) == len(target.elts) and not any(isinstance(item, ast.Starred) for item in (*types, *target.elts))
    return whole and isinstance(kind := types[at], ast.Name) and configs.keeps(kind.id)


def _types(tree: Tree, parser: ast.expr) -> list[ast.expr]:
    """Return the classes that a parser is given, in their order, none if that is not plain."""
    made = tree.behind(parser)
    if len(made) != 1 or not isinstance(call := made[0], ast.Call) or "Parser" not in called(call):
        return []
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == _TYPES)]
    found = tree.behind(given[0]) if len(given) == 1 else []
    if len(found) != 1:
        return []
    return found[0].elts if isinstance(found[0], ast.Tuple | ast.List) else found
