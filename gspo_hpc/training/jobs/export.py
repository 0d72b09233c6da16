"""The job that writes a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gspo_hpc.checkpoint import adapters, hugging_face, sharded
from gspo_hpc.ops import hf_folder
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start, stop
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.training.bringup import ONE_RANK, read_architecture, whole_checkpoint

_ON_ANY_MACHINE = ("cluster.platform=cpu", "model.layers=torch", "model.fp8=null")


def export(run_dir: Path, step: int | None, out: Path, adapter_alone: bool, remark: Callable[[str], None]) -> None:
    """Write the checkpoint of `step`, or the newest one, into the folder `out`; `remark` gets lines for the user.

    Adapters are merged into their base, or with `adapter_alone` written without it, in the format of peft.
    """
    run = RunDir(run_dir)
    config = run.load_config(overrides=ONE_RANK)
    if adapter_alone and config.adapter.type is None:
        raise ValueError(f"{run_dir} trains the whole model, so it has no adapter: leave out --adapter")
    known = config.model.provider == "own"
    if known:
        config = run.load_config(overrides=(*ONE_RANK, *_ON_ANY_MACHINE))
    ranks = start(config)
    arch, whole = read_architecture(config), whole_checkpoint(run, step, remark)
    if config.adapter.type is not None:
        write = adapters.to_peft if adapter_alone else adapters.to_hugging_face
        write(whole / "megatron", arch, config, out)
    elif known:
        hugging_face.to_hugging_face(whole / "megatron", arch, config, out)
    else:
        policy = Policy(arch, config, ranks, trains=False)
        sharded.load_weights(policy, whole)
        shapes = [(name, tuple(tensor.shape)) for name, tensor in policy.stream()]
        dtype = next(policy.parameters()).dtype
        hf_folder.write(out, str(config.model.path), shapes, dtype, policy.stream())
    stop()
