"""Choice of the updates of a run that moved away from what sampled, and of settings that keep them nearer to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_hpc.config.derived import old_logprobs_are_the_engines
from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.runs.reader import value


def later_updates(run: Evidence) -> list[Mapping[str, Any]]:
    """Return the recent steps whose policy was not the one that sampled: only there can a ratio be clipped.

    The first update of a rollout is one of them where ratios are to the engine's log-probs.
    """
    without = (None,) if old_logprobs_are_the_engines(run.config) else (None, 0.0)
    return [r for r in run.recent if value(r, "update") not in without and not r.get("empty")]


def newer(run: Evidence) -> list[str]:
    """Return the settings by which the weights that sample are nearer to those that are updated."""
    rollout, settings = run.config.rollout, list[str]()
    if rollout.max_staleness > 0:
        settings.append(f"rollout.max_staleness={rollout.max_staleness - 1}")
    if rollout.unfinished == "continue":
        settings.append("rollout.unfinished=wait")
    return settings
