"""Write docs/reference.md, the settings of a config, from the schema: run this after changing a setting.

With --check it writes nothing, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import generated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_hpc.config import schema  # noqa: E402
from gspo_hpc.config.reference.settings import Setting, settings  # noqa: E402


def reference() -> str:
    """Return all settings as Markdown, a heading for each section of a config and an item for each key."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for section, group in groupby(settings().values(), key=lambda one: one.key.partition(".")[0]):
        yield from (f"## {section}", "")
        if about := _about(section):
            yield from (_escaped(about), "")
        yield from map(_item, group)
        yield ""


def _about(section: str) -> str:
    """Return what the section is for, in the first paragraph of its docstring; the algorithms have none in common."""
    kind = schema.Config.model_fields[section].annotation
    text = kind.__doc__ if isinstance(kind, type) else None
    return " ".join((text or "").split("\n\n")[0].split())


def _item(one: Setting) -> str:
    """Return a setting as an item: a cell of a table would be too narrow for some meanings."""
    default = f"; default: `{one.default}`" if one.default not in ("", "null") else ""
    return f"- **`{one.key}`** ({_escaped(one.values)}{default}). {_escaped(one.meaning)}"


def _escaped(text: str) -> str:
    """Return a text without characters that Markdown reads as more than themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<\[\]|])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    sys.exit(generated.main("make_reference", __doc__, {"reference.md": generated.section("settings", reference())}))
