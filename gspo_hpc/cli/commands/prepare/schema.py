"""``gspo-hpc schema``: the JSON schema of a config, for editors."""

from __future__ import annotations

import argparse
import json

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Prints the JSON schema of a config: every key with its meaning, range and default. Save it to a FILE, and put "
        "`# yaml-language-server: $schema=FILE` at the top of a config: editors then complete and check its keys."
    )
    describe(parser, text, "gspo-hpc schema > gspo-hpc.schema.json")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    from gspo_hpc.config.reference.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return DONE
