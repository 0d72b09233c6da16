"""A grader for the tests of this tier."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from gspo_hpc.rewards.builtin import number_match


def slow(completion: str, *, prompt: str, fields: Mapping[str, Any]) -> float:
    """number_match, after the seconds of $GSPO_HPC_TEST_GRADER_SECONDS: makes a rollout last long enough to be hit."""
    time.sleep(float(os.environ.get("GSPO_HPC_TEST_GRADER_SECONDS", "0")))
    return number_match(completion, prompt=prompt, fields=fields)
