"""The weight sync: from the trainer to the engines, with a probe that shows that the weights arrived."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gspo_hpc.config.constants import TRANSFER_BUCKET_BYTES
from gspo_hpc.config.derived import offload_trainer
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.engine import transfer
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.exchange.peers import engine_peers, engine_place
from gspo_hpc.ops.weight_parts import Fingerprint, Memory, Part, Stream
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import Abandoned, PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import any_rank, shared_fingerprint, store
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.system.progress import waiting
from gspo_hpc.training import probe
from gspo_hpc.training.agreement.gap import Baseline, Gap
from gspo_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class Synced:
    """The result of a sync."""

    fingerprint: str  # of the weights, bit for bit
    gap: Gap  # on the probe, over all engines that took part and are alive


class WeightSync:
    """The way of a policy's weights into the engines, which ends with the probe; made once in an attempt.

    It keeps the memory that the engines' workers read weights from.
    """

    def __init__(self, policy: Policy, sequences: Sequence[Sequence[int]], monitor: PassMonitor | None = None) -> None:
        """`sequences` are those of the probe; `monitor` stops the trainer's pass over them."""
        self.policy = policy
        self._sequences, self._monitor = sequences, monitor
        self._beside = adapters_beside_weights(policy.config, experts=policy.arch.experts is not None)
        self._sender: transfer.WeightSender | None = None
        self._examine_head = True  # until it has been: an attempt may have another vLLM than the one before

    def run(self, engine: Engine | None, first: Gap | None = None) -> tuple[Synced, EngineDied | None]:
        """Wake `engine`, fill it with the current weights and check it; with None, only take part. Collective.

        If offloading of the trainer is configured, only its weights stay meanwhile, and nothing afterwards: the engines
        have the memory. The error of an engine that died on the way is returned, not raised, so that all other ranks go
        on; the caller restarts the engine and syncs again. `first` is the gap of the run's first sync, which later ones
        are compared with. Raises ProbeMismatch, on every rank.
        """
        policy = self.policy
        offload.leave_to_engines(policy, keep_weights=True)
        death: EngineDied | None = None
        if engine is not None:
            try:
                engine.wake_up(["weights"])
            except EngineDied as error:
                death = error
        fingerprint, death = self.push(engine if death is None else None, death)
        alive = engine if death is None else None
        gap, death = probe.check(
            policy, alive, self._sequences, death, self._monitor, first, examine_head=self._examine_head
        )
        if alive is not None and death is None:
            self._examine_head = False
        return Synced(fingerprint, gap), death

    def push(self, engine: Engine | None, death: EngineDied | None = None) -> tuple[str, EngineDied | None]:
        """Stream the current weights into `engine` (only take part if it is None). Collective.

        Where engines have adapters beside their weights, only these travel, and the model's own weights before them if
        an engine lacks those. Returns the fingerprint of the weights, and how the engine died: `death`, or the error
        that ended the stream.
        """
        policy = self.policy
        if not self._beside:
            return self._pass(policy.parts, engine.update_weights if engine else None, death)
        lacks = engine is not None and engine.lacks_weights
        if any_rank(lacks, policy.ranks.device):
            _, death = self._pass(policy.base_parts, engine.update_weights if engine and lacks else None, death)
        alive = engine if death is None else None
        adapters, death = self._pass(policy.adapter_parts, alive.update_adapters if alive else None, death)
        return hashlib.sha256(f"{policy.base} {adapters}".encode()).hexdigest()[: len(adapters)], death

    def _pass(
        self,
        source: Callable[[Memory | None], Iterable[Sequence[Part]]],
        fill: Callable[[Stream, transfer.WeightSender], None] | None,
        death: EngineDied | None,
    ) -> tuple[str, EngineDied | None]:
        """Take `source` to its end, and `fill` this rank's engine with it, if that is not None. Collective.

        Returns the fingerprint of what was passed on, and how the engine died, as :meth:`push` does.
        """
        ranks, device = self.policy.ranks, self.policy.ranks.device
        fingerprint = Fingerprint(ranks.rank, ranks.world_size)  # every rank has all parts, and hashes its share

        def stream(memory: Memory | None = None) -> Iterator[Sequence[Part]]:
            for parts in source(memory):
                for part in parts:
                    fingerprint.add(part)
                yield parts

        if fill is not None:
            with _single_threaded(device):
                try:
                    fill(stream, self._get_sender())
                except EngineDied as error:
                    death = error
        elif self._has_peers():
            self._get_sender().send(stream)
        else:
            for _ in stream():
                pass
        return shared_fingerprint(fingerprint, ranks), death

    def _has_peers(self) -> bool:
        """Return True if an engine uses the GPUs of several ranks, and this rank's is one of them."""
        config, ranks = self.policy.config, self.policy.ranks
        return config.rollout.tensor_parallel_size > 1 and engine_place(config, ranks.local_rank) is not None

    def _get_sender(self) -> transfer.WeightSender:
        """Return this rank's memory for the workers of an engine, made once. Collective among the engine's ranks."""
        if self._sender is None:
            config = self.policy.config
            size, platform = config.rollout.tensor_parallel_size, config.cluster.platform
            ranks = self.policy.ranks
            peers = (
                engine_peers(config, ranks.rank, ranks.local_rank, ranks.timeout, store) if self._has_peers() else None
            )
            self._sender = transfer.WeightSender(platform, size, TRANSFER_BUCKET_BYTES[platform], peers)
        return self._sender


