#!/usr/bin/env python3
"""Convert between a Hugging Face folder and a sharded checkpoint of any layout, a layer at a time.

    python tools/convert_checkpoint.py to-hf   --checkpoint runs/a/checkpoints/000100 --model MODEL --out FOLDER
    python tools/convert_checkpoint.py from-hf --model MODEL --out CHECKPOINT [--dtype bfloat16] [--adapter FOLDER]

The process needs the memory of one layer (in models with experts, of one expert), however large the model is. MODEL is
the Hugging Face folder that gives config.json and the tokenizer. A checkpoint of from-hf contains only weights, in
Megatron-Core's sharded format torch_dist. `gspo-hpc export` does to-hf for a run.

The checkpoint of a run that trains LoRA adapters holds these alone, and MODEL is then their base: to-hf writes it with
them merged, or with --adapter them alone, in the format of peft. from-hf with --adapter makes such a checkpoint of a
folder of peft and its base.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import traceback
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
            command.add_argument("--adapter", action="store_true", help="write the adapters alone, as peft does")
            command.add_argument("--alpha", type=float, help="of adapters whose checkpoint does not say it")
        else:
            command.add_argument("--adapter", type=Path, help="a folder of peft: a checkpoint of these adapters alone")
            command.add_argument(
                "--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, or that of --adapter"
            )
    args = parser.parse_args()
    return _convert(args)


def _convert(args: argparse.Namespace) -> int:
    """Convert: a person gets the result or the error, and a log what libraries say, which stays only after a bug."""
    from gspo_hpc.system import environment
    from gspo_hpc.system.terminal import redirect_to_log

    output, errors, log = sys.stdout, sys.stderr, None
    if not os.environ.get(environment.DEBUG):
        handle, name = tempfile.mkstemp(prefix=f"gspo-hpc-{args.command}-", suffix=".log")
        os.close(handle)
        log = Path(name)
        output, errors = redirect_to_log(log)
    try:
        if args.command == "to-hf":
            to_hugging_face(args.checkpoint, args.model, args.out, args.adapter, args.alpha)
        else:
            from_hugging_face(args.model, args.out, args.dtype, args.adapter)
        print(f"wrote {args.out}", file=output)
        code = 0
    except ValueError as error:
        print(f"error: {error}", file=errors)
        code = 2
    except Exception as error:
        if log is None:
            raise
        traceback.print_exc()  # into the log
        print(f"error: {type(error).__name__}: {error}", file=errors)
        print(f"error: {log} has the traceback, and what libraries wrote", file=errors)
        return 1
    if log is not None:
        log.unlink()
    return code


def to_hugging_face(checkpoint: Path, model: Path, out: Path, alone: bool, alpha: float | None) -> None:
    """A whole checkpoint, of whatever layout, as a Hugging Face folder in the dtype that its weights have.

    Adapters are merged into their base, or `alone` in a folder of peft.
    """
    from gspo_hpc.models import architecture
    from gspo_hpc.runs import commit

    if problems := commit.verify(checkpoint):
        raise ValueError(f"{checkpoint}: {problems[0]}")
    arch = architecture.read(model)
    from gspo_hpc.checkpoint import adapters, hugging_face  # Megatron-Core, which takes its time
    from gspo_hpc.config import schema

    shards = checkpoint / "megatron"
    adapter = adapters.settings(shards, alpha)
    if adapter is None and alone:
        raise ValueError(f"{checkpoint} has the weights of a whole model, and no adapters: leave out --adapter")
    config = _one_rank(model, hugging_face.dtype_of(shards))
    if adapter is None:
        hugging_face.to_hugging_face(shards, arch, config, out)
        return
    write = adapters.to_peft if alone else adapters.to_hugging_face
    write(shards, arch, schema.replace(config, adapter=adapter), out)


def from_hugging_face(model: Path, out: Path, dtype: str | None, adapter: Path | None) -> None:
    """A Hugging Face folder, or adapters of a folder of peft, as a whole checkpoint of step 0, without an optimizer."""
    from gspo_hpc.models import architecture
    from gspo_hpc.runs import commit

    if out.exists():
        raise ValueError(f"{out} exists: give another folder, or remove it")
    arch = architecture.read(model)
    from gspo_hpc.checkpoint import adapters, hugging_face  # Megatron-Core, which takes its time
    from gspo_hpc.config import schema
    from gspo_hpc.ops import peft_folder

    begins = None if adapter is None else peft_folder.settings(adapter)
    config = _one_rank(model, dtype or ("bfloat16" if adapter is None else peft_folder.dtype_of(adapter)))
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = commit.begin(out.parent / f".{out.name}", 0)
    shards = staging / "megatron"
    shards.mkdir(mode=0o700)
    if begins is None:
        written = hugging_face.from_hugging_face(arch, config, shards)
    else:
        written = adapters.from_peft(arch, schema.replace(config, adapter=begins), shards)
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
