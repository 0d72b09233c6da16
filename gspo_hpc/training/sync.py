"""The weight sync: from the trainer to the engines, with a probe that shows that the weights arrived."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gspo_hpc.config.derived import offload_trainer
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import any_rank, broadcast_bytes
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.training import probe
from gspo_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class Synced:
    """The result of a sync. Gaps are in nats, over all engines that took part and are alive."""

    fingerprint: str  # of the weights, bit for bit
    gap_max: float
    gap_mean: float


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield each tensor with the running fingerprint of all tensors up to it."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        digest.update(int(torch.hash_tensor(tensor).item()).to_bytes(8, "little", signed=False))
        yield name, tensor, digest.hexdigest()[:16]


def synchronize(
    policy: Policy, engine: Engine | None, sequences: Sequence[Sequence[int]], monitor: PassMonitor | None = None
) -> tuple[Synced, EngineDied | None]:
    """Wake `engine`, fill it with the current weights and check it on the probe; with None, only take part. Collective.

    If offloading of the trainer is configured, only its weights stay meanwhile, and nothing afterwards: the engines
    have the memory. The error of an engine that died on the way is returned, not raised, so that all other ranks go on;
    the caller restarts the engine and syncs again. Raises ProbeMismatch, on every rank.
    """
    offload.leave_to_engines(policy, keep_weights=True)
    death: EngineDied | None = None
    if engine is not None:
        try:
            engine.wake_up(["weights"])
        except EngineDied as error:
            death = error
    fingerprint, death = _push(policy, engine if death is None else None, death)
    gap_max, gap_mean, death = probe.check(policy, engine if death is None else None, sequences, death, monitor)
    return Synced(fingerprint, gap_max, gap_mean), death


def _push(policy: Policy, engine: Engine | None, death: EngineDied | None) -> tuple[str, EngineDied | None]:
    """Stream the current weights into `engine` (only take part if it is None), and return their fingerprint."""
    last = ""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor, so_far in fingerprint(policy.stream()):
            last = so_far
            yield name, tensor

    if engine is None:
        for _ in tensors():
            pass
    else:
        with _single_threaded(policy.ranks.device):
            try:
                engine.update_weights(tensors())  # takes the stream to its end even where it fails
            except EngineDied as error:
                death = error
    return broadcast_bytes(last.encode(), policy.ranks.device).decode(), death


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
        policy: Policy,
        worker: RolloutWorker,
        sequences: Sequence[Sequence[int]],  # of the probe
        clock: StepClock,
    ) -> None:
        self.newest: Synced | None = None  # the result of the newest sync
        self._policy, self._worker, self._sequences, self._clock = policy, worker, sequences, clock
        self._version = 0  # of the policy's weights, in this attempt
        self._engine_version: int | None = None  # of those that the engines have; None: no weights
        self._awake = not offload_trainer(policy.config)  # as they start

    def mark_updated(self) -> None:
        """Note that an update has changed the policy's weights."""
        self._version += 1

    def sync(self) -> Synced:
        """Wake the engines, and give them the current weights unless they have them. Collective.

        Engines that die on the way are restarted and filled again.
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
                synced, death = synchronize(self._policy, engine, self._sequences, self._clock.monitor)
                if not any_rank(death is not None, ranks.device):
                    break
                if death is not None:
                    self._worker.recovery.restart(death)
        self.newest, self._engine_version = synced, self._version
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
