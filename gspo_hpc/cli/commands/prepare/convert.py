"""``gspo-hpc convert``: a config from another project's command line or config."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_hpc.cli.parser import describe

if TYPE_CHECKING:
    from gspo_hpc.importers.convert import Converted

MOST_MISTAKES = 8  # that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Writes a config for a run of ms-swift (on Megatron or on Hugging Face), verl or TRL, with comments on "
        "what is not carried over and where a batch size means something else. Starts nothing."
    )
    examples = """
        gspo-hpc convert run_gspo.sh --out mine.yaml
        gspo-hpc convert grpo_config.yaml --gpus 8 --rows 7473
        gspo-hpc convert - --from swift < arguments.txt"""
    describe(parser, text, examples)
    parser.add_argument("config", metavar="FILE|-", help="script, arguments, YAML or Python file; - is standard input")
    parser.add_argument(
        "--from",
        dest="source",
        choices=["swift", "megatron-swift", "ms-swift", "verl", "trl"],
        help="the project, where swift is either of the next two (default: recognized from FILE)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="config to write (default: standard output)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that train, whatever the file gives")
    parser.add_argument("--rows", type=int, metavar="N", help="prompts in the data, to turn epochs into steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the config and every argument")


def run(args: argparse.Namespace) -> int:
    """Write the config, and print on standard error what needs a look; return the exit code."""
    from gspo_hpc.cli.inputs import require_path, warn
    from gspo_hpc.importers.convert import convert
    from gspo_hpc.importers.inputs import read_text

    path = None if args.config == "-" else Path(args.config)
    if path is not None:
        require_path(path, "file")
    for name, count in (("--gpus", args.gpus), ("--rows", args.rows)):
        if count is not None and count < 1:
            raise ValueError(f"{name} {count}: must be 1 or more")
    if args.out is not None and args.out.exists():
        raise ValueError(f"{args.out} is there already; name another file")
    text = read_text(path)
    place = (Path(), "") if path is None else (path.parent, path.name)
    try:
        found = convert(text, args.source, args.gpus, args.rows, *place)
    except ValueError as error:
        lines = str(error).splitlines()
        more = [f"... and {len(lines) - MOST_MISTAKES} more"] if len(lines) > MOST_MISTAKES else []
        raise ValueError("\n".join(f"{args.config}: {line}" for line in lines[:MOST_MISTAKES] + more)) from None
    warnings = _warnings(found, args.rows)
    if args.out is not None:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(found.text)
    if args.json:
        print(json.dumps(_as_json(found, warnings)))
        return 0
    if args.out is None:
        print(found.text, end="")
    else:
        print(f"{args.out}: written from {found.project}; {len(found.carried)} arguments are carried over")
        for title, items in (("where a size means something else", found.differs), ("not carried over", found.dropped)):
            print("\n".join([f"{title}:", *(f"  {item}" for item in items)]) if items else f"{title}: nothing")
    for line in warnings:
        warn(line)
    return 0


def _as_json(found: Converted, warnings: list[str]) -> dict[str, Any]:
    """Return the config, and each argument of the original run in one of three lists."""
    from gspo_hpc.config import yaml_text

    return {
        "project": found.project,
        "config": yaml_text.read(found.text),
        "carried_over": [_shown(item, "keys") for item in found.carried],
        "not_carried_over": [_shown(item, "why") for item in found.left],
        "unknown": [_shown(item) for item in found.strange],
        "differs": list(found.differs),
        "warnings": warnings,
    }


def _shown(argument: Any, *more: str) -> dict[str, Any]:
    fields = dataclasses.asdict(argument)
    return {name: fields[name] for name in ("name", "given", *more)}


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
