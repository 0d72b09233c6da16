"""Keep secrets out of what is shown or sent elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
_SECRET = re.compile(
    r"(?:^|[_\-.])(?:token|secret|password|passwd|credentials?|api_?key|access_?key|private_?key)$", re.IGNORECASE
)


def redact(value: Any) -> Any:
    """Return a copy of nested mappings and lists in which the text under every key that names a secret is replaced.

    Numbers stay: `micro_batch_tokens` and the like are counts, not secrets.
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(inner, str) and _SECRET.search(str(key)) else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact(inner) for inner in value]
    return value
