"""``gspo-hpc submit``: a run as a Slurm job, made with submitit.

Floor 6. Every submission has a folder of its own, RUN/jobs/NNNN: the config, a copy of this package (what was submitted
is what runs, whatever is edited meanwhile), submitit's files and the job's log. The job is one Python process on the
first node, :mod:`gspo_hpc.supervisor`, which starts the ranks with srun.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from gspo_hpc import config_file, slurm_commands, snapshot, srun
from gspo_hpc.config import Config
from gspo_hpc.control import ADDRESS, TOKEN
from gspo_hpc.durable import make_private_dir, read_json, write_atomically, write_json
from gspo_hpc.launch import check_inputs, require
from gspo_hpc.rundir import RunDir, open_run
from gspo_hpc.slurm_commands import SlurmError

# Names that go into lines of #SBATCH and into the job's script: nothing that sbatch or a shell could take for more.
PLAIN_PATH = re.compile(r"[A-Za-z0-9 ._+=,:@/-]+")  # that a batch script can carry
_OWN_OPTIONS = {  # of sbatch, which have a key of their own or belong to the package
    *("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "signal", "requeue", "open-mode", "array"),
    *("partition", "account", "qos", "time", "constraint", "reservation", "exclude", "nodelist", "exclusive", "mem"),
    *("cpus-per-task", "gres", "gpus-per-node", "mail-user", "mail-type", "comment", "wrap", "export-file"),
}


@dataclass(frozen=True)
class Supervise:
    """What submitit pickles: by name, so that the job loads it from the code in its folder."""

    run_dir: str
    job_dir: str

    def __call__(self) -> None:
        """Become the supervisor, and leave nothing of submitit behind: its signal handlers would requeue in the middle
        of whatever runs, and after three time limits no more."""
        os.execv(sys.executable, [sys.executable, "-u", "-m", "gspo_hpc.supervisor", self.run_dir, self.job_dir])


class _Executor(SlurmExecutor):
    """Writes the script also where there is no Slurm, for --dry-run."""

    @classmethod
    def affinity(cls) -> int:
        """Not asked here: sbatch is, once there is something to submit."""
        return 2


def dry_run(config: Config) -> str:
    """The batch script and the command it leads to. Touches nothing."""
    _require(config)
    run = RunDir(config.run_dir)
    job_dir = run.path / "jobs" / "NNNN"
    executor = make_executor(config, run.path, job_dir)
    script = executor._make_submission_file_text(executor._submitit_command_str, "")
    own = srun.environment(config, job_dir)
    command = shlex.join(srun.command(config, run.path, job_dir, [*own, ADDRESS, TOKEN]))
    variables = "\n".join(f"#   {name}={shlex.quote(value)}" for name, value in own.items())
    start = f"# The job starts every attempt with\n#   {command}\n# and these in its environment:\n{variables}\n"
    return f"{script.rstrip()}\n\n{start}"


def submit(config: Config) -> str:
    """Submit the run, new or to be resumed; Slurm's id of the job.

    Raises ValueError for what is refused: a plan that does not hold, bad rows, a run that is running or waiting
    already, another config; SlurmError where Slurm did not take the job.
    """
    _require(config)
    check_inputs(config)
    run, _ = open_run(config)
    with run.lock():
        # By their comment as well: a submit that was killed may not have come to write down its job.
        marked = [job_id for job_id, comment in slurm_commands.own_jobs() if _mark(run) in comment]
        for waiting in dict.fromkeys([*job_ids(run), *marked]):
            job = slurm_commands.job(waiting)
            if job is not None and job.active:
                raise ValueError(f"{run.path}: job {waiting} is {job.state.lower()} already; cancel it first")
        job_dir = _make_job_dir(config, run)
        comment = _comment(config, run, job_dir)
        executor = make_executor(config, run.path, job_dir, comment)
        with _private_files():
            job_id = _hand_in(executor, Supervise(str(run.path), str(job_dir)), job_dir, comment)
        write_json(job_dir / "job.json", {"job_id": job_id, "comment": comment})
    return job_id


def job_ids(run: RunDir) -> list[str]:
    """Slurm's ids of the jobs of a run, oldest first."""
    return [str(read_json(path)["job_id"]) for path in sorted((run.path / "jobs").glob("[0-9]*/job.json"))]


