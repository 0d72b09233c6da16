"""Submit a run as a Slurm job, through submitit.

Every submission has its own folder RUN/jobs/NNNN, with the config, an archive of this package (the code that was
submitted is the code that runs, whatever is edited meanwhile), submitit's files and the job's log. The job is one
Python process on the first node, :mod:`gspo_hpc.launch.slurm.supervisor`, which starts the ranks with srun.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.derived import cpus_per_task
from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.launch import preflight
from gspo_hpc.launch.checks import check_inputs, check_model, rehearse, require, resolved
from gspo_hpc.launch.slurm import commands, compat, srun
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.slurm.compat import Executor, SubmitError
from gspo_hpc.launch.slurm.components import Component, components
from gspo_hpc.models import hub
from gspo_hpc.runs import snapshot
from gspo_hpc.runs.directory import RunDir, open_locked
from gspo_hpc.runs.jobs import discard, job_ids, new_job_folder, record_job
from gspo_hpc.system import environment
from gspo_hpc.system.environment import CONTROL, CONTROL_TOKEN
from gspo_hpc.system.exit_codes import INTERRUPTED
from gspo_hpc.system.files import remove_tree, write_atomically

PATIENCE = 60.0  # seconds that a controller which does not answer is waited for
_SUPERVISOR = "gspo_hpc.launch.slurm.supervisor"


@dataclass(frozen=True)
class Supervise:
    """The callable that submitit pickles: by name, so that the job loads it from the code in its folder."""

    run_dir: str
    job_dir: str

    def __call__(self) -> None:
        """Replace this process by the supervisor, and with it submitit's signal handlers.

        These would requeue the job at any moment, whatever it does then, and not at all after three time limits.
        """
        os.execv(sys.executable, [sys.executable, "-u", "-P", "-m", _SUPERVISOR, self.run_dir, self.job_dir])


class Unconfirmed(SlurmError):
    """Slurm may have taken the job, and has not answered since: what was made for it stays."""


def dry_run(config: Config) -> str:
    """Return :func:`script` of a config that would not be refused for what of it is on this machine."""
    return script(rehearse(config, [preflight.path_in_script], here=False))


def script(config: Config) -> str:
    """Return the batch script and the command it leads to. Writes nothing and asks Slurm nothing."""
    require_safe(config)
    run = RunDir(config.run_dir)
    job_dir = run.path / "jobs" / "NNNN"
    executor = make_executor(config, job_dir, supervisor=Supervisor.of(config, run.path, job_dir))
    return f"{executor.script().rstrip()}\n\n{start_of_attempts(config, run.path, job_dir)}"


def start_of_attempts(config: Config, run_dir: Path, job_dir: Path) -> str:
    """Return comments for a batch script that say how its job starts attempts."""
    own = srun.environment(config, job_dir / srun.CODE)
    command = shlex.join(srun.command(config, run_dir, job_dir / srun.CODE, [*own, CONTROL, CONTROL_TOKEN]))
    variables = "\n".join(f"#   {name}={shlex.quote(value)}" for name, value in own.items())
    return f"# The job starts every attempt with\n#   {command}\n# and these in its environment:\n{variables}\n"


def submit(config: Config, told: Callable[[], None] | None = None, checks: Sequence[preflight.Check] = ()) -> str:
    """Submit a run, new or to be resumed, and return Slurm's id of the job.

    Raises ValueError if the plan breaks a rule, a row is malformed, the run is running or waiting already, or its
    directory belongs to another config; SlurmError if Slurm does not take the job. Then nothing of it is left. `told`
    is called once if Slurm does not answer at once. `checks`: more checks of what this machine shows.
    """
    config = checked(config, set(), checks)
    known = commands.own_jobs(PATIENCE, told)  # before anything is written: Slurm must answer
    run, resumed, lock = open_locked(config, lambda run: _refuse_active(run, known))
    with lock, undone(lambda: None if resumed else discard(run)):
        mark = _mark(run)
        job_dir = new_job_folder(run.path)
        with undone(lambda: remove_tree(job_dir)):
            snapshot.take(job_dir / srun.CODE, config)
            write_atomically(job_dir / "config.yaml", loader.dump(config))
            comment = comment_of(config, f"{mark}{job_dir.name}")
            start = Supervisor.of(config, run.path, job_dir)
            executor = make_executor(config, job_dir, comment, supervisor=start)
            task = Supervise(str(run.path), str(job_dir))
            job_id = hand_in(lambda: executor.hand_in(task), job_dir, comment)
        record_job(job_dir, job_id, comment)
    return job_id


def _mark(run: RunDir) -> str:
    """Return what the comments of all jobs of a run have in common."""
    return f"gspo_hpc:{run.read_info()['run_id']}:"


def _refuse_active(run: RunDir, known: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError if a job of the run runs or waits; `known` are jobs of this user with their comments."""
    # By their comment, too: a submit that was killed after sbatch has not recorded its job.
    mark = _mark(run)
    for waiting in dict.fromkeys([*job_ids(run), *(job_id for job_id, comment in known if mark in comment)]):
        job = commands.job(waiting)
        if job is not None and job.active:
            raise ValueError(f"{run.path}: job {waiting} is {job.state.lower()} already; cancel it first")


