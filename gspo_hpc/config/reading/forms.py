"""Say what to write where a list, a mapping or the keys of a section were given in another form.

What is proposed is what was given, in the form that the key takes: ``reward.functions=[number_match]`` is answered with
``{function: number_match}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from gspo_hpc.config import schema, yaml_text
from gspo_hpc.config.section import Section

_PAIR = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)\s*[=:]\s*(\S.*)", re.DOTALL)
_NAME = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)")
_OF_A_NAME = ("name", "type", "func", "fn", "callable", "path")  # keys by which people give the name of a function
_DASHED = ("slurm", "sbatch")  # whose names have dashes
_A_NAME, _VALUE = "NAME", "VALUE"  # stand for what was not given


def hint(path: Sequence[str | int], given: Any) -> str:
    """Return what to write in the place of a value of the wrong form, as the end of a sentence; empty if unknown."""
    return _written(path, _forms(schema.kind_at(path), given, dashes=tuple(path) == _DASHED))


def of_item(path: Sequence[str | int], name: str, given: Any) -> str:
    """Return the same where an item of a list has a strange key: ``[{number_match: {weight: 2}}]``."""
    return _written(path, _items(schema.kind_at(path), {name: given}))


def _written(path: Sequence[str | int], forms: Iterable[Any]) -> str:
    found = next((one for one in forms if _taken(path, one)), None)
    return "" if found is None else f"; write {yaml_text.write_line(found)}"


def _taken(path: Sequence[str | int], value: Any) -> bool:
    """Tell whether a key, or an item of its list, takes a value."""
    field = schema.field_at(path)
    assert field is not None
    return _valid(schema.kind_at(path) if isinstance(path[-1], int) else Annotated[field.annotation, field], value)


def _valid(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter[Any](kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _forms(kind: Any, given: Any, dashes: bool) -> Iterator[Any]:
    """Yield what may be meant by a value where one of this kind is taken. `dashes`: names have them."""
    if get_origin(kind) is dict:
        found = {name if dashes else name.replace("-", "_"): value for name, value in _mapping(given).items()}
        yield found or {_A_NAME: _VALUE}
        yield {name: str(value) for name, value in found.items()}  # of text
    elif get_origin(kind) is tuple:
        inner = schema.plain_type(get_args(kind)[0])
        yield from _lists(inner, given)
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield from _items(kind, given)


def _lists(inner: Any, given: Any) -> Iterator[Any]:
    """Yield lists of `inner` that may be meant by a text, or by a mapping."""
    if isinstance(given, Mapping) and isinstance(inner, type) and issubclass(inner, Section):
        yield [dict(given)]
        forms = [[one for one in _items(inner, {name: value}) if _valid(inner, one)] for name, value in given.items()]
        if all(forms):
            yield [found[0] for found in forms]
    elif isinstance(given, Mapping):
        yield list(given)
    elif isinstance(inner, type) and issubclass(inner, Section):
        yield [next(_items(inner, part), part) for part in _split(given)]
    else:
        yield _split(given)


def _split(given: Any) -> list[Any]:
    """Return the parts of a text between commas."""
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else [given]


def _items(kind: type[Section], given: Any) -> Iterator[Any]:
    """Yield keys of an item that may be meant by the name that it needs, or by a mapping of that to something."""
    fields = kind.model_fields
    named = next((name for name, field in fields.items() if field.is_required()), None)
    if named is None:
        return
    if isinstance(given, list | tuple) and len(given) == 1:
        yield from _items(kind, given[0])
    elif isinstance(given, str):
        yield {named: given}
    elif isinstance(given, Mapping) and len(given) == 1 and not fields.keys() & given.keys():
        ((name, inner),) = given.items()
        if isinstance(inner, Mapping):
            yield {named: name, **inner}
            yield {named: name, "args": dict(inner)}
        elif inner is None:
            yield {named: name}
        elif name in _OF_A_NAME and isinstance(inner, str):
            yield {named: inner}
        elif "weight" in fields:
            yield {named: name, "weight": inner}
    if not isinstance(given, Mapping):
        yield {named: _A_NAME}


def _mapping(given: Any) -> dict[str, Any]:
    """Return the mapping that may be meant by a list of its parts, or by one part: ``[a=1, {b: 2}]``."""
    found: dict[str, Any] = {}
    for part in given if isinstance(given, list | tuple) else [given]:
        if isinstance(part, Mapping):
            found |= {str(name): value for name, value in part.items()}
        elif isinstance(part, str) and (pair := _PAIR.fullmatch(part.strip())):
            found[pair[1]] = _value(pair[2])
        elif isinstance(part, str) and (name := _NAME.fullmatch(part.strip())):
            found[name[1]] = _VALUE
    return found


def _value(text: str) -> Any:
    try:
        return yaml_text.read(text)
    except ValueError:
        return text
