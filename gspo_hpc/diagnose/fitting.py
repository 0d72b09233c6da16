"""Settings that make a run fit its GPUs: tried with the estimate of memory before they are offered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.system.text import gib

_CAPACITY = re.compile(r"total capacity of ([0-9.]+) GiB")  # in torch's error


def lighter(run: Evidence, settings: Sequence[str], error: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return settings with which the passes take less memory, and a sentence about the first of them.

    Those with which everything fits come first, then those that save most. Of several values of a key it is the first
    with which it does. Without an estimate, because neither the config nor the `error` tells how large a GPU is, or the
    model is not known, they are the first value of each key, in their order.
    """
    card = _card(run, error)
    before = _plan(run, card)
    chosen: dict[str, str] = {}
    estimates: dict[str, tuple[bool, int]] = {}  # by setting: too large, bytes of the largest pass
    for text in settings:
        key = text.partition("=")[0]
        after = _plan(run, [*card, text])
        if before is None or before.memory is None or after is None or after.memory is None:
            chosen.setdefault(key, text)
            continue
        busiest = after.memory.busiest.reserved
        if busiest >= before.memory.busiest.reserved:
            continue
        estimates[text] = (after.memory.headroom < 0 or not after.valid, busiest)
        if key not in chosen or estimates.get(chosen[key], (False, 0))[0]:  # the one before is too large
            chosen[key] = text
    known = [text for text in chosen.values() if text in estimates]
    fitting = [text for text in known if not estimates[text][0]]
    others = sorted((text for text in known if estimates[text][0]), key=lambda text: estimates[text][1])
    found = [*fitting, *others, *(text for text in chosen.values() if text not in estimates)]
    if not found or found[0] not in estimates or before is None or before.memory is None:
        return tuple(found), ()
    now = f"{gib(before.memory.busiest.reserved)} of {gib(before.memory.card)} in the largest pass"
    told = f"estimated memory of a GPU: {now}, {gib(estimates[found[0]][1])} with {found[0]}"
    together = None if fitting else _plan(run, [*card, *known])
    if together is not None and together.memory is not None:
        told += f"; none of the settings is enough alone, all of them take {gib(together.memory.busiest.reserved)}"
    return tuple(found), (told,)


def _card(run: Evidence, error: str) -> list[str]:
    """Return the setting that tells how large a GPU is, if only the error does."""
    cluster, found = run.config.cluster, _CAPACITY.search(error)
    known = cluster.gpu is not None or cluster.gpu_memory_gb is not None
    return [] if known or found is None else [f"cluster.gpu_memory_gb={float(found[1]):.0f}"]


def _plan(run: Evidence, settings: Sequence[str]) -> Plan | None:
    """Return the plan with these settings; None where one of them is not valid."""
    try:
        return make_plan(run.with_settings(*settings))
    except ValueError:
        return None
