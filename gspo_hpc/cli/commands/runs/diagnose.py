"""``gspo-hpc diagnose``: what is wrong or slow in a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE, FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Reads the directory of a run, finished, running or dead, and names what is wrong or slow, with evidence, "
        "cause and the setting to change. Exits with 1 if there is a problem, with 0 if there are only warnings and "
        "notes."
    )
    examples = """
        gspo-hpc diagnose runs/tiny
        gspo-hpc diagnose runs/tiny --json"""
    describe(parser, text, examples)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; FAILED if there is a problem."""
    import json

    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.diagnose import gather

    require_path(args.run_dir, "run directory")
    found = gather.diagnose(args.run_dir)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        from gspo_hpc.cli.pages import diagnosis, render

        render.show(diagnosis.page(found))
    return FAILED if found.problems else DONE