def _require(config: Config) -> None:
    require(config)
    path = str(RunDir(config.run_dir).path)
    if not PLAIN_PATH.fullmatch(path):
        wrong = sorted(set(path) - set("".join(PLAIN_PATH.findall(path))))
        raise ValueError(
            f"run.dir: {path!r} has {' '.join(map(repr, wrong))}, which a batch script cannot carry safely"
        )
    own = sorted({name.lstrip("-") for name in config.slurm.sbatch} & _OWN_OPTIONS)
    if own:
        raise ValueError(f"slurm.sbatch: {', '.join(own)} are set by other keys, of slurm, cluster or run")
    for name, value in config.slurm.sbatch.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not config_file.SBATCH_VALUE.fullmatch(str(value)):
            raise ValueError(f"slurm.sbatch: {name!r}: {value!r} cannot be an option of sbatch")
    for name in config.slurm.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"slurm.environment: {name!r} cannot be the name of a variable")
        if re.search(r"key|token|secret|password", name, re.IGNORECASE):
            raise ValueError(
                f"slurm.environment: {name} looks like a secret, and the config is kept with the run: set it in the "
                "environment of the shell that submits"
            )


def make_executor(config: Config, run_dir: Path, job_dir: Path, comment: str | None = None) -> SlurmExecutor:
    """submitit's, with what section slurm says; its files go into `job_dir`."""
    slurm, cluster = config.slurm, config.cluster
    executor = _Executor(folder=job_dir, python=shlex.quote(slurm.python or sys.executable))
    more: dict[str, Any] = {name.replace("-", "_"): value for name, value in slurm.sbatch.items()}
    if slurm.requeue:
        more["requeue"] = True
    else:
        more["no_requeue"] = True
    if slurm.reservation:
        more["reservation"] = slurm.reservation
    if slurm.mem:
        more["mem"] = slurm.mem
    gpus = cluster.gpus_per_node if cluster.platform == "cuda" and not slurm.gres else None
    values = {
        "job_name": config.run.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_minutes,
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.gpus_per_node,
        "cpus_per_task": slurm.cpus_per_task,
        "gpus_per_node": gpus,
        "gres": slurm.gres,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "nodelist": slurm.nodelist,
        "exclusive": True if slurm.exclusive else None,
        "mail_user": slurm.mail_user,
        "mail_type": slurm.mail_type,
        "comment": comment or slurm.comment,
    }
    executor.update_parameters(
        **{key: value for key, value in values.items() if value is not None},
        signal_delay_s=slurm.signal_seconds,
        setup=_setup(config, job_dir),
        stderr_to_stdout=True,
        use_srun=False,
        additional_parameters=more,
        wckey=None,  # submitit's default is its own name
    )
    return executor


def _setup(config: Config, job_dir: Path) -> list[str]:
    """Lines of shell before anything of ours: the site's, then what makes the job run the code in its folder."""
    slurm = config.slurm
    return [
        *slurm.setup,
        *(f"module load {shlex.quote(name)}" for name in slurm.modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in snapshot.environment(job_dir / srun.CODE).items()),
    ]


def _make_job_dir(config: Config, run: RunDir) -> Path:
    """RUN/jobs/NNNN with the config and a copy of this package and of the graders."""
    jobs = run.path / "jobs"
    make_private_dir(jobs)
    number = max((int(path.name) for path in jobs.iterdir() if path.name.isdigit()), default=0) + 1
    job_dir = jobs / f"{number:04d}"
    make_private_dir(job_dir)
    snapshot.take(job_dir / srun.CODE, config.reward)
    write_atomically(job_dir / "config.yaml", config_file.dump(config))
    return job_dir


def _comment(config: Config, run: RunDir, job_dir: Path) -> str:
    """What the job is known by, should sbatch not say whether Slurm has taken it."""
    own = f"{_mark(run)}{job_dir.name}"
    return f"{config.slurm.comment} {own}" if config.slurm.comment else own


def _mark(run: RunDir) -> str:
    """What the comments of all jobs of a run have in them."""
    return f"gspo_hpc:{run.read_info()['run_id']}:"


def _hand_in(executor: SlurmExecutor, task: Supervise, job_dir: Path, comment: str) -> str:
    """Slurm's id of the job. A controller that is restarted meanwhile may have taken it or not: it is asked, once it
    answers again, and gets the job a second time only if it does not know it."""
    for last in (False, True):
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # what sbatch says is in the error, too
                return str(executor.submit(task).job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            said = [line for line in str(error).splitlines() if re.match(r"sbatch: (error|fatal): ", line.strip())]
            text = said[-1].strip() if said else str(error).strip()
            if not slurm_commands.is_away(text) or last:
                raise SlurmError(text) from None
        if found := [job_id for job_id, theirs in slurm_commands.own_jobs() if theirs == comment]:
            _give_pickle(job_dir, found[0])
            return found[0]
        for left in [*job_dir.glob("*.pkl"), *job_dir.glob(".submission_file_*.sh")]:
            left.unlink()
    raise AssertionError


def _give_pickle(job_dir: Path, job_id: str) -> None:
    """Do what submitit does once it knows the job's id."""
    for pickle in job_dir.glob("*.pkl"):
        pickle.rename(job_dir / f"{job_id}_submitted.pkl")
    for script in job_dir.glob(".submission_file_*.sh"):
        script.rename(job_dir / f"{job_id}_submission.sh")


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
