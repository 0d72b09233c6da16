"""Jobs of a run beside those that train it: they serve its checkpoints, or evaluate them.

Slurm need not answer: then there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gspo_hpc.launch.slurm.commands import SlurmError


class FurtherJob(Protocol):
    """A job of one of both kinds."""

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields as plain values."""


def serving(run: Path) -> list[dict[str, Any]]:
    """Return the jobs that serve a checkpoint of a run now, or wait to do so."""
    if not (run / "served" / "jobs").is_dir():
        return []
    from gspo_hpc.launch.slurm import server_job  # only here: most runs are not served

    return _told(lambda: server_job.served(run))


def evaluating(run: Path) -> list[dict[str, Any]]:
    """Return the jobs that evaluate a checkpoint of a run now, or wait to do so."""
    if not (run / "evaluations" / "jobs").is_dir():
        return []
    from gspo_hpc.launch.slurm import evaluation_job  # only here: most runs have none

    return _told(lambda: evaluation_job.evaluating(run))


def _told(jobs: Callable[[], Iterable[FurtherJob]]) -> list[dict[str, Any]]:
    with contextlib.suppress(SlurmError, ValueError, OSError, KeyError, TypeError):
        return [dict(one.to_json()) for one in jobs()]
    return []
