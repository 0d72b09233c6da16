"""``gspo-hpc sync``: send the trackers of a run what they lack."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides
from gspo_hpc.system.exit_codes import DONE, FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Sends the records of metrics.jsonl that a tracker lacks: because nodes have no network, because its server "
        "was away, or because the tracker is new to the run. Each tracker is asked what it has, so nothing is sent "
        "twice. The run must not be running. Neither torch nor a GPU is needed."
    )
    examples = """
        gspo-hpc sync runs/tiny
        gspo-hpc sync runs/tiny tracking.tensorboard=true
        MLFLOW_TRACKING_URI=http://mlflow:5000 gspo-hpc sync runs/tiny tracking.mlflow=true"""
    describe(parser, text, examples)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    takes_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Send each tracker what it lacks, and print a line for each."""
    import sys

    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.runs.directory import RunDir
    from gspo_hpc.system.terminal import paint
    from gspo_hpc.trackers import sync

    require_path(args.run_dir, "run directory")
    run_dir = RunDir(args.run_dir)
    run_dir.read_info()

    def warn(text: str) -> None:
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)

    failed = False
    results = sync.sync(run_dir, run_dir.load_config(overrides=args.overrides), warn)
    for result in results:
        if result.error:
            failed = True
            print(f"{paint('error:', '31', sys.stderr)} {result.name}: {result.error}", file=sys.stderr)
        elif result.steps:
            first, last = result.steps[0], result.steps[-1]
            count = f"{len(result.steps):,} record{'s' * (len(result.steps) != 1)}"
            print(f"{result.place}: sent {count}, steps {first} to {last}")
        else:
            has = f"it has everything up to step {result.last}" if result.last >= 0 else "the run has no record yet"
            print(f"{result.place}: nothing to send, {result.never or has}")
    if any(result.hangs for result in results):
        sys.stdout.flush()
        os._exit(FAILED)  # Python would wait for the threads of a library that hangs
    return FAILED if failed else DONE
