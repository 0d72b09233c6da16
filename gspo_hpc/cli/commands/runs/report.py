"""``gspo-hpc report``: the report page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = "Writes one self-contained HTML file with curves, samples from before and after training, plan and attempts."
    examples = """
        gspo-hpc report runs/tiny
        gspo-hpc report runs/tiny --out tiny.html"""
    describe(parser, text, examples)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.report.page import write_report

    require_path(args.run_dir, "run directory")
    print(write_report(args.run_dir, args.out))
    return DONE
