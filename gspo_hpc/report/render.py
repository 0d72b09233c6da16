"""The templates of the report page, filled in with autoescape always on.

A report shows text that a model or a data set supplied. Every value that a template prints is therefore cleaned of
control characters and escaped. Only this module and :mod:`gspo_hpc.report.svg` declare text to be markup.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, TemplateNotFound
from markupsafe import Markup

from gspo_hpc.config.paths import PACKAGE

TEMPLATES = PACKAGE / "report" / "templates"
ASSETS = PACKAGE / "report" / "assets"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def render(name: str, **values: Any) -> str:
    """Return the text of a template, filled in with the given values.

    Raises FileNotFoundError if a template is missing, which only an incomplete installation can cause.
    """
    try:
        return _environment().get_template(name).render(values)
    except TemplateNotFound as error:
        path = TEMPLATES / (error.name or name)
        raise FileNotFoundError(
            f"{path} is missing: this installation of gspo_hpc is incomplete; install it again"
        ) from None


def asset(name: str) -> Markup:
    """Return a style sheet or script of this package, to be inlined as it is."""
    return Markup((ASSETS / name).read_text("utf-8"))  # our own file: escaping would break it


def printable(value: Any) -> Any:
    """Return a string with visible symbols in place of control characters, always encodable as UTF-8.

    Markup, and whatever is no string, is returned unchanged. Jinja2 calls this for every value that a template prints,
    before it escapes the value.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else "\ufffd", whole)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        finalize=printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _template(name: str) -> str | None:
    """Return the source of a template; None if there is none."""
    path = TEMPLATES / name
    return path.read_text(encoding="utf-8") if path.is_file() else None
