"""The weight sync of server mode, on the ranks that train: weights are broadcast, and the probe is sent with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch.distributed as dist

from gspo_hpc.config.constants import TRANSFER_BUCKET_BYTES
from gspo_hpc.exchange.weight_broadcast import SentMemory
from gspo_hpc.ops.weight_parts import Fingerprint, Part
from gspo_hpc.policy import offload
from gspo_hpc.policy.policy import Policy
from gspo_hpc.rollout.worker import Interrupted
from gspo_hpc.training.agreement.explain import ask_trainer
from gspo_hpc.training.agreement.gap import Baseline, Gap
from gspo_hpc.training.agreement.scoring import rounding_gap, score
from gspo_hpc.training.probe import Trainer
from gspo_hpc.training.serving.commands import EXPLAIN, Values
from gspo_hpc.training.serving.connection import Connection
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.sync import Synced
from gspo_hpc.training.telemetry.step_clock import StepClock


class RemoteWeights:
    """The weights of engines on GPUs of their own. It has the methods of EngineWeights; they are collective."""

    def __init__(
        self,
        policy: Policy,
        sequences: Sequence[Sequence[int]],
        engines: RemoteEngines,
        connection: Connection | None,
        clock: StepClock,
        baseline: Baseline,
    ) -> None:
        """`sequences` are those of the probe; rank 0 alone has a `connection`."""
        self.newest: Synced | None = None
        self._policy, self._sequences, self._engines = policy, sequences, engines
        self._connection, self._clock, self._baseline = connection, clock, baseline
        self._version, self._sent_version = 0, -1
        device = policy.ranks.device
        self._memory = SentMemory(device, TRANSFER_BUCKET_BYTES[device.type], connection)

    def mark_updated(self) -> None:
        """Note that an update has changed the policy's weights.

        Engines that have started again during the update are filled here, and go on with what they had to do.
        """
        self._version += 1
        self._engines.look_after()

    def sleep(self, level: int | None = None) -> None:
        """Do nothing: engines do not use the memory of these GPUs."""

    def has_weights(self, fingerprint: str) -> bool:
        """Return True if the policy has the weights with this fingerprint, which engines got from it."""
        unchanged = self._sent_version == self._version
        return unchanged and self.newest is not None and self.newest.fingerprint == fingerprint

    def sync(self, version: int | None = None, *, in_flight: bool = False) -> Synced:
        """Give the engines the current weights unless they have them, once they have nothing more to generate.

        `version`: the number of steps that have made them, which matters to what is trained on. With `in_flight`
        engines take them at once, in the middle of what they generate. Raises Interrupted if what they generate was
        stopped. Where other weights arrive than were sent, or a probe disagrees, the ranks that generate fail, and so
        does the attempt.
        """
        if self.newest is not None and self._sent_version == self._version:
            return self.newest
        with self._clock.phase("sync"):
            self.newest = self._send(version, in_flight)
        self._sent_version = self._version
        self._baseline.probe = self._baseline.probe or self.newest.gap
        return self.newest

    def _send(self, version: int | None, in_flight: bool) -> Synced:
        if not in_flight:
            self._engines.wait_for_all()  # here, where a stop is noticed, and not in the broadcast
        offload.leave_to_engines(self._policy)  # a state that a start or a save brought back, if it stays on the host
        ours = score(self._policy, self._sequences, self._clock.monitor).logprobs
        rounding = rounding_gap(self._policy, self._sequences, ours, self._clock.monitor)
        trainer = Trainer(ours, rounding, self._policy.expert_sums(), self._policy.constants())
        first = self._baseline.probe
        values = {
            "version": version,
            "sequences": [list(map(int, tokens)) for tokens in self._sequences],
            "trainer": trainer.values(),
            "first": None if first is None else asdict(first),
            "explains": True,
        }

        def offer() -> Values:
            assert self._connection is not None
            self._connection.offer(values)
            return {}

        self._engines.from_rank_0(lambda: self._engines.persist(offer))
        fingerprint = self._stream()

        def answer() -> Values:
            assert self._connection is not None
            self._connection.note_sent(values, fingerprint)
            return self._engines.persist(self._connection.confirm)

        found = self._engines.from_rank_0(answer)
        if found["asks"]:
            self._explain()
        if found["stopped"]:
            raise Interrupted
        return Synced(str(found["fingerprint"]), Gap(**found["gap"]))

    def _explain(self) -> None:
        """Give the ranks that generate what they ask for to name the cause of a gap, with which they then fail."""
        pairs = ask_trainer(self._policy, self._sequences, self._clock.monitor)

        def wait() -> Values:  # for the end of the attempt
            assert self._connection is not None
            commands = self._connection.commands
            return commands.wait_for_answer(commands.post(EXPLAIN, pairs.values()), self._connection.check)

        self._engines.from_rank_0(wait)

    def _stream(self) -> str:
        """Gather all weights and send them; return their fingerprint on rank 0."""
        ranks = self._policy.ranks
        fingerprint = Fingerprint(ranks.rank, ranks.world_size)

        def buckets() -> Iterator[Sequence[Part]]:
            for parts in self._policy.parts(self._memory):
                for part in parts:
                    fingerprint.add(part)
                yield parts

        if self._connection is None:
            for _ in buckets():
                pass
            self._memory.release()
        else:
            self._connection.send(buckets(), self._memory)
        values = fingerprint.values()
        if ranks.world_size > 1:
            dist.reduce(values, 0)
        return fingerprint.text(values) if ranks.rank == 0 else ""
