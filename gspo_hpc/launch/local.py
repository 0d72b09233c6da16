"""Start the ranks of a run on this machine and watch them; run ``eval``, ``try`` and ``export`` in a process.

Every rank leads its own session: the engines and grader processes that it starts can be ended together with it, and a
Ctrl-C reaches only the launcher, which passes it on. No process is left behind. If a rank that trains dies, the others
are ended; if only ranks that generate were killed, these start again. If the launcher dies, even by SIGKILL, the kernel
and a guard process end everything (system/processes.py); if the guard was killed too, the next start of the run does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.launch import preflight
from gspo_hpc.launch.checks import check_inputs, check_model, rehearse, require, resolved
from gspo_hpc.launch.failures import Failure, first_failure
from gspo_hpc.launch.notify.notices import Notices
from gspo_hpc.launch.rank_process import GeneratorRestarts, RankProcess, end_all, ending
from gspo_hpc.models import hub
from gspo_hpc.runs.directory import Attempt, RunDir, open_locked
from gspo_hpc.system import environment, processes
from gspo_hpc.system.exit_codes import DONE, FAILED, REFUSED, REQUEUE, RESTART
from gspo_hpc.system.files import open_log, read_json, write_atomically, write_json
from gspo_hpc.system.signals import MEMORY, StopFlag
from gspo_hpc.system.terminal import pasteable
from gspo_hpc.system.text import from_traceback, last_traceback, tail

WORKER = tuple(environment.python("gspo_hpc.training.worker"))

_POLL = 0.2  # seconds between two looks at the ranks
_SETTLE = 0.5  # seconds after a first failure in which others may show that they failed before
_GRACE = 5.0  # seconds that the other ranks get to end by themselves once one has failed
_REAP = 4.0  # seconds in which a rank must end on SIGKILL; one that waits for a hung device or disk does not
_ENDED_WELL = (None, DONE, REQUEUE, RESTART)  # or not ended
_LOG_TAIL = 65536  # bytes of a log that are searched for the error


def train(
    config: Config,
    *,
    checks: Sequence[preflight.Check] = (),
    worker: Sequence[str] = WORKER,
    grace: float = _GRACE,
) -> int:
    """Start or resume the run of `config` with all its ranks on this machine; wait, and return the exit code.

    The code is DONE, REFUSED (a mistake that only the real model or data show), REQUEUE (stopped and saved) or FAILED.
    `checks`: more checks of this machine. `worker` is the command that becomes a rank, `grace` the seconds that the
    other ranks get once one has failed. Raises ValueError for a mistake that shows before any rank is started.
    """
    _refuse_several_nodes(config)
    config = resolved(hub_data.with_files(config))
    require(config)
    preflight.refuse(config, [*preflight.ON_THIS_MACHINE, *checks])
    check_inputs(config)
    config = hub.with_folder(config)
    plan = require(config)  # with the model's own sizes
    check_model(config)
    run, _, lock = open_locked(config, _end_leftovers)
    # The inner one frees the lock before messages are waited for, the outer one if there cannot be any.
    with lock, Notices(config, run) as notices, lock, _stop_flag() as flag:
        run_id = run.read_info()["run_id"]
        code = RESTART
        while code == RESTART:
            attempt = run.new_attempt(config)
            lock.describe(attempt.number)
            try:
                write_json(run.plan, plan.to_json())
                code, reason, detail = _run_ranks(config, run, attempt, run_id, flag, worker, grace)
            except BaseException as error:
                what = f"launcher: {type(error).__name__}: {error}"
                notices.ended("failed", what)
                notices.over(FAILED)
                with contextlib.suppress(OSError):  # a full disk: what is raised says so already
                    attempt.finish("failed", FAILED, what)
                raise
            attempt.finish(reason, code, detail)
            notices.ended(reason, detail)
            if code == FAILED:
                more = "gspo-hpc diagnose RUN says what to change, gspo-hpc logs RUN --errors shows the traceback"
                _say(
                    f"next: {pasteable(more, run.path)}; the same command goes on from the last checkpoint",
                    attempt.console,
                )
        notices.over(code)
    return code


def _end_leftovers(run: RunDir) -> None:
    if count := processes.kill_marked(run.read_info()["run_id"]):
        _say(f"ended {count} processes that an earlier, killed start of this run had left")


def dry_run(config: Config, *, worker: Sequence[str] = WORKER, grace: float = _GRACE) -> list[dict[str, Any]] | int:
    """Start all ranks on this machine only to join their process groups, and return the place of each.

    Return the exit code instead if a rank fails or the dry run is stopped. Nothing is loaded, and nothing is left.
    Raises ValueError for several nodes, and for what :func:`train` refuses of what is there; the rest may be missing.
    """
    _refuse_several_nodes(config)
    config = rehearse(config, preflight.ON_THIS_MACHINE)
    run_id = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="gspo-dry-run-") as name, _stop_flag() as flag:
        folder = Path(name)
        write_atomically(folder / "config.yaml", loader.dump(config))
        shared = processes.mark(run_id, 0)

        def log_path(rank: int) -> Path:
            return folder / f"rank-{rank}.log"

        with processes.guarded(run_id, 0):
            _, first, _ = _run_together(config, [*worker, "dry-run", name], shared, log_path, flag, grace)
        if flag.requested:
            return FAILED
        if first:
            blamed, code = _blame(first, log_path)
            if code == REFUSED:
                return _failure(blamed, code, log_path(blamed))[0]
            # The log does not stay; what libraries said before an error is no help.
            print(from_traceback(_tail(log_path(blamed))), end="", file=sys.stderr)
            _say(f"rank {blamed} {ending(code)}")
            return FAILED
        places: list[dict[str, Any]] = read_json(folder / "ranks.json")
    return places


def _refuse_several_nodes(config: Config) -> None:
    if config.cluster.nodes > 1:
        raise ValueError(
            f"cluster.nodes is {config.cluster.nodes}, but train starts ranks on this machine only: use "
            "gspo-hpc submit, or give cluster.nodes=1"
        )


def export(run_dir: str | Path, step: int | None, out: str | Path, *more: str, worker: Sequence[str] = WORKER) -> int:
    """Export a checkpoint (default: the newest) in another process, with the options `more`; return its exit code."""
    return _run_alone([*worker, "export", str(run_dir), *_step(step), "--out", str(out), *more])


def evaluate(
    target: str | Path,
    step: int | None,
    overrides: Sequence[str],
    as_json: bool,
    out: Path | None = None,
    *,
    worker: Sequence[str] = WORKER,
) -> int:
    """Evaluate a run, a config or a model folder in another process, which prints scores; return its exit code.

    `out` is the file of the completions.
    """
    options = [*_step(step), *(["--json"] if as_json else []), *([] if out is None else ["--out", str(out)])]
    return _run_alone([*worker, "eval", str(target), *options, *overrides])


def try_out(
    target: str | Path,
    step: int | None,
    prompts: int,
    samples: int | None,
    overrides: Sequence[str],
    as_json: bool,
    *,
    worker: Sequence[str] = WORKER,
) -> int:
    """Sample and grade a few prompts in another process, which prints them; return its exit code."""
    options = ["--prompts", str(prompts), *([] if samples is None else ["--samples", str(samples)])]
    options += ["--json"] if as_json else []
    return _run_alone([*worker, "try", str(target), *_step(step), *options, *overrides])


def _end_all(ranks: Sequence[RankProcess]) -> list[str]:
    """End and reap all ranks; return, and print, what keeps those that do not end: nothing waits for them longer."""
    left = end_all(ranks, _REAP)
    for text in left:
        _say(text)
    return left


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
    """Run all ranks of an attempt until none of its processes is left; return exit code, reason and detail."""
    shared = {**processes.mark(run_id, attempt.number), environment.ATTEMPT: str(attempt.number)}

    def log(number: int) -> Path | None:
        return attempt.log_path(number) if number else None  # rank 0 has the terminal

    with processes.guarded(run_id, attempt.number):
        codes, first, left = _run_together(config, [*worker, "train", str(run.path)], shared, log, flag, grace, attempt)
    if flag.forced:
        return FAILED, "failed", "interrupted twice: ended without saving"
    if first:
        blamed, code = _blame(first, attempt.log_path)
        stop = f"stopped by {flag.requested} before it could save"
        if flag.requested and code == -_forwarded(flag.requested):
            _say(stop, attempt.console)
            return REQUEUE, "stopped", stop
        code, reason, detail = _failure(blamed, code, attempt.log_path(blamed), attempt.console)
        return code, reason, "; ".join([detail, *left])
    if RESTART in codes and not flag.requested:
        detail = f"more than faults.restart_above_memory ({config.faults.restart_above_memory:g}) of the memory is used"
        _say(f"{detail}: starting again", attempt.console)
        return RESTART, MEMORY, detail
    return (REQUEUE, "stopped", flag.requested or "") if any(codes) else (DONE, "done", "")


def _run_together(
    config: Config,
    command: Sequence[str],
    shared: Mapping[str, str],
    log: Callable[[int], Path | None],
    flag: StopFlag,
    grace: float,
    attempt: Attempt | None = None,
) -> tuple[list[int], dict[int, int], list[str]]:
    """Run the command once for each rank until none of its processes is left, or until none of those can be ended.

    `attempt`: in which ranks that generate may start again; None: they may not. Returns what :func:`_watch` returns,
    and a sentence about each rank that could not be ended.
    """
    size = config.cluster.gpus_per_node
    hidden = environment.no_gpus() if config.cluster.platform == "cpu" else {}
    ranks: list[RankProcess] = []
    try:
        # Rank 0 inherits the socket: a port that is only looked for here may be another process's when it listens.
        with socket.create_server(("127.0.0.1", 0), backlog=size) as store:
            port, inherited = store.getsockname()[1], {environment.STORE: str(store.fileno())}
            variables = {**_environment(size, config.cluster.threads_per_rank, port), **hidden, **shared}

            def start(number: int, more: Mapping[str, str]) -> RankProcess:
                own = {**variables, "RANK": str(number), "LOCAL_RANK": str(number), **more}
                return RankProcess(number, command, own, log(number), () if number else (store.fileno(),))

            for number in range(size):
                ranks.append(start(number, {} if number else inherited))
        again = GeneratorRestarts(config, ranks, start, _REAP)

        def restart(failed: Mapping[int, int]) -> bool:
            if attempt is None:
                return False
            return again.make(_blame(failed, attempt.log_path)[0], failed, lambda text: _say(text, attempt.console))

        codes, first = _watch(ranks, flag, grace, restart)
    finally:
        left = _end_all(ranks)
    return codes, first, left


def _watch(
    ranks: Sequence[RankProcess],
    flag: StopFlag,
    grace: float,
    restart: Callable[[Mapping[int, int]], bool] = lambda failed: False,
) -> tuple[list[int], dict[int, int]]:
    """Wait until every rank has ended, or must be killed; return the exit codes, and by rank those of first failures.

    A stop is passed on to the ranks, which take the time they need to save. After a failure the other ranks cannot go
    on: they get SIGTERM, and the caller kills those that are left `grace` seconds later; unless `restart`, which gets
    the first failures, returns True.
    """
    forwarded = False
    failed_at: float | None = None
    first: dict[int, int] = {}
    while True:
        codes = [rank.exit_code() for rank in ranks]
        bad = {rank.number: code for rank, code in zip(ranks, codes, strict=True) if code not in _ENDED_WELL}
        ended = [code for code in codes if code is not None]
        if flag.forced:
            return ended, first
        if (stop := flag.requested) and not forwarded:
            forwarded = True
            _say(f"{stop}: the ranks stop at the next safe point and save; Ctrl-C (twice in all) ends them unsaved")
            _send(ranks, codes, _forwarded(stop))
        if bad and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None:
            seconds = time.monotonic() - failed_at
            if not first and (seconds > _SETTLE or len(ended) == len(ranks)):
                first = {number: code for number, code in bad.items() if code is not None}
                if not flag.requested and restart(first):
                    first, failed_at = {}, None
                    continue
                _send(ranks, codes, signal.SIGTERM)
            if seconds > _SETTLE + grace:
                return ended, first
        if len(ended) == len(ranks):
            return ended, first
        time.sleep(_POLL)


def _run_alone(command: Sequence[str]) -> int:
    """Run one worker as a world of one rank; return its exit code. A stop ends it at once: it has nothing to save."""
    mark = secrets.token_hex(8)
    own = {**_environment(1, None), **processes.mark(mark, 0), "RANK": "0", "LOCAL_RANK": "0"}
    with _stop_flag() as flag, processes.guarded(mark, 0):
        rank = RankProcess(0, command, own, None)
        try:
            while (code := rank.exit_code()) is None and flag.requested is None:
                time.sleep(_POLL)
        finally:
            _end_all([rank])
    if code is None:
        _say(f"stopped by {flag.requested}")
        return FAILED
    if code < 0:
        _say(f"the worker {ending(code)}")
    return code if code in (DONE, REFUSED, REQUEUE) else FAILED


def _environment(size: int, threads: int | None, port: int = 0) -> dict[str, str]:
    """Return the variables that torch.distributed and OpenMP read, the same for all ranks.

    Port 0 is for a single rank, which takes any when it listens.
    """
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
    """Return the signal that ranks get for the launcher's. SIGINT becomes SIGTERM: a second SIGINT would end them."""
    return signal.SIGTERM if name == "SIGINT" else signal.Signals[name]


