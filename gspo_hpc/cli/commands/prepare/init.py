"""``gspo-hpc init``: begin a project."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE

_PROJECTS = ("trl", "verl", "swift", "megatron-swift", "ms-swift")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Writes a config with comments, twenty rows of data, a reward function and a test for it into FOLDER. It asks "
        "nothing and overwrites nothing. On a machine without a GPU the config is for the CPU. With --from, the config "
        "is made from a script or config of TRL, verl or ms-swift, or for data: a file (JSONL, CSV, parquet) or the "
        "folder of a dataset."
    )
    examples = """
        gspo-hpc init sums
        gspo-hpc init mine --from data.jsonl
        gspo-hpc init mine --from run_grpo.sh"""
    describe(parser, text, examples)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a script, a config, or data")
    parser.add_argument("--project", choices=_PROJECTS, help="whose script it is, if the file does not show it")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print what comes next."""
    import shlex

    from gspo_hpc.cli.inputs import require_path, warn
    from gspo_hpc.starter import project
    from gspo_hpc.system.terminal import program

    if args.source is not None:
        require_path(args.source, "file")
    made = project.write(args.folder, args.source, project=args.project, cuda=Path("/dev/nvidiactl").exists())
    for path in made.files:
        print(path)
    for note in made.notes:
        print(f"note: {note}")
    for warning in made.warnings:
        warn(warning)
    if made.converted is not None:
        own = shlex.join([str(args.source), *(["--from", args.project] if args.project else [])])
        print(f"{len(made.converted.carried)} arguments of {made.converted.project} are carried over; for the others:")
        print(f"  {program()} convert {own}")
    here = "" if args.folder == Path() else f"cd {shlex.quote(str(args.folder))} && "
    print(f"next: {here}{program()} plan {project.CONFIG}    then: {program()} train {project.CONFIG}")
    return DONE
