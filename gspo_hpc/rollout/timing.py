"""The time that engines take for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TAIL = 0.1  # of the completions that ran at once: with fewer, an engine has too little to do


@dataclass
class EngineTime:
    """The work of one engine in a rollout, in seconds of wall time in its steps, restarts included."""

    busy: float = 0.0
    tail: float = 0.0  # of these, with at most a tenth as many completions running as at its fullest
    tokens: int = 0  # of finished completions
    fullest: int = 0  # completions running at once

    def add(self, seconds: float, running: int) -> None:
        """Add a step, at whose start `running` completions ran."""
        self.busy += seconds
        self.fullest = max(self.fullest, running)
        self.tail += seconds if 0 < running <= _TAIL * self.fullest else 0.0


def engine_metrics(engines: Sequence[EngineTime]) -> dict[str, float]:
    """Return the logged metrics of a rollout's engines; empty if none had anything to do."""
    used = [engine for engine in engines if engine.busy > 0.0]
    if not used:
        return {}
    speeds = [engine.tokens / engine.busy for engine in used]
    return {
        "seconds/engine_least": min(engine.busy for engine in engines),
        "seconds/engine_most": max(engine.busy for engine in engines),
        "seconds/generate_tail": max(engine.tail for engine in used),
        "engine_tokens_per_s_least": min(speeds),
        "engine_tokens_per_s_most": max(speeds),
    }
