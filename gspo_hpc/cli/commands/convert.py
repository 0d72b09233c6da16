"""``gspo-hpc convert``: a config from another project's command line or config."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_hpc.cli.parser import describe

if TYPE_CHECKING:
    from gspo_hpc.importers.convert import Converted

MOST_MISTAKES = 8  # that are shown


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
    """Write the config, and print on standard error what needs a look; return the exit code."""
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.importers.convert import convert
    from gspo_hpc.importers.inputs import read_text
    from gspo_hpc.system.terminal import paint

    path = None if args.config == "-" else Path(args.config)
    if path is not None:
        require_path(path, "file")
    for name, count in (("--gpus", args.gpus), ("--rows", args.rows)):
        if count is not None and count < 1:
            raise ValueError(f"{name} {count}: must be 1 or more")
    if args.out is not None and args.out.exists():
        raise ValueError(f"{args.out} is there already; name another file")
    text = read_text(path)
    try:
        found = convert(text, args.source, args.gpus, args.rows, Path() if path is None else path.parent)
    except ValueError as error:
        lines = str(error).splitlines()
        more = [f"... and {len(lines) - MOST_MISTAKES} more"] if len(lines) > MOST_MISTAKES else []
        raise ValueError("\n".join(f"{args.config}: {line}" for line in lines[:MOST_MISTAKES] + more)) from None
    if args.out is None:
        print(found.text, end="")
    else:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(found.text)
        print(f"{args.out}: written from {found.project}")
        for title, items in (("where a size means something else", found.differs), ("not carried over", found.dropped)):
            print("\n".join([f"{title}:", *(f"  {item}" for item in items)]) if items else f"{title}: nothing")
    for line in _warnings(found, args.rows):
        print(f"{paint('warning:', '33', sys.stderr)} {line}", file=sys.stderr)
    return 0


def _warnings(found: Converted, rows: int | None) -> list[str]:
    """Return what was assumed, and which rules the plan breaks with a fix."""
    from gspo_hpc.planning.fixes import search
    from gspo_hpc.planning.plan import make_plan

    plan = make_plan(found.config, rows)
    lines = [*found.assumed, *(f"the plan breaks rule {item.rule}: {item.message}" for item in plan.broken)]
    lines += [one.reason for one in plan.not_run]
    if plan.broken and (offered := search.find(found.config, rows, limit=1)):
        lines.append(f"this fixes the plan: {offered[0]}")
    return [*lines, *plan.warnings]