@contextlib.contextmanager
def _single_threaded(device: torch.device) -> Iterator[None]:
    """Copy with one thread on the CPU: the engine, which unpacks at the same time, needs the other cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class EngineWeights:
    """The weights of the engines, kept equal to those of the policy; known alike on every rank.

    Whether the engines have the current weights is known from what all ranks did, not from an engine that only some of
    them own, for every sync is collective.
    """

    def __init__(
        self,
        sync: WeightSync,
        worker: RolloutWorker,
        clock: StepClock,
        baseline: Baseline | None = None,  # gets the gap of the run's first sync, unless it has it
    ) -> None:
        self.newest: Synced | None = None  # the result of the newest sync
        self._baseline = baseline or Baseline()
        self._sync, self._policy, self._worker, self._clock = sync, sync.policy, worker, clock
        self._version = 0  # of the policy's weights, in this attempt
        self._engine_version: int | None = None  # of those that the engines have; None: no weights
        self._awake = not offload_trainer(sync.policy.config)  # as they start

    def mark_updated(self) -> None:
        """Note that an update has changed the policy's weights."""
        self._version += 1

    def sync(self) -> Synced:
        """Wake the engines, and give them the current weights unless they have them. Collective.

        Engines that die on the way are restarted and filled again. Raises Abandoned, on every rank, if a stop is
        requested by then.
        """
        engine, ranks = self._worker.engine, self._policy.ranks
        if self.newest is not None and self._engine_version == self._version:
            offload.leave_to_engines(self._policy)
            self._awake = True
            if engine is not None:
                with contextlib.suppress(EngineDied):  # the first step of generation finds it dead, and restarts it
                    engine.wake_up()
            return self.newest
        self._awake = True
        with self._clock.phase("sync"):
            while True:
                synced, death = self._sync.run(engine, self._baseline.probe)
                if not any_rank(death is not None, ranks.device):
                    break
                if death is not None:
                    self._worker.recovery.restart(death)
                elif engine is not None and offload_trainer(self._policy.config):
                    with contextlib.suppress(EngineDied):  # found dead by the next sync
                        engine.sleep(self._policy.config.rollout.sleep_level)  # the trainer's weights come back first
                with waiting():  # for engines that start again
                    stops = any_rank(self._clock.monitor.stop_requested(), ranks.device)
                if stops:
                    raise Abandoned
        self.newest, self._engine_version = synced, self._version
        self._baseline.probe = self._baseline.probe or synced.gap
        return synced

    def sleep(self, level: int | None = None) -> None:
        """Put all engines to sleep, and return when all have left the memory; do nothing if they sleep. Collective.

        `level`: see :meth:`Engine.sleep`; by default that of the configuration. At level 2 they have no weights from
        now on, so the next :meth:`sync` sends all weights again, even if no update has changed them (one that was
        skipped, a batch without a gradient).
        """
        if not self._awake:
            return
        self._awake = False
        level = level or self._policy.config.rollout.sleep_level
        if level == 2:
            self._engine_version = None
        if self._worker.engine is not None:
            with contextlib.suppress(EngineDied):  # restarted by the next sync
                self._worker.engine.sleep(level)
        offload.wait_for_all(self._policy)
