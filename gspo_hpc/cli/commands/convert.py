"""``gspo-hpc convert``: a config from another project's command line or config."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Writes a config for a Megatron-SWIFT command line, verl's overrides or a TRL GRPOConfig, with comments on "
        "what is not carried over and where a batch size means something else. Starts nothing."
    )
    examples = """
        gspo-hpc convert run_gspo.sh --out mine.yaml
        gspo-hpc convert grpo_config.yaml --gpus 8 --rows 7473
        gspo-hpc convert - --from swift < arguments.txt"""
    describe(parser, text, examples)
    parser.add_argument("config", metavar="FILE|-", help="script, list of arguments or YAML; - is standard input")
    parser.add_argument(
        "--from", dest="source", choices=["swift", "verl", "trl"], help="the project (default: recognized from FILE)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="config to write (default: standard output)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that train, if the file does not give them")
    parser.add_argument("--rows", type=int, metavar="N", help="prompts in the data, to turn epochs into steps")


def run(args: argparse.Namespace) -> int:
    """Write the config; return the exit code."""
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.importers import convert

    if args.config != "-":
        require_path(Path(args.config), "file")
    return convert.run(args)
