"""Hand in a Slurm job that serves a checkpoint or a model with vLLM's own server (:mod:`server_job`)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace, run_name
from gspo_hpc.launch import preflight
from gspo_hpc.launch.slurm import batch_step, commands, srun
from gspo_hpc.launch.slurm.compat import Executor
from gspo_hpc.launch.slurm.server_job import KEY, ORDER, Order, gpus_of
from gspo_hpc.launch.slurm.submit import PATIENCE, comment_of, hand_in, make_executor, undone
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import new_job_folder, record_job
from gspo_hpc.system.files import make_private_dir, remove_tree, write_atomically, write_json

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
        cluster=replace(config.cluster, nodes=1, gpus_per_node=gpus, generation_nodes=0),
        rollout=replace(config.rollout, mode="colocate", tensor_parallel_size=gpus, engines_per_node=None),
        slurm=replace(config.slurm, requeue=False),
    )
    preflight.refuse(config, [preflight.path_in_script])
    return config


def script(config: Config, order: Order) -> str:
    """Return the batch script. Writes nothing and asks Slurm nothing."""
    folder = Path(config.run_dir) / "jobs" / "NNNN"
    return make_executor(config, folder).script(_command(config, order, folder))


def submit(config: Config, order: Order) -> tuple[str, Path]:
    """Hand the job in; return Slurm's id of it and its folder. Raises SlurmError if Slurm does not take it."""
    commands.own_jobs(PATIENCE)  # before anything is written: Slurm must answer
    make_private_dir(Path(config.run_dir))
    folder = new_job_folder(Path(config.run_dir))
    with undone(lambda: remove_tree(folder)):
        snapshot.take(folder / srun.CODE)  # nothing of a user's own runs
        write_atomically(folder / "config.yaml", loader.dump(config))
        write_json(folder / ORDER, asdict(order))
        comment = comment_of(config, f"gspo_hpc_serve:{secrets.token_hex(8)}")
        executor: Executor = make_executor(config, folder, comment)
        command = _command(config, order, folder)
        job_id = hand_in(lambda: executor.hand_in_script(command), folder, comment)
    record_job(folder, job_id, comment)
    return job_id, folder


def _command(config: Config, order: Order, folder: Path) -> str:
    return batch_step.command(config, _MODULE, folder, Path(order.target).resolve(), [KEY])
