"""``gspo-hpc train`` on this machine: one process per rank, watched to the last grandchild; ``eval``, ``export`` too.

Floor 6, on the user's side: imports nothing heavy. Every rank leads a session of its own, so that it and the engines
and graders it starts can be ended together, and a Ctrl-C reaches the launcher alone, which passes it on. Nothing is
left behind: a rank that dies takes the others with it, and a launcher that ends, even by SIGKILL, everything (the
kernel and a guard see to that, orphans.py; where the guard was killed as well, the next start does).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gspo_hpc import mends, orphans
from gspo_hpc.config import Config
from gspo_hpc.durable import open_private, write_json
from gspo_hpc.plan import Plan, make_plan
from gspo_hpc.preemption import StopFlag, signals_default_in_children
from gspo_hpc.rundir import Attempt, RunDir, open_run
from gspo_hpc.verdict import AFTERMATH

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75
WORKER = (sys.executable, "-m", "gspo_hpc.worker")

_POLL = 0.2  # seconds between two looks at the ranks
_SETTLE = 0.5  # seconds after a first failure in which others may show that they failed before
_LOG_TAIL = 65536  # bytes of a log that are searched for the error


def train(config: Config, *, worker: Sequence[str] = WORKER, grace: float = 10.0) -> int:
    """Start or resume the run of `config` with all its ranks here, and wait: 0 done, 2 refused by a rank (a mistake
    only the real model or data could show), 75 stopped and saved, 1 failed.

    `worker`: the command that becomes a rank. `grace`: seconds that the other ranks get once one has failed.
    Raises ValueError for what is refused before any rank is started, which the command line makes exit code 2.
    """
    if config.cluster.nodes > 1:
        raise ValueError(
            f"cluster.nodes is {config.cluster.nodes}, and train starts ranks on this machine only: hand it to Slurm "
            "with gspo-hpc submit, or give cluster.nodes=1"
        )
    plan = require(config)
    check_inputs(config)
    run, resumed = open_run(config)
    with run.lock() as lock, _stop_flag() as flag:
        run_id = run.read_info()["run_id"]
        if resumed and (count := orphans.kill_marked(run_id)):
            _say(f"ended {count} processes that a killed start of this run had left")
        attempt = run.new_attempt(config)
        lock.describe(attempt.number)
        try:
            write_json(run.plan, plan.to_json())
            code, reason, detail = _run_ranks(config, run, attempt, run_id, flag, worker, grace)
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk: what is raised says so already
                attempt.finish("failed", FAILED, f"launcher: {type(error).__name__}: {error}")
            raise
        attempt.finish(reason, code, detail)
    return code


def require(config: Config) -> Plan:
    """The plan of a config that can be run. Raises ValueError for what is missing and for every broken rule."""
    if missing := config.missing():
        raise ValueError(f"to train, give also: {', '.join(missing)}")
    if config.rollout.mode == "server":
        raise ValueError("rollout.mode is server, which can be planned but not run yet: give rollout.mode=colocate")
    plan = make_plan(config)
    nearest = mends.find(config, limit=1) if plan.broken else []
    plan.require(f"nearest mend: {nearest[0]} (gspo-hpc plan shows others)" if nearest else "")
    return plan


def check_inputs(config: Config) -> None:
    """Raise ValueError for a model that is not there, malformed rows and graders that cannot be, while nothing has been
    started or made."""
    from gspo_hpc import prompts, rewards  # numpy comes with them, which plan and help can do without

    if config.model.path is not None and not Path(config.model.path).is_dir():  # a plan goes without it
        raise ValueError(f"model.path {config.model.path} is not there: it must be a Hugging Face model folder")
    rewards.check(config.reward)
    for path in (config.data.train, config.data.eval):
        if path is not None:
            prompts.load_rows(path, config.data)


def export(run_dir: str | Path, step: int | None, out: str | Path, *, worker: Sequence[str] = WORKER) -> int:
    """Write a checkpoint (default: the newest) as a Hugging Face folder, in a process of its own; its exit code."""
    return _run_alone([*worker, "export", str(run_dir), *_step(step), "--out", str(out)])


def evaluate(
    target: str | Path,
    step: int | None,
    overrides: Sequence[str],
    as_json: bool,
    *,
    worker: Sequence[str] = WORKER,
) -> int:
    """Evaluate a run, a config or a model folder in a process of its own, which prints the scores; its exit code."""
    return _run_alone([*worker, "eval", str(target), *_step(step), *(["--json"] if as_json else []), *overrides])


class _Rank:
    """One rank's process. It is not reaped before :meth:`end`, so that its ids cannot come to mean anybody else."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        self.number = number
        output = None if log is None else open_private(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            with signals_default_in_children():
                self._process = subprocess.Popen(
                    command,
                    env=os.environ | environment | {orphans.PARENT: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            if output is not None:
                os.close(output)

    def exit_code(self) -> int | None:
        """As in subprocess: None while it lives, minus the signal's number if one ended it."""
        state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def send(self, number: int) -> None:
        """A signal to the rank itself, not to its children: it ends those in its own way."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the rank and to its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left of the rank and its children, and reap it."""
        self.kill()
        self._process.wait()


@contextlib.contextmanager
def _stop_flag() -> Iterator[StopFlag]:
    flag = StopFlag(exit_on_second_interrupt=False).start()
    try:
        yield flag
    finally:
        flag.close()


def _run_ranks(
    config: Config, run: RunDir, attempt: Attempt, run_id: str, flag: StopFlag, worker: Sequence[str], grace: float
) -> tuple[int, str, str]:
    """Exit code, reason and detail of an attempt, when no process of it is left."""
    size = config.cluster.gpus_per_node
    shared = {
        **_environment(size, config.cluster.threads_per_rank),
        **orphans.mark(run_id, attempt.number),
        "GSPO_HPC_ATTEMPT": str(attempt.number),
    }
    ranks: list[_Rank] = []
    with orphans.guarded(run_id, attempt.number):
        try:
            for number in range(size):
                log = attempt.log_path(number) if number else None  # rank 0 has the terminal
                own = shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
                ranks.append(_Rank(number, [*worker, "train", str(run.path)], own, log))
            codes, first = _watch(ranks, flag, grace)
        finally:
            for rank in ranks:
                rank.kill()  # all before the first is waited for
            for rank in ranks:
                rank.end()
    if flag.forced:
        return FAILED, "failed", "interrupted twice: ended without saving"
    if first:
        blamed, code = _blame(first, attempt.log_path)
        stop = f"stopped by {flag.requested} before it could save"
        if flag.requested and code == -_forwarded(flag.requested):
            _say(stop)
            return STOPPED, "stopped", stop
        return _failure(blamed, code, attempt.log_path(blamed))
    if any(codes):
        return STOPPED, "stopped", flag.requested or ""
    return DONE, "done", ""


def _watch(ranks: Sequence[_Rank], flag: StopFlag, grace: float) -> tuple[list[int], dict[int, int]]:
    """Wait until every rank has ended: the exit codes, and those (by rank) that ended the attempt, if it failed.

    A stop is passed on to the ranks, which take the time they need to save. A failure is not waited for: the other
    ranks cannot go on, and get SIGTERM and `grace` seconds.
    """
    forwarded = False
    failed_at: float | None = None
    first: dict[int, int] = {}
    while True:
        codes = [rank.exit_code() for rank in ranks]
        bad = {rank.number: code for rank, code in zip(ranks, codes, strict=True) if code not in (None, DONE, STOPPED)}
        ended = [code for code in codes if code is not None]
        if flag.forced:
            for rank in ranks:
                rank.kill()
        if (stop := flag.requested) and not forwarded:
            forwarded = True
            _say(f"{stop}: the ranks stop at the next safe point and save; Ctrl-C (twice in all) ends them at once")
            _send(ranks, codes, _forwarded(stop))
        if bad and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None:
            seconds = time.monotonic() - failed_at
            if not first and (seconds > _SETTLE or len(ended) == len(ranks)):
                first = {number: code for number, code in bad.items() if code is not None}
                _send(ranks, codes, signal.SIGTERM)
            if seconds > _SETTLE + grace:
                for rank in ranks:
                    rank.kill()
        if len(ended) == len(ranks):
            return ended, first
        time.sleep(_POLL)


def _run_alone(command: Sequence[str]) -> int:
    """Run one worker as a world of one rank. A stop ends it at once: it has nothing to save."""
    mark = secrets.token_hex(8)
    own = {**_environment(1, None), **orphans.mark(mark, 0), "RANK": "0", "LOCAL_RANK": "0"}
    with _stop_flag() as flag, orphans.guarded(mark, 0):
        rank = _Rank(0, command, own, None)
        try:
            while (code := rank.exit_code()) is None and flag.requested is None:
                time.sleep(_POLL)
        finally:
            rank.end()
    if code is None:
        _say(f"stopped by {flag.requested}")
        return FAILED
    if code < 0:
        _say(f"the worker {_ending(code)}")
    return code if code in (DONE, REFUSED, STOPPED) else FAILED


def _environment(size: int, threads: int | None) -> dict[str, str]:
    """What torch.distributed and OpenMP read, the same for all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads or max(1, len(os.sched_getaffinity(0)) // size)),
    }


def _step(step: int | None) -> list[str]:
    return [] if step is None else ["--step", str(step)]


def _forwarded(name: str) -> signal.Signals:
    """The signal that ranks get for the one the launcher got: a second SIGINT would end them, so they get none."""
    return signal.SIGTERM if name == "SIGINT" else signal.Signals[name]


def _send(ranks: Sequence[_Rank], codes: Sequence[int | None], number: int) -> None:
    for rank, code in zip(ranks, codes, strict=True):
        if code is None:
            rank.send(number)


def _blame(failed: Mapping[int, int], log_path: Callable[[int], Path]) -> tuple[int, int]:
    """(rank, exit code) of the one that most likely failed first: killed by a signal, or with an error that is not
    about another rank having gone."""

    def aftermath(number: int) -> tuple[int, int]:
        error = _last_error(log_path(number))
        return (0 if failed[number] < 0 else 2 if not error else 3 if AFTERMATH.search(error) else 1), number

    number = min(failed, key=aftermath)
    return number, failed[number]


def _failure(rank: int, code: int, log: Path) -> tuple[int, str, str]:
    """Tell what happened in one line; exit code, reason and detail."""
    error = _last_error(log)
    if code == REFUSED:  # the user's mistake, which may have several lines, and nothing else
        tail = "\n".join(_tail(log))
        error = tail[tail.rfind("\nerror: ") + 8 :].strip() if "\nerror: " in "\n" + tail else error
        if error:
            _say(error)
        return REFUSED, "refused", error
    detail = f"rank {rank} {_ending(code)}" + (f": {error}" if error else "")
    _say(detail + (f"  (log: {log})" if log.exists() else ""))
    return FAILED, "failed", detail


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _last_error(log: Path) -> str:
    """The line of a log's last traceback that says what happened; without a traceback, nothing."""
    lines = _tail(log)
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = (line for line in lines[starts[-1] + 1 :] if line and not line[0].isspace()) if starts else iter(())
    return next(after, "")


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL))
            return file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:  # a rank that ended before it had a log wrote to the terminal
        return []


def _say(text: str) -> None:
    print(f"gspo-hpc: {text}", file=sys.stderr, flush=True)
