"""``gspo-hpc status``: the state of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE

_WATCH_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Shows state, step, reward, speed, time left, and how earlier attempts ended. Works without Slurm, too. Slurm "
        "holds a requeued job for two minutes; with --watch, this command lets it start within seconds."
    )
    examples = """
        gspo-hpc status
        gspo-hpc status runs/tiny --watch
        gspo-hpc status runs/tiny --json"""
    describe(parser, text, examples)
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", type=Path, help="run or sweep directories (default: all in runs/)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run, each on one line")
    parser.add_argument("--watch", action="store_true", help="show it again every five seconds until all runs end")


def run(args: argparse.Namespace) -> int:
    """Print the state of each run."""
    import json
    import sys
    import time

    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.cli.pages import status as page
    from gspo_hpc.launch import status
    from gspo_hpc.runs import sweep

    for path in args.runs:
        require_path(path, "run directory")
    while True:
        found = sweep.expand(args.runs) or status.runs_below(Path("runs"))
        if args.runs and not found:
            raise ValueError(f"{args.runs[0]}: none of its runs has been submitted yet")
        if not found:
            raise ValueError("no runs in runs/; name a run directory")
        states = [status.read(path) for path in found]
        if args.json:
            for state in states:
                print(json.dumps(state.to_json()), flush=True)
        else:
            whole = len(args.runs) == 1 and sweep.SweepDir(args.runs[0]).exists
            page.show(states, sys.stdout, clear=args.watch, sweep=args.runs[0] if whole else None)
        if not args.watch or all(state.is_over for state in states):
            return DONE
        for path in found:
            status.lift_hold(path)
        time.sleep(_WATCH_SECONDS)
