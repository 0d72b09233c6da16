"""``gspo-hpc eval``: scores of a run, a checkpoint or a model folder on the evaluation prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Answers the evaluation prompts and prints the accuracy of greedy decoding, and avg@k, pass@k and maj@k if "
        "eval.samples is above 1. The completions stay in the folder evaluations of a run, or in the file of --out; "
        "`rescore` grades them again, and `compare` compares two evaluations. An evaluation that is killed goes on "
        "where it stood. With --slurm it is a job of low priority, with the section slurm of the run and the settings "
        "that are given; it goes back into the queue by itself until it is done, and its log has the scores."
    )
    examples = """
        gspo-hpc eval runs/tiny
        gspo-hpc eval runs/tiny --step 20 eval.samples=8
        gspo-hpc eval my.yaml --json --out before.jsonl
        gspo-hpc eval runs/tiny --slurm slurm.time_minutes=60 eval.samples=8"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="CONFIG|RUN|MODEL_FOLDER", type=Path, help="what to evaluate")
    takes_overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the completions (default: one of the run)")
    parser.add_argument("--slurm", action="store_true", help="evaluate in a Slurm job")
    parser.add_argument("--dry-run", action="store_true", help="with --slurm: print the batch script, submit nothing")


def run(args: argparse.Namespace) -> int:
    """Evaluate in another process, which prints the scores; return its exit code."""
    from gspo_hpc.cli.inputs import find_target, require_new_file
    from gspo_hpc.launch.local import evaluate

    target = find_target(args.target)
    require_new_file(args.out)
    if args.dry_run and not args.slurm:
        raise ValueError("--dry-run: belongs to a Slurm job, which --slurm asks for")
    if args.slurm:
        return _hand_in(args, target)
    return evaluate(target, args.step, args.overrides, args.json, args.out)


def _hand_in(args: argparse.Namespace, target: Path) -> int:
    """Submit the job that evaluates, or print its script."""
    from gspo_hpc.launch import serving
    from gspo_hpc.launch.slurm import evaluation
    from gspo_hpc.launch.slurm.evaluation_job import Order
    from gspo_hpc.system.exit_codes import DONE

    if args.json:
        raise ValueError("--json: a job prints its scores into its log, and keeps its completions as without --slurm")
    is_run = (target / "run.json").exists()
    step = args.step
    if is_run:
        step = serving.checkpoint(target, step)  # the newest now, whatever is saved before the job starts
    elif args.out is None:
        raise ValueError("--out FILE is needed: what is no run has no folder for the completions of a job")
    out = None if args.out is None else str(args.out.resolve())
    order = Order(str(target.resolve()), is_run, step, out, tuple(args.overrides))
    config = evaluation.config_of(order, args.overrides)
    if args.dry_run:
        print(evaluation.script(config, order), end="")
        return DONE
    job_id, folder = evaluation.submit(config, order)
    print(f"job {job_id} submitted, folder {folder}: its log has the scores, and scancel {job_id} ends it")
    return DONE
