"""Repairs of plans with several independent faults, for which no change of one or two settings is enough.

Rules are repaired one after another: each change is the nearest of those that leave the fewest rules broken.
"""

from __future__ import annotations

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes.search import Change, Fix, Search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import with_value

_LONGEST = 8  # changes of one repair


def find(config: Config, rows: int | None = None) -> Fix | None:
    """Return a fix of several settings, or one after which as few rules as possible are broken (its `left`).

    None if no change leaves fewer rules broken, and for a valid plan. `rows` is that of make_plan.
    """
    changes: dict[str, Change] = {}
    now, plan = config, make_plan(config, rows)
    while not plan.valid and len(changes) < _LONGEST:
        search = Search(now, rows, plan)
        singles = search.singles()
        together = next((fix.changes for fix in singles or search.layout()), ())
        if not together and (best := search.best_first()) is not None:
            together = (best,)
        if not together:
            break
        for change in together:
            before = changes[change.key].before if change.key in changes else change.before
            changes[change.key] = Change(change.key, before, change.value)
            now = with_value(now, change.key, change.value)
        plan = make_plan(now, rows)
    if not changes:
        return None
    return Fix(tuple(changes.values()), left=tuple(dict.fromkeys(item.rule for item in plan.broken)))
