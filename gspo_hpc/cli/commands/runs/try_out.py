"""``gspo-hpc try``: a few prompts of the training data, completions and their rewards, before any training."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Samples the first prompts of training as training would, and grades them. Shows each prompt as the model "
        "sees it, its completions, the parts of their rewards, and how long each reward function takes. Trains nothing."
    )
    examples = """
        gspo-hpc try my.yaml
        gspo-hpc try my.yaml --prompts 5 --samples 8 rollout.temperature=0.8
        gspo-hpc try runs/tiny --step 20 --json"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="CONFIG|RUN|MODEL_FOLDER", type=Path, help="what to sample from")
    takes_overrides(parser)
    parser.add_argument("--prompts", type=int, metavar="N", default=2, help="prompts to sample (default: %(default)s)")
    parser.add_argument("--samples", type=int, metavar="N", help="completions of each (default: at most 4)")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Sample in another process, which prints the completions; return its exit code."""
    from gspo_hpc.cli.inputs import find_target
    from gspo_hpc.launch.local import try_out

    for name, count in (("--prompts", args.prompts), ("--samples", args.samples)):
        if count is not None and count < 1:
            raise ValueError(f"{name} {count}: must be 1 or more")
    target = find_target(args.target)
    return try_out(target, args.step, args.prompts, args.samples, args.overrides, args.json)
