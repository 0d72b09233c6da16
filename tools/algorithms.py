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


def settings(kind: type[AlgorithmSettings]) -> Iterator[str]:
    """Yield the lines about one algorithm: its reference, what it is and a table of its settings."""
    summary = (kind.__doc__ or "").partition("\n\n")[0]
    yield from (f"### {kind.model_fields['name'].default}", "", f"{' '.join(summary.split())} Reference: {kind.paper}.")
    yield from ("", "| setting | default | allowed | meaning |", "|---|---|---|---|")
    for name, field in kind.model_fields.items():
        if name != "name":
            yield f"| `{name}` | {shown(field.default)} | {allowed(field)} | {field.description} |"
    yield ""


def content() -> str:
    """Return the settings of every algorithm."""
    return "\n".join(line for kind in plugins.algorithms().values() for line in settings(kind))


if __name__ == "__main__":
    sys.exit(generated.main("algorithms", __doc__, {"algorithms.md": generated.section("settings", content())}))
