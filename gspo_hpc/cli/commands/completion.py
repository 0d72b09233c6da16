"""``gspo-hpc completion``: a completion script for a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import COMMANDS, describe, parsers
from gspo_hpc.system.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = "The script lets the Tab key complete commands, options, run directories and config files."
    examples = """
        eval "$(gspo-hpc completion bash)"                                   # in ~/.bashrc
        gspo-hpc completion zsh > ~/.zfunc/_gspo-hpc"""
    describe(parser, text, examples)
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    top, commands = parsers(COMMANDS)
    for parser in commands.values():
        for action in parser._actions:
            if action.type is Path or action.dest == "config":
                action.complete = shtab.FILE if action.dest in ("config", "target", "out") else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(top, shell=args.shell))
    return DONE
