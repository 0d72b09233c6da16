"""``gspo-hpc``: what a person types.

Floor 6. Whatever trains or reads a run is imported by the command that needs it, so that ``--help`` and ``plan`` answer
at once on a login node. Exit codes: 0 done, 2 refused before it began, 75 stopped to be requeued, 1 failed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from gspo_hpc import __version__, algorithms, config_file
from gspo_hpc.config import Config
from gspo_hpc.plan import Plan, make_plan

DONE, FAILED, REFUSED = 0, 1, 2

_COUNTED_BYTES = 64 * 2**20  # a larger data file is not read to count its rows: the plan answers at once

_MEANING = {
    "world_size": "GPUs that train",
    "dp_size": "world_size / (TP x PP x CP)",
    "expert_dp_size": "the same for expert layers: world_size / (ETP x EP x PP)",
    "micro_batch_size": "completions per micro-batch and DP rank",
    "micro_batch_tokens": "tokens per micro-batch, filled by packing",
    "global_batch_size": "completions per optimizer step",
    "steps_per_generation": "optimizer steps per rollout and pass over it",
    "generation_batch_size": "completions per rollout",
    "num_generations": "completions per prompt",
    "num_iterations": "passes over one rollout",
    "gradient_accumulation_steps": "micro-batches per optimizer step and DP rank",
    "per_device_generation_batch_size": "completions per rollout and GPU",
    "num_rollout_prompts": "prompts per rollout",
    "num_train_prompts": "prompts per optimizer step",
    "num_rollout_prompts_per_dp_group": "prompts per rollout and DP group",
    "num_prompts_per_dp_group": "prompts per optimizer step and DP group",
    "num_iters_per_step": "num_rollout_prompts_per_dp_group / micro_batch_size",
    "num_rows": "prompts in the training data",
    "steps_per_epoch": "optimizer steps per pass over the data",
    "max_steps": "optimizer steps of the run",
    "num_rollouts": "rollouts of the run",
    "num_completions": "completions of the run",
    "num_epochs": "passes over the data",
}


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
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("GSPO_HPC_DEBUG") or _own_bug(error):
            raise
        _complain(error)
        return REFUSED if isinstance(error, ValueError | FileNotFoundError | ModuleNotFoundError) else FAILED


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
        print(f"{_paint('error:', '31', sys.stderr)} {line}", file=sys.stderr)


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

    setting = "settings put over the file, such as run.max_steps=10 or batch.num_generations=8"
    text = "Needs no GPU and starts nothing. Exits with 2 and every broken rule if the sizes do not fit together."
    plan = add("plan", _plan, "show what a config amounts to: sizes, layout, passes, steps", text, _PLAN_EXAMPLES)
    plan.add_argument("config", metavar="CONFIG", help="YAML file")
    plan.add_argument("overrides", metavar="key=value", nargs="*", help=setting)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    text = "The run directory is run.dir, by default runs/NAME. An existing one is resumed where it stopped."
    train = add("train", _train, "train on this machine", text, _TRAIN_EXAMPLES)
    train.add_argument("config", metavar="CONFIG", help="YAML file")
    train.add_argument("overrides", metavar="key=value", nargs="*", help=setting)
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


def _plan(args: argparse.Namespace) -> int:
    config = _config(args)
    plan = make_plan(config, _count_rows(config.data.train))
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print("\n".join(_page(args.config, config, plan)))
    return DONE if plan.valid else REFUSED


def _train(args: argparse.Namespace) -> int:
    config = _config(args)
    for text in algorithms.warnings(config):
        print(f"{_paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    from gspo_hpc.launch import train

    return train(config)


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


def _paint(text: str, code: str, stream: object) -> str:
    """`text` in a colour, where `stream` is a terminal."""
    coloured = getattr(stream, "isatty", lambda: False)() and not os.environ.get("NO_COLOR")
    return f"\033[{code}m{text}\033[0m" if coloured else text


def _page(name: str, config: Config, plan: Plan) -> Iterator[str]:
    """The lines of the plan page."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)

    def title(text: str) -> str:
        return "\n" + _paint(text, "1", sys.stdout)

    def items(texts: Sequence[tuple[str, str]], code: str) -> Iterator[str]:
        for head, text in texts:
            lines = textwrap.wrap(text, max(40, width - len(head) - 4), break_long_words=False, break_on_hyphens=False)
            yield f"  {_paint(head, code, sys.stdout)}  {lines[0]}"
            yield from (" " * (len(head) + 4) + line for line in lines[1:])

    count = len(plan.broken)
    verdict = _paint("valid", "32", sys.stdout) if plan.valid else _paint(f"{count} broken", "31", sys.stdout)
    yield f"{_paint('plan', '1', sys.stdout)} of {name}: {verdict}"
    yield title("Layout")
    yield from (f"  {head:<9} {text}" for head, text in _layout(plan))
    yield title("Quantities")
    columns = max(map(len, plan.quantities))
    values = {key: f"{v:,}" if isinstance(v, int) else f"{v:,.6g}" for key, v in plan.quantities.items()}
    digits = max(map(len, values.values()))
    yield from (
        f"  {key:<{columns}}  {text:>{digits}}  {_MEANING.get(key, '')}".rstrip() for key, text in values.items()
    )
    yield title("Passes")
    for key, size in plan.passes.items():
        if not size.needed:
            why = "one update per rollout" if key == "old_logprobs" else "kl_beta is 0"
            yield f"  {key:<12} not needed: {why}"
        elif size.micro_batch_tokens:
            yield f"  {key:<12} micro_batch_tokens {size.micro_batch_tokens:,}"
        else:
            yield f"  {key:<12} micro_batch_size {size.micro_batch_size or 'not given'}"
    if plan.broken:
        yield title("Broken rules")
        yield from items([(f"rule {item.rule:>2}", item.message) for item in plan.broken], "31")
    if plan.warnings:
        yield title("Warnings")
        yield from items([("!", text) for text in plan.warnings], "33")
    notes = [*plan.notes]
    if missing := config.missing():
        notes.append(f"A run also needs: {', '.join(missing)}.")
    if notes:
        yield title("Notes")
        yield from items([("-", text) for text in notes], "0")


def _layout(plan: Plan) -> Iterator[tuple[str, str]]:
    at, q = plan.layout, plan.quantities
    apart = at.get("gpus_set_apart_per_node", 0)
    yield (
        "machines",
        f"{at['nodes']} x {at['gpus_per_node']} GPUs" + (f", {apart} of each for generation" * bool(apart)),
    )
    grid = [("TP", "tensor_model"), ("PP", "pipeline_model"), ("CP", "context"), ("DP", "data")]
    experts = [("ETP", "expert_tensor"), ("EP", "expert_model"), ("PP", "pipeline_model"), ("DP", "expert_data")]
    for head, parts in (("ranks", grid), ("experts", experts)):
        cut = " x ".join(f"{short} {at.get(f'{long}_parallel_size', '?')}" for short, long in parts)
        yield head, f"{cut} = {q.get('world_size', '?')}"
    if "num_engines" in at:
        yield (
            "engines",
            f"{at['num_engines']} ({at['engines_per_node']} per node), TP {at['rollout_tensor_parallel_size']} each",
        )


if __name__ == "__main__":
    sys.exit(main())
