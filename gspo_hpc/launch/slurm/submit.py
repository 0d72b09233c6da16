"""Submit a run as a Slurm job, through submitit.

Every submission has its own folder RUN/jobs/NNNN, with the config, a copy of this package (the code that was submitted
is the code that runs, whatever is edited meanwhile), submitit's files and the job's log. The job is one Python process
on the first node, :mod:`gspo_hpc.launch.slurm.supervisor`, which starts the ranks with srun.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.derived import cpus_per_task
from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.launch.checks import check_inputs, check_model, require, resolved
from gspo_hpc.launch.slurm import commands, compat, srun
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.slurm.compat import Executor, SubmitError
from gspo_hpc.models import hub
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.runs.jobs import job_ids
from gspo_hpc.system import environment
from gspo_hpc.system.environment import CONTROL, CONTROL_TOKEN
from gspo_hpc.system.exit_codes import INTERRUPTED
from gspo_hpc.system.files import make_private_dir, write_atomically, write_json

_SUPERVISOR = "gspo_hpc.launch.slurm.supervisor"
# Paths that go into #SBATCH lines and into the script: without characters that sbatch or a shell would interpret.
PLAIN_PATH = re.compile(r"[A-Za-z0-9 ._+=,:@/-]+")


@dataclass(frozen=True)
class Supervise:
    """The callable that submitit pickles: by name, so that the job loads it from the code in its folder."""

    run_dir: str
    job_dir: str

    def __call__(self) -> None:
        """Replace this process by the supervisor, and with it submitit's signal handlers.

        These would requeue the job at any moment, whatever it does then, and not at all after three time limits.
        """
        os.execv(sys.executable, [sys.executable, "-u", "-m", _SUPERVISOR, self.run_dir, self.job_dir])


def dry_run(config: Config) -> str:
    """Return the batch script and the command it leads to. Writes nothing and asks Slurm nothing."""
    _require(config)
    run = RunDir(config.run_dir)
    job_dir = run.path / "jobs" / "NNNN"
    executor = make_executor(config, run.path, job_dir)
    own = srun.environment(config, job_dir / srun.CODE)
    command = shlex.join(srun.command(config, run.path, job_dir, [*own, CONTROL, CONTROL_TOKEN]))
    variables = "\n".join(f"#   {name}={shlex.quote(value)}" for name, value in own.items())
    start = f"# The job starts every attempt with\n#   {command}\n# and these in its environment:\n{variables}\n"
    return f"{executor.script().rstrip()}\n\n{start}"


def submit(config: Config) -> str:
    """Submit a run, new or to be resumed, and return Slurm's id of the job.

    Raises ValueError if the plan breaks a rule, a row is malformed, the run is running or waiting already, or its
    directory belongs to another config; SlurmError if Slurm does not take the job.
    """
    config = resolved(hub_data.with_files(config))
    _require(config)
    check_inputs(config, here=False)
    config = hub.with_folder(config)
    check_model(config)
    _require(config)  # with the model's own sizes
    run, _ = open_run(config)
    with run.lock():
        # By their comment, too: a submit that was killed after sbatch has not recorded its job.
        marked = [job_id for job_id, comment in commands.own_jobs() if _mark(run) in comment]
        for waiting in dict.fromkeys([*job_ids(run), *marked]):
            job = commands.job(waiting)
            if job is not None and job.active:
                raise ValueError(f"{run.path}: job {waiting} is {job.state.lower()} already; cancel it first")
        job_dir = _make_job_dir(config, run)
        comment = _comment(config, run, job_dir)
        executor = make_executor(config, run.path, job_dir, comment)
        with _private_files():
            job_id = _hand_in(executor, Supervise(str(run.path), str(job_dir)), job_dir, comment)
        write_json(job_dir / "job.json", {"job_id": job_id, "comment": comment})
    return job_id


def _require(config: Config) -> None:
    require(config)
    path = str(RunDir(config.run_dir).path)
    if not PLAIN_PATH.fullmatch(path):
        wrong = sorted(set(path) - set("".join(PLAIN_PATH.findall(path))))
        raise ValueError(
            f"run.dir: {path!r} has {' '.join(map(repr, wrong))}, which is not safe in a batch script: "
            "choose another path"
        )


def make_executor(
    config: Config, run_dir: Path, job_dir: Path, comment: str | None = None, *, supervised: bool = True
) -> Executor:
    """Return submitit's executor with the settings of section slurm; its files go into `job_dir`.

    `supervised`: the job is a supervisor, which another one follows where a signal ends it.
    """
    slurm, cluster = config.slurm, config.cluster
    executor = Executor(folder=job_dir, python=shlex.quote(slurm.python or sys.executable))
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
        "cpus_per_task": cpus_per_task(config),
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
        teardown=_teardown(config, run_dir, job_dir) if supervised else None,
        stderr_to_stdout=True,
        use_srun=False,
        additional_parameters=more,
        wckey=None,  # submitit's default is its own name
    )
    return executor


def _setup(config: Config, job_dir: Path) -> list[str]:
    """Return the first shell lines of the script: the site's, then those that select the code in its folder."""
    slurm = config.slurm
    return [
        *slurm.setup,
        *(f"module load {shlex.quote(name)}" for name in slurm.modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in snapshot.environment(job_dir / srun.CODE).items()),
        f'export {environment.JOB_BEGAN}="$(date +%s)"',
        "set +e",  # whatever the site's lines have set: the last lines look at how the supervisor ended
    ]


