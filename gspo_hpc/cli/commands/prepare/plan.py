"""``gspo-hpc plan``: sizes, layout, memory and time of a run, before a GPU is asked for."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe, takes_config, takes_response_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Needs no GPU and starts nothing. If sizes do not fit, it names broken rules and fixes, and exits with 2. It "
        "also exits with 2 if this version can plan the config, but not run it, and says why. It exits with 3 if no "
        "rule is broken, but the config lacks settings that a run needs, nothing is known of its model, or a file that "
        "it names is not on this machine, which is a note and no error. It exits with 0 where a run downloads what is "
        "not here. What is there and makes train refuse the run before it starts anything is an error: exit code 2."
    )
    examples = """
        gspo-hpc plan tiny_cpu
        gspo-hpc plan my.yaml cluster.nodes=8 batch.global_batch_size=512
        gspo-hpc plan qwen3_30b_a3b_ep8 cluster.nodes=4
        gspo-hpc plan my.yaml --sbatch
        gspo-hpc plan my.yaml cluster.gpu=H100 --price 2.5
        gspo-hpc plan my.yaml --json --ranks"""
    describe(parser, text, examples)
    takes_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", action="store_true", help="show every rank: one row each, or a JSON list")
    parser.add_argument("--sbatch", action="store_true", help="also print the batch script that submit would use")
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU-hour, for the cost of the run")
    takes_response_tokens(parser)
    for option, metavar, text in (
        ("--turns", "N", "average messages of the model in a conversation (default: half of environment.max_turns)"),
        ("--reply-tokens", "N", "average length of a reply of the environment or a tool (default: that of a message)"),
        ("--answer-seconds", "S", "average seconds in which the environment or a tool answers (default: none)"),
    ):
        parser.add_argument(option, type=float, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return the exit code that `plans.plan` gives it."""
    from gspo_hpc.cli.inputs import load_config
    from gspo_hpc.cli.plans import plan

    config = load_config(args)
    options = {"as_json": args.json, "ranks": args.ranks, "sbatch": args.sbatch, "price": args.price}
    talk = (args.turns, args.reply_tokens, args.answer_seconds)
    return plan(args.config, config, args.places, **options, response_tokens=args.response_tokens, talk=talk)
