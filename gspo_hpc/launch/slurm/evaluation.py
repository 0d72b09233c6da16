"""Hand in a Slurm job that evaluates a checkpoint, at a low priority (:mod:`evaluation_job`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace, run_name
from gspo_hpc.launch import preflight
from gspo_hpc.launch.slurm import batch_step
from gspo_hpc.launch.slurm.evaluation_job import ORDER, Order
from gspo_hpc.runs.directory import RunDir

_MODULE = "gspo_hpc.launch.slurm.evaluation_job"
_NICE = 1000  # sbatch --nice: other jobs of the same priority go first


def config_of(order: Order, overrides: Sequence[str]) -> Config:
    """Return the config by which the job is asked for: one rank with one engine, on one node.

    It is that of the run, of the config, or the defaults for the folder of a model, with `overrides`. Raises ValueError
    for a mistake.
    """
    target = Path(order.target)
    if order.is_run:
        config = RunDir(target).load_config(overrides=overrides)
    else:
        config = loader.load(None if target.is_dir() else target, overrides)
    folder = target / "evaluations" if order.is_run else Path(f"{order.out}.jobs").resolve()
    slurm = config.slurm
    config = replace(
        config,
        run=replace(config.run, name=run_name(f"eval_{target.name.removesuffix('.yaml')}"), dir=str(folder)),
        cluster=replace(config.cluster, nodes=1, gpus_per_node=1, generation_nodes=0, generation_gpus_per_node=None),
        rollout=replace(
            config.rollout, mode="colocate", max_staleness=0, tensor_parallel_size=1, engines_per_node=None
        ),
        slurm=replace(slurm, sbatch={"nice": _NICE, **slurm.sbatch}),
    )
    preflight.refuse(config, [preflight.path_in_script])
    return config


def script(config: Config, order: Order) -> str:
    """Return the batch script. Writes nothing and asks Slurm nothing."""
    return batch_step.script(config, lambda folder: _command(config, order, folder))


def submit(config: Config, order: Order) -> tuple[str, Path]:
    """Hand the job in, with the user's own graders; see :func:`batch_step.submit`."""
    return batch_step.submit(
        config, lambda folder: _command(config, order, folder), (ORDER, asdict(order)), "eval", config
    )


def _command(config: Config, order: Order, folder: Path) -> str:
    outside = replace(config, slurm=replace(config.slurm, container=None))  # it enters the container itself
    return batch_step.command(outside, _MODULE, folder, Path(order.target).resolve())
