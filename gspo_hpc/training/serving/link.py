"""The connection of the ranks that train to those that generate, made once in an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.serving.connection import Connection
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


class GeneratorLink:
    """A training rank's end of the connection."""

    def __init__(self, config: Config, ranks: Ranks, rollouts: Path, flag: StopFlag) -> None:
        """Connect training rank 0 to the ranks that generate; the others talk to it. `rollouts`: folder of journals."""
        self._connection = Connection(config, ranks) if ranks.rank == 0 else None
        self.engines = RemoteEngines(config, ranks, self._connection, rollouts, flag)

    def weights(
        self, policy: Policy, sequences: Sequence[Sequence[int]], clock: StepClock, baseline: Baseline
    ) -> RemoteWeights:
        """Return the way of the policy's weights to the engines; `sequences` are those of the probe."""
        return RemoteWeights(policy, sequences, self.engines, self._connection, clock, baseline)
