"""Fixes that keep what an argument of `rollout.engine` says, and give it the name or the place where it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from gspo_hpc.config.engine_arguments import OWN_ENGINE_ARGUMENTS
from gspo_hpc.config.schema import Config, as_dict, keys
from gspo_hpc.planning.rules.engine_arguments import meant, slip_of, takes
from gspo_hpc.planning.settings import ENGINE

Settings = tuple[tuple[str, Any], ...]


def candidates(config: Config) -> Iterator[Settings]:
    """Yield settings that take an argument away, and give its value to the one that is meant, if that is not given."""
    given = config.rollout.engine
    for key, value in given.items():
        if (name := slip_of(key)) is not None and name not in given and name not in OWN_ENGINE_ARGUMENTS:
            for wanted in (value,) if takes(name, value) else meant(name, value):
                yield (ENGINE + key, None), (ENGINE + name, wanted)
        setting = OWN_ENGINE_ARGUMENTS.get(name or key)
        if setting in keys() and _is_free(config, setting, value):
            yield (ENGINE + key, None), (setting, value)


def _is_free(config: Config, setting: str, value: Any) -> bool:
    """Return whether a setting has its default, and takes the value."""
    section, name = setting.split(".")
    part = getattr(config, section)
    raw = as_dict(part)
    if raw[name] != keys()[setting].default:
        return False
    try:
        type(part).model_validate(raw | {name: value})
    except ValidationError:
        return False
    return bool(raw[name] != value)
