"""YAML as text: values read from it and written to it.

Only this room imports PyYAML, and only its safe loaders: no text makes an object of a class. Every mistake in a text is
a ValueError of one line here, where PyYAML has errors of its own beside those of dates and of recursion.
"""

from __future__ import annotations

from typing import Any

import yaml


def read(text: str) -> Any:
    """Return the value that a text holds.

    Raises ValueError, with the line where it is known, for a text that is not valid YAML or nested too deeply.
    """
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.problem == "but found another document":
            raise ValueError(
                f"line {mark.line + 1 if mark else 1}: it holds several YAML documents: leave one"
            ) from None
        raise ValueError(f"line {mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ValueError("not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())[:200]}") from None


def read_shipped(text: str) -> Any:
    """Return the value of a text that comes with this package: faster where PyYAML was built with libyaml.

    libyaml does not count how deeply a text is nested, so a stranger's could end the process.
    """
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def write_line(value: Any) -> str:
    """Return a value as one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...").strip()
