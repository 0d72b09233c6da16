"""``gspo-hpc cancel``: the end of a run, with a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "A running run saves a checkpoint before it ends; submit or train resumes it from there. A run that waits in "
        "the queue is taken out of it. Of a sweep, all runs are ended."
    )
    describe(parser, text, "gspo-hpc cancel runs/tiny")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory, or that of a sweep")


def run(args: argparse.Namespace) -> int:
    """Cancel a run, and wait for the end of its job."""
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.launch import status

    require_path(args.run_dir, "run directory")
    status.cancel(args.run_dir, print)
    return DONE
