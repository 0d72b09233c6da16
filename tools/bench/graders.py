"""A reward for measuring speed alone: `tools/bench/graders.py:random_reward`."""

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
    """In [0, 1], by the text alone: the same completions get the same rewards."""
    return zlib.crc32(completion.encode()) / 0xFFFFFFFF
