"""The program ``gspo-hpc``: find the command, run it, explain what went wrong, return an exit code.

A command imports what it needs when it runs, so that ``--help`` and ``plan`` answer at once on a login node. The exit
codes are in system/exit_codes.py.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence

from gspo_hpc.cli.parser import COMMANDS, UsageError, parser_of, parsers
from gspo_hpc.system.exit_codes import DONE, FAILED, INTERRUPTED, OUTPUT_CLOSED, REFUSED
from gspo_hpc.system.terminal import paint, pasteable
from gspo_hpc.system.text import near_miss

_BRIEF = ("plan", "suggest", "keys", "schema", "completion")  # commands that compute, print and end


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A user's mistake is one or two lines on standard error, and with --json also an object on standard output, whose
    `errors` are these lines; only with GSPO_HPC_DEBUG=1 is it a traceback.
    """
    if argv is None and "_ARGCOMPLETE" in os.environ:  # a shell asks what may stand at the cursor
        from gspo_hpc.cli import completers

        completers.answer()
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] and words[0] in _BRIEF:
        # The process ends soon: its garbage is freed with it. Looking for it takes a seventh of the time of a plan.
        gc.disable()
        atexit.register(gc.freeze)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # gspo-hpc plan ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    as_json = False
    try:
        if name not in COMMANDS:
            top, _ = parsers()
            if name.startswith("-"):
                top.parse_args(words)  # --help and --version end here
            return _unknown(name, top, list(COMMANDS), as_json="--json" in words)
        args = parser_of(name).parse_intermixed_args(words[1:])
        as_json = getattr(args, "json", False)
        return int(args.run(args))
    except UsageError as end:
        if "--json" in words:
            _print_errors([end.text])
        return REFUSED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        from gspo_hpc.launch.slurm.commands import SlurmError
        from gspo_hpc.system.environment import DEBUG

        refusals = (ValueError, FileNotFoundError, ModuleNotFoundError, SlurmError)
        if not isinstance(error, (*refusals, OSError)) or os.environ.get(DEBUG) or _own_bug(error):
            raise
        _complain(error, as_json)
        return REFUSED if isinstance(error, refusals) else FAILED


def _own_bug(error: Exception) -> bool:
    """Return True for a missing module of this package itself, which is not a mistake of the user."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "gspo_hpc").startswith("gspo_hpc")


def _complain(error: Exception, as_json: bool) -> None:
    if isinstance(error, ModuleNotFoundError):
        text = f"{error.name} is not installed here; install gspo_hpc[cpu] or gspo_hpc[gpu]"
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = pasteable(str(error)) or type(error).__name__
    for line in text.splitlines():
        print(f"{paint('error:', '31', sys.stderr)} {line}", file=sys.stderr)
    if as_json:
        _print_errors(text.splitlines())


def _print_errors(lines: list[str]) -> None:
    import json  # only here: a command that is right may not need it

    print(json.dumps({"errors": lines}))


def _unknown(name: str, top: argparse.ArgumentParser, commands: list[str], *, as_json: bool) -> int:
    if not name:
        top.print_help(sys.stderr)
        return REFUSED
    text = f"no command {name!r}{near_miss(name, commands, known=True)}"
    print(f"gspo-hpc: {text}", file=sys.stderr)
    if as_json:
        _print_errors(text.splitlines())
    return REFUSED
