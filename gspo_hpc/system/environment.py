"""The environment of processes that this package starts: its variables, each with its meaning, and Python itself.

The launcher, the supervisor and its batch script set them for the processes they start, except for DEBUG, which a user
sets. The shell scripts in tools/ and slurm/ have variables of their own, which their ``--help`` lists.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEBUG = "GSPO_HPC_DEBUG"  # set by a user: a refused command also prints its traceback
ATTEMPT = "GSPO_HPC_ATTEMPT"  # number of the attempt that a rank belongs to
RUN_ID = "GSPO_HPC_RUN_ID"  # id of the run that a rank of a Slurm job belongs to
MARK = "GSPO_HPC_MARK"  # RUN_ID:ATTEMPT, in every process of a run, to find what is left of an attempt
PARENT = "GSPO_HPC_PARENT"  # process id of the launcher that started this rank
CONTROL = "GSPO_HPC_CONTROL"  # HOST:PORT of the process that watches this rank
CONTROL_TOKEN = "GSPO_HPC_CONTROL_TOKEN"  # secret that opens a connection to it
STORE = "GSPO_HPC_STORE"  # descriptor of the socket that listens at MASTER_PORT, which rank 0 of a launcher inherits
CODE = "GSPO_HPC_CODE"  # archive of the package and of a user's own files that were submitted
GENERATOR_DEATHS = "GSPO_HPC_GENERATOR_DEATHS"  # JSON list, of ranks that generate: why those before were ended
ENGINE = "GSPO_HPC_ENGINE"  # random token in the processes of one engine, to find them all
ENGINE_OWNER = "GSPO_HPC_ENGINE_OWNER"  # process id of the rank that owns an engine
JOB_BEGAN = "GSPO_HPC_JOB_BEGAN"  # when the batch script of a Slurm job began, in seconds since the epoch
KILLED = "GSPO_HPC_KILLED"  # exit status of the supervisor before this one, if a signal ended it


def import_root() -> Path:
    """Return what must be on sys.path for this package: in a checkout its folder, in a submitted run its archive."""
    return Path(__file__).resolve().parents[2]


def python(module: str, *words: str, interpreter: str = sys.executable) -> list[str]:
    """Return the command that runs a module in another Python, which does not import from the current folder.

    That may be a run directory or a data set of somebody else, with a torch.py in it. Every Python that is started
    needs -P, and the processes that multiprocessing spawns inherit it.
    """
    return [interpreter, "-P", "-m", module, *words]


def importing() -> dict[str, str]:
    """Return the variable with which such a Python finds this package: none where it lies among installed ones.

    An empty entry of the user's PYTHONPATH would be the current folder.
    """
    own = import_root()
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(own))]
    if own.name not in ("site-packages", "dist-packages"):  # a checkout: this one, and no other
        theirs = [str(own), *theirs]
    return {"PYTHONPATH": os.pathsep.join(theirs)} if theirs or "PYTHONPATH" in os.environ else {}


def offline() -> dict[str, str]:
    """Return the variables of Hugging Face's libraries, in ranks and engines: models and data are folders."""
    return {"HF_HUB_OFFLINE": "1", **one_thread_of_tokenizers()}


def one_thread_of_tokenizers() -> dict[str, str]:
    """Return the variable with which the library tokenizers has no threads, that make it warn where a process forks."""
    return {"TOKENIZERS_PARALLELISM": "false"}


def no_gpus() -> dict[str, str]:
    """Return the variables of a rank on the CPU, which must not use a GPU that its machine may have."""
    return {"CUDA_VISIBLE_DEVICES": ""}


def brief_spinning() -> dict[str, str]:
    """Return the variables with which an OpenMP thread that waits spins for about a millisecond only.

    Ranks, engines and reward functions share the cores. Threads that spin for long cost ten times the time where
    anything else wants a core; threads that do not spin at all must be woken for every operation. A millisecond is as
    good as forever on idle cores.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"}


def node_name() -> str:
    """Return this node's name: Slurm's, or the host's where Slurm has started nothing."""
    import socket

    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def of_components(name: str) -> list[str]:
    """Return a variable that Slurm sets for a job: of a heterogeneous job, that of each component."""
    size = int(os.environ.get("SLURM_HET_SIZE", "0"))
    return [os.environ[f"{name}_HET_GROUP_{number}"] for number in range(size)] or [os.environ[name]]


def slurm_job_id() -> str | None:
    """Return Slurm's name of the job that this process belongs to: 123, or 123_4 for a task of an array.

    A task also has a number of its own, but one task has that of the array: a command that is given it means all tasks.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
