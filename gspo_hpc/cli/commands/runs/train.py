"""``gspo-hpc train``: a run on this machine."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe, takes_config
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Starts one process per rank and waits for them. The run directory is run.dir, by default runs/NAME. If it "
        "exists, the run is resumed from it."
    )
    examples = """
        gspo-hpc train tiny_cpu
        gspo-hpc train my.yaml run.name=second run.seed=2 optimizer.lr=1e-6
        gspo-hpc train my.yaml --dry-run"""
    describe(parser, text, examples)
    takes_config(parser)
    dry = "only bring up the process groups, and print the place of each rank and the parameters that it would hold"
    parser.add_argument("--dry-run", action="store_true", help=dry)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code of the run."""
    from gspo_hpc.cli.inputs import load_config, places_told, print_warnings
    from gspo_hpc.doctor.node import obstacles
    from gspo_hpc.launch.local import dry_run, train

    config = load_config(args)
    print_warnings(config)
    with places_told(args):
        if not args.dry_run:
            return train(config, checks=[obstacles])
        found = dry_run(config)
    if isinstance(found, int):
        return found
    from gspo_hpc.cli.pages import ranks, render
    from gspo_hpc.system.text import counted

    render.show(ranks.places(found))
    their = "its" if len(found) == 1 else "their"
    print(f"{counted(len(found), 'rank')} joined {their} process groups and summed over each of them")
    return DONE
