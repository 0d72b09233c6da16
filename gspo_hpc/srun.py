"""The srun command that starts the ranks of an attempt, and the environment it hands on to them.

Floor 6. ``submit --dry-run`` shows the same command that the supervisor runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc import snapshot
from gspo_hpc.config import Config, Container

CODE, CANCEL = "code", "cancel"  # in a job folder: the code as it was submitted; a file that asks for the end


def environment(config: Config, job_dir: Path) -> dict[str, str]:
    """What ranks have in addition to the environment of the job. Nothing secret is ever an argument of a command."""
    threads = config.cluster.threads_per_rank or config.slurm.cpus_per_task
    return {
        **config.slurm.environment,
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        **snapshot.environment(job_dir / CODE),
        "PYTHONUNBUFFERED": "1",
    }


def command(config: Config, run_dir: Path, job_dir: Path, names: Sequence[str]) -> list[str]:
    """One task per rank. `names`: variables of the environment that must reach ranks in a container."""
    slurm, cluster = config.slurm, config.cluster
    words = [
        "srun",
        f"--nodes={cluster.nodes}",
        f"--ntasks={config.world_size}",
        f"--ntasks-per-node={cluster.gpus_per_node}",
        "--kill-on-bad-exit=1",
        "--distribution=block:block",  # ranks of a node are neighbours, as the layout counts them
        "--export=ALL",
    ]
    if slurm.cpus_per_task:
        words.append(f"--cpus-per-task={slurm.cpus_per_task}")  # which srun no longer takes over from sbatch
    if cluster.platform == "cuda":
        # Every rank sees all GPUs of its node: it picks its own, and its engine shares memory with its neighbours.
        words.append(f"--gpu-bind={slurm.gpu_bind or 'none'}")
    words += slurm.srun
    python = [slurm.python or sys.executable]
    if slurm.container is not None:
        python = _in_container(slurm.container, cluster.platform == "cuda", run_dir, names)
    return [*words, *python, "-m", "gspo_hpc.worker", "train", str(run_dir)]


def _in_container(box: Container, gpus: bool, run_dir: Path, names: Sequence[str]) -> list[str]:
    mounts = [f"{run_dir}:{run_dir}", *box.mounts]
    if box.kind == "pyxis":
        # The image's own values would go before the job's.
        keep = f"--container-env={','.join(names)}"
        where = [f"--container-image={box.image}", f"--container-mounts={','.join(mounts)}"]
        return [*where, keep, *box.args, box.python]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, *box.args, box.image, box.python]