def _teardown(config: Config, run_dir: Path, job_dir: Path) -> list[str]:
    """Return the last shell lines of the script: if a signal ended the supervisor, another one takes over.

    It counts that as a failure and gives up as it does after failures of ranks. The script itself gives up only on
    supervisors that do not live long enough to count. The status of a second Ctrl-C is no such end.
    """
    words = [config.slurm.python or sys.executable, "-u", "-m", _SUPERVISOR, str(run_dir), str(job_dir)]
    attempts, tries = shlex.quote(str(RunDir(run_dir).attempts)), config.faults.max_restarts + 1
    return [
        f"status=$? tries={tries}",
        f'while [ "$status" -gt 128 ] && [ "$status" -ne {INTERRUPTED} ] && [ "$tries" -gt 0 ]; do',
        '    echo "gspo-hpc: signal $((status - 128)) ended the supervisor: starting another"',
        f"    before=$(ls {attempts})",
        f'    {environment.KILLED}="$status" {shlex.join(words)}',
        "    status=$?",
        f'    if [ "$before" = "$(ls {attempts})" ]; then tries=$((tries - 1)); else tries={tries}; fi',
        "done",
        'exit "$status"',
    ]


def _make_job_dir(config: Config, run: RunDir) -> Path:
    """Make RUN/jobs/NNNN with the config, a copy of this package and of the reward functions; return its path."""
    jobs = run.path / "jobs"
    make_private_dir(jobs)
    number = max((int(path.name) for path in jobs.iterdir() if path.name.isdigit()), default=0) + 1
    job_dir = jobs / f"{number:04d}"
    make_private_dir(job_dir)
    snapshot.take(job_dir / srun.CODE, config.reward)
    write_atomically(job_dir / "config.yaml", loader.dump(config))
    return job_dir


def _comment(config: Config, run: RunDir, job_dir: Path) -> str:
    """Return the comment by which the job is found if sbatch does not report whether Slurm has taken it."""
    own = f"{_mark(run)}{job_dir.name}"
    return f"{config.slurm.comment} {own}" if config.slurm.comment else own


def _mark(run: RunDir) -> str:
    """Return the text that the comments of all jobs of a run contain."""
    return f"gspo_hpc:{run.read_info()['run_id']}:"


def _hand_in(executor: Executor, task: Supervise, job_dir: Path, comment: str) -> str:
    """Submit the job and return Slurm's id of it.

    A controller that restarts meanwhile may have taken the job or not. Once it answers again it is asked, and it gets
    the job a second time only if it does not know it.
    """
    for last in (False, True):
        try:
            return executor.hand_in(task)
        except SubmitError as error:
            if last or not commands.is_away(str(error)):
                raise SlurmError(str(error)) from None
        if found := [job_id for job_id, theirs in commands.own_jobs() if theirs == comment]:
            compat.adopt(job_dir, found[0])
            return found[0]
        compat.discard(job_dir)
    raise AssertionError


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
