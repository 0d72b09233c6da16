"""One rank: bring-up, signals, the loop, the exit code.

Floor 5. Started by the local launcher, by srun or by a test as ``python -m gspo_hpc.worker train RUN_DIR`` (also
``export`` and ``eval``) with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Heavy imports happen inside
functions: grader processes import this module again and must stay light.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from gspo_hpc.preemption import StopFlag

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

    from gspo_hpc.orphans import die_with_parent
    from gspo_hpc.preemption import StopFlag

    die_with_parent()
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
    except ValueError as error:  # a user's mistake that only the real model or data could show
        traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except Exception as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


def _train(run_dir: Path, flag: StopFlag) -> int:
    from gspo_hpc.rundir import RunDir

    run = RunDir(run_dir)
    attempt = run.attempt(int(os.environ["GSPO_HPC_ATTEMPT"]))
    terminal = _redirect_output(attempt.log_path(int(os.environ["RANK"])))
    from gspo_hpc import jobs  # only now: what libraries say on import belongs into the log

    return EXIT_DONE if jobs.train(run, attempt, flag, terminal) == "done" else EXIT_REQUEUE


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
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    for key, value in defaults.items():
        if value:
            os.environ.setdefault(key, value)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # library threads (gloo, vLLM's client) must not keep a finished rank alive
