"""vLLM's server in a Slurm job: what was asked for, where it listens, and the batch step itself.

``python -m gspo_hpc.launch.slurm.server_job JOB_DIR`` exports the checkpoint, writes down where the server will listen,
and becomes the server. A job has a folder RUN/served/jobs/NNNN with what was asked for, the submitted code, the job's
log and the address. :mod:`gspo_hpc.launch.slurm.serve` hands it in.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.launch import serving
from gspo_hpc.launch.slurm import commands, srun
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_folder, job_ids, job_logs
from gspo_hpc.system.exit_codes import FAILED, REFUSED
from gspo_hpc.system.files import read_json, write_json

KEY = "VLLM_API_KEY"  # the variable in which vLLM looks for the key that clients have to send
ORDER, ADDRESS = "serve.json", "address.json"  # in a job folder: what is asked for; where the server listens
_TENSOR = "--tensor-parallel-size"
_PARALLEL = {_TENSOR: "-tp", "--pipeline-parallel-size": "-pp", "--data-parallel-size": "-dp"}  # long and short


@dataclass(frozen=True)
class Order:
    """A server that is asked for."""

    target: str  # a run directory or the folder of a model
    is_run: bool
    step: int | None
    name: str
    host: str
    port: int | None  # None: a free one of the node
    options: str  # further ones of vLLM's, in one text
    keyed: bool = False  # clients have to send the key of the shell that submitted


@dataclass(frozen=True)
class Served:
    """A job that serves, or will."""

    job_id: str
    state: str  # Slurm's, in small letters
    node: str  # empty until the job has one
    address: str  # empty until the server is started
    name: str
    log: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def served(run: Path) -> Iterator[Served]:
    """Yield the jobs that serve a run's checkpoints, or wait to do so. Raises SlurmError if Slurm does not answer."""
    jobs = RunDir(run / "served")
    for job_id in job_ids(jobs):
        folder = job_folder(jobs, job_id)
        job = commands.job(job_id, patience=2.0)
        if job is None or not job.active:
            continue
        order, path = read_json(folder / ORDER), folder / ADDRESS
        address = str(read_json(path)["address"]) if path.exists() else ""
        log = next(iter(job_logs(jobs, job_id)), folder)
        yield Served(job_id, job.state.lower(), job.nodes, address, str(order["name"]), str(log))


def newest_log(run: Path) -> Path:
    """Return the log of the newest job that served a checkpoint of a run. Raises ValueError if there is none."""
    logs = job_logs(RunDir(run / "served"))
    if not logs:
        raise ValueError(f"{run} has no log of a server: gspo-hpc serve {run} --slurm starts one")
    return logs[-1]


def gpus_of(options: str, own: int) -> int:
    """Return the GPUs of a server, by the options of vLLM that divide a model. `own`: without them."""
    words = [part for word in shlex.split(options) for part in word.split("=", 1)]
    found = {
        name: int(value)
        for name, short in _PARALLEL.items()
        for word, value in zip(words, words[1:], strict=False)
        if value.isdecimal() and (word == short or serving.option(word, [name]))
    }
    return max(1, math.prod(found.values()) * (1 if _TENSOR in found else own))


def main(argv: Sequence[str] | None = None) -> int:
    """Export what is to be served, say where, and become the server. Return only what failed."""
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    order, config = Order(**read_json(folder / ORDER)), loader.load(folder / "config.yaml")
    os.environ.update(srun.environment(config, folder / srun.CODE))
    if order.keyed and not os.environ.get(KEY):
        print(f"error: {KEY} did not reach this job: Slurm must hand it on (sbatch --export=ALL)", flush=True)
        return REFUSED
    target = Path(order.target)
    try:
        model = serving.exported(target, order.step) if order.is_run else target
    except RuntimeError:  # export has said why
        return FAILED
    port = order.port or _free_port(order.host)
    options = order.options
    if (divided := config.cluster.gpus_per_node // gpus_of(options, 1)) > 1:  # by the run's own setting
        options = f"{_TENSOR} {divided} {options}"
    words = serving.command(model, order.name, order.host, port, options)
    node, anywhere = socket.gethostname(), order.host in ("0.0.0.0", "::")
    address = f"http://{node if anywhere else order.host}:{port}/v1"
    write_json(folder / ADDRESS, {"address": address, "node": node, "port": port})
    print(f"serving {model} as {order.name} at {address} on {node}", flush=True)
    if serving.is_loopback(order.host):
        print(f"only {node} reaches it: ssh -L {port}:127.0.0.1:{port} {node}", flush=True)
    serving.become(words)
    return FAILED  # not reached: the process has become another one


def _free_port(host: str) -> int:
    """Return a port that is free now. The server listens minutes later: where it is taken by then, the job fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
