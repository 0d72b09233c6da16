"""Base class of the sections of a config, and the types of their keys with their ranges.

A section is a frozen pydantic model that takes no unknown key and no value of another type. Three things are looser,
because YAML and the command line write them so: a whole number may have a point or an exponent (1e3), a tuple may be a
list, and a section may be a mapping. A whole number is at least 1 and a number at least 0 unless the key states another
range. A validator that raises ValueError states the end of a sentence which begins with the key. Whatever a validator
checks of a value by itself, the JSON schema says too (a test compares them).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

from gspo_hpc.config.constants import MOST_GPUS_PER_NODE
from gspo_hpc.config.reading.config_yaml import Ambiguous

# Pydantic would look through every installed package for plug-ins: that takes time, and none may change what is valid.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# A whole number above this is a slip of the hand, and nothing that counts with it may run for minutes.
MOST = 10**9


class Section(BaseModel):
    """Base class of all sections of a config."""

    # defer_build: a section is compiled when it is first validated by itself, which few processes ever do.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


S = TypeVar("S", bound=BaseModel)


def key(default: Any, text: str) -> Any:
    """Return the pydantic field of a key: its default and its meaning. Its type has its range."""
    return Field(default, description=text)


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


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def written(value: Any) -> str:
    """Return a value as it stands behind key= on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise ValueError(f"must be two numbers, [low, high]; found {len(value)}")
    return _tuple(value)


class Inner(ValueError):
    """A mistake inside a free-form value: the steps that lead to it, and the end of a sentence that begins with it.

    `given` is a value of which the key itself says what may be meant.
    """

    def __init__(self, steps: tuple[str | int, ...], text: str, given: Ambiguous | None = None) -> None:
        super().__init__(text)
        self.steps, self.given = steps, given


def plain(value: Any, steps: tuple[str | int, ...] = (), *, as_text: bool = False) -> Any:
    """Return a deep copy of free-form values, which survives YAML and JSON unchanged. Raises Inner for others.

    `as_text`: whoever gets them reads text, and not as YAML does.
    """
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str)]:
            raise Inner(steps, f"has the key {bad[0]!r}; keys must be text: put quotes around it")
        return {name: plain(item, (*steps, name), as_text=as_text) for name, item in value.items()}
    if isinstance(value, Ambiguous):
        raise Inner(steps, value.refusal(number=not as_text), None if as_text else value)
    if isinstance(value, list | tuple):
        return [plain(item, (*steps, number), as_text=as_text) for number, item in enumerate(value)]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise Inner(steps, f"is {describe(value)}; allowed: text, finite numbers, true, false, null, lists, mappings")


def _plain_text(value: Any) -> Any:
    return plain(value, as_text=True) if isinstance(value, Mapping) else value


def checked(holds: Callable[[Any], bool], text: str) -> AfterValidator:
    """Return a validator that refuses values for which `holds` is false, with `text` about what they must be."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"{text}; found {value!r}")
        return value

    return AfterValidator(check)


class Matching:
    """Marker of text that a pattern matches as a whole; `text` says what it must be."""

    def __init__(self, pattern: str, text: str) -> None:
        self.pattern, self.text, self._fits = pattern, text, re.compile(pattern).fullmatch

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check after that of the type."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the type with the pattern, which says that nothing follows: `$` alone allows a newline in Python."""
        return handler(schema) | {"pattern": rf"^(?:{self.pattern})$(?!\n)", "errorMessage": self.text}

    def _check(self, value: str) -> str:
        if not self._fits(value):
            raise ValueError(f"{self.text}; found {value!r}")
        return value


# What a line of #SBATCH carries: nothing there that a shell or sbatch itself takes for a quote, a command or an escape.
_SBATCH_NAME = re.compile(r"[a-z][a-z-]*")
SBATCH_VALUE = re.compile(r"[A-Za-z0-9 _.,:@%+=/\[\]()|&*!~^-]+")
# Line breaks and other control characters, those that turn or hide text included, and halves of characters.
_CONTROLS = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"

WHOLE = BeforeValidator(_whole)  # stands last: pydantic's core then tests the bounds, and the JSON schema has them
Count = Annotated[int, Field(ge=1, le=MOST), WHOLE]
CountFrom0 = Annotated[int, Field(ge=0, le=MOST), WHOLE]
PerNode = Annotated[int, Field(ge=1, le=MOST_GPUS_PER_NODE), WHOLE]
AnyNumber = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FromOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
# vLLM refuses above 2, and takes 0.01 for anything between it and 0 without a word that reaches the trainer.
Temperature = Annotated[
    float,
    Field(
        ge=0.01,
        le=2,
        allow_inf_nan=False,
        json_schema_extra={"errorMessage": "must be at least 0.01 and at most 2: vLLM accepts no other temperature"},
    ),
]
_TOP_K = "must be 1 or more, or -1 for all tokens"
TopK = Annotated[
    int,
    Field(ge=-1, le=MOST, json_schema_extra={"not": {"const": 0}, "errorMessage": _TOP_K}),
    checked(lambda v: v != 0, _TOP_K),
    WHOLE,
]
OneLine = Annotated[str, Matching(f"[^{_CONTROLS}]+", "must be one line of text")]
SbatchText = Annotated[str, Matching(SBATCH_VALUE.pattern, f"must be made of {SBATCH_VALUE.pattern[:-1]}")]
Texts = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
Lines = Annotated[tuple[OneLine, ...], BeforeValidator(_tuple)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_tuple)]
Listed = BeforeValidator(_tuple)  # for tuples of sections
Range = Annotated[tuple[AnyNumber, AnyNumber], BeforeValidator(_pair)]
FreeForm = Annotated[dict[str, Any], BeforeValidator(lambda v: plain(v) if isinstance(v, Mapping) else v)]
OptionsAsText = Annotated[dict[str, Any], BeforeValidator(_plain_text)]  # 24:00:00 is no number to who gets them
TextByName = Annotated[dict[str, str], BeforeValidator(_plain_text)]


def is_sbatch_option(name: str, value: object) -> bool:
    """Return whether a name without dashes and a value may stand in a line of #SBATCH."""
    return bool(_SBATCH_NAME.fullmatch(name) and SBATCH_VALUE.fullmatch(str(value)))