def _send(ranks: Sequence[RankProcess], codes: Sequence[int | None], number: int) -> None:
    for rank, code in zip(ranks, codes, strict=True):
        if code is None:
            rank.send(number)


def _blame(failed: Mapping[int, int], log_path: Callable[[int], Path]) -> tuple[int, int]:
    """Return (rank, exit code) of the rank that most likely failed first."""
    found = first_failure(Failure(rank, _last_error(log_path(rank)), failed[rank] < 0) for rank in failed)
    return found.rank, failed[found.rank]


def _failure(rank: int, code: int, log: Path, console: Path | None = None) -> tuple[int, str, str]:
    """Print why the attempt failed, and keep it in `console`; return its exit code, reason and detail."""
    error = _last_error(log)
    if code == REFUSED:  # the user's mistake, which may have several lines, and nothing else
        text = "\n" + _tail(log)
        error = text.rpartition("\nerror: ")[2].strip() if "\nerror: " in text else error
        if error:
            _say(error, console)
        return REFUSED, "refused", error
    detail = f"rank {rank} {ending(code)}" + (f": {error}" if error else "")
    _say(detail + (f"  (log: {log})" if log.exists() else ""), console)
    return FAILED, "failed", detail


def _last_error(log: Path) -> str:
    """Return the error line of the last traceback in a log; empty if there is none."""
    found = (last_traceback(_tail(log)) or "").rstrip().splitlines()
    return found[-1] if found and not found[-1][0].isspace() and len(found) > 1 else ""


def _tail(log: Path) -> str:
    try:
        return tail(log, _LOG_TAIL)
    except FileNotFoundError:  # a rank that ended before it had a log wrote to the terminal
        return ""


def _say(text: str, console: Path | None = None) -> None:
    """Print to standard error, and to the file that keeps an attempt's console."""
    print(f"gspo-hpc: {text}", file=sys.stderr, flush=True)
    if console is not None:
        with contextlib.suppress(OSError), os.fdopen(open_log(console), "w", encoding="utf-8") as kept:
            kept.write(f"gspo-hpc: {text}\n")
