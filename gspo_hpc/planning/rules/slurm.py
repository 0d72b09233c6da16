"""Rules of what a job asks Slurm for."""

from __future__ import annotations

from collections.abc import Iterator
from enum import auto

from gspo_hpc.config.derived import busy_processes
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule


class SlurmRule(RuleId):
    """Names of the rules in this file."""

    CPUS_PER_TASK_SUFFICE = auto()


@rule(
    SlurmRule.CPUS_PER_TASK_SUFFICE,
    "on GPUs, `slurm.cpus_per_task` gives each process of a rank that has an engine a core",
    estimable=True,
)
def _cores(plan: PlanBuilder) -> Iterator[str]:
    slurm, busy = plan.config.slurm, busy_processes(plan.config)
    if plan.config.cluster.platform != "cuda" or slurm.cpus_per_task is None:
        return
    if any(word.startswith("--cpu-bind=none") for word in slurm.srun):  # ranks share the cores of their node
        return
    if slurm.cpus_per_task < busy.total:
        yield (
            f"slurm.cpus_per_task ({slurm.cpus_per_task}) must be at least {busy.total}: {busy} are busy at the same "
            f"time, and Slurm binds them to these cores; reward.workers is {plan.config.reward.workers}"
        )
