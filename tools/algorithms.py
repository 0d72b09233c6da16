"""Write the settings of every algorithm into docs/algorithms.md from their classes: run this after adding an algorithm.

With --check it writes nothing, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from gspo_hpc.config import plugins, schema  # noqa: E402
from gspo_hpc.config.algorithm import AlgorithmSettings  # noqa: E402

PAGE = PROJECT / "docs" / "algorithms.md"
BEGIN, END = "<!-- settings: written by tools/algorithms.py -->\n", "<!-- end of settings -->\n"
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


def page(text: str) -> str:
    """Return the page with the settings of today."""
    before, rest = text.split(BEGIN)
    lines = [line for kind in plugins.algorithms().values() for line in settings(kind)]
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check, text = parser.parse_args().check, PAGE.read_text("utf-8")
    if page(text) == text:
        return 0
    if check:
        print("the settings in docs/algorithms.md are out of date; run: python tools/algorithms.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
