"""The algorithms that a config may name: every file of the plug-in folder gspo_hpc/algorithms/ that defines one.

A file NAME.py defines an algorithm if it has a class derived from AlgorithmSettings with ``name: Literal["NAME"]``.
The folder lies above this room, so its modules are found and imported at run time, by name, when the first config is
validated. Other modules of that folder are not imported: the loss needs torch, which `plan` must do without.

A user's own file has one too, named FILE.py:CLASS, without a `name` of its own. It is run only for a config that the
user has named in a command, and in the ranks that train: whoever reads the directory of a run must not run what another
user's config names.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, InitErrorDetails, SchemaValidator, core_schema

from gspo_hpc.config import paths
from gspo_hpc.config.algorithm import AlgorithmInFile, AlgorithmSettings
from gspo_hpc.config.reading import own_code

DEFAULT = "gspo"
OTHER_NAMES = {"reinforce++": "reinforce_plus_plus"}  # no name of a file of Python
RUN_CODE = "run_code"  # in the context of a validation: algorithms in users' files may be run
_LOADED: dict[str, type[AlgorithmSettings]] = {}  # from users' files, by their names in a config


@cache
def algorithms() -> dict[str, type[AlgorithmSettings]]:
    """Return the settings class of every algorithm by its name, the default one first. Imports all of them."""
    return {name: _algorithm(name) for name in names()}


@cache
def names() -> tuple[str, ...]:
    """Return the names of all algorithms, the default one first. Imports none of them."""
    found = [path.name.removesuffix(".py") for path in paths.files(paths.ALGORITHMS, ".py")]
    return DEFAULT, *(name for name in found if name != DEFAULT and _defines(name))


def named(name: object) -> type[AlgorithmSettings] | None:
    """Return the class of one algorithm, also of a user's file that this process has met; None if there is none."""
    if not isinstance(name, str):
        return None
    return _algorithm(name) if name in names() else _LOADED.get(name)


def default() -> AlgorithmSettings:
    """Return the settings of the default algorithm."""
    return _algorithm(DEFAULT).model_validate({"name": DEFAULT})


def marker(name: str) -> str:
    """Return the text by which a file is known to define the algorithm of its name."""
    return f'name: Literal["{name}"]'


def _defines(name: str) -> bool:
    text = (paths.ALGORITHMS / f"{name}.py").read_text(encoding="utf-8")
    return marker(name) in text.replace("'", '"')


@cache
def _algorithm(name: str) -> type[AlgorithmSettings]:
    """Import one file of the folder and return its settings class. Raises ValueError where that fails or has none."""
    try:
        module = importlib.import_module(f"{paths.PACKAGE.name}.{paths.ALGORITHMS.name}.{name}")
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.filename else f"{paths.ALGORITHMS / name}.py"
        raise ValueError(f"{place}: cannot be imported: {type(error).__name__}: {error.msg}") from error
    except Exception as error:  # somebody else's code: whatever it raises is reported with its file
        raise ValueError(f"{paths.ALGORITHMS / name}.py: cannot be imported: {_in_a_line(error)}") from error
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, AlgorithmSettings) and one.__module__ == module.__name__:
            return _described(one, str(module.__file__))
    raise ValueError(
        f"{module.__file__}: no class here is derived from AlgorithmSettings; see the other files beside it"
    )


def _described(kind: type[AlgorithmSettings], file: str) -> type[AlgorithmSettings]:
    """Return the class. Raises ValueError if a setting has no description, which `plan` and the documentation show."""
    if bare := [key for key, field in kind.model_fields.items() if key != "name" and not field.description]:
        raise ValueError(
            f"{file}: {kind.__name__} has settings without a description: {', '.join(bare)}; "
            "use Field(description=...) or a type such as ClipLow that has one"
        )
    return kind


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


class Chosen:
    """Marker of the key whose value is the settings of one algorithm, chosen by `name`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that asks the class which the name stands for: building those of all costs every command."""
        return core_schema.with_info_plain_validator_function(_validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the union of all algorithms, tagged by their names."""
        return handler(_union())


def _union() -> CoreSchema:
    kinds = algorithms()
    for kind in kinds.values():
        kind.model_rebuild()  # they are built when they are first needed
    choices = {name: kind.__pydantic_core_schema__ for name, kind in kinds.items()}
    return core_schema.tagged_union_schema(choices, discriminator="name")


def _validated(given: Any, info: ValidationInfo) -> Any:
    """Return the settings, of the default algorithm where none is named."""
    if isinstance(given, AlgorithmSettings):
        return given
    name = given.get("name") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and (name is None or (isinstance(name, str) and name in OTHER_NAMES)):
        name = DEFAULT if name is None else OTHER_NAMES[name]
        given = {**given, "name": name}
    if isinstance(name, str) and name in names():
        kind = _algorithm(name)
    elif isinstance(name, str) and own_code.is_file(name):
        try:
            path, class_name = own_code.split(name, "an algorithm", "Class")
        except ValueError as error:
            raise ValueError(f"is {name!r}, but {error}") from None
        kind = in_file(path, class_name, name) if (info.context or {}).get(RUN_CODE) else AlgorithmInFile
    else:  # a mistake, which the union of all algorithms says
        return SchemaValidator(_union()).validate_python(given)
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:  # with the name in the path, as errors of the union have it
        lines = [
            InitErrorDetails(type=one["type"], loc=(name, *one["loc"]), input=one["input"], ctx=one.get("ctx", {}))
            for one in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(name, lines) from None


def in_file(path: Path, class_name: str, name: str) -> type[AlgorithmSettings]:
    """Return the settings class of an algorithm in a user's file, which is run. Raises ValueError where it has none.

    `name`: what the config calls it.
    """
    try:
        kind = own_code.load(path, class_name)
    except FileNotFoundError:
        raise ValueError(f"is {name!r}, but there is no {path}; relative paths begin at {os.getcwd()}") from None
    except AttributeError as error:
        if error.name != class_name:
            raise ValueError(f"is {name!r}, which cannot be loaded: {_in_a_line(error)}") from error
        raise ValueError(f"is {name!r}, but {path} has no class {class_name}") from None
    except Exception as error:  # somebody else's code: whatever it raises is reported with its file
        raise ValueError(f"is {name!r}, which cannot be loaded: {_in_a_line(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, AlgorithmSettings)):
        raise ValueError(f"is {name!r}, which is not derived from SequenceRatio or TokenRatio (docs/algorithms.md)")
    if kind.model_fields["name"].annotation is not str:
        raise ValueError(f"is {name!r}: remove `name` from {class_name}: it is for files in gspo_hpc/algorithms/ only")
    _LOADED[name] = _described(kind, str(path))
    return kind
