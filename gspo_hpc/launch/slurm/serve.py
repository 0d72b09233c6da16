"""Hand in a Slurm job that serves a checkpoint or a model with vLLM's own server (:mod:`server_job`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace, run_name
from gspo_hpc.launch import preflight
from gspo_hpc.launch.slurm import batch_step
from gspo_hpc.launch.slurm.server_job import KEY, ORDER, Order, gpus_of
from gspo_hpc.runs.directory import RunDir

_MODULE = "gspo_hpc.launch.slurm.server_job"


def config_of(order: Order, overrides: Sequence[str]) -> Config:
    """Return the config by which the job is asked for: one node, with the GPUs of one server.

    It is that of the run, or the defaults for the folder of a model, with `overrides`. Raises ValueError for a mistake.
    """
    config = RunDir(order.target).load_config(overrides=overrides) if order.is_run else loader.load(None, overrides)
    folder = (
        Path(order.target).resolve() / "served" if order.is_run else Path("served").resolve() / run_name(order.name)
    )
    gpus = gpus_of(order.options, config.rollout.tensor_parallel_size if order.is_run else 1)
    config = replace(
        config,
        run=replace(config.run, name=run_name(f"serve_{order.name}"), dir=str(folder)),
        cluster=replace(config.cluster, nodes=1, gpus_per_node=gpus, generation_nodes=0, generation_gpus_per_node=None),
        rollout=replace(config.rollout, mode="colocate", tensor_parallel_size=gpus, engines_per_node=None),
        slurm=replace(config.slurm, requeue=False),
    )
    preflight.refuse(config, [preflight.path_in_script])
    return config


def script(config: Config, order: Order) -> str:
    """Return the batch script. Writes nothing and asks Slurm nothing."""
    return batch_step.script(config, lambda folder: _command(config, order, folder))


def submit(config: Config, order: Order) -> tuple[str, Path]:
    """Hand the job in, without anything of a user's own runs; see :func:`batch_step.submit`."""
    return batch_step.submit(config, lambda folder: _command(config, order, folder), (ORDER, asdict(order)), "serve")


def _command(config: Config, order: Order, folder: Path) -> str:
    return batch_step.command(config, _MODULE, folder, Path(order.target).resolve(), [KEY])
