"""Plans, and runs on this machine or as Slurm jobs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_hpc.api.run import Run, open_run
from gspo_hpc.config.schema import Config
from gspo_hpc.system.exit_codes import DONE, REQUEUE
from gspo_hpc.system.terminal import pasteable

if TYPE_CHECKING:
    from gspo_hpc.planning.plan import Plan


class RunFailed(RuntimeError):
    """A run that ended with a failure; `path` is its directory, whose logs tell more."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail or 'failed'} ({pasteable('gspo-hpc logs RUN', path)} --errors)")
        self.path = path


def plan(config: Config, *, rows: int | None = None) -> Plan:
    """Plan a run: sizes, broken rules, layout and memory. Nothing is started, and no GPU is needed.

    Args:
        config: A config, or the part of one that is known.
        rows: The number of prompts in the training data, if it is to be checked.

    Returns:
        The plan. ``plan.valid`` tells whether all rules hold, ``plan.broken`` names those that do not, and
        ``plan.quantities`` has the sizes by name.

    Raises:
        ValueError: A file that says what the model is cannot be read.

    Example:
        >>> found = gspo_hpc.plan(gspo_hpc.load_config("tiny_cpu", "cluster.gpus_per_node=3"))
        >>> found.valid, [str(one.rule) for one in found.broken]
        (False, ['rollout_prompts_divide_over_dp'])
        >>> gspo_hpc.plan(gspo_hpc.load_config("tiny_cpu")).quantities["num_rollout_prompts"]
        32
    """
    from gspo_hpc.planning.plan import make_plan

    return make_plan(config, rows)


def train(config: Config) -> Run:
    """Train on this machine, and wait for the end. Where the run directory exists, its run is resumed.

    Call it in the main thread. An interrupt (Ctrl-C) saves and stops the run.

    Args:
        config: The config of the run.

    Returns:
        The run. Its `state` is "done", or "stopped" if it was interrupted.

    Raises:
        ValueError: The config, the data, the model or a reward function cannot be used; nothing was started.
        RunFailed: The run was started and failed.

    Example:
        >>> run = gspo_hpc.train(gspo_hpc.load_config("tiny_cpu", "run.max_steps=4"))  # doctest: +SKIP
        >>> run.metrics()[-1]["reward"]  # doctest: +SKIP
        0.25
    """
    from gspo_hpc.doctor.node import obstacles
    from gspo_hpc.launch import local

    if threading.current_thread() is not threading.main_thread():
        raise ValueError("train() handles signals, which Python gives to the main thread only: call it there")
    code = local.train(config, checks=[obstacles])
    run = open_run(config.run_dir)
    if code in (DONE, REQUEUE):
        return run
    raise RunFailed(run.path, run.failure)


def submit(config: Config) -> str:
    """Submit a run as a Slurm job, new or to be resumed. It needs submitit and Slurm's commands.

    Args:
        config: The config of the run. A copy of this package and of the code of your own that the config names is
            made for the job.

    Returns:
        Slurm's id of the job.

    Raises:
        ValueError: The run cannot work as it is, is running or waiting already, or belongs to another config.
        RuntimeError: Slurm does not take the job.

    Example:
        >>> gspo_hpc.submit(gspo_hpc.load_config("qwen2.5_7b_tp2", "slurm.partition=gpu"))  # doctest: +SKIP
        '4711'
    """
    from gspo_hpc.doctor.node import no_space
    from gspo_hpc.launch.slurm import submit as slurm

    return slurm.submit(config, checks=[no_space])
