"""``gspo-hpc``: what a person types.

Floor 6. Whatever trains or reads a run is imported by the command that needs it, so that ``--help`` and ``plan`` answer
at once on a login node. Exit codes: 0 done, 2 refused before it began, 75 stopped to be requeued, 1 failed;
141, as after SIGPIPE, where whoever read the output has closed it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import shtab

from gspo_hpc import algorithms, config_file
from gspo_hpc.cli_options import REFUSED, Handler, parsers
from gspo_hpc.config import Config
from gspo_hpc.plan_page import paint
from gspo_hpc.slurm_commands import SlurmError

DONE, FAILED = 0, 1
_CUT_OFF = 141  # as a shell shows what SIGPIPE has ended: whoever read the output wanted no more of it

_WATCH_SECONDS = 5.0
_ENDED = ("done", "failed", "refused", "cancelled", "killed", "stopped")  # states of a run that nothing goes on with


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A user's mistake is one or two lines on stderr, never a traceback;
    GSPO_HPC_DEBUG=1 shows the traceback too."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # plan ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_OFF


def _run(words: list[str]) -> int:
    top, commands = parsers(_HANDLERS)
    try:
        name = words[0] if words else ""
        if name not in commands:
            if name.startswith("-"):
                top.parse_args(words)  # --help and --version end here
            return _unknown(name, top, list(commands))
        args = commands[name].parse_intermixed_args(words[1:])
        handler: Handler = args.handler
        return handler(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ModuleNotFoundError, SlurmError) as error:
        if os.environ.get("GSPO_HPC_DEBUG") or _own_bug(error):
            raise
        _complain(error)
        refusals = ValueError | FileNotFoundError | ModuleNotFoundError | SlurmError
        return REFUSED if isinstance(error, refusals) else FAILED


def _own_bug(error: Exception) -> bool:
    """A module of this package that is not there is no mistake of the user."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "gspo_hpc").startswith("gspo_hpc")


def _complain(error: Exception) -> None:
    if isinstance(error, ModuleNotFoundError):
        text = f"{error.name} is not installed here; install gspo_hpc[cpu] or gspo_hpc[gpu]"
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    for line in text.splitlines():
        print(f"{paint('error:', '31', sys.stderr)} {line}", file=sys.stderr)


def _unknown(name: str, top: argparse.ArgumentParser, commands: list[str]) -> int:
    if not name:
        top.print_help(sys.stderr)
        return REFUSED
    nearest = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"commands: {', '.join(commands)}"
    print(f"gspo-hpc: no command {name!r}; {hint}", file=sys.stderr)
    return REFUSED


def _plan(args: argparse.Namespace) -> int:
    from gspo_hpc import plan_command

    config = _config(args)
    options = {"as_json": args.json, "ranks": args.ranks, "sbatch": args.sbatch, "price": args.price}
    valid = plan_command.plan(args.config, config, **options, response_tokens=args.response_tokens)
    return DONE if valid else REFUSED


def _suggest(args: argparse.Namespace) -> int:
    from gspo_hpc import plan_command

    options = {"as_json": args.json, "limit": args.limit, "response_tokens": args.response_tokens}
    return DONE if plan_command.suggest_layouts(_config(args), args.keep, **options) else REFUSED


def _doctor(args: argparse.Namespace) -> int:
    config = None if args.config is None else _config(args)
    from gspo_hpc import doctor

    wait = doctor.WAIT_SECONDS if args.wait is None else args.wait
    found = doctor.diagnose(config, args.config, nodes=args.nodes, wait=wait, say=_to_stderr)
    print(json.dumps(found.to_json(), indent=2) if args.json else "\n".join(doctor.page(found)))
    return DONE if found.ok else FAILED


def _train(args: argparse.Namespace) -> int:
    config = _config(args)
    for text in algorithms.warnings(config):
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    from gspo_hpc.launch import train

    return train(config)


def _submit(args: argparse.Namespace) -> int:
    config = _config(args)
    for text in algorithms.warnings(config):
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    from gspo_hpc import submit

    if args.dry_run:
        print(submit.dry_run(config), end="")
        return DONE
    job_id = submit.submit(config)
    print(f"job {job_id} submitted; run directory {config.run_dir}")
    return DONE


