"""``gspo-hpc completion``: a completion script for a shell."""

from __future__ import annotations

import argparse

from gspo_hpc.cli.parser import describe
from gspo_hpc.system.exit_codes import DONE

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "The script lets the Tab key complete commands, options, presets, settings (batch.num_generations=) with their "
        "values, and run directories. gspo-hpc must be on PATH."
    )
    examples = """
        eval "$(gspo-hpc completion bash)"                                   # in ~/.bashrc
        eval "$(gspo-hpc completion zsh)"                                    # in ~/.zshrc, below compinit
        gspo-hpc completion fish > ~/.config/fish/completions/gspo-hpc.fish"""
    describe(parser, text, examples)
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import argcomplete

    print(argcomplete.shellcode(["gspo-hpc"], shell=args.shell))
    return DONE
