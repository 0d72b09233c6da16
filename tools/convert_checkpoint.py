#!/usr/bin/env python3
"""Convert between a Hugging Face folder and a sharded checkpoint of any layout, a layer at a time.

    python tools/convert_checkpoint.py to-hf   --checkpoint runs/a/checkpoints/000100 --model MODEL --out FOLDER
    python tools/convert_checkpoint.py from-hf --model MODEL --out CHECKPOINT [--dtype bfloat16]

The process needs the memory of one layer (in models with experts, of one expert), however large the model is. MODEL is
the Hugging Face folder that gives config.json and the tokenizer. A checkpoint of from-hf contains only weights, in
Megatron-Core's sharded format torch_dist. `gspo-hpc export` does to-hf for a run.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo_hpc.config.schema import Config


def main() -> int:
    """The exit code: 2 for what is refused."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("to-hf", "from-hf"):
        command = commands.add_parser(name)
        command.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
        command.add_argument("--out", type=Path, required=True, help="a new folder")
        if name == "to-hf":
            command.add_argument(
                "--checkpoint",
                type=Path,
                required=True,
                help="checkpoints/NNNNNN of a run, or a folder that from-hf wrote",
            )
        else:
            command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args()
    try:
        if args.command == "to-hf":
            to_hugging_face(args.checkpoint, args.model, args.out)
        else:
            from_hugging_face(args.model, args.out, args.dtype)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


def to_hugging_face(checkpoint: Path, model: Path, out: Path) -> None:
    """A whole checkpoint, of whatever layout, as a Hugging Face folder in the dtype that its weights have."""
    from gspo_hpc.models import architecture
    from gspo_hpc.runs import commit

    if problems := commit.verify(checkpoint):
        raise ValueError(f"{checkpoint}: {problems[0]}")
    arch = architecture.read(model)
    from gspo_hpc.checkpoint import hugging_face  # Megatron-Core, which takes its time

    config = _one_rank(model, hugging_face.dtype_of(checkpoint / "megatron"))
    hugging_face.to_hugging_face(checkpoint / "megatron", arch, config, out)


def from_hugging_face(model: Path, out: Path, dtype: str) -> None:
    """A Hugging Face folder as a whole checkpoint of step 0, without an optimizer."""
    from gspo_hpc.models import architecture
    from gspo_hpc.runs import commit

    if out.exists():
        raise ValueError(f"{out} exists: give another folder, or remove it")
    arch = architecture.read(model)
    from gspo_hpc.checkpoint import hugging_face  # Megatron-Core, which takes its time

    config = _one_rank(model, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = commit.begin(out.parent / f".{out.name}", 0)
    shards = staging / "megatron"
    shards.mkdir(mode=0o700)
    written = hugging_face.from_hugging_face(arch, config, shards)
    commit.commit(staging, 0, {"layout": config.layout}, written).rename(out)
    (out.parent / f".{out.name}").rmdir()


def _one_rank(model: Path, dtype: str) -> Config:  # noqa: F821
    """A configuration for this process alone, which is made the only rank there is."""
    from gspo_hpc.config import loader
    from gspo_hpc.policy import process_groups

    config = loader.load(None, [f"model.path={model}", f"model.dtype={dtype}", "cluster.platform=cpu"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
    process_groups.start(config)
    return config


if __name__ == "__main__":
    sys.exit(main())
