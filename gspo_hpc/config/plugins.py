"""The algorithms that a config may name: every file of the plug-in folder gspo_hpc/algorithms/ that defines one.

A file NAME.py defines an algorithm if it has a class derived from AlgorithmSettings with ``name: Literal["NAME"]``.
The folder lies above this room, so its modules are found and imported at run time, by name, when the first config is
validated. Other modules of that folder are not imported: the loss needs torch, which `plan` must do without.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from gspo_hpc.config import paths
from gspo_hpc.config.algorithm import AlgorithmSettings

DEFAULT = "gspo"


@cache
def algorithms() -> dict[str, type[AlgorithmSettings]]:
    """Return the settings class of every algorithm by its name, the default one first."""
    names = [path.name.removesuffix(".py") for path in paths.files(paths.ALGORITHMS, ".py")]
    found = {name: _algorithm(name) for name in names if _defines(name)}
    return {DEFAULT: found.pop(DEFAULT)} | found


def default() -> AlgorithmSettings:
    """Return the settings of the default algorithm."""
    return algorithms()[DEFAULT].model_validate({"name": DEFAULT})


def marker(name: str) -> str:
    """Return the text by which a file is known to define the algorithm of its name."""
    return f'name: Literal["{name}"]'


def _defines(name: str) -> bool:
    text = (paths.ALGORITHMS / f"{name}.py").read_text(encoding="utf-8")
    return marker(name) in text.replace("'", '"')


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
        """Return the union of all algorithms, tagged by their names."""
        choices = {name: handler.generate_schema(kind) for name, kind in algorithms().items()}
        union = core_schema.tagged_union_schema(choices, discriminator="name")
        return core_schema.no_info_before_validator_function(_named, union)


def _named(given: Any) -> Any:
    """Add the name of the default algorithm where none is given."""
    if isinstance(given, Mapping) and given.get("name") is None:
        return {**given, "name": DEFAULT}
    return given
