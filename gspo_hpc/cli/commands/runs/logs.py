"""``gspo-hpc logs``: the logs of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Without --rank it shows the console of the run, as it was; with --rank it shows everything that this rank "
        "and its libraries wrote. --errors shows the first traceback, from which all other failures follow."
    )
    examples = """
        gspo-hpc logs runs/tiny -f
        gspo-hpc logs runs/tiny --rank 3
        gspo-hpc logs runs/tiny --errors
        gspo-hpc logs --columns"""
    describe(parser, text, examples)
    parser.add_argument("run_dir", metavar="RUN", type=Path, nargs="?", help="run directory")
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines, too, until the run ends")
    parser.add_argument("--rank", type=int, metavar="N", help="show the log of this rank")
    parser.add_argument("--attempt", type=int, metavar="N", help="show an earlier attempt (default: the newest)")
    parser.add_argument("--served", action="store_true", help="show the log of the newest job of serve --slurm")
    parser.add_argument("--columns", action="store_true", help="explain the columns of the console, and end")
    parser.add_argument("--errors", action="store_true", help="show only the first traceback among all ranks")


def run(args: argparse.Namespace) -> int:
    """Print a log, or the first error."""
    import sys

    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.launch import status
    from gspo_hpc.system.terminal import paint

    if args.columns:
        return _explain_columns()
    if args.run_dir is None:
        raise ValueError("which run? gspo-hpc logs RUN, such as gspo-hpc logs runs/tiny")
    require_path(args.run_dir, "run directory")
    if args.served:
        from gspo_hpc.launch.slurm import server_job

        path = server_job.newest_log(args.run_dir)
        for text in status.follow(path, forever=args.follow, done=lambda: not [*server_job.served(args.run_dir)]):
            print(text, end="", flush=True)
        return DONE
    if args.errors:
        if (found := status.first_error(args.run_dir, args.attempt)) is None:
            print(f"{args.run_dir}: no error: there is no traceback in the log of any rank")
            return DONE
        log, text = found
        print(f"{paint(str(log), '1', sys.stdout)}\n{text}", end="")
        return DONE
    path = status.log_path(args.run_dir, args.rank, args.attempt)
    for text in status.follow(path, forever=args.follow, done=lambda: status.read(args.run_dir).is_over):
        print(text, end="", flush=True)
    return DONE


def _explain_columns() -> int:
    from gspo_hpc.cli.pages import render
    from gspo_hpc.runs.console_columns import COLUMNS

    render.show([render.grid((column.title, column.meaning) for column in COLUMNS)])
    return DONE
