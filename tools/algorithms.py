"""Write the settings of every algorithm into docs/algorithms.md from their classes: run this after adding an algorithm.

With --check it writes nothing, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import generated
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_hpc.config import plugins, schema  # noqa: E402
from gspo_hpc.config.algorithm import AlgorithmSettings  # noqa: E402

_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def allowed(field: FieldInfo) -> str:
    """Return the values that a setting takes."""
    kind = schema.plain_type(field.annotation)
    if kind is bool:
        return "true or false"
    if choices := get_args(kind):
        return " or ".join(map(str, choices))
    bounds = [_BOUNDS[name].format(value) for name, value in schema.limits(field).items()]
    return " and ".join(bounds) or f"any {kind.__name__}"


def shown(value: object) -> str:
    """Return a default as a config writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def common() -> dict[str, FieldInfo]:
    """Return the settings that every algorithm has, but for its name."""
    return {name: field for name, field in AlgorithmSettings.model_fields.items() if name != "name"}


def presets() -> Iterator[str]:
    """Yield a table from algorithm and paper to the settings that differ from the common defaults."""
    yield from ("### Presets", "", "| algorithm | paper | settings | what it is |", "|---|---|---|---|")
    for name, kind in plugins.algorithms().items():
        summary = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        own = ((key, field) for key, field in kind.model_fields.items() if key != "name")
        given = [f"`{key}: {shown(f.default)}`" for key, f in own if f.default != _default(key)]
        yield f"| `{name}` | {kind.paper} | {', '.join(given)} | {summary} |"
    yield ""


def _default(name: str) -> object:
    field = common().get(name)
    return None if field is None else field.default


def table() -> Iterator[str]:
    """Yield a table of all settings, with the default of algorithms that have none of their own."""
    yield from ("### Keys", "", "| setting | default | allowed | meaning |", "|---|---|---|---|")
    for name, field in common().items():
        default = "of the algorithm" if field.is_required() else shown(field.default)
        yield f"| `{name}` | {default} | {allowed(field)} | {field.description} |"
    for kind in plugins.algorithms().values():
        for name, field in kind.model_fields.items():
            if name not in AlgorithmSettings.model_fields:
                yield f"| `{name}` | {shown(field.default)} | {allowed(field)} | {field.description} |"
    yield ""


def content() -> str:
    """Return the tables of all algorithms and of all settings."""
    return "\n".join((*presets(), *table()))


if __name__ == "__main__":
    sys.exit(generated.main("algorithms", __doc__, {"algorithms.md": generated.section("settings", content())}))
