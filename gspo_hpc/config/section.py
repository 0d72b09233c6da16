"""Base class of the sections of a config, and the types of their keys with their ranges.

A section is a frozen pydantic model that takes no unknown key and no value of another type. Three things are looser,
because YAML and the command line write them so: a number may be text ("1e-6" has no point, so YAML reads it as text),
a tuple may be a list, and a section may be a mapping. A whole number is at least 1 and a number at least 0 unless the
key states another range. A validator that raises ValueError states the end of a sentence which begins with the key.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gspo_hpc.config.constants import MOST_GPUS_PER_NODE

# Pydantic would look through every installed package for plug-ins: that takes time, and none may change what is valid.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# A whole number above this is a slip of the hand, and nothing that counts with it may run for minutes.
MOST = 10**9


class Section(BaseModel):
    """Base class of all sections of a config."""

    # defer_build: a section is compiled when it is first validated by itself, which few processes ever do.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


S = TypeVar("S", bound=BaseModel)


def key(default: Any, text: str, *, rule: str | None = None, **limits: Any) -> Any:
    """Return the pydantic field of a key: its default, its meaning and its range.

    `limits` are pydantic's (ge, gt, le, lt, pattern). `rule` replaces the sentence that reports a value out of range;
    editors show it too.
    """
    extra: dict[str, Any] = {"json_schema_extra": {"errorMessage": rule}} if rule else {}
    return Field(default, description=text, **extra, **limits)


def replace(section: S, **changes: Any) -> S:
    """Return the section, or the config, with other values of some keys; as with a dataclass nothing is validated."""
    return section.model_copy(update=changes)


def as_dict(section: BaseModel) -> dict[str, Any]:
    """Return nested plain values of a section or a config in the order of its keys; tuples stay tuples."""
    return section.model_dump(warnings=False)


def describe(value: Any) -> str:
    """Return a value as a message shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping | list | tuple):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return f"{value!r}" if isinstance(value, str | int | float) else f"{value} ({type(value).__name__})"


def written(value: Any) -> str:
    """Return a value as it stands behind key= on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    try:  # YAML reads 1e-6, without a point, as text
        number = float(value)
    except (ValueError, OverflowError):
        return str(value)  # which is no number for pydantic
    return number if math.isfinite(number) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Return a deep copy of free-form values, which survives YAML and JSON unchanged. Raises ValueError for others."""
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"has the key {bad[0]!r}; keys must be text: put quotes around it")
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"holds {describe(value)}; allowed: text, finite numbers, true, false, null, lists, mappings")


def checked(holds: Callable[[Any], bool], text: str) -> AfterValidator:
    """Return a validator that refuses values for which `holds` is false, with `text` about what they must be."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"{text}; found {value!r}")
        return value

    return AfterValidator(check)


# What a line of #SBATCH carries: nothing there that a shell or sbatch itself takes for a quote, a command or an escape.
SBATCH_VALUE = re.compile(r"[A-Za-z0-9 _.,:@%+=/\[\]()|&*!~^-]+")
_SBATCH_SCHEMA: dict[str, Any] = {"pattern": f"^{SBATCH_VALUE.pattern}$"}

Count = Annotated[int, Field(ge=1, le=MOST)]
CountFrom0 = Annotated[int, Field(ge=0, le=MOST)]
PerNode = Annotated[int, Field(ge=1, le=MOST_GPUS_PER_NODE)]
READ = BeforeValidator(_number)  # stands last: pydantic's core then tests the bounds, and the JSON schema has them
AnyNumber = Annotated[float, Field(allow_inf_nan=False), READ]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False), READ]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), READ]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), READ]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), READ]
# vLLM refuses above 2, and takes 0.01 for anything between it and 0 without a word that reaches the trainer.
Temperature = Annotated[
    float,
    Field(
        ge=0.01,
        le=2,
        allow_inf_nan=False,
        json_schema_extra={"errorMessage": "must be at least 0.01 and at most 2: vLLM samples at no other"},
    ),
    READ,
]
OneLine = Annotated[
    str,
    checked(lambda v: v.isprintable() and v != "", "must be one line of text"),
    Field(json_schema_extra={"minLength": 1}),
]
SbatchText = Annotated[
    str,
    checked(lambda v: SBATCH_VALUE.fullmatch(v) is not None, f"must be made of {SBATCH_VALUE.pattern[:-1]}"),
    Field(json_schema_extra=_SBATCH_SCHEMA),
]
Texts = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
Lines = Annotated[tuple[OneLine, ...], BeforeValidator(_tuple)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_tuple)]
Listed = BeforeValidator(_tuple)  # for tuples of sections
FreeForm = Annotated[dict[str, Any], BeforeValidator(lambda v: plain(v) if isinstance(v, Mapping) else v)]
TextByName = Annotated[dict[str, str], BeforeValidator(lambda v: plain(v) if isinstance(v, Mapping) else v)]
