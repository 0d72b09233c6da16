"""``gspo-hpc eval``: scores of a run, a checkpoint or a model folder on the evaluation prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Answers the evaluation prompts and prints the accuracy of greedy decoding, and avg@k, pass@k and maj@k if "
        "eval.samples is above 1. The completions stay in the folder evaluations of a run, or in the file of --out; "
        "`rescore` grades them again, and `compare` compares two evaluations."
    )
    examples = """
        gspo-hpc eval runs/tiny
        gspo-hpc eval runs/tiny --step 20 eval.samples=8
        gspo-hpc eval my.yaml --json --out before.jsonl"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="CONFIG|RUN|MODEL_FOLDER", type=Path, help="what to evaluate")
    takes_overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the completions (default: one of the run)")


def run(args: argparse.Namespace) -> int:
    """Evaluate in another process, which prints the scores; return its exit code."""
    from gspo_hpc.cli.inputs import find_target, require_new_file
    from gspo_hpc.launch.local import evaluate

    target = find_target(args.target)
    require_new_file(args.out)
    return evaluate(target, args.step, args.overrides, args.json, args.out)
