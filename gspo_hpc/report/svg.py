"""SVG elements as escaped markup: the only markup of the report that is made in Python instead of a template."""

from __future__ import annotations

from markupsafe import Markup

from gspo_hpc.report.render import printable


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return one element with its children and attributes, all of them escaped unless they are markup already.

    Text is cleaned of control characters, as that which a template prints.

    Underscores in the names of attributes become hyphens, and one at the end is dropped: `class_`, `text_anchor`.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(key.removesuffix("_").replace("_", "-"), printable(value))
        for key, value in attributes.items()
    )
    if not children:
        return Markup("<{}{}/>").format(name, written)
    return Markup("<{}{}>{}</{}>").format(name, written, Markup("").join(map(printable, children)), name)
