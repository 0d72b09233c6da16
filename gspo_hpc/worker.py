"""One rank: bring-up, signals, the loop, the exit code.

Floor 5. Started by the local launcher, by srun or by a test as ``python -m gspo_hpc.worker train RUN_DIR`` (also
``export`` and ``eval``) with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Heavy imports happen inside
functions: grader processes import this module again and must stay light.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gspo_hpc import leftovers, orphans

if TYPE_CHECKING:
    from gspo_hpc.control import Client
    from gspo_hpc.preemption import StopFlag

_RANK_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}

EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, EXIT_REQUEUE = 0, 1, 2, 75


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of this rank."""
    parser = argparse.ArgumentParser(prog="gspo_hpc.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("run_dir", type=Path)
    export = commands.add_parser("export")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--step", type=int)
    export.add_argument("--out", type=Path, required=True)
    evaluate = commands.add_parser("eval")
    evaluate.add_argument("target", type=Path)
    evaluate.add_argument("--step", type=int)
    evaluate.add_argument("--json", action="store_true")
    # key=value may stand among the options, which argparse cannot say of a list of positional arguments.
    arguments, overrides = parser.parse_known_args(argv)
    if unknown := [text for text in overrides if text.startswith("-") or arguments.command != "eval"]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    from gspo_hpc.preemption import StopFlag

    orphans.die_with_parent()
    flag = StopFlag().start()
    _environment()
    try:
        if arguments.command == "train":
            return _train(arguments.run_dir, flag)
        from gspo_hpc import jobs

        if arguments.command == "export":
            jobs.export(arguments.run_dir, arguments.step, arguments.out)
        else:
            jobs.evaluate(arguments.target, arguments.step, overrides, arguments.json)
        return EXIT_DONE
    except Exception as error:
        outcome, detail = _outcome(error)
        traceback.print_exc()
        print(f"error: {detail}", file=sys.stderr, flush=True)
        return EXIT_REFUSED if outcome == "refused" else EXIT_FAILED


def _train(run_dir: Path, flag: StopFlag) -> int:
    from gspo_hpc import config_file, debugging
    from gspo_hpc.rundir import RunDir

    for name, slurms in _RANK_FROM_SLURM.items():
        if name not in os.environ and slurms in os.environ:
            os.environ[name] = os.environ[slurms]
    run = RunDir(run_dir)
    attempt = run.attempt(int(os.environ["GSPO_HPC_ATTEMPT"]))
    terminal = _redirect_output(attempt.log_path(int(os.environ["RANK"])))
    stacks = attempt.stacks_path(int(os.environ["RANK"]))
    _show_stacks(stacks)
    control = _connect(flag)
    guard = None if control is None else _guard(os.environ["GSPO_HPC_RUN_ID"], attempt.number)
    mark = os.environ[orphans.MARK]
    leftovers.claim(mark)
    try:
        if config_file.load(attempt.config).tracking.debug:
            debugging.switch_on(os.environ)
        from gspo_hpc import jobs  # only now: what libraries say on import belongs into the log

        with leftovers.temporary_folder(mark):
            outcome = jobs.train(run, attempt, flag, terminal, control)
    except Exception as error:
        if control is not None:
            control.finish(*_outcome(error))
        raise
    stacks.unlink(missing_ok=True)
    if control is None:
        return EXIT_DONE if outcome == "done" else EXIT_REQUEUE
    # Whoever watches is told in this way, for at an exit code that is not 0 srun ends the ranks that still save.
    control.finish(outcome)
    if guard is not None:
        guard.kill()  # all has been closed in order; it would end the ranks that still close theirs
    return EXIT_DONE


def _show_stacks(path: Path) -> None:
    """SIGABRT, by which whoever watches ends a rank that hangs, writes the stacks of all threads into a file of their
    own: they are written a word at a time, and into the log everything else on the node writes as well."""
    faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _guard(run_id: str, attempt: int) -> subprocess.Popen[bytes] | None:
    """See to it that nothing of this run is left on this node: neither of an earlier attempt nor, once this is over,
    of this one, whatever kills this process."""
    os.environ.update(orphans.mark(run_id, attempt))  # of all processes that are started from here on
    if os.environ["LOCAL_RANK"] == "0":
        orphans.kill_marked(run_id, but=attempt)
        leftovers.sweep(run_id, range(1, attempt))
        return orphans.start_guard(run_id, attempt)
    return None


def _outcome(error: Exception) -> tuple[str, str]:
    """How a rank ends that ends with this error, and the error in a line."""
    if isinstance(error, ValueError):  # a user's mistake that only the real model or data could show
        return "refused", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def _connect(flag: StopFlag) -> Client | None:
    """The connection to whoever watches this rank, if anybody does."""
    from gspo_hpc import control

    if control.ADDRESS not in os.environ:
        return None
    return control.Client(
        os.environ[control.ADDRESS],
        os.environ.pop(control.TOKEN),  # for this process only
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        on_stop=flag.request,
        signal_name=lambda: flag.name,
    )


def _redirect_output(path: Path) -> TextIO:
    """Libraries and children write to this rank's log; what was standard output is returned, for the console."""
    terminal = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return terminal


def _environment() -> None:
    """What libraries read when they are imported."""
    defaults = {
        "HF_HUB_OFFLINE": "1",  # models and data are folders; a run never asks a hub
        "TOKENIZERS_PARALLELISM": "false",
        # Ranks, engine and graders share the cores: a thread that waits may spin for a millisecond, and no longer.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "100000",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }
    meeting = os.environ.get("GSPO_HPC_CONTROL") or os.environ.get("MASTER_ADDR") or ""
    if meeting.startswith("127."):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    for key, value in defaults.items():
        if value:
            os.environ.setdefault(key, value)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # library threads (gloo, vLLM's client) must not keep a finished rank alive
