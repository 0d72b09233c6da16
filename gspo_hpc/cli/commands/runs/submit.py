"""``gspo-hpc submit``: a run as a Slurm job, or a sweep as an array of jobs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from gspo_hpc.cli.parser import describe, takes_config
from gspo_hpc.system.exit_codes import DONE

if TYPE_CHECKING:
    from gspo_hpc.config.schema import Config
    from gspo_hpc.config.sweep import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Submits the run through submitit. The run directory is run.dir, by default runs/NAME; if it exists, the run "
        "is resumed from it. When the job is preempted or its time is up, it saves and requeues itself, until the "
        "last step is done. With --array, every combination of the values is a run below that directory, and all of "
        "them are one Slurm array; the same command again submits those that are not done."
    )
    examples = """
        gspo-hpc submit my.yaml slurm.partition=gpu slurm.account=abc cluster.nodes=4
        gspo-hpc submit my.yaml slurm.profile=my_cluster slurm.time_minutes=240
        gspo-hpc submit my.yaml --array run.seed=1,2,3 optimizer.lr=1e-6,2e-6 --at-most 2
        gspo-hpc submit my.yaml --dry-run"""
    describe(parser, text, examples)
    takes_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    values = "settings with all values that they take, for runs with every combination of them"
    parser.add_argument("--array", metavar="key=value,value", nargs="+", help=values)
    parser.add_argument("--at-most", metavar="N", type=int, help="runs of --array that Slurm starts at a time")


def run(args: argparse.Namespace) -> int:
    """Submit the run, or the sweep, and print the id of its job."""
    from gspo_hpc.cli.inputs import load_config, places_told, print_warnings
    from gspo_hpc.doctor.node import no_space
    from gspo_hpc.launch.slurm import submit

    if args.at_most is not None and (args.array is None or args.at_most < 1):
        raise ValueError(f"--at-most {args.at_most} must be at least 1, and belongs to --array")
    if args.array is not None:
        return _run_sweep(args)
    config = load_config(args)
    print_warnings(config)
    with places_told(args):
        if args.dry_run:
            print(submit.dry_run(config), end="")
            return DONE
        job_id = submit.submit(config, _tell_waiting, [no_space])
    print(f"job {job_id} submitted; run directory {config.run_dir}")
    return DONE


def _run_sweep(args: argparse.Namespace) -> int:
    from gspo_hpc.cli.inputs import print_warnings
    from gspo_hpc.doctor.node import no_space
    from gspo_hpc.launch.slurm import array

    points = _points(args)
    for config in points.values():
        print_warnings(config)
        break
    if args.dry_run:
        script = array.dry_run(points, args.at_most)
        print("\n".join(_table(list(points))), end="\n\n")
        print(script, end="")
        return DONE
    found = array.submit(points, args.at_most, _tell_waiting, [no_space])
    folder = next(iter(points.values())).run_dir
    for names, what in ((found.done, "done"), (found.active, "running or waiting already")):
        if names:
            print(
                f"{_runs(len(names))} of {len(points)} {'is' if len(names) == 1 else 'are'} {what}: {', '.join(names)}"
            )
    if found.job_id is None:
        print(f"nothing to submit; sweep directory {folder}")
    else:
        print(f"job array {found.job_id} submitted: {_runs(len(found.submitted))}; sweep directory {folder}")
    return DONE


def _points(args: argparse.Namespace) -> dict[Point, Config]:
    """Return the points of a sweep with their configs. Raises ValueError that names a point whose config is wrong."""
    from gspo_hpc.config import loader, sweep
    from gspo_hpc.config.reading.config_files import find_config

    path, found = find_config(args.config), {}
    for point in sweep.points(args.array):
        try:
            found[point] = loader.load(path, [*args.overrides, *point.settings])
        except ValueError as error:
            raise ValueError(f"point {point.name}: {error}") from None
    return found


def _table(points: list[Point]) -> list[str]:
    """Return the lines of a table of points: the task's number, the run's folder and the settings."""
    wide = max(len(point.name) for point in points)
    rows = [f"{number:4}  {point.name:{wide}}  {' '.join(point.settings)}" for number, point in enumerate(points)]
    return [f"task  {'run':{wide}}  settings", *rows]


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _tell_waiting() -> None:
    from gspo_hpc.launch.slurm.submit import PATIENCE

    print(f"Slurm's controller does not answer: trying again for {PATIENCE:.0f} s", file=sys.stderr, flush=True)
