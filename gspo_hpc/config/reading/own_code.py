"""Code of a user's own, which a config names as path/to/file.py:NAME: a reward function, an algorithm or an observer.

Nothing has to be registered or installed: the name in the config is what every process of a run loads the code by. Only
:func:`load` runs a file. Where a config is only looked at, :func:`signature` reads the file's syntax tree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

from gspo_hpc.config.paths import Part
from gspo_hpc.system.environment import CODE
from gspo_hpc.system.text import near_miss


class FileAbsent(ValueError):
    """A file of the user's own that is not on this machine."""


def is_file(text: str) -> bool:
    """Return whether a name in a config means something in a file, rightly written or not."""
    return ":" in text or text.endswith(".py")


def split(text: str, what: str, name_is: str = "function") -> tuple[Path, str]:
    """Return the file and the name in it. Raises ValueError, which says how `what` is to be given."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{what} of your own must be given as path/to/file.py:{name_is}")
    return Path(path).expanduser(), name


def file_of(text: str) -> Path | None:
    """Return the file of path/to/file.py:NAME; None for a name of another form."""
    path, colon, _ = text.rpartition(":")
    return Path(path).expanduser() if colon and path.endswith(".py") else None


def source(path: Path) -> Part:
    """Return the file to read for a user's file: its copy, if this process belongs to a submitted job."""
    archive = os.environ.get(CODE)
    if archive is None or not os.path.isfile(archive):
        return path
    copy = zipfile.Path(archive, copy_name(path))
    return copy if copy.exists() else path


def copy_name(path: Path) -> str:
    """Return the name of the copy of a user's file in the archive that a submitted job has."""
    return f"own/{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}-{path.name}"


def load(path: Path, name: str) -> Any:
    """Return what a user's file calls `name`. It runs the file, once for each content that the file has.

    Raises whatever the file raises, and AttributeError where it has no such name.
    """
    file = source(path)
    content = file.read_bytes()
    key = f"_own_code:{path.resolve()}:{hashlib.sha256(content).hexdigest()[:16]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, str(file), loader=_Content(str(file), content))
        assert spec is not None and spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # the file may import its neighbours
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return getattr(sys.modules[key], name)


class _Content(importlib.abc.SourceLoader):
    """The loader of a file that was read already; tracebacks show its lines, and nothing is written beside it."""

    def __init__(self, name: str, content: bytes) -> None:
        self._name, self._content = name, content

    def get_filename(self, fullname: str) -> str:
        """Return the path that tracebacks name."""
        return self._name

    def get_data(self, path: str | bytes) -> bytes:
        """Return the content of the file, the only one that this loader has."""
        if path != self._name:
            raise OSError(f"{path!r} is not kept")  # Python looks for bytecode beside it
        return self._content


def signature(path: Path, name: str, *, may_be_async: bool = False) -> inspect.Signature:
    """Return the signature of a function at the top level of a file, without running it and without annotations.

    With `may_be_async`, it may be an `async def`.
    Raises ValueError where the file cannot be read, is not Python, or has no such function, or one that is a generator;
    FileAbsent where there is none.
    """
    return _signature(definition(path, name, may_be_async=may_be_async).args)


def definition(path: Path, name: str, *, may_be_async: bool = False) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the syntax tree of a function at the top level of a file. Raises what :func:`signature` does."""
    tree = _parsed(path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if may_be_async else (ast.FunctionDef,)
    defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
    if name not in defined:
        if (other := _other_kind(tree, name)) is not None:
            raise ValueError(f"{path}: {name!r} is {other}, and must be a function that `def` makes in this file")
        raise ValueError(
            f"{path} has no function {name!r} at its top level{near_miss(name, sorted(defined), known=True)}"
        )
    if _yields(defined[name]):
        raise ValueError(f"{path}: {name!r} is a generator: it has `yield`, and must give its value with `return`")
    return defined[name]


def methods(path: Path, name: str) -> dict[str, inspect.Signature] | None:
    """Return the methods of a class at the top level of a file, without running the file.

    Their signatures have neither `self` nor annotations. None where it has base classes or decorators, which may give
    it more. Raises ValueError where the file cannot be read, is not
    Python, or has no such class; FileAbsent where there is none.
    """
    defined = {node.name: node for node in _parsed(path).body if isinstance(node, ast.ClassDef)}
    if name not in defined:
        raise ValueError(f"{path} has no class {name!r} at its top level{near_miss(name, sorted(defined), known=True)}")
    if defined[name].bases or defined[name].decorator_list:
        return None
    found = {}
    for node in defined[name].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = list(_signature(node.args).parameters.values())
            found[node.name] = inspect.Signature(parameters[1:])
    return found


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(source(path).read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise FileAbsent(f"{path} is not there; relative paths begin at {os.getcwd()}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{path} is not Python: {getattr(error, 'msg', error)}{line}") from None


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a call makes a generator: functions and classes within it have their own `yield`."""
    inner: list[ast.AST] = [*function.body]
    while inner:
        node = inner.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inner.extend(ast.iter_child_nodes(node))
    return False


def _other_kind(tree: ast.Module, name: str) -> str | None:
    """Return what a name at the top level of a file means, if it is no plain function; None if it means nothing."""
    for node in reversed(tree.body):
        match node:
            case ast.AsyncFunctionDef(name=found) if found == name:
                return "asynchronous"
            case ast.ClassDef(name=found) if found == name:
                return "a class"
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                if name in [one.asname or one.name for one in names]:
                    return "imported"
            case ast.Assign(targets=[*targets]) if name in [one.id for one in targets if isinstance(one, ast.Name)]:
                return "a value that is assigned"
    return None


def check_observer(text: str) -> None:
    """Raise ValueError unless a name means a function in a file that can be called with the record of a step."""
    found = signature(*split(text, "an observer"))
    try:
        found.bind({}, **({"run_dir": ""} if "run_dir" in found.parameters else {}))
    except TypeError as error:
        raise ValueError(
            f"cannot be called: {error}. An observer has the form f(record) or f(record, *, run_dir)"
        ) from None


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if i < required else None,
        )
        for i, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
