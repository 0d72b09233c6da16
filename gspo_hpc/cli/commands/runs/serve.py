"""``gspo-hpc serve``: vLLM's own server on a checkpoint of a run, or on a model folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gspo_hpc.cli.parser import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = (
        "Starts vLLM's OpenAI-compatible server, which Ctrl-C ends. A run's checkpoint is exported first, into the "
        "folder served/ of the run, and kept there. Only this machine reaches the server, unless --host says otherwise."
    )
    examples = """
        gspo-hpc serve runs/tiny
        gspo-hpc serve runs/tiny --step 20 --port 8001
        gspo-hpc serve exported/ --name mine --vllm='--max-model-len 4096 --dtype bfloat16'"""
    describe(parser, text, examples)
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", type=Path, help="what to serve")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--name", help="name of the model for clients (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen at (default: %(default)s)")
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
    if not 1 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: must be from 1 to 65535")
    name = args.name or args.target.resolve().name
    words = serving.command(args.target, name, args.host, args.port, args.vllm)  # a mistake shows before the export
    if is_run:
        try:
            folder = serving.exported(args.target, args.step)
        except RuntimeError:  # export has said why
            return FAILED
        words = serving.command(folder, name, args.host, args.port, args.vllm)
    keyed = "--api-key" in args.vllm or "VLLM_API_KEY" in os.environ
    if not keyed and not serving.is_loopback(args.host):
        warn(
            f"everybody who reaches {args.host} may use this server: VLLM_API_KEY sets a key that clients have to send"
        )
    print(f"serving {words[words.index('--model') + 1]} as {name} at http://{args.host}:{args.port}/v1; Ctrl-C ends it")
    serving.become(words)
    return FAILED  # not reached: the process has become another one