def _status(args: argparse.Namespace) -> int:
    from gspo_hpc import status

    for run in args.runs:
        _exists(run, "run directory")
    while True:
        found = args.runs or status.runs_below(Path("runs"))
        if not found:
            raise ValueError("no runs in runs/; name a run directory")
        states = [status.read(run) for run in found]
        if args.watch and not args.json and sys.stdout.isatty():
            print("\033[2J\033[H" + status.now())
        for state in states:
            print(json.dumps(state.to_json()) if args.json else "\n".join(status.lines(state)), flush=True)
        if not args.watch or all(state.state in _ENDED for state in states):
            return DONE
        for run in found:
            status.lift_hold(run)
        time.sleep(_WATCH_SECONDS)


def _logs(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc import status

    if args.errors:
        log, text = status.first_error(args.run, args.attempt)
        print(f"{paint(str(log), '1', sys.stdout)}\n{text}", end="")
        return DONE
    path = status.log_path(args.run, args.rank, args.attempt)
    for text in status.follow(path, forever=args.follow, done=lambda: status.read(args.run).state in _ENDED):
        print(text, end="", flush=True)
    return DONE


def _cancel(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc import status

    status.cancel(args.run, print)
    return DONE


def _completion(args: argparse.Namespace) -> int:
    print(shtab.complete(args.top, shell=args.shell))
    return DONE


def _eval(args: argparse.Namespace) -> int:
    if not args.target.exists() and args.target.suffix in (".yaml", ".yml"):
        args.target = Path(_config_path(str(args.target)))
    _exists(args.target, "config, run directory or model folder")
    from gspo_hpc.launch import evaluate

    return evaluate(args.target, args.step, args.overrides, args.json)


def _export(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc.launch import export

    return export(args.run, args.step, args.out)


def _report(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc.report import write_report

    print(write_report(args.run, args.out))
    return DONE


def _convert(args: argparse.Namespace) -> int:
    if args.config != "-":
        _exists(Path(args.config), "file")
    from gspo_hpc import foreign

    return foreign.run(args)


def _diagnose(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc import diagnose

    found = diagnose.diagnose(args.run)
    print(json.dumps(found.to_json(), indent=2) if args.json else "\n".join(diagnose.page(found)))
    return FAILED if found.problems else DONE


def _config(args: argparse.Namespace) -> Config:
    """The config that a command is given; `args.config` is its file from here on."""
    args.config = _config_path(args.config)
    return config_file.load(args.config, args.overrides)


def _config_path(given: str) -> str:
    """The file of a config: a path, or the name of a preset in configs/ here or beside the package."""
    path = Path(given)
    if path.exists():
        return given
    if "=" in given:
        raise ValueError(f"{given} is a setting; the config file comes first: gspo-hpc COMMAND CONFIG key=value")
    folders = (path.parent, Path("configs"), Path(__file__).parents[1] / "configs")
    there = {file.stem: file for folder in reversed(folders) for file in sorted(folder.glob("*.y*ml"))}
    stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if path.name == given and stem in there:
        return str(there[stem])
    nearest = difflib.get_close_matches(stem, there, n=1)
    raise ValueError(f"{given}: no such config file{f'; nearest: {there[nearest[0]]}' if nearest else ''}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _exists(path: Path, what: str) -> None:
    """Refuses a path that is not there, with the nearest one beside it."""
    if not path.exists():
        beside = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(str(path), beside, n=1)
        raise ValueError(f"{path}: no such {what}{f'; nearest: {nearest[0]}' if nearest else ''}")


_HANDLERS: dict[str, Handler] = {
    "plan": _plan,
    "suggest": _suggest,
    "doctor": _doctor,
    "train": _train,
    "submit": _submit,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "eval": _eval,
    "export": _export,
    "report": _report,
    "diagnose": _diagnose,
    "convert": _convert,
    "completion": _completion,
}


if __name__ == "__main__":
    sys.exit(main())
