"""The commands of ``gspo-hpc`` and their options, with help and examples.

Floor 6.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import shtab

from gspo_hpc import __version__

REFUSED = 2

Handler = Callable[[argparse.Namespace], int]  # gives the exit code


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option for an unknown one, and the nearest choice for a wrong one."""

    def error(self, message: str) -> NoReturn:
        head, colon, names = message.partition(": ")
        hint = ""
        if head.startswith("the following arguments are required"):
            spare = [action.metavar for action in self._actions if action.nargs in ("*", "?")]  # intermixed parsing
            message = head + colon + ", ".join(name for name in names.split(", ") if name not in spare)
        elif head.startswith("unrecognized arguments"):
            options = [text for action in self._actions for text in action.option_strings]
            wrong = next((word.split("=")[0] for word in names.split() if word.startswith("-")), "")
            hint = _nearest(wrong, options)
        self.exit(REFUSED, f"{self.prog}: {message}{hint}\n{self.format_usage()}")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _nearest(str(value), [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def _nearest(wrong: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(wrong, names, n=1)
    return f"; nearest: {found[0]}" if found else ""


def parsers(handlers: Mapping[str, Handler]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the bare program, and one for each command, which names its handler."""
    raw = argparse.RawDescriptionHelpFormatter
    top = Parser(
        prog="gspo-hpc",
        formatter_class=raw,
        allow_abbrev=False,
        description="Trains language models with GSPO: Megatron-Core trains, vLLM generates on the same GPUs.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"gspo-hpc {__version__}")
    group = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    commands: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, summary: str, text: str, examples: str) -> Parser:
        epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")
        description = f"{summary[0].upper()}{summary[1:]}.\n\n{textwrap.fill(text, 100)}"
        parser = group.add_parser(
            name, help=summary, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
        )
        parser.set_defaults(handler=handlers[name])
        commands[name] = parser
        return parser

    def takes_config(parser: Parser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a preset in configs/")
        parser.add_argument("overrides", metavar="key=value", nargs="*", help=setting)

    setting = "settings put over the file, such as run.max_steps=10 or batch.num_generations=8"
    text = "Needs no GPU and starts nothing. Exits with 2, every broken rule and what mends them if sizes do not fit."
    plan = add("plan", "show what a config amounts to: sizes, layout, passes, steps", text, _PLAN_EXAMPLES)
    takes_config(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument(
        "--ranks", action="store_true", help="which rank sits where, every one: a row each, or a list in JSON"
    )
    plan.add_argument("--sbatch", action="store_true", help="print also the batch script that submit would hand in")
    plan.add_argument("--price", type=float, metavar="P", help="of one GPU for one hour: the cost of the run")
    expected = "average response that time is estimated for (default: half of the longest)"
    plan.add_argument("--response-tokens", type=float, metavar="N", help=expected)
    text = (
        "Tries the parallel sizes, recomputation and offloading that keep every rule and fit the GPUs of cluster.gpu, "
        "and ranks them by estimated time. Batch sizes, lengths, model and machines stay as they are. --keep names "
        "what else does."
    )
    suggest = add("suggest", "suggest the best layouts for a model on given GPUs", text, _SUGGEST_EXAMPLES)
    takes_config(suggest)
    suggest.add_argument("--keep", action="append", default=[], metavar="KEY", help="a setting that is not chosen")
    suggest.add_argument("--limit", type=int, default=5, metavar="N", help="how many layouts (default: 5)")
    suggest.add_argument("--response-tokens", type=float, metavar="N", help=expected)
    suggest.add_argument("--json", action="store_true", help="print one JSON list")
    text = (
        "Looks at versions, GPUs, memory, network, files, model, data, W&B and Slurm, and says what mends what is not "
        "as it should be. Without CONFIG: at this machine. Exits with 1 if something will fail."
    )
    doctor = add("doctor", "check what a run needs, before it starts", text, _DOCTOR_EXAMPLES)
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", help=setting)
    doctor.add_argument("--nodes", type=int, metavar="N", help="look at N nodes too, in a short Slurm job")
    doctor.add_argument("--wait", type=float, metavar="S", help="seconds for that job to start (default: 300)")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    text = "The run directory is run.dir, by default runs/NAME. An existing one is resumed where it stopped."
    train = add("train", "train on this machine", text, _TRAIN_EXAMPLES)
    takes_config(train)
    text = (
        "Submits the run through submitit. The run directory is run.dir; an existing one is resumed where it stopped. "
        "The job requeues itself when it is preempted or out of time, until the last step is done."
    )
    submit = add("submit", "train on a Slurm cluster", text, _SUBMIT_EXAMPLES)
    takes_config(submit)
    submit.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    text = "Where runs stand: state, step, reward, speed, time left, and why attempts ended. Works without Slurm, too."
    status = add("status", "show where runs stand", text, _STATUS_EXAMPLES)
    status.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="run directories (default: all in runs/)")
    status.add_argument("--json", action="store_true", help="print one JSON object a run, one a line")
    status.add_argument("--watch", action="store_true", help="again every few seconds; also lets requeued jobs start")
    text = "Without --rank: what the run tells people. With it: all that this rank and its libraries wrote."
    logs = add("logs", "show what a run wrote", text, _LOGS_EXAMPLES)
    logs.add_argument("run", metavar="RUN", type=Path, help="run directory")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until the run ends")
    logs.add_argument("--rank", type=int, metavar="N", help="the log of one rank")
    logs.add_argument("--attempt", type=int, metavar="N", help="of an earlier start (default: the newest)")
    logs.add_argument("--errors", action="store_true", help="only the first traceback among all ranks")
    text = (
        "A run that runs saves a checkpoint before it ends; submit or train goes on from there. One that waits is gone."
    )
    cancel = add("cancel", "end a run, saved", text, _CANCEL_EXAMPLES)
    cancel.add_argument("run", metavar="RUN", type=Path, help="run directory")
    text = "Answers the evaluation prompts: greedy accuracy, and avg@k and pass@k where eval.samples is above 1."
    evaluate = add("eval", "evaluate a run, a checkpoint or a model folder", text, _EVAL_EXAMPLES)
    evaluate.add_argument("target", metavar="CONFIG|RUN|MODEL_FOLDER", type=Path, help="what is evaluated")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", help=setting)
    evaluate.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    text = "The folder has safetensors, config and tokenizer, and loads in transformers and vLLM."
    export = add("export", "write a checkpoint as a Hugging Face folder", text, _EXPORT_EXAMPLES)
    export.add_argument("run", metavar="RUN", type=Path, help="run directory")
    export.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")
    export.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write")
    text = "One self-contained HTML file: curves, samples before and after, the plan, the attempts."
    report = add("report", "write the report page of a run", text, _REPORT_EXAMPLES)
    report.add_argument("run", metavar="RUN", type=Path, help="run directory")
    report.add_argument("--out", type=Path, metavar="FILE", help="page to write (default: report.html in RUN)")
    text = (
        "Reads a run directory (finished, running or dead) and names what is wrong or slow, with evidence, cause and "
        "the setting to change. Exits with 1 if a problem is found, with 0 if not (warnings and notes are none)."
    )
    diagnose = add("diagnose", "say what is wrong or slow in a run", text, _DIAGNOSE_EXAMPLES)
    diagnose.add_argument("run", metavar="RUN", type=Path, help="run directory")
    diagnose.add_argument("--json", action="store_true", help="print one JSON object")
    text = (
        "Writes a config for a Megatron-SWIFT command line, verl's overrides or a TRL GRPOConfig, and says what is not "
        "carried over and where a batch size means something else. Starts nothing."
    )
    convert = add("convert", "convert another project's config", text, _CONVERT_EXAMPLES)
    convert.add_argument("config", metavar="FILE|-", help="script, list of arguments or YAML; - is standard input")
    convert.add_argument("--from", dest="source", choices=["swift", "verl", "trl"], help="whose (default: recognised)")
    convert.add_argument("--out", type=Path, metavar="FILE", help="config to write (default: standard output)")
    convert.add_argument("--gpus", type=int, metavar="N", help="GPUs that train, where the file does not say")
    convert.add_argument("--rows", type=int, metavar="N", help="prompts of the data, to turn epochs into steps")
    text = "Prints a script for your shell; runs, config files and options then complete with the tabulator."
    completion = add("completion", "print a completion script", text, _COMPLETION_EXAMPLES)
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
    gspo-hpc plan qwen3_30b_a3b_ep8 cluster.nodes=4
    gspo-hpc plan my.yaml --sbatch
    gspo-hpc plan my.yaml cluster.gpu=H100 --price 2.5
    gspo-hpc plan my.yaml --json --ranks"""
_SUGGEST_EXAMPLES = """
    gspo-hpc suggest my.yaml cluster.gpu=H100 cluster.nodes=4
    gspo-hpc suggest my.yaml cluster.gpu=H200 --keep parallel.tensor_model_parallel_size"""
_DOCTOR_EXAMPLES = """
    gspo-hpc doctor
    gspo-hpc doctor my.yaml cluster.nodes=4
    gspo-hpc doctor my.yaml --nodes 4 --json"""
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
_CONVERT_EXAMPLES = """
    gspo-hpc convert run_gspo.sh --out mine.yaml
    gspo-hpc convert grpo_config.yaml --gpus 8 --rows 7473
    gspo-hpc convert - --from swift < arguments.txt"""
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
