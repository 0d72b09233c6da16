"""``gspo-hpc``: what a person types.

Floor 6. Whatever trains or reads a run is imported by the command that needs it, so that ``--help`` and ``plan`` answer
at once on a login node. Exit codes: 0 done, 2 refused before it began, 75 stopped to be requeued, 1 failed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import shtab

from gspo_hpc import __version__, algorithms, config_file, mends
from gspo_hpc.config import Config
from gspo_hpc.plan import make_plan
from gspo_hpc.plan_page import page, paint
from gspo_hpc.slurm_commands import SlurmError

DONE, FAILED, REFUSED = 0, 1, 2

_WATCH_SECONDS = 5.0
_ENDED = ("done", "failed", "refused", "cancelled", "killed", "stopped")  # states of a run that nothing goes on with
_COUNTED_BYTES = 64 * 2**20  # a larger data file is not read to count its rows: the plan answers at once


class _Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        options = [text for action in self._actions for text in action.option_strings]
        wrong = [word for word in message.split() if word.startswith("-")]
        nearest = difflib.get_close_matches(wrong[0].split("=")[0], options, n=1) if wrong else []
        hint = f"; nearest: {nearest[0]}" if nearest and nearest[0] != wrong[0] else ""
        self.exit(REFUSED, f"{self.prog}: {message}{hint}\n{self.format_usage()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A user's mistake is one or two lines on stderr, never a traceback;
    GSPO_HPC_DEBUG=1 shows the traceback too."""
    words = list(sys.argv[1:] if argv is None else argv)
    top, commands = _parsers()
    try:
        name = words[0] if words else ""
        if name not in commands:
            if name.startswith("-"):
                top.parse_args(words)  # --help and --version end here
            return _unknown(name, top, list(commands))
        args = commands[name].parse_intermixed_args(words[1:])
        handler: Callable[[argparse.Namespace], int] = args.handler
        code = handler(args)
        sys.stdout.flush()
        return code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # plan ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
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


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the bare program, and one for each command."""
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(
        prog="gspo-hpc",
        formatter_class=raw,
        allow_abbrev=False,
        description="Trains language models with GSPO: Megatron-Core trains, vLLM generates on the same GPUs.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"gspo-hpc {__version__}")
    group = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    commands: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, handler: Callable[[argparse.Namespace], int], summary: str, text: str, examples: str) -> _Parser:
        epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")
        description = f"{summary[0].upper()}{summary[1:]}.\n\n{textwrap.fill(text, 100)}"
        parser = group.add_parser(
            name, help=summary, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
        )
        parser.set_defaults(handler=handler)
        commands[name] = parser
        return parser

    def takes_config(parser: _Parser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file")
        parser.add_argument("overrides", metavar="key=value", nargs="*", help=setting)

    setting = "settings put over the file, such as run.max_steps=10 or batch.num_generations=8"
    text = "Needs no GPU and starts nothing. Exits with 2, every broken rule and what mends them if sizes do not fit."
    plan = add("plan", _plan, "show what a config amounts to: sizes, layout, passes, steps", text, _PLAN_EXAMPLES)
    takes_config(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    text = "The run directory is run.dir, by default runs/NAME. An existing one is resumed where it stopped."
    train = add("train", _train, "train on this machine", text, _TRAIN_EXAMPLES)
    takes_config(train)
    text = (
        "Submits the run through submitit. The run directory is run.dir; an existing one is resumed where it stopped. "
        "The job requeues itself when it is preempted or out of time, until the last step is done."
    )
    submit = add("submit", _submit, "train on a Slurm cluster", text, _SUBMIT_EXAMPLES)
    takes_config(submit)
    submit.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    text = "Where runs stand: state, step, reward, speed, time left, and why attempts ended. Works without Slurm, too."
    status = add("status", _status, "show where runs stand", text, _STATUS_EXAMPLES)
    status.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="run directories (default: all in runs/)")
    status.add_argument("--json", action="store_true", help="print one JSON object a run, one a line")
    status.add_argument("--watch", action="store_true", help="again every few seconds; also lets requeued jobs start")
    text = "Without --rank: what the run tells people. With it: all that this rank and its libraries wrote."
    logs = add("logs", _logs, "show what a run wrote", text, _LOGS_EXAMPLES)
    logs.add_argument("run", metavar="RUN", type=Path, help="run directory")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until the run ends")
    logs.add_argument("--rank", type=int, metavar="N", help="the log of one rank")
    logs.add_argument("--attempt", type=int, metavar="N", help="of an earlier start (default: the newest)")
    logs.add_argument("--errors", action="store_true", help="only the first traceback among all ranks")
    text = (
        "A run that runs saves a checkpoint before it ends; submit or train goes on from there. One that waits is gone."
    )
    cancel = add("cancel", _cancel, "end a run, saved", text, _CANCEL_EXAMPLES)
    cancel.add_argument("run", metavar="RUN", type=Path, help="run directory")
    text = "Answers the evaluation prompts: greedy accuracy, and avg@k and pass@k where eval.samples is above 1."
    evaluate = add("eval", _eval, "evaluate a run, a checkpoint or a model folder", text, _EVAL_EXAMPLES)
    evaluate.add_argument("target", metavar="CONFIG|RUN|MODEL_FOLDER", type=Path, help="what is evaluated")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", help=setting)
    evaluate.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    text = "The folder has safetensors, config and tokenizer, and loads in transformers and vLLM."
    export = add("export", _export, "write a checkpoint as a Hugging Face folder", text, _EXPORT_EXAMPLES)
    export.add_argument("run", metavar="RUN", type=Path, help="run directory")
    export.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")
    export.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write")
    text = "One self-contained HTML file: curves, samples before and after, the plan, the attempts."
    report = add("report", _report, "write the report page of a run", text, _REPORT_EXAMPLES)
    report.add_argument("run", metavar="RUN", type=Path, help="run directory")
    report.add_argument("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")
    text = (
        "Reads a run directory (finished, running or dead) and names what is wrong or slow, with evidence, cause and "
        "the setting to change. Exits with 1 if a problem is found, with 0 if not (warnings and notes are none)."
    )
    diagnose = add("diagnose", _diagnose, "say what is wrong or slow in a run", text, _DIAGNOSE_EXAMPLES)
    diagnose.add_argument("run", metavar="RUN", type=Path, help="run directory")
    diagnose.add_argument("--json", action="store_true", help="print one JSON object")
    text = "Prints a script for your shell; runs, config files and options then complete with the tabulator."
    completion = add("completion", _completion, "print a completion script", text, _COMPLETION_EXAMPLES)
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="your shell")
    completion.set_defaults(top=top)
    for parser in commands.values():
        for action in parser._actions:
            if action.type is Path or action.dest == "config":
                action.complete = shtab.FILE if action.dest in ("config", "target", "out") else shtab.DIRECTORY  # type: ignore[attr-defined]
    return top, commands


_EPILOG = """\
gspo-hpc COMMAND --help explains a command with examples.
exit codes: 0 done, 2 refused before it began, 75 stopped to be requeued, 1 failed"""
_PLAN_EXAMPLES = """
    gspo-hpc plan configs/tiny_cpu.yaml
    gspo-hpc plan my.yaml cluster.nodes=8 batch.global_batch_size=512
    gspo-hpc plan my.yaml --json"""
_TRAIN_EXAMPLES = """
    gspo-hpc train configs/tiny_cpu.yaml
    gspo-hpc train my.yaml run.name=second run.seed=2 optimizer.lr=1e-6"""
_SUBMIT_EXAMPLES = """
    gspo-hpc submit my.yaml slurm.partition=gpu slurm.account=abc cluster.nodes=4
    gspo-hpc submit my.yaml slurm.profile=my_cluster slurm.time_minutes=240
    gspo-hpc submit my.yaml --dry-run"""
_STATUS_EXAMPLES = """
    gspo-hpc status
    gspo-hpc status runs/tiny --watch
    gspo-hpc status runs/tiny --json"""
_LOGS_EXAMPLES = """
    gspo-hpc logs runs/tiny -f
    gspo-hpc logs runs/tiny --rank 3
    gspo-hpc logs runs/tiny --errors"""
_CANCEL_EXAMPLES = """
    gspo-hpc cancel runs/tiny"""
_COMPLETION_EXAMPLES = """
    eval "$(gspo-hpc completion bash)"                                   # in ~/.bashrc
    gspo-hpc completion zsh > ~/.zfunc/_gspo-hpc"""
_EVAL_EXAMPLES = """
    gspo-hpc eval runs/tiny
    gspo-hpc eval runs/tiny --step 20 eval.samples=8
    gspo-hpc eval my.yaml --json"""
_EXPORT_EXAMPLES = """
    gspo-hpc export runs/tiny --out exported/
    gspo-hpc export runs/tiny --step 20 --out exported/"""
_REPORT_EXAMPLES = """
    gspo-hpc report runs/tiny
    gspo-hpc report runs/tiny --out tiny.html"""

_DIAGNOSE_EXAMPLES = """
    gspo-hpc diagnose runs/tiny
    gspo-hpc diagnose runs/tiny --json"""


def _plan(args: argparse.Namespace) -> int:
    config = _config(args)
    rows = _count_rows(config.data.train)
    plan = make_plan(config, rows)
    found = mends.find(config, rows)
    if args.json:
        print(json.dumps(plan.to_json() | {"mends": [mend.to_json() for mend in found]}, indent=2))
    else:
        print("\n".join(page(args.config, config, plan, found)))
    return DONE if plan.valid else REFUSED


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


def _diagnose(args: argparse.Namespace) -> int:
    _exists(args.run, "run directory")
    from gspo_hpc import diagnose

    found = diagnose.diagnose(args.run)
    print(json.dumps(found.to_json(), indent=2) if args.json else "\n".join(diagnose.page(found)))
    return FAILED if found.problems else DONE


def _config(args: argparse.Namespace) -> Config:
    if "=" in args.config and not Path(args.config).exists():
        raise ValueError(f"{args.config} is a setting; the config file comes first: gspo-hpc COMMAND CONFIG key=value")
    return config_file.load(args.config, args.overrides)


def _exists(path: Path, what: str) -> None:
    """Refuses a path that is not there, with the nearest one beside it."""
    if not path.exists():
        beside = [str(item) for item in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(str(path), beside, n=1)
        raise ValueError(f"{path}: no such {what}{f'; nearest: {nearest[0]}' if nearest else ''}")


def _count_rows(train: str | None) -> int | None:
    """Rows of a JSONL file; None where they are not to be had at once."""
    path = Path(train or "")
    if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _COUNTED_BYTES:
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


if __name__ == "__main__":
    sys.exit(main())
