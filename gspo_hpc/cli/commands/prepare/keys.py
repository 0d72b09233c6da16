"""``gspo-hpc keys``: search the settings of a config."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Shows each setting with its allowed values, its default and its meaning. WORD is a part of a name or of a "
        "meaning, or the name that TRL, verl, ms-swift or OpenRLHF have for a setting. Without WORD it shows all."
    )
    examples = """
        gspo-hpc keys batch.num_generations
        gspo-hpc keys learning rate
        gspo-hpc keys epsilon
        gspo-hpc keys checkpoint --json"""
    describe(parser, text, examples)
    parser.add_argument("words", metavar="WORD", nargs="*", help="what to search for")
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the settings that are found."""
    import dataclasses
    import json

    from gspo_hpc.config.reference.settings import search, settings

    word = " ".join(args.words)
    found = search(word) if word else list(settings().values())
    if not found:
        raise ValueError(f"{word}: no setting has this word in its name or meaning; gspo-hpc keys shows all settings")
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2, ensure_ascii=False))
    else:
        from gspo_hpc.cli.pages import keys, render

        render.show(keys.page(found, word))
    return DONE
