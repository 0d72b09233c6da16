"""Hand in a Slurm job that evaluates a checkpoint, at a low priority (:mod:`evaluation_job`)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace, run_name
from gspo_hpc.launch import preflight
from gspo_hpc.launch.slurm import batch_step, commands, srun
from gspo_hpc.launch.slurm.evaluation_job import ORDER, Order
from gspo_hpc.launch.slurm.submit import PATIENCE, comment_of, hand_in, make_executor, undone
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import new_job_folder, record_job
from gspo_hpc.system.files import make_private_dir, remove_tree, write_atomically, write_json

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
        cluster=replace(config.cluster, nodes=1, gpus_per_node=1, generation_nodes=0),
        rollout=replace(
            config.rollout, mode="colocate", max_staleness=0, tensor_parallel_size=1, engines_per_node=None
        ),
        slurm=replace(slurm, sbatch={"nice": _NICE, **slurm.sbatch}),
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
        snapshot.take(folder / srun.CODE, config)  # with the user's own graders
        write_atomically(folder / "config.yaml", loader.dump(config))
        write_json(folder / ORDER, asdict(order))
        comment = comment_of(config, f"gspo_hpc_eval:{secrets.token_hex(8)}")
        executor = make_executor(config, folder, comment)
        command = _command(config, order, folder)
        job_id = hand_in(lambda: executor.hand_in_script(command), folder, comment)
    record_job(folder, job_id, comment)
    return job_id, folder


def _command(config: Config, order: Order, folder: Path) -> str:
    outside = replace(config, slurm=replace(config.slurm, container=None))  # it enters the container itself
    return batch_step.command(outside, _MODULE, folder, Path(order.target).resolve())
