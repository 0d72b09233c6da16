"""Random rewards, for measurements of speed alone: `tools/bench/graders.py:random_reward`."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

_SOURCE = random.SystemRandom()  # grader processes that were forked from one another must not repeat each other


def random_reward(completion: str, *, prompt: str, fields: Mapping[str, Any]) -> float:
    """Uniform in [0, 1), whatever the answer is: no group has equal rewards, so no completion has advantage zero."""
    return _SOURCE.random()


def text_reward(completion: str, *, prompt: str, fields: Mapping[str, Any]) -> float:
    """Return a reward in [0, 1] that depends on the text alone: equal completions get equal rewards."""
    return zlib.crc32(completion.encode()) / 0xFFFFFFFF