def checked(config: Config, tried: set[str], checks: Sequence[preflight.Check] = ()) -> Config:
    """Return the config of a run that can be submitted. Raises ValueError for everything that shows before it starts.

    `tried`: what the rows and the reward functions of other configs were that have passed, and now are of this one.
    """
    config = resolved(hub_data.with_files(config))
    require_safe(config)
    inputs = repr((config.data, config.reward))
    if inputs not in tried:
        check_inputs(config, here=False)
        tried.add(inputs)
    config = hub.with_folder(config)
    require_safe(config)  # with the model's own sizes
    check_model(config, tried)
    preflight.refuse(config, checks)
    return config


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Undo what was made if a submission fails, but not where Slurm may have taken the job."""
    try:
        yield
    except Unconfirmed:
        raise
    except Exception:
        undo()
        raise


def require_safe(config: Config) -> None:
    """Raise ValueError for a config that cannot be run, or whose run directory a batch script cannot name."""
    require(config)
    preflight.refuse(config, [preflight.path_in_script])


@dataclass(frozen=True)
class Supervisor:
    """Words of the shell with which the batch script starts supervisors, and how many of them."""

    command: str
    attempts: str  # the folder of the run's attempts
    tries: int  # supervisors that do not live long enough to count

    @classmethod
    def of(cls, config: Config, run_dir: Path, job_dir: Path) -> Supervisor:
        """Return that of a single run."""
        return cls.in_shell(config, shlex.quote(str(run_dir)), shlex.quote(str(job_dir)))

    @classmethod
    def in_shell(cls, config: Config, run_dir: str, job_dir: str) -> Supervisor:
        """Return that of the run and the folder that two words of the shell stand for."""
        python = shlex.quote(config.slurm.python or sys.executable)
        command = f"{python} -u -P -m {_SUPERVISOR} {run_dir} {job_dir}"
        return cls(command, f"{run_dir}/attempts", config.faults.max_restarts + 1)


def make_executor(
    config: Config,
    job_dir: Path,
    comment: str | None = None,
    *,
    supervisor: Supervisor | None = None,
    array: str | None = None,
    setup: Sequence[str] = (),
) -> Executor:
    """Return submitit's executor with the settings of section slurm; its files go into `job_dir`.

    `supervisor`: what the job runs, and another one follows where a signal ends it. `array`: the numbers of the tasks
    if the job is an array, as --array takes them. `setup`: lines of the script before the command.
    """
    first, *others = components(config)
    if others and array is not None:
        raise ValueError(
            "the nodes that generate are a component of a heterogeneous job, of which Slurm has no arrays: submit each "
            "run of the sweep by itself, or leave out cluster.generation_gpus_per_node and slurm.generation_*"
        )
    executor = _executor(config, first, job_dir, comment, array)
    executor.update_parameters(
        setup=[*_setup(config, job_dir), *setup], teardown=None if supervisor is None else _teardown(supervisor)
    )
    if array is not None:
        executor.name_files_by_task()
    for part in others:
        executor.ask_beside(_executor(config, part, job_dir, comment))
    return executor


def _executor(
    config: Config, part: Component, job_dir: Path, comment: str | None, array: str | None = None
) -> Executor:
    """Return submitit's executor with the options of one component of a job."""
    slurm, cluster = part.slurm, config.cluster
    executor = Executor(folder=job_dir, python=f"{shlex.quote(slurm.python or sys.executable)} -P")
    more: dict[str, Any] = {name.replace("-", "_"): value for name, value in slurm.sbatch.items()}
    if slurm.requeue:
        more["requeue"] = True
    else:
        more["no_requeue"] = True
    if slurm.reservation:
        more["reservation"] = slurm.reservation
    if slurm.mem:
        more["mem"] = slurm.mem
    if array is not None:
        more["array"] = array
    gpus = part.gpus if cluster.platform == "cuda" and not slurm.gres else None
    values = {
        "job_name": config.run.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_minutes,
        "nodes": part.nodes,
        "ntasks_per_node": part.gpus,
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


def _teardown(supervisor: Supervisor) -> list[str]:
    """Return the last shell lines of the script: if a signal ended the supervisor, another one takes over.

    It counts that as a failure and gives up as it does after failures of ranks. The script itself gives up only on
    supervisors that do not live long enough to count. The status of a second Ctrl-C is no such end.
    """
    attempts, tries = supervisor.attempts, supervisor.tries
    return [
        f"status=$? tries={tries}",
        f'while [ "$status" -gt 128 ] && [ "$status" -ne {INTERRUPTED} ] && [ "$tries" -gt 0 ]; do',
        '    echo "gspo-hpc: signal $((status - 128)) ended the supervisor: starting another"',
        f"    before=$(ls {attempts})",
        f'    {environment.KILLED}="$status" {supervisor.command}',
        "    status=$?",
        f'    if [ "$before" = "$(ls {attempts})" ]; then tries=$((tries - 1)); else tries={tries}; fi',
        "done",
        'exit "$status"',
    ]


def comment_of(config: Config, own: str) -> str:
    """Return the comment by which the job is found if sbatch does not report whether Slurm has taken it."""
    return f"{config.slurm.comment} {own}" if config.slurm.comment else own


def hand_in(send: Callable[[], str], job_dir: Path, comment: str) -> str:
    """Submit a job, or an array of jobs, with `send`, and return Slurm's id of it.

    A controller that restarts meanwhile may have taken the job or not. Once it answers again it is asked, and it gets
    the job a second time only if it does not know it.
    """
    for last in (False, True):
        try:
            with _private_files():
                return send()
        except SubmitError as error:
            if not commands.is_away(str(error)):
                raise SlurmError(commands.explained(str(error))) from None
            unsure = not commands.is_unreachable(str(error))
            if last:
                raise _unconfirmed(str(error)) if unsure else SlurmError(commands.explained(str(error))) from None
        try:
            known = commands.own_jobs(PATIENCE)
        except SlurmError as error:
            raise _unconfirmed(str(error)) if unsure else error from None
        if found := [job_id.partition("_")[0] for job_id, theirs in known if theirs == comment]:
            compat.adopt(job_dir, found[0])
            return found[0]
        compat.discard(job_dir)
    raise AssertionError


def _unconfirmed(error: str) -> Unconfirmed:
    return Unconfirmed(
        f"{error}\nSlurm may have taken the job: give the command again later; it finds a job that waits"
    )


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
