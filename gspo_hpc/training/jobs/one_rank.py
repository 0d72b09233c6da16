"""Jobs of one rank that sample: from a checkpoint of a run, or from the model that a configuration names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gspo_hpc.checkpoint import sharded
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Prompt
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, memory, phases
from gspo_hpc.policy import offload
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start, stop
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.text import in_gib
from gspo_hpc.training import probe
from gspo_hpc.training.bringup import ONE_RANK, read_architecture, start_rollout_worker, whole_checkpoint
from gspo_hpc.training.sampling.scored import ScoredCompletions
from gspo_hpc.training.sync import WeightSync


def run_of(target: Path) -> RunDir | None:
    """Return the run whose directory `target` is, or None."""
    return RunDir(target) if (target / "run.json").exists() else None


def read_config(target: Path, run: RunDir | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run, of a model's folder or of a file, for one rank."""
    if run is not None:
        return run.load_config(overrides=[*overrides, *ONE_RANK])
    if target.is_dir():
        return loader.load(None, [f"model.path={target}", *overrides, *ONE_RANK])
    return loader.load(target, [*overrides, *ONE_RANK])


def checkpoint_of(run: RunDir | None, step: int | None, remark: Callable[[str], None]) -> Path | None:
    """Return the checkpoint of a run, the newest where `step` is None; None where there is no run.

    `remark` gets lines for the user.
    """
    return None if run is None else whole_checkpoint(run, step, remark)


@contextlib.contextmanager
def sampling_worker(config: Config, checkpoint: Path | None, prompts: Sequence[Prompt]) -> Iterator[RolloutWorker]:
    """Start an engine and graders, and give the engine the weights of a run's checkpoint, or with None of the model.

    The sync is checked with some of `prompts`.
    """
    ranks = start(config)
    worker = None
    try:
        policy = Policy(read_architecture(config), config, ranks, trains=False)
        if checkpoint is None or policy.has_adapters:
            policy.load(str(config.model.path), begins=checkpoint is None)
        if checkpoint is not None:
            sharded.load_weights(policy, checkpoint)
        weight_sync = WeightSync(policy, probe.probe_sequences(prompts, config.rollout.probe_tokens))
        worker = start_rollout_worker(
            config,
            ranks,
            experts=policy.arch.experts is not None,
            make_room=lambda: offload.leave_to_engines(policy),
            sync_weights=lambda engine: weight_sync.run(engine)[1],
        )
        if (death := weight_sync.run(worker.engine)[1]) is not None:
            raise death
        yield worker
    finally:
        if worker is not None:
            worker.close()
    stop()


def completions_of(worker: RolloutWorker) -> ScoredCompletions:
    """Return the completions of a worker with all of their rewards."""
    return ScoredCompletions(worker, _AloneOnItsGpu(worker))


class _AloneOnItsGpu:
    """The engine of a job whose policy has no more use for the GPU: its weights wait in host memory when it sleeps."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def sync(self) -> None:
        """Wake the engine, with the weights that it had."""
        if self._worker.engine is not None:
            self._worker.engine.wake_up()

    def sleep(self) -> None:
        """Put the engine to sleep."""
        if self._worker.engine is not None:
            self._worker.engine.sleep(1)


def lack_of_memory(config: Config) -> str | None:
    """Return the end of a line that says that one GPU of the config's kind has too little memory to sample, or None.

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
    return f"may run out of memory: {phases.shown(worst.name)} takes {taken}, {most}; use a larger GPU"
