"""The starts of the ranks that generate, of which one attempt may have several: the store has keys for each of them.

Whoever starts these ranks again tells them, in a variable, why each start before was ended; so they know their number.
Once their engines are up, the first of them tells training rank 0, through the store of the job.
"""

from __future__ import annotations

import json
import os

import torch.distributed as dist

from gspo_hpc.system.environment import GENERATOR_DEATHS

_ENDED = "generators/ended"  # key of why earlier starts were ended


def keys_of(job_store: dist.Store, number: int) -> dist.Store:
    """Return the part of a job's store that only start `number` uses; the first start has no names of its own."""
    return job_store if number == 1 else dist.PrefixStore(f"generators/{number}", job_store)


def own_keys(job_store: dist.Store) -> dist.Store:
    """Return that part for this rank, which is the whole store for one that trains."""
    return keys_of(job_store, 1 + len(own_deaths()))


def own_deaths() -> list[str]:
    """Return why the starts before this rank's were ended."""
    found: list[str] = json.loads(os.environ.get(GENERATOR_DEATHS, "[]"))
    return found


def announce(own: dist.Store) -> None:
    """Tell training rank 0 of this start, whose part of the store is `own`, unless it is the first one."""
    if deaths := own_deaths():
        assert isinstance(own, dist.PrefixStore)
        own.underlying_store.set(_ENDED, json.dumps(deaths))


def ended(job_store: dist.Store) -> list[str]:
    """Return why all starts before the newest that was announced were ended."""
    found: list[str] = json.loads(job_store.get(_ENDED)) if job_store.check([_ENDED]) else []
    return found
