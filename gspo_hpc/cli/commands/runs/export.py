"""``gspo-hpc export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_hpc.cli.parser import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = "The folder has safetensors files, config and tokenizer, and transformers and vLLM can load it. "
    text += "Adapters are merged into the model."
    examples = """
        gspo-hpc export runs/tiny --out exported/
        gspo-hpc export runs/tiny --step 20 --out exported/
        gspo-hpc export runs/lora --adapter --out adapter/"""
    describe(parser, text, examples)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write")
    parser.add_argument(
        "--adapter", action="store_true", help="write the adapters alone, as a folder that peft and vLLM load"
    )


def run(args: argparse.Namespace) -> int:
    """Export in another process; return its exit code."""
    from gspo_hpc.cli.inputs import require_path
    from gspo_hpc.launch.local import export

    require_path(args.run_dir, "run directory")
    return export(args.run_dir, args.step, args.out, *(["--adapter"] if args.adapter else []))
