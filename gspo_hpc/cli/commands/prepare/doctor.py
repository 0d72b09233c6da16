"""``gspo-hpc doctor``: checks of what a run needs, before it starts."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe, takes_config
from gspo_hpc.system.exit_codes import DONE, FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Checks versions, GPUs, memory, network, files, model, data, W&B and Slurm, and prints a fix for everything "
        "that is not right. Without CONFIG it checks this machine. Exits with 1 if something will fail."
    )
    examples = """
        gspo-hpc doctor
        gspo-hpc doctor my.yaml cluster.nodes=4
        gspo-hpc doctor my.yaml --nodes 4 --groups"""
    describe(parser, text, examples)
    takes_config(parser, optional=True)
    parser.add_argument("--nodes", type=int, metavar="N", help="check N nodes too, in a short Slurm job")
    groups = "with --nodes: also start the ranks of the run there, which join their process groups and end"
    parser.add_argument("--groups", action="store_true", help=groups)
    parser.add_argument("--wait", type=float, metavar="S", help="seconds to wait for that job (default: 300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the findings; FAILED if one of them makes a run fail."""
    import json
    import sys

    from gspo_hpc.cli.inputs import load_config
    from gspo_hpc.doctor import examine

    config = None if args.config is None else load_config(args)
    wait = examine.WAIT_SECONDS if args.wait is None else args.wait
    found = examine.diagnose(
        config,
        args.config,
        nodes=args.nodes,
        groups=args.groups,
        wait=wait,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        from gspo_hpc.cli.pages import doctor, render

        render.show(doctor.page(found))
    return DONE if found.ok else FAILED
