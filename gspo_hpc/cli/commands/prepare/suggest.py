"""``gspo-hpc suggest``: the best layouts for a model on given GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_config, takes_response_tokens
from gspo_hpc.system.exit_codes import DONE, REFUSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Tries the parallel sizes, recomputation and offloading that keep every rule and fit the GPUs of cluster.gpu, "
        "and ranks them by estimated time; a layout that leaves little GPU memory free counts as slower. Batch sizes, "
        "lengths, model and machines stay as they are, and so does every setting named with --keep; a token budget is "
        "lowered only where a layout does not fit otherwise. If nothing fits, it says what would have to change."
    )
    examples = """
        gspo-hpc suggest my.yaml cluster.gpu=H100 cluster.nodes=4
        gspo-hpc suggest my.yaml cluster.gpu=H100 --out faster.yaml
        gspo-hpc suggest my.yaml cluster.gpu=H200 --keep parallel.tensor_model_parallel_size"""
    describe(parser, text, examples)
    takes_config(parser)
    parser.add_argument("--keep", action="append", default=[], metavar="KEY", help="leave this setting as it is")
    parser.add_argument("--limit", type=int, default=5, metavar="N", help="how many layouts (default: 5)")
    takes_response_tokens(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the config with the first layout to FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the layouts; REFUSED if there is none."""
    from gspo_hpc.cli.inputs import load_config
    from gspo_hpc.cli.suggestions import suggest

    config = load_config(args)
    options = {"keep": args.keep, "as_json": args.json, "limit": args.limit, "out": args.out}
    found = suggest(args.config, config, args.places, **options, response_tokens=args.response_tokens)
    return DONE if found else REFUSED
