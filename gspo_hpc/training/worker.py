"""One rank: bring-up, signals, the loop, the exit code.

Started by the local launcher, by srun or by a test as ``python -m gspo_hpc.training.worker train RUN_DIR`` (also
``dry-run``, ``export``, ``eval`` and ``try``) with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set.
Heavy imports happen inside functions: the processes of reward functions import this module again, and must stay light.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_hpc.system import environment, leftovers, processes
from gspo_hpc.system.exit_codes import DONE, FAILED, REFUSED, REQUEUE, RESTART
from gspo_hpc.system.files import open_log
from gspo_hpc.system.malloc import uncollected
from gspo_hpc.system.signals import MEMORY
from gspo_hpc.system.terminal import redirect_to_log

if TYPE_CHECKING:
    from gspo_hpc.system.control import Client
    from gspo_hpc.system.signals import StopFlag

_CLOSE = 8.0  # seconds that a rank whose error is reported may take to close what it has
_RANK_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of the command line, and return the exit code of this rank."""
    parser = argparse.ArgumentParser(prog="gspo_hpc.training.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("run_dir", type=Path)
    rehearsal = commands.add_parser("dry-run")
    rehearsal.add_argument("folder", type=Path)
    export = commands.add_parser("export")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--step", type=int)
    export.add_argument("--out", type=Path, required=True)
    export.add_argument("--adapter", action="store_true")
    evaluate = commands.add_parser("eval")
    evaluate.add_argument("target", type=Path)
    evaluate.add_argument("--step", type=int)
    evaluate.add_argument("--json", action="store_true")
    evaluate.add_argument("--out", type=Path)
    trial = commands.add_parser("try")
    trial.add_argument("target", type=Path)
    trial.add_argument("--step", type=int)
    trial.add_argument("--prompts", type=int, required=True)
    trial.add_argument("--samples", type=int)
    trial.add_argument("--json", action="store_true")
    # key=value may stand among the options, which argparse cannot say of a list of positional arguments.
    arguments, overrides = parser.parse_known_args(argv)
    if unknown := [text for text in overrides if text.startswith("-") or arguments.command not in ("eval", "try")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    from gspo_hpc.system.signals import StopFlag

    processes.die_with_parent()
    flag = StopFlag().start()
    _environment()
    try:
        if arguments.command == "train":
            return _train(arguments.run_dir, flag)
        if arguments.command in ("export", "eval", "try"):
            return _alone(arguments, overrides)
        with uncollected():
            from gspo_hpc.training.jobs.dry_run import dry_run
        _take_place_from_slurm()
        dry_run(arguments.folder)
        return DONE
    except Exception as error:
        return _tell(error)


def _alone(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run `export`, `eval` or `try`: a person gets the result, remarks and errors, and a log what libraries say."""
    log, kept = _own_log(arguments)
    debug = bool(os.environ.get(environment.DEBUG))
    output, errors = (sys.stdout, sys.stderr) if debug else redirect_to_log(log)

    def remark(text: str) -> None:
        print(text, file=errors, flush=True)

    try:
        print(_result(arguments, overrides, remark), file=output, flush=True)
        code = DONE
    except Exception as error:
        outcome, detail = _outcome(error)
        code = REFUSED if outcome == "refused" else FAILED
        if code == FAILED or debug:
            traceback.print_exc()  # into the log
        for line in detail.splitlines():
            remark(f"error: {line}")
        if code == FAILED and not debug:
            remark(f"error: {log} has the traceback, and what libraries wrote")
            return code
    if not kept or code == REFUSED:  # a mistake of the user has no more to it than its line
        log.unlink(missing_ok=True)
    return code


def _result(arguments: argparse.Namespace, overrides: Sequence[str], remark: Callable[[str], None]) -> str:
    """Run the job of `export`, `eval` or `try`, and return what is printed of it."""
    if arguments.command == "export":
        with uncollected():
            from gspo_hpc.training.jobs.export import export
        export(arguments.run_dir, arguments.step, arguments.out, arguments.adapter, remark)
        return f"wrote {arguments.out}"
    target, step, as_json = arguments.target, arguments.step, arguments.json
    if arguments.command == "eval":
        with uncollected():
            from gspo_hpc.training.jobs.evaluate import evaluate
        return evaluate(target, step, overrides, as_json, arguments.out, remark)
    with uncollected():
        from gspo_hpc.training.jobs.try_out import try_out
    return try_out(target, step, arguments.prompts, arguments.samples, overrides, as_json, remark)


def _own_log(arguments: argparse.Namespace) -> tuple[Path, bool]:
    """Return the log of a command for one rank, and whether it stays: in the run's directory, else a temporary file."""
    target = arguments.run_dir if arguments.command == "export" else arguments.target
    path = Path(target) / f"{arguments.command}.log"
    if (path.parent / "run.json").exists() and os.access(path if path.exists() else path.parent, os.W_OK):
        path.unlink(missing_ok=True)  # that of an earlier call
        return path, True
    handle, name = tempfile.mkstemp(prefix=f"gspo-hpc-{arguments.command}-", suffix=".log")
    os.close(handle)
    return Path(name), False


def _train(run_dir: Path, flag: StopFlag) -> int:
    from gspo_hpc.config import loader
    from gspo_hpc.runs.directory import RunDir
    from gspo_hpc.system import debugging

    _take_place_from_slurm()
    run = RunDir(run_dir)
    attempt = run.attempt(int(os.environ[environment.ATTEMPT]))
    terminal, _ = redirect_to_log(attempt.log_path(int(os.environ["RANK"])))
    stacks = attempt.stacks_path(int(os.environ["RANK"]))
    _show_stacks(stacks)
    control = _connect(flag)
    guard = None if control is None else _guard(os.environ[environment.RUN_ID], attempt.number)
    mark = os.environ[environment.MARK]
    leftovers.claim(mark)
    report = Report(control)
    try:
        if loader.load(attempt.config).tracking.debug:
            debugging.switch_on(os.environ)
        with uncollected():  # only now: what libraries say on import belongs into the log
            from gspo_hpc.training.jobs import train as job

        with leftovers.temporary_folder(mark):
            outcome = job.train(run, attempt, flag, terminal, control, report)
    except Exception as error:
        return report(error)
    stacks.unlink(missing_ok=True)
    if control is None:
        short = (flag.name or "").startswith(MEMORY)
        return DONE if outcome == "done" else RESTART if short else REQUEUE
    # The watching process learns it in this way: at an exit code other than 0 srun ends the ranks that still save.
    control.finish(outcome)
    if guard is not None:
        guard.kill()  # all has been closed in order; it would end the ranks that still close theirs
    return DONE


def _take_place_from_slurm() -> None:
    for name, slurms in _RANK_FROM_SLURM.items():
        if name not in os.environ and slurms in os.environ:
            os.environ[name] = os.environ[slurms]


def _show_stacks(path: Path) -> None:
    """Have SIGABRT, which ends a rank that hangs, write the stacks of all threads into a file of their own.

    They are written a word at a time, and everything else on the node writes into the log as well.
    """
    faulthandler.enable(open_log(path), all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _guard(run_id: str, attempt: int) -> subprocess.Popen[bytes] | None:
    """Leave nothing of this run on this node: neither of an earlier attempt nor, once this is over, of this one.

    That holds whatever kills this process.
    """
    os.environ.update(processes.mark(run_id, attempt))  # of all processes that are started from here on
    if os.environ["LOCAL_RANK"] == "0":
        processes.kill_marked(run_id, but=attempt)
        leftovers.sweep(run_id, range(1, attempt))
        return processes.start_guard(run_id, attempt)
    return None


class Report:
    """A report of this rank's error to its log and to the process that watches it; the first one counts.

    It comes before anything is closed, and nothing can keep the rank from ending. What a failed rank would close may
    block for ever: NCCL waits for kernels that the other ranks never join, an engine for a process that hangs. Those
    who watch the rank end the others, and they do so as soon as they know.
    """

    def __init__(self, control: Client | None) -> None:
        self._control = control
        self._first: BaseException | None = None
        self._code, self._size = FAILED, 0

    def __call__(self, error: BaseException) -> int:
        """Report the error, and return the exit code of this rank, with which it ends in any case before long."""
        if self._first is None:
            self._first, self._code = error, _tell(error)
            if self._control is not None:
                self._control.finish(*_outcome(error))
            threading.Thread(target=_end, args=(self._code,), name="end", daemon=True).start()
            self._size = _log_size()
        elif _log_size() != self._size:  # what was closed had something to say, maybe with a traceback of its own
            _tell(self._first)  # and a launcher takes the last one for the error
        return self._code


def _tell(error: BaseException) -> int:
    """Write the error with its traceback, last the line for a person; return the exit code."""
    kind, detail = _outcome(error)
    with contextlib.suppress(
        OSError
    ):  # the log may lie on the disk that is full: those who watch learn it all the same
        traceback.print_exception(error)
        print(f"error: {detail}", file=sys.stderr, flush=True)
    return REFUSED if kind == "refused" else FAILED


def _log_size() -> int:
    return os.fstat(2).st_size


def _outcome(error: BaseException) -> tuple[str, str]:
    """Return the outcome of a rank that ends with this error, and the error in a line."""
    if isinstance(error, ValueError):  # a user's mistake that only the real model or data could show
        return "refused", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def _end(code: int) -> None:
    time.sleep(_CLOSE)
    print(f"this rank did not close all that it has within {_CLOSE:.0f} s, and ends now", file=sys.stderr, flush=True)
    os._exit(code)


def _connect(flag: StopFlag) -> Client | None:
    """Return the connection to the process that watches this rank, if there is one."""
    from gspo_hpc.system import control

    if environment.CONTROL not in os.environ:
        return None
    return control.Client(
        os.environ[environment.CONTROL],
        os.environ.pop(environment.CONTROL_TOKEN),  # for this process only
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        node=environment.node_name(),
        on_stop=flag.request,
        signal_name=lambda: flag.name,
    )


def _environment() -> None:
    """Set the variables that libraries read when they are imported."""
    defaults = {
        **environment.offline(),
        **environment.brief_spinning(),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }
    meeting = os.environ.get(environment.CONTROL) or os.environ.get("MASTER_ADDR") or ""
    if meeting.startswith("127."):
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nobody else is to reach this run
    for key, value in defaults.items():
        if value:
            os.environ.setdefault(key, value)


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk does not change how the rank ended
            stream.flush()
    os._exit(code)  # library threads (gloo, vLLM's client) must not keep a finished rank alive
