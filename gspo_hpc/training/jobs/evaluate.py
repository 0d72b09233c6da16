"""The job that evaluates a checkpoint of a run, or a model, on unseen prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gspo_hpc.checkpoint import sharded
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.evaluation import evaluate as evaluation
from gspo_hpc.models import architecture, hub
from gspo_hpc.planning.estimates import devices, memory, phases
from gspo_hpc.policy import offload
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start, stop
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.text import in_gib
from gspo_hpc.training import probe
from gspo_hpc.training.bringup import (
    ONE_RANK,
    read_architecture,
    read_prompts,
    start_rollout_worker,
    whole_checkpoint,
)
from gspo_hpc.training.sync import WeightSync


def evaluate(
    target: Path, step: int | None, overrides: Sequence[str], as_json: bool, remark: Callable[[str], None]
) -> str:
    """Return the scores of a run's checkpoint, or of the model a configuration names, as text or as JSON.

    `remark` gets lines for the user.
    """
    run = RunDir(target) if (target / "run.json").exists() else None
    config = _load_config(target, run, overrides)
    if (lack := lack_of_memory(config)) is not None:
        remark(lack)
    ranks = start(config)
    worker = None
    try:
        policy = Policy(read_architecture(config), config, ranks, trains=False)
        if run is None or policy.has_adapters:
            policy.load(str(config.model.path), begins=run is None)
        if run is not None:
            sharded.load_weights(policy, whole_checkpoint(run, step, remark))
        _, unseen = read_prompts(config)
        sequences = probe.probe_sequences(unseen, config.rollout.probe_tokens)

        weight_sync = WeightSync(policy, sequences)
        worker = start_rollout_worker(
            config,
            ranks,
            experts=policy.arch.experts is not None,
            make_room=lambda: offload.leave_to_engines(policy),
            sync_weights=lambda engine: weight_sync.run(engine)[1],
        )
        if (death := weight_sync.run(worker.engine)[1]) is not None:
            raise death
        scores, _ = evaluation.run(worker, unseen, len(unseen), config)
    finally:
        if worker is not None:
            worker.close()
    stop()
    return _shown(len(unseen), scores, as_json)


def _load_config(target: Path, run: RunDir | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run, of a model's folder or of a file; raise ValueError if it cannot evaluate."""
    if run is not None:
        config = run.load_config(overrides=[*overrides, *ONE_RANK])
    elif target.is_dir():
        config = loader.load(None, [f"model.path={target}", *overrides, *ONE_RANK])
    else:
        config = loader.load(target, [*overrides, *ONE_RANK])
    held_out = config.data.train is not None and config.data.train_ratio < 1
    if not config.data.eval and not held_out:
        raise ValueError("data.eval is not set: give a file of unseen prompts with data.eval=FILE")
    if not config.reward.functions:
        raise ValueError(
            "reward.functions is not set: give a reward function, such as reward.functions=[{function: number_match}]"
        )
    return hub_data.with_files(hub.with_folder(config, teacher=False))


def lack_of_memory(config: Config) -> str | None:
    """Return in a line that one GPU of the config's kind has too little memory to evaluate, or None.

    It is no error: the GPU that is here may be another one.
    """
    arch = architecture.find(config)
    device = devices.card(config.cluster) if config.cluster.platform == "cuda" else None
    if arch is None or device is None:
        return None
    found = memory.of_evaluation(arch, config, device)
    worst = max(found.phases, key=lambda phase: phase.total)
    if worst.total <= found.card:
        return None
    largest = max(worst.parts, key=lambda name: worst.parts[name])
    taken = f"{in_gib(worst.total)} of the {in_gib(found.card)} GiB of one {device.name}"
    most = f"{in_gib(worst.parts[largest])} of them {phases.shown(largest)}"
    return (
        f"evaluation may run out of memory: {phases.shown(worst.name)} takes {taken}, {most}; use a larger GPU, or let "
        "the run evaluate (eval.interval, eval.after) on all of its GPUs"
    )


def _shown(prompts: int, scores: Mapping[str, float], as_json: bool) -> str:
    if as_json:
        return json.dumps({"prompts": prompts} | dict(scores))
    return "\n".join(f"{name.removeprefix('eval/'):<18} {value:.4f}" for name, value in scores.items())
