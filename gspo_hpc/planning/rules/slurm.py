"""Rules of what a job asks Slurm for, so that no one learns of them only when a job is submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import auto

from gspo_hpc.config.derived import busy_processes
from gspo_hpc.config.section import is_sbatch_option
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule


class SlurmRule(RuleId):
    """Names of the rules in this file."""

    CPUS_PER_TASK_SUFFICE = auto()
    SIGNAL_LEAVES_TIME = auto()
    SBATCH_OPTIONS_ARE_FREE = auto()
    GENERATION_OPTIONS_NEED_NODES = auto()
    GENERATION_GRES_IS_GIVEN = auto()
    SLURM_ENVIRONMENT_IS_PLAIN = auto()


_OWN_OPTIONS = {  # options of sbatch that other keys of the config set, or that this package needs
    *("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "signal", "requeue", "open-mode", "array"),
    *("partition", "account", "qos", "time", "constraint", "reservation", "exclude", "nodelist", "exclusive", "mem"),
    *("cpus-per-task", "gres", "gpus-per-node", "mail-user", "mail-type", "comment", "wrap", "export-file"),
}
# What nodes that generate may have otherwise, with the settings of `slurm` that they have in common with the others.
_OF_GENERATION = {"account", "qos", "reservation", "exclude", "nodelist", "mem"}


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


@rule(SlurmRule.SIGNAL_LEAVES_TIME, "a job has time before `slurm.signal_seconds` before its end", estimable=True)
def _signal(plan: PlanBuilder) -> Iterator[str]:
    """Yield a message for a job that begins with its signal: it would save, be requeued and never make a step."""
    slurm = plan.config.slurm
    if slurm.signal_seconds >= slurm.time_minutes * 60:
        yield (
            f"slurm.signal_seconds ({slurm.signal_seconds}) must be below the {slurm.time_minutes * 60} seconds of "
            f"slurm.time_minutes ({slurm.time_minutes}): the run stops and saves so long before the end of a job"
        )


@rule(
    SlurmRule.SBATCH_OPTIONS_ARE_FREE,
    "`slurm.sbatch` gives options of sbatch that no other setting decides",
    estimable=True,
)
def _options(plan: PlanBuilder) -> Iterator[str]:
    slurm = plan.config.slurm
    for key, given, taken in (
        ("sbatch", slurm.sbatch, _OWN_OPTIONS),
        ("generation_sbatch", slurm.generation_sbatch, _OWN_OPTIONS - _OF_GENERATION),
    ):
        if own := sorted({name.lstrip("-") for name in given} & taken):
            are = "is" if len(own) == 1 else "are"
            yield f"slurm.{key}: {', '.join(own)} {are} set by other keys of the sections slurm, cluster and run"
        for name, value in given.items():
            if name not in taken and not is_sbatch_option(name, value):
                yield f"slurm.{key}: {name!r}: {value!r} cannot be an option of sbatch"


@rule(
    SlurmRule.GENERATION_OPTIONS_NEED_NODES,
    "`slurm.generation_*` needs `cluster.generation_nodes`",
    estimable=True,
)
def _component(plan: PlanBuilder) -> Iterator[str]:
    slurm, cluster = plan.config.slurm, plan.config.cluster
    names = ("partition", "constraint", "gres", "sbatch")
    given = [f"slurm.generation_{name}" for name in names if getattr(slurm, f"generation_{name}")]
    if given and not cluster.generation_nodes:
        need = "needs" if len(given) == 1 else "need"
        yield f"{' and '.join(given)} {need} cluster.generation_nodes, for which these options are"


@rule(
    SlurmRule.GENERATION_GRES_IS_GIVEN,
    "`slurm.gres` needs `slurm.generation_gres` where `cluster.generation_gpus_per_node` is another number",
    estimable=True,
)
def _gres(plan: PlanBuilder) -> Iterator[str]:
    slurm, cluster = plan.config.slurm, plan.config.cluster
    other = cluster.generation_gpus_per_node
    if slurm.gres and not slurm.generation_gres and other not in (None, cluster.gpus_per_node):
        yield (
            f"slurm.gres ({slurm.gres}) is for nodes of cluster.gpus_per_node ({cluster.gpus_per_node}), and "
            f"cluster.generation_gpus_per_node is {other}: give slurm.generation_gres"
        )


@rule(
    SlurmRule.SLURM_ENVIRONMENT_IS_PLAIN,
    "`slurm.environment` has names of variables, and no secret",
    estimable=True,
)
def _environment(plan: PlanBuilder) -> Iterator[str]:
    for name in plan.config.slurm.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"slurm.environment: {name!r} cannot be the name of a variable"
        elif re.search(r"key|token|secret|password", name, re.IGNORECASE):
            yield (
                f"slurm.environment: {name} looks like a secret, and the config is kept with the run: set the variable "
                "in the shell that submits"
            )
