"""``gspo-hpc compare``: two evaluations of the same prompts, with the interval of their difference."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Prints how much more of the same prompts the second answers rightly, with a 95 % interval by drawing prompts "
        "again, and McNemar's exact test of the greedy answers. Each is an evaluation that a run stored, or a file of "
        "`eval --out` or `rescore --out`. Prompts that only one has are left out."
    )
    examples = """
        gspo-hpc compare runs/first runs/second
        gspo-hpc compare runs/tiny runs/tiny --steps 0 20
        gspo-hpc compare before.jsonl runs/tiny --json"""
    describe(parser, text, examples)
    for name in ("first", "second"):
        parser.add_argument(name, metavar="RUN|FILE", type=Path, help=f"{name} run, or file of an evaluation")
    parser.add_argument(
        "--steps", type=int, nargs=2, metavar="N", help="steps of the two runs that were evaluated (default: the last)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    import json

    from gspo_hpc.cli.inputs import require_path, warn
    from gspo_hpc.evaluation import stored
    from gspo_hpc.evaluation.compare import compare

    for path in (args.first, args.second):
        require_path(path, "run directory or file of an evaluation")
    steps = args.steps or (None, None)
    files = [stored.find(path, step) for path, step in zip((args.first, args.second), steps, strict=True)]
    if files[0].samefile(files[1]):
        raise ValueError(f"both are {files[0]}: give two evaluations, or two steps of a run, as --steps 0 20")
    found = compare(*map(stored.read, files))
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        from gspo_hpc.cli.pages import evaluations, render

        render.show(evaluations.compared(found))
    deciding = [side.prompts[0].decides for side in (found.first, found.second)]
    if deciding[0] != deciding[1]:
        warn(f"{deciding[0]} decided in the first and {deciding[1]} in the second: grade both alike with rescore --out")
    return DONE
