"""One line for each mistake that pydantic finds in a config: its place, what was given and what is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gspo_hpc.config import paths, plugins, schema
from gspo_hpc.config.engine_arguments import ENGINE_VALUES
from gspo_hpc.config.reading.config_yaml import Ambiguous, number_meant
from gspo_hpc.config.section import Inner, Section, describe
from gspo_hpc.system.text import near_miss, rounded

_KINDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be {} or more"),
    "greater_than": ("gt", "must be above {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be below {}"),
}
_ENGINE = "rollout.engine"
_THREE = re.compile(r"\d{3}")  # digits behind a comma
_NO = ("off", "no", "none", "null", "false", "never", "disable", "disabled")  # words for nothing ...
_NOTHING = ("disabled", "off", "none")  # ... and values that say it
_NO_VALUE_MODEL = "it trains a value model beside the policy; the nearest without one is grpo, or gspo"
_FROM_PAIRS = "it learns from given pairs of answers, and this package from answers that the policy samples"
_NOT_ALGORITHMS = {  # that people ask for, by the reason why they are none of ours
    **dict.fromkeys(("ppo", "vapo", "vc_ppo"), _NO_VALUE_MODEL),
    **dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), _FROM_PAIRS),
}
_PHRASES = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def lines(error: ValidationError, raw: Mapping[Any, Any], place: Callable[[str], str]) -> list[str]:
    """Return a line for each mistake, in the order of `raw`; `place` gives "file:line" of a dotted key."""
    details = sorted(error.errors(include_url=False), key=lambda one: _position(one["loc"], raw))
    missing: dict[tuple[str | int, ...], list[str]] = {}  # keys, by what lacks them
    for one in details:
        if one["type"] == "missing":
            missing.setdefault(one["loc"][:-1], []).append(dotted(one["loc"]))
    found = list[str]()
    for one in details:
        if one["type"] != "missing":
            line = _of_comma(one, raw, place) or _line(one, place)
            found += [line] if line not in found else []
        elif keys := missing.pop(one["loc"][:-1], None):
            text = f"{keys[0]} is missing" if len(keys) == 1 else f"{' and '.join(keys)} are missing"
            found.append(f"{place(dotted(one['loc'][:-1]))}: {text}")
    return found


def _of_comma(one: ErrorDetails, raw: Mapping[Any, Any], place: Callable[[str], str]) -> str:
    """Return that a number in braces has a comma, where YAML begins another key; empty if it is something else."""
    inner: Any = raw
    for step in one["loc"][:-1]:
        inner = inner.get(step) if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping):
        return ""
    name, digits = None, ""  # the last key that is none of such groups, and the groups behind it
    found = False
    for key, value in inner.items():
        if value is None and _THREE.fullmatch(str(key)):
            digits, found = f"{digits}{key}", found or str(key) == str(one["loc"][-1])
        elif found:
            break
        else:
            name, digits = key, ""
    first = inner.get(name)
    if not found or isinstance(first, bool) or not isinstance(first, int):
        return ""
    key = dotted((*one["loc"][:-1], str(name)))
    return f"{place(key)}: {key} is {first}, for a comma ends a number in braces; write {first}{digits}"


def _allowed(names: Iterable[Any]) -> str:
    return f"; allowed: {', '.join(str(name) for name in names)}"


def _line(one: ErrorDetails, place: Callable[[str], str]) -> str:
    loc, kind, given = one["loc"], one["type"], one["input"]
    if loc == ("algorithm",) and kind == "value_error":  # of the name of one in a user's file
        return f"{place('algorithm.name')}: algorithm.name {one['ctx']['error']}"
    if kind == "value_error" and isinstance(inner := one["ctx"]["error"], Inner):
        key = dotted((*loc, *inner.steps))
        return f"{place(key)}: {key} {_argument(key, inner.given) if inner.given is not None else inner}"
    key = dotted(loc)
    if kind == "union_tag_invalid":
        return f"{place('algorithm.name')}: algorithm.name {_no_algorithm(given.get('name'))}"
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{place(key)}: {_unknown(loc, given)}"
    if kind in ("model_type", "model_attributes_type") and len(loc) == 1:
        keys = _allowed(_class_at(loc).model_fields)
        return f"{place(key)}: {key} is a section of keys; found {describe(given)}{keys}"
    item = isinstance(loc[-1], int) and kind != "model_type"  # of a list: what was found says which
    return f"{place(key)}: {dotted(loc[:-1]) if item else key} {_wrong(one)}"


def _wrong(one: ErrorDetails) -> str:
    """Return the end of a sentence that begins with the key."""
    kind, given, field = one["type"], one["input"], schema.field_at(one["loc"])
    if kind == "value_error":
        return str(one["ctx"]["error"])
    if isinstance(given, Ambiguous):
        return _ambiguous(given, kind, field)
    if kind == "model_type":
        of = " of keys" if isinstance(one["loc"][-1], int) else ""
        return f"must be a mapping{of}; found {describe(given)}{_form(one['loc'], given)}"
    if kind == "literal_error" and field is not None:
        values = get_args(schema.kind_at(one["loc"]))
        meant = next((one for one in values if one in _NOTHING), None) if str(given).lower() in _NO else None
        hint = near_miss(str(given), values) if meant is None else f"; nearest: {meant}"
        return f"is {given!r}, which is not allowed{hint}{_allowed(values)}"
    if kind in _KINDS:
        hint = "; put quotes around it" if kind == "string_type" and isinstance(given, int | float | date) else ""
        if kind in ("int_type", "float_type") and isinstance(given, str):
            hint = _number(given, str(one["loc"][-1]), field, whole=kind == "int_type")
        if kind in ("dict_type", "tuple_type"):
            hint = _form(one["loc"], given)
        return f"{_KINDS[kind]}; found {describe(given)}{hint}"
    rule = _rule(one, field)
    huge = isinstance(given, int) and abs(given) >= 10**18
    default = f"; {one['loc'][1]} has {field.default}" if _is_tagged(one["loc"]) and field is not None else ""
    return f"{rule}; found {f'{len(str(given))} digits' if huge else repr(given)}{default}"


def _form(loc: Sequence[str | int], given: Any) -> str:
    """Return what to write where a list, a mapping or keys were given in another form: "; write ...", or nothing."""
    from gspo_hpc.config.reading import forms  # only here: most configs are right

    return forms.hint(loc, given)


def _number(given: str, name: str, field: FieldInfo | None, *, whole: bool) -> str:
    """Return what to write for text where a number is taken: "; write ...", or nothing."""
    from gspo_hpc.config.reading import units  # only here: most configs are right

    def taken(value: Any) -> bool:
        return field is None or schema.in_range(field, value)

    if (unit := units.counted(name)) and (value := units.converted(given, unit)) is not None:
        number = int(value) if value.is_integer() else float(rounded(value))
        fits = taken(number) and not (whole and isinstance(number, float))
        counts = f"; it counts {unit}"
        return f"{counts}: write {number}" if fits else f"{counts}: that is {number}, and it {_range(field)}"
    share = field is None or _is_share(field)
    return number_meant(given, whole=whole, share=share, taken=taken, must=_range(field))


def _is_share(field: FieldInfo) -> bool:
    """Return whether a number is a part of something: one that is at most 1."""
    bounds = schema.limits(field)
    return any(bounds[name] <= 1 for name in ("le", "lt") if name in bounds)


def _ambiguous(given: Ambiguous, kind: str, field: Any) -> str:
    """Return what to write for a value that YAML 1.1 and 1.2 read differently, of what its key takes."""
    whole = kind == "int_type"
    numbers = whole or kind == "float_type"

    def taken(value: Any) -> bool:
        in_range = field is None or schema.in_range(field, value)
        return in_range and not (whole and isinstance(value, float))

    must = "" if kind == "string_type" else (numbers and _range(field)) or _KINDS.get(kind, "")
    return given.refusal(number=numbers, text=not must, taken=taken, must=must)


def _argument(key: str, given: Ambiguous) -> str:
    """Return the same for what stands in a free-form value: only of some arguments of vLLM the range is known."""
    name = key.removeprefix(f"{_ENGINE}.")
    if name == key or name not in ENGINE_VALUES:
        return given.refusal()
    holds, must = ENGINE_VALUES[name]
    return given.refusal(text=False, taken=holds, must=must)


def _rule(one: ErrorDetails, field: Any) -> str:
    """Return what a value out of range must be."""
    found = schema.limits(field) if field is not None else {}
    if _own_words(field) or (len(found) == 2 and schema.plain_type(field.annotation) is float):
        return _range(field)
    name, text = _BOUNDS[one["type"]]
    return text.format(found.get(name, one["ctx"][name]))


def _range(field: Any) -> str:
    """Return what a number must be to be in the range of a key: "must be ..."; empty if any number is."""
    if field is None:
        return ""
    if own := _own_words(field):
        return own
    bounds = " and ".join(f"{_PHRASES[bound]} {value}" for bound, value in schema.limits(field).items())
    return f"must be {bounds}" if bounds else ""


def _own_words(field: Any) -> str:
    """Return what a key's own message says that its values must be; empty if it has none."""
    extra = field.json_schema_extra if field is not None else None
    return str(extra["errorMessage"]) if isinstance(extra, dict) and "errorMessage" in extra else ""


