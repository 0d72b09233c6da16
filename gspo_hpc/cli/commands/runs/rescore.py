"""``gspo-hpc rescore``: the completions of an evaluation, graded again."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides
from gspo_hpc.system.exit_codes import DONE

_TAKEN = ("reward.", "sandbox.", "judges.", "eval.reward=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Calls reward functions on the completions that an evaluation stored, and prints the scores before and after, "
        "and how many answers changed from right to wrong and back. No engine is started, and the run stays as it is. "
        "The functions are those of the run, as their files are now, unless reward.functions names others."
    )
    examples = """
        gspo-hpc rescore runs/tiny 'reward.functions=[{function: math_verify}]'
        gspo-hpc rescore runs/tiny --step 20 --json
        gspo-hpc rescore before.jsonl 'reward.functions=[{function: reward.py:reward}]' --out again.jsonl"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="RUN|FILE", type=Path, help="run, or file of an evaluation")
    takes_overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="step that was evaluated (default: the last)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the completions with their new grades")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Grade the completions again, and print both scores."""
    import json

    from gspo_hpc.cli.inputs import require_new_file, require_path
    from gspo_hpc.config import loader
    from gspo_hpc.evaluation import stored
    from gspo_hpc.evaluation.rescore import rescore

    require_path(args.target, "run directory or file of an evaluation")
    require_new_file(args.out)
    for text in args.overrides:
        if not text.startswith(_TAKEN):
            taken = "settings of reward, sandbox and judges, and eval.reward"
            raise ValueError(f"{text}: nothing is generated, so only {taken} are taken")
    old = stored.read(stored.find(args.target, args.step))
    run_dir = stored.run_of(args.target)
    config = loader.load(None, args.overrides) if run_dir is None else run_dir.load_config(overrides=args.overrides)
    found = rescore(old, config)
    if args.out is not None:
        stored.write(args.out, [one.raw for one in found.new.prompts])
    if args.json:
        print(json.dumps(found.to_json()))
        return DONE
    from gspo_hpc.cli.pages import evaluations, render

    render.show(evaluations.rescored(found))
    return DONE
