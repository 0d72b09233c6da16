"""A grader for the tests of this tier."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from typing import Any

from gspo_hpc.rewards.functions import number_match


def slow(completion: str, *, prompt: str, fields: Mapping[str, Any]) -> float:
    """number_match, after the seconds of $GSPO_HPC_TEST_GRADER_SECONDS: makes a rollout last long enough to be hit.

    Rewards of the prompt $GSPO_HPC_TEST_HUGE are numbers, but ones that no gradient survives.
    """
    time.sleep(float(os.environ.get("GSPO_HPC_TEST_GRADER_SECONDS", "0")))
    if prompt == os.environ.get("GSPO_HPC_TEST_HUGE"):
        return 3e38 * (zlib.crc32(completion.encode()) % 2)  # near the end of float32: the loss is beyond it
    return number_match(completion, prompt=prompt, fields=fields)
