"""A job that is no run, but one process: a module of this package, which the folder of the job tells what to do."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands, srun
from gspo_hpc.launch.slurm.submit import PATIENCE, comment_of, hand_in, make_executor, undone
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.jobs import new_job_folder, record_job
from gspo_hpc.system.files import make_private_dir, remove_tree, write_atomically, write_json

Step = Callable[[Path], str]  # the command of the batch step by the folder of the job


def command(config: Config, module: str, folder: Path, seen: Path, names: Sequence[str] = ()) -> str:
    """Return the command of the batch step; in a container, it is started there by srun.

    `seen`: the directory that it works on; `names`: variables of the shell that submits which must reach it.
    """
    box, code = config.slurm.container, folder / srun.CODE
    if box is None:
        python = config.slurm.python or sys.executable
        return shlex.join([python, "-u", "-P", "-m", module, str(folder)])
    own = [*srun.environment(config, code), *names]
    inside = srun.in_container(box, config.cluster.platform == "cuda", seen, code, own)
    step = ["srun", "--nodes=1", "--ntasks=1", "--export=ALL", *config.slurm.srun]
    return shlex.join([*step, *inside, box.python, "-u", "-P", "-m", module, str(folder)])


def script(config: Config, step: Step) -> str:
    """Return the batch script. Writes nothing and asks Slurm nothing."""
    folder = Path(config.run_dir) / "jobs" / "NNNN"
    return make_executor(config, folder).script(step(folder))


def submit(
    config: Config, step: Step, order: tuple[str, Mapping[str, Any]], kind: str, *code_of: Config
) -> tuple[str, Path]:
    """Hand the job in; return Slurm's id of it and its folder. Raises SlurmError if Slurm does not take it.

    `order`: the file of the folder that tells the step what to do, and what that holds. `kind` is part of the comment
    by which Slurm finds the job. The submitted code has the user's own files that `code_of` name.
    """
    commands.own_jobs(PATIENCE)  # before anything is written: Slurm must answer
    make_private_dir(Path(config.run_dir))
    folder = new_job_folder(Path(config.run_dir))
    with undone(lambda: remove_tree(folder)):
        snapshot.take(folder / srun.CODE, *code_of)
        write_atomically(folder / "config.yaml", loader.dump(config))
        write_json(folder / order[0], order[1])
        comment = comment_of(config, f"gspo_hpc_{kind}:{secrets.token_hex(8)}")
        executor, line = make_executor(config, folder, comment), step(folder)
        job_id = hand_in(lambda: executor.hand_in_script(line), folder, comment)
    record_job(folder, job_id, comment)
    return job_id, folder
