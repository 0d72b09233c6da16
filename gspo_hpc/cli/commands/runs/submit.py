"""``gspo-hpc submit``: a run as a Slurm job."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe, takes_config
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Submits the run through submitit. The run directory is run.dir, by default runs/NAME; if it exists, the run "
        "is resumed from it. When the job is preempted or its time is up, it saves and requeues itself, until the "
        "last step is done."
    )
    examples = """
        gspo-hpc submit my.yaml slurm.partition=gpu slurm.account=abc cluster.nodes=4
        gspo-hpc submit my.yaml slurm.profile=my_cluster slurm.time_minutes=240
        gspo-hpc submit my.yaml --dry-run"""
    describe(parser, text, examples)
    takes_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")


def run(args: argparse.Namespace) -> int:
    """Submit the run and print the id of its job."""
    from gspo_hpc.cli.inputs import load_config, places_told, print_warnings
    from gspo_hpc.launch.slurm import submit

    config = load_config(args)
    print_warnings(config)
    with places_told(args):
        if args.dry_run:
            print(submit.dry_run(config), end="")
            return DONE
        job_id = submit.submit(config)
    print(f"job {job_id} submitted; run directory {config.run_dir}")
    return DONE