def _unknown(loc: Sequence[str | int], given: Any) -> str:
    from gspo_hpc.config.reading.peer_names import here, inside  # only here: most configs are right

    name = str(loc[-1])
    if isinstance(given, Mapping) and (peers := inside(given, dotted(loc), _own_names())):
        what = f"section {loc[0]!r}" if len(loc) == 1 else f"key {dotted(loc)}"
        return f"unknown {what}; here {', '.join(peers)}"
    if (ours := here(dotted(loc))) is not None:
        return f"unknown key {dotted(loc)}; here it is {ours}"
    if len(loc) == 1:
        sections = list(schema.Config.model_fields)
        return f"unknown section {loc[0]!r}{near_miss(name, [*sections, *schema.keys()]) or _allowed(sections)}"
    parent, known = dotted(loc[:-1]), list(_class_at(loc[:-1]).model_fields)
    elsewhere = [key for key in schema.keys() if key.split(".")[1] == name]
    hint = near_miss(name, known, shown=lambda near: f"{parent}.{near}")
    if not hint and isinstance(loc[-2], int):
        from gspo_hpc.config.reading import forms

        hint = forms.of_item(loc[:-1], name, given)
    elif not hint and elsewhere:
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    owner = f" of {loc[1]}" if _is_tagged(loc) else ""
    return f"unknown key {dotted(loc)}{owner}{hint or _allowed(known)}"


