"""Environments by name: check that a configuration can make one, and make it in a worker process.

Only :func:`make` executes a user's file, and only worker processes call it; a configuration is checked by reading the
file's syntax tree.
"""

from __future__ import annotations

import inspect
from typing import Any

from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Environment as Settings
from gspo_hpc.rewards.environments.protocol import Environment
from gspo_hpc.rewards.environments.tasks import TASKS
from gspo_hpc.system.text import near_miss

_WHAT = "an environment"


def check(settings: Settings) -> None:
    """Raise ValueError if there is no such environment, or if it cannot take its arguments.

    FileAbsent, which is one, where the file of the user's own is not there.
    """
    assert settings.name is not None
    if own_code.is_file(settings.name):
        methods = own_code.methods(*own_code.split(settings.name, _WHAT, "Class"))
        if methods is None:
            return
        if "step" not in methods:
            raise ValueError(f"{settings.name} has no method step(self, state, message)")
        if "score_group" in methods:
            _check_score_group(settings.name, methods["score_group"])
        signature = methods.get("__init__", inspect.Signature())
    elif settings.name in TASKS:
        signature = inspect.signature(TASKS[settings.name])
    else:
        raise ValueError(
            f"there is no such environment{near_miss(settings.name, sorted(TASKS), known=True)}. Give one of your own "
            "as path/to/file.py:Class"
        )
    try:
        signature.bind(**settings.args)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ValueError(f"{settings.name} cannot be made with environment.args: {error}; it takes: {takes}") from None


def _check_score_group(name: str, signature: inspect.Signature) -> None:
    try:
        signature.bind({}, [])
    except TypeError as error:
        text = f"{name} has score_group{signature}, which is called with fields and conversations: {error}"
        raise ValueError(text) from None


def scores_groups(settings: Settings) -> bool:
    """Return whether an environment scores the conversations of a group together.

    FileAbsent or ValueError where its file cannot be read; True where its class may have got the method from another.
    """
    if settings.name is None:
        return False
    if not own_code.is_file(settings.name):
        return hasattr(TASKS[settings.name], "score_group")
    methods = own_code.methods(*own_code.split(settings.name, _WHAT, "Class"))
    return methods is None or "score_group" in methods


def make(name: str, arguments: dict[str, Any]) -> Environment:
    """Return an object of the environment. It runs a user's file: raises whatever that raises."""
    made = own_code.load(*own_code.split(name, _WHAT, "Class")) if own_code.is_file(name) else TASKS[name]
    found: Environment = made(**arguments)
    return found
