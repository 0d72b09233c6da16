"""The time that engines take for a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TAIL = 0.1  # of the completions that ran at once: with fewer, an engine has too little to do


@dataclass
class EngineTime:
    """The work of one engine in a rollout, in seconds of wall time in its steps, restarts included."""

    busy: float = 0.0
    tail: float = 0.0  # of these, with at most a tenth as many completions running as at its fullest
    tokens: int = 0  # of finished completions
    fullest: int = 0  # completions running at once
    environment: float | None = None  # seconds beside these, in which only an environment or tools were waited for

    def add(self, seconds: float, running: int, *, waited: float | None = None) -> None:
        """Add a step, at whose start `running` completions ran.

        `waited`: seconds of it in which only an environment or tools were waited for; None where there are none.
        """
        if waited is not None:
            self.environment = (self.environment or 0.0) + waited
            seconds -= waited
        self.busy += seconds
        self.fullest = max(self.fullest, running)
        self.tail += seconds if 0 < running <= _TAIL * self.fullest else 0.0


def engine_extremes(engine: EngineTime | None) -> list[float]:
    """Return numbers of this rank's engine whose largest over all ranks :func:`engine_metrics` reads; None: no engine.

    They are a few, so that their cost does not grow with the number of engines.
    """
    none = -math.inf
    if engine is None:
        return [none] * 6
    environment = none if engine.environment is None else engine.environment
    if engine.busy == 0.0:
        return [0.0, 0.0, none, none, none, environment]
    speed = engine.tokens / engine.busy
    return [engine.busy, -engine.busy, engine.tail, speed, -speed, environment]


def added_up(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of engines of several calls of generation as those of one.

    Speeds are means over the time of the calls: one engine is no slower than another because it had little to do in a
    call, in which each completion takes as long as in a full one.
    """
    rounds = [metrics for metrics in rounds if metrics]  # an empty one had nothing to do
    busy = [metrics["seconds/engine_most"] for metrics in rounds]
    found: dict[str, float] = {}
    for name in rounds[0] if rounds else ():
        values = [metrics[name] for metrics in rounds]
        if name.startswith("seconds/"):
            found[name] = sum(values)
        else:
            found[name] = sum(map(math.prod, zip(values, busy, strict=True))) / sum(busy)
    return found


def engine_metrics(extremes: Sequence[float]) -> dict[str, float]:
    """Return the logged metrics of a rollout's engines from all ranks' extremes; empty if none had anything to do."""
    most, least, tail, fastest, slowest, environment = extremes
    if not most > 0.0:
        return {}
    waited = {} if environment == -math.inf else {"seconds/environment_wait": environment}
    return waited | {
        "seconds/engine_least": abs(least),
        "seconds/engine_most": most,
        "seconds/generate_tail": tail,
        "engine_tokens_per_s_least": abs(slowest),
        "engine_tokens_per_s_most": fastest,
    }