@cache
def _own_names() -> dict[str, str]:
    """Return our keys by their names, and by their last parts where one alone has it."""
    counts = Counter(key.rpartition(".")[2] for key in schema.keys())
    own = {key: key for key in schema.keys()}
    return own | {last: key for key in own if counts[last := key.rpartition(".")[2]] == 1}


def _no_algorithm(given: Any) -> str:
    """Return what is wrong with the name of an algorithm."""
    if not isinstance(given, str):
        return f"must be text; found {describe(given)}"
    names = plugins.names()
    if (reason := _NOT_ALGORITHMS.get(given.lower().replace("-", "_"))) is not None:
        return f"is {given!r}, and there is no {given.upper()} here: {reason}{_allowed(names)}"
    if (paths.ALGORITHMS / f"{given}.py").is_file():
        return f"is {given!r}, but algorithms/{given}.py has no class with `{plugins.marker(given)}`{_allowed(names)}"
    return f"is {given!r}, which is not allowed{near_miss(given, names)}{_allowed(names)}"


def _is_tagged(loc: Sequence[str | int]) -> bool:
    """Return True for a path that pydantic gives below an algorithm, with its name behind the section's."""
    return loc[0] == "algorithm" and len(loc) > 1 and plugins.named(loc[1]) is not None


def _class_at(loc: Sequence[str | int]) -> type[Section]:
    """Return the section, or the class of an item of a list of sections, that a path leads to."""
    if len(loc) == 1:
        return schema.section_class(str(loc[0]))
    if len(loc) == 2 and loc[0] == "algorithm" and (chosen := plugins.named(loc[1])) is not None:
        return chosen
    field = schema.field_at(loc)
    assert field is not None
    kind = schema.plain_type(field.annotation)
    found: type[Section] = get_args(kind)[0] if isinstance(loc[-1], int) else kind
    return found


def dotted(loc: Sequence[str | int]) -> str:
    """Return a path as people write it: reward.functions[1].weight."""
    text = ""
    loc = (loc[0], *loc[2:]) if _is_tagged(loc) else loc
    for at, step in enumerate(loc):  # a number among the first two is a strange name of a section or a key
        text += f"[{step}]" if isinstance(step, int) and at >= 2 else f".{step}" if text else str(step)
    return text


def _position(loc: Sequence[str | int], raw: Mapping[Any, Any]) -> list[int]:
    """Return where a path stands among the keys of the config, for sorting."""
    found: list[int] = []
    inner: Any = raw
    for step in (loc[0], *loc[2:]) if _is_tagged(loc) else loc:
        if isinstance(inner, Mapping) and step in inner:
            found.append(list(inner).index(step))
            inner = inner[step]
        elif isinstance(inner, list | tuple) and isinstance(step, int):
            found.append(step)
            inner = inner[step]
        else:
            break
    return found
