"""Tell from what ranks reported, and when, that an attempt will not end by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gspo_hpc.config.derived import bringup_seconds
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.failures import Failure, first_failure
from gspo_hpc.system.control import RankState
from gspo_hpc.system.progress import LIMITED, STARTED, WAITS

LINGER = 10.0  # seconds that a step may take to end once a rank has failed
COLD = 300.0  # seconds without a heartbeat while libraries are imported: a slow disk holds the interpreter's lock


def problem(
    ranks: Mapping[int, RankState], config: Config, now: float, began: float, node_of: Callable[[int], str]
) -> str | None:
    """Return why the process that watches an attempt must end it, or None.

    Times are on its monotonic clock; `began`: when the ranks were started; `node_of`: returns the node of a rank, also
    of one that has not reported.
    """
    limit = bringup_seconds(config)
    if now - began > limit and len(ranks) < config.num_ranks:
        missing = sorted(set(range(config.num_ranks)) - set(ranks))
        where = ", ".join(f"rank {rank} on {node_of(rank)}" for rank in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return f"not up within {limit:.0f} s: {where}{more} (faults.bringup_timeout)"
    gone = [state for state in ranks.values() if state.lost or state.outcome in ("failed", "refused")]
    if any(now - state.ended_at > LINGER for state in gone):
        return _first_gone(ranks, gone)
    live = [state for state in ranks.values() if state.outcome is None and not state.lost]
    limit = config.faults.hang_timeout
    # A rank that ended a moment ago was waited for, too.
    settled = len(ranks) == config.num_ranks and all(
        now - state.ended_at > limit for state in ranks.values() if state.outcome is not None or state.lost
    )
    return _silent(live, config.faults.heartbeat_timeout, now) or _hanging(live, limit, now, settled=settled)


def _first_gone(ranks: Mapping[int, RankState], gone: Sequence[RankState]) -> str:
    failures = (Failure(s.rank, s.detail, killed=s.lost, at=s.ended_at) for s in gone)
    first = ranks[first_failure(failures).rank]
    name = f"rank {first.rank} on {first.node}"
    return f"{name} has gone and its step has not" if first.lost else f"{name}: {first.detail}"


def _silent(live: Sequence[RankState], limit: float, now: float) -> str | None:
    for state in live:
        cold = state.phase == STARTED or state.excuse == LIMITED
        seconds = max(COLD, limit) if cold else limit
        if now - state.heard_at > seconds:
            key = "" if seconds > limit else " (faults.heartbeat_timeout)"
            return f"rank {state.rank} on {state.node} has not been heard of for {seconds:.0f} s{key}"
    return None


def _hanging(live: Sequence[RankState], limit: float, now: float, *, settled: bool) -> str | None:
    """Return which rank hangs: one that says that it works, or the first if all have waited for each other so long.

    `settled`: all ranks have reported, and none has ended lately; else they wait, or waited, for that one. A rank that
    worked until a moment ago may wait now, while the others' last reports are from the time when they waited for it.
    """
    deadlock = settled and all(state.excuse == WAITS and now - state.moved_at > limit for state in live)
    for state in live:
        if now - state.moved_at > limit and (state.excuse is None or deadlock):
            return f"rank {state.rank} on {state.node} hangs in '{state.phase}' for {limit:.0f} s (faults.hang_timeout)"
    return None
