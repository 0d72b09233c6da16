"""``gspo-hpc serve``: vLLM's own server on a checkpoint of a run, or on a model folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gspo_hpc.cli.parser import describe, takes_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Starts vLLM's OpenAI-compatible server, which Ctrl-C ends. A run's checkpoint is exported first, into the "
        "folder served/ of the run, and kept there. Only its machine reaches the server, unless --host says otherwise. "
        "With --slurm it is a job, with the section slurm of the run and the settings that are given; `status RUN` "
        "shows its address, `logs RUN --served` what it says, and scancel ends it."
    )
    examples = """
        gspo-hpc serve runs/tiny
        gspo-hpc serve runs/tiny --step 20 --port 8001
        gspo-hpc serve exported/ --name mine --vllm='--max-model-len 4096 --dtype bfloat16'
        gspo-hpc serve runs/tiny --slurm slurm.time_minutes=240 --host 0.0.0.0"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", type=Path, help="what to serve")
    takes_overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--name", help="name of the model for clients (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    text = "port to listen at (default: 8000, in a job a free one of its node)"
    parser.add_argument("--port", type=int, metavar="N", help=text)
    parser.add_argument("--slurm", action="store_true", help="serve in a Slurm job, for which key=value are settings")
    parser.add_argument("--dry-run", action="store_true", help="with --slurm: print the batch script, submit nothing")
    parser.add_argument(
        "--vllm",
        default="",
        metavar="OPTIONS",
        help="further options of `vllm serve` in one text: --vllm='--max-model-len 4096'",
    )


def run(args: argparse.Namespace) -> int:
    """Export what is to be served, and become the server."""
    from gspo_hpc.cli.inputs import find_target, warn
    from gspo_hpc.launch import serving
    from gspo_hpc.system.exit_codes import FAILED

    is_run = (find_target(args.target, configs=False) / "run.json").exists()
    if not is_run and args.step is not None:
        raise ValueError(f"--step {args.step}: {args.target} is the folder of a model, which has no checkpoints")
    if args.port is not None and not 1 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: must be from 1 to 65535")
    if not args.slurm and (given := [*args.overrides, *["--dry-run"] * args.dry_run]):
        raise ValueError(f"{given[0]}: belongs to a Slurm job, which --slurm asks for")
    name, port = args.name or args.target.resolve().name, args.port or 8000
    words = serving.command(args.target, name, args.host, port, args.vllm)  # a mistake shows before the export
    if args.slurm:
        return _hand_in(args, name, is_run=is_run)
    if is_run:
        try:
            folder = serving.exported(args.target, args.step)
        except RuntimeError:  # export has said why
            return FAILED
        words = serving.command(folder, name, args.host, port, args.vllm)
    keyed = serving.has_key(args.vllm) or "VLLM_API_KEY" in os.environ
    if not keyed and not serving.is_loopback(args.host):
        warn(
            f"everybody who reaches {args.host} may use this server: VLLM_API_KEY sets a key that clients have to send"
        )
    print(f"serving {words[words.index('--model') + 1]} as {name} at http://{args.host}:{port}/v1; Ctrl-C ends it")
    serving.become(words)
    return FAILED  # not reached: the process has become another one


def _hand_in(args: argparse.Namespace, name: str, *, is_run: bool) -> int:
    """Submit the job that serves, or print its script."""
    from gspo_hpc.cli.inputs import warn
    from gspo_hpc.launch import serving
    from gspo_hpc.launch.slurm import serve
    from gspo_hpc.launch.slurm.server_job import KEY, Order
    from gspo_hpc.system.exit_codes import DONE

    if serving.has_key(args.vllm):
        raise ValueError(f"--vllm: give the key as {KEY} in the environment: options are kept in files of the job")
    if is_run:
        serving.checkpoint(args.target, args.step)  # a mistake shows before there is a job
    keyed = bool(os.environ.get(KEY))
    target = str(args.target.resolve())
    order = Order(target, is_run, args.step, name, args.host, args.port, args.vllm, keyed)
    config = serve.config_of(order, args.overrides)
    if not keyed:
        reach = "is on its node" if serving.is_loopback(args.host) else "reaches its node"
        warn(f"everybody who {reach} may use this server: {KEY} sets a key that clients have to send")
    if args.dry_run:
        print(serve.script(config, order), end="")
        return DONE
    job_id, folder = serve.submit(config, order)
    where = f"gspo-hpc status {args.target} shows its address" if is_run else "its log has the address"
    print(f"job {job_id} submitted, folder {folder}: {where}, and scancel {job_id} ends it")
    return DONE
