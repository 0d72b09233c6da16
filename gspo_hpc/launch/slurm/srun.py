"""The srun command that starts the ranks of an attempt, and their environment.

The supervisor runs the command, and ``submit --dry-run`` prints the same one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.config.derived import cpus_per_task, shares_cores
from gspo_hpc.config.schema import Config, Container
from gspo_hpc.launch.slurm.components import Component, components
from gspo_hpc.runs import snapshot
from gspo_hpc.system import environment as system

# In a job folder: the submitted code; a file that asks for the end of the run.
CODE, CANCEL = "code.zip", "cancel"


def environment(config: Config, code: Path) -> dict[str, str]:
    """Return the variables that ranks get in addition to the job's. Secrets are never arguments of a command.

    `code`: the archive that they import this package from.
    """
    threads = config.cluster.threads_per_rank or cpus_per_task(config)
    return {
        **(system.no_gpus() if config.cluster.platform == "cpu" else {}),
        **config.slurm.environment,
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        **snapshot.environment(code),
        "PYTHONUNBUFFERED": "1",
    }


def command(
    config: Config, run_dir: Path, code: Path, names: Sequence[str], task: Sequence[str] | None = None
) -> list[str]:
    """Return the command with one task per rank, which have the archive `code`.

    In a heterogeneous job it is one step over all components, which counts its tasks as the layout counts ranks.
    `names`: variables that must reach ranks in a container. `task`: another module than that of a rank, with its words.
    """
    module, *words = task or ("gspo_hpc.training.worker", "train", str(run_dir))
    slurm = config.slurm
    start: list[str] = []
    python = slurm.python or sys.executable
    if slurm.container is not None:
        start = in_container(slurm.container, config.cluster.platform == "cuda", run_dir, code, names)
        python = slurm.container.python
    ranks = [*start, *system.python(module, *words, interpreter=python)]
    parts = components(config)
    if len(parts) == 1:
        return ["srun", *_options(config, parts[0]), *ranks]
    steps = [[f"--het-group={number}", *_options(config, part), *ranks] for number, part in enumerate(parts)]
    return ["srun", *steps[0], *(word for step in steps[1:] for word in (":", *step))]


def _options(config: Config, part: Component) -> list[str]:
    """Return the options of srun for the ranks of one component."""
    slurm, cluster = config.slurm, config.cluster
    words = [
        f"--nodes={part.nodes}",
        f"--ntasks={part.nodes * part.gpus}",
        f"--ntasks-per-node={part.gpus}",
        "--kill-on-bad-exit=1",
        "--distribution=block:block",  # ranks of a node are neighbours, as the layout counts them
        "--export=ALL",
    ]
    if cpus := cpus_per_task(config):
        words.append(f"--cpus-per-task={cpus}")  # srun no longer takes it over from sbatch
    if shares_cores(config):
        words.append("--cpu-bind=none")
    if cluster.platform == "cuda":
        # Every rank sees all GPUs of its node: it picks its own, and its engine shares memory with its neighbours.
        words.append(f"--gpu-bind={slurm.gpu_bind or 'none'}")
    return [*words, *slurm.srun]


def in_container(box: Container, gpus: bool, run_dir: Path, code: Path, names: Sequence[str]) -> list[str]:
    """Return the words that start what follows them in a container, with a run and its code mounted.

    `names`: variables that must reach it.
    """
    own = [run_dir] if code.is_relative_to(run_dir) else [run_dir, code.parent]  # a sweep has one archive for its runs
    mounts = [*(f"{path}:{path}" for path in own), *box.mounts]
    if box.kind == "pyxis":
        # Without this option the values of the image would hide those of the job.
        keep = f"--container-env={','.join(names)}"
        where = [f"--container-image={box.image}", f"--container-mounts={','.join(mounts)}"]
        return [*where, keep, *box.args]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, *box.args, box.image]
