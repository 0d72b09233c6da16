"""The commands of ``gspo-hpc`` with their one-line help; the arguments of each are in commands/FOLDER/NAME.py.

A command is a module of such a folder with two functions: ``add_arguments(parser)``, which declares its description,
examples and options, and ``run(args)``, which returns its exit code. The module is imported only when its command is
used, so that ``--help`` answers at once. To add a command, add its file and one line to FOLDERS.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Collection
from typing import Any, NoReturn

from gspo_hpc import __version__
from gspo_hpc.system.exit_codes import REFUSED
from gspo_hpc.system.text import near_miss

FOLDERS = {  # of commands/, each with its commands and their one line of help
    "prepare": {
        "init": "begin a project: config, data, reward function and its test",
        "plan": "show what a config means: sizes, layout, passes, steps",
        "suggest": "suggest the best layouts for a model on given GPUs",
        "keys": "search the settings of a config",
        "convert": "convert another project's config",
        "doctor": "check what a run needs, before it starts",
        "schema": "print the JSON schema of a config, for editors",
        "completion": "print a completion script for a shell",
    },
    "runs": {
        "try": "sample a few prompts and grade them, before training",
        "train": "train on this machine",
        "submit": "train on a Slurm cluster",
        "status": "show the state of runs",
        "logs": "show the logs of a run",
        "cancel": "end a run, with a checkpoint",
        "eval": "evaluate a run, a checkpoint or a model folder",
        "rescore": "grade the completions of an evaluation again",
        "compare": "compare two evaluations, prompt by prompt",
        "serve": "start vLLM's server on a run or a model folder",
        "export": "write a checkpoint as a Hugging Face folder",
        "report": "write the report page of a run",
        "sync": "send the trackers of a run what they lack",
        "diagnose": "explain what is wrong or slow in a run",
    },
}
MODULES = {"try": "try_out"}  # of commands that are words of Python, which name no module
COMMANDS = {name: text for folder in FOLDERS.values() for name, text in folder.items()}  # in the order of --help
_PROGRAM = "gspo-hpc"
_LAYOUT: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
_EPILOG = """\
gspo-hpc COMMAND --help explains a command with examples.
exit codes: 0 done, 1 failed, 2 refused before the first step, 3 an incomplete plan,
75 stopped and saved, can be resumed"""


class UsageError(SystemExit):
    """The end of a command whose words cannot be understood, with the reason in one line, which is printed already."""

    def __init__(self, text: str) -> None:
        super().__init__(REFUSED)
        self.text = text


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option for an unknown one, and the nearest choice for a wrong one."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake with a hint and the usage, and exit with REFUSED."""
        head, colon, names = message.partition(": ")
        hint = ""
        if head.startswith("the following arguments are required"):
            spare = [action.metavar for action in self._actions if action.nargs in ("*", "?")]  # intermixed parsing
            message = head + colon + ", ".join(name for name in names.split(", ") if name not in spare)
        elif head.startswith("unrecognized arguments"):
            options = [text for action in self._actions for text in action.option_strings]
            wrong = next((word.split("=")[0] for word in names.split() if word.startswith("-")), "")
            hint = near_miss(wrong, options)
            if any(action.metavar == "key=value" for action in self._actions) and (not hint or "." in wrong):
                hint = _as_setting(next(word for word in names.split() if word.startswith("-")))
        text = f"{self.prog}: {message}{hint}"
        self._print_message(f"{text}\n{self.format_usage()}", sys.stderr)
        raise UsageError(text)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = near_miss(str(value), [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def _as_setting(word: str) -> str:
    """Return how a setting is written that was given as an option, as TRL and ms-swift take them."""
    key, _, value = word.lstrip("-").partition("=")
    if "." not in key:
        from gspo_hpc.config.reading.peer_names import PEER_NAMES  # only here: most commands are right

        key = PEER_NAMES.get(key.lower().replace("-", "_"), "")
        if " " in key or "." not in key:
            return "; settings are written section.key=value, and gspo-hpc keys WORD finds them"
    return f"; write {key}={value or 'VALUE'}, without dashes"


def parser_of(command: str) -> Parser:
    """Return the parser of one command, without those of the others."""
    parser = Parser(prog=f"{_PROGRAM} {command}", **_LAYOUT)
    _complete(parser, command)
    return parser


def parsers(complete: Collection[str] = ()) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the bare program and one for each command; only those in `complete` know their arguments."""
    top = Parser(
        prog=_PROGRAM,
        **_LAYOUT,
        description="Train language models with GSPO: Megatron-Core trains, vLLM generates.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    group = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name, summary in COMMANDS.items():
        commands[name] = group.add_parser(name, help=summary, **_LAYOUT)
        if name in complete:
            _complete(commands[name], name)
    return top, commands


def _complete(parser: Parser, command: str) -> None:
    """Give the parser the arguments of a command, and the function that runs it."""
    folder = next(name for name, commands in FOLDERS.items() if command in commands)
    module = importlib.import_module(f"gspo_hpc.cli.commands.{folder}.{MODULES.get(command, command)}")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def describe(parser: argparse.ArgumentParser, text: str, examples: str) -> None:
    """Give the parser of a command its description, below the line of COMMANDS, and its examples, one a line."""
    summary = COMMANDS[parser.prog.split()[-1]]
    parser.description = f"{summary[0].upper()}{summary[1:]}.\n\n{textwrap.fill(text, 100)}"
    parser.epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")


def takes_config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the arguments CONFIG, which may be `optional`, and key=value."""
    count = "?" if optional else None
    parser.add_argument("config", metavar="CONFIG", nargs=count, help="YAML file, or the name of a preset")
    takes_overrides(parser)


def takes_response_tokens(parser: argparse.ArgumentParser) -> None:
    """Add the option --response-tokens."""
    text = "average length of a response, for the estimate of time (default: half of the longest)"
    parser.add_argument("--response-tokens", type=float, metavar="N", help=text)


def takes_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the arguments key=value."""
    text = "settings that override the file, such as run.max_steps=10 or batch.num_generations=8"
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=text)
