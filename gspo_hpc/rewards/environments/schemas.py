"""JSON Schemas of tools: what the model is told of a function, and whether arguments that it gives fit.

A schema is read from the function's syntax tree, so no code of a user's runs in a rank: types from the annotations,
texts from a docstring in Google's style, as transformers reads them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_TYPES = {
    **{"int": "integer", "float": "number", "str": "string", "bool": "boolean"},
    **{"list": "array", "List": "array", "Sequence": "array", "tuple": "array"},
    **{"dict": "object", "Dict": "object", "Mapping": "object"},
}
_PYTHON: dict[str, tuple[type, ...]] = {
    **{"integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,)},
    **{"array": (list,), "object": (dict,), "null": (type(None),)},
}
_SECTION = re.compile(r"(?m)^\s*(?:Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENTS = re.compile(r"(?m)^(\s*)(?:Args|Arguments|Parameters):\s*$")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def declared(function: ast.FunctionDef | ast.AsyncFunctionDef, without: frozenset[str]) -> dict[str, Any]:
    """Return name, description and parameters of a function, as chat templates want a tool; `without` some parameters.

    Raises ValueError where the model cannot give the arguments by name.
    """
    arguments = function.args
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise ValueError(f"{function.name} has parameters that cannot be given by name: name each of them")
    doc = ast.get_docstring(function) or ""
    texts = _described(doc)
    optional = {one.arg for one in arguments.args[len(arguments.args) - len(arguments.defaults) :]}
    optional |= {one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default}
    properties = {}
    for one in (*arguments.args, *arguments.kwonlyargs):
        if one.arg not in without:
            told = {"description": texts[one.arg]} if one.arg in texts else {}
            properties[one.arg] = _schema(one.annotation) | told
    required = [name for name in properties if name not in optional]
    first = _SECTION.split(doc)[0].strip().split("\n\n")[0]
    return {
        "name": function.name,
        "description": " ".join(first.split()),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


def misfit(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Return why arguments do not fit the schema of a tool, in words for the model; None where they do.

    Names and plain types are checked; what else a schema may ask for is left to the tool.
    """
    properties = parameters.get("properties", {})
    takes = f"it takes: {', '.join(properties) or 'none'}"
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"missing arguments: {', '.join(missing)}; {takes}"
    if parameters.get("additionalProperties", False) is False:
        if unknown := [name for name in arguments if name not in properties]:
            return f"unknown arguments: {', '.join(unknown)}; {takes}"
    for name, value in arguments.items():
        given = properties.get(name, {})
        wanted = given.get("type") if isinstance(given, Mapping) else None
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if isinstance(kinds, list) and not any(_is(value, kind) for kind in kinds):
            return f"argument {name} must be of type {' or '.join(map(str, kinds))}"
        if isinstance(given, Mapping) and isinstance(given.get("enum"), list) and value not in given["enum"]:
            return f"argument {name} must be one of {', '.join(map(str, given['enum']))}"
    return None


def value(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """Return what a text stands for as an argument: JSON, unless the schema has it a text or it is no JSON."""
    given = parameters.get("properties", {}).get(name, {})
    if not isinstance(given, Mapping) or given.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind not in _PYTHON or isinstance(value, _PYTHON[kind])


def _schema(annotation: ast.expr | None) -> dict[str, Any]:
    """Return the schema of an annotation; {} for one that says nothing to a model."""
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _TYPES:
            return {"type": _TYPES[name]}
        case ast.Constant(value=str() as text):
            try:
                return _schema(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return {}
        case ast.BinOp(op=ast.BitOr()):
            return _any_of(_alternatives(annotation))
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            if name == "Literal":
                return _literal(inner)
            if name == "Optional":
                return _schema(inner)
            if name == "Union" and isinstance(inner, ast.Tuple):
                return _any_of(inner.elts)
            if name in ("list", "List", "Sequence"):
                items = _schema(inner)
                return {"type": "array"} | ({"items": items} if items else {})
            return {"type": _TYPES[name]} if name in _TYPES else {}
    return {}


def _alternatives(annotation: ast.expr) -> list[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [annotation]


def _any_of(annotations: list[ast.expr]) -> dict[str, Any]:
    """Return the schema of one of several types, of which None says only that the argument may be left out."""
    found = [_schema(one) for one in annotations if not (isinstance(one, ast.Constant) and one.value is None)]
    if len(found) == 1:
        return found[0]
    return {"anyOf": found} if all(found) else {}


def _literal(inner: ast.expr) -> dict[str, Any]:
    every = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    values = [one.value for one in every if isinstance(one, ast.Constant) and isinstance(one.value, str | int | float)]
    kinds = {_TYPES.get(type(value).__name__) for value in values}
    return {"enum": values} | ({"type": kinds.pop()} if len(kinds) == 1 else {})


def _described(doc: str) -> dict[str, str]:
    """Return the texts of parameters in a docstring, by name."""
    begins = _ARGUMENTS.search(doc)
    if begins is None:
        return {}
    found: dict[str, str] = {}
    depth = None
    for line in doc[begins.end() :].splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent <= len(begins[1]):
            break
        depth = indent if depth is None and line.strip() else depth
        named = _ARGUMENT.fullmatch(line.strip())
        if indent == depth and named:
            found[named[1]] = named[2]
        elif found and line.strip():
            last = list(found)[-1]
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found
