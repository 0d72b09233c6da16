"""Rows of data that a section picks and renames, with who grades them: what sources and evaluation sets share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gspo_hpc.config.section import FreeForm, Matching, Range, Section, checked, key


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_condition(value: Any) -> bool:
    """Tell whether a value says which values of a field are wanted."""
    if isinstance(value, dict):
        return bool(value) and value.keys() <= {"min", "max"} and all(map(_is_number, value.values()))
    wanted = value if isinstance(value, list) else [value]
    return bool(wanted) and all(one is None or isinstance(one, str | int | float) for one in wanted)


_VALUE = {"type": ["string", "number", "boolean", "null"]}
_A_CONDITION = {
    "anyOf": [
        _VALUE,
        {"type": "array", "items": _VALUE, "minItems": 1},
        {
            "type": "object",
            "properties": {"min": {"type": "number"}, "max": {"type": "number"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
}
_NEW_NAMES = "must have new names of columns, as text, or null"
NewNames = Annotated[
    FreeForm,
    Field(
        json_schema_extra={
            "additionalProperties": {"type": ["string", "null"], "minLength": 1},
            "errorMessage": _NEW_NAMES,
        }
    ),
    checked(lambda v: all(one is None or (isinstance(one, str) and one) for one in v.values()), _NEW_NAMES),
]
_CONDITION = "must have for each field a value, a list of values, or {min: number, max: number}"
Conditions = Annotated[
    FreeForm,
    Field(json_schema_extra={"additionalProperties": _A_CONDITION, "errorMessage": _CONDITION}),
    checked(lambda v: all(map(_is_condition, v.values())), _CONDITION),
]
_WEIGHTS = "must have a number for each reward function, and at least one of them"
Weights = Annotated[
    FreeForm,
    Field(json_schema_extra={"minProperties": 1, "additionalProperties": {"type": "number"}, "errorMessage": _WEIGHTS}),
    checked(lambda v: v and all(map(_is_number, v.values())), _WEIGHTS),
]


class Rows(Section):
    """Rows of files under a name: which of them are used, how their columns are called, and who grades them."""

    name: Annotated[
        str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", "must be 1 to 40 letters, digits, '.', '_' or '-'")
    ] = key(..., "The name of the source or set, in metrics and in the field data_source of its rows.")
    files: str = key(..., "Its prompts, named as data.train is; #N behind takes N of its rows, drawn by run.seed.")
    columns: NewNames = key(
        {}, "Columns that are renamed, {old: new}, such as {question: prompt}; {old: null} leaves a column out."
    )
    constants: FreeForm = key({}, "Fields that every row gets, such as {subject: algebra}.")
    filter: Conditions = key(
        {},
        "Rows that are used, by their fields after renaming, all of which must fit: {field: value}, {field: [value, "
        "...]} or {field: {min: number, max: number}}.",
    )
    characters: Range | None = key(None, "Fewest and most characters of a prompt, [low, high]; others are left out.")
    tokens: Range | None = key(
        None, "Fewest and most tokens of a prompt with its chat template, [low, high]; others are left out."
    )
    system_prompt: str | None = key(None, "A system message in front of its prompts, in place of data.system_prompt.")
    rewards: Weights | None = key(
        None,
        "The reward functions that grade it, by their names in reward.functions, and their weights: {number_match: 1}. "
        "The first of them decides whether an answer is right; by default all grade it, with their own weights.",
    )
