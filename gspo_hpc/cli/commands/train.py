"""``gspo-hpc train``: a run on this machine."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe, takes_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Starts one process per rank and waits for them. The run directory is run.dir, by default runs/NAME. If it "
        "exists, the run is resumed from it."
    )
    examples = """
        gspo-hpc train tiny_cpu
        gspo-hpc train my.yaml run.name=second run.seed=2 optimizer.lr=1e-6"""
    describe(parser, text, examples)
    takes_config(parser)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code of the run."""
    from gspo_hpc.cli.inputs import load_config, places_told, print_warnings
    from gspo_hpc.launch.local import train

    config = load_config(args)
    print_warnings(config)
    with places_told(args):
        return train(config)
