"""The connection of the ranks that train to those that generate, made once in an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from gspo_hpc.config.derived import role_of
from gspo_hpc.config.schema import Config
from gspo_hpc.exchange.weight_broadcast import WeightBroadcast
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.system.progress import waiting
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.serving.commands import Commands
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.serving.weights import RemoteWeights
from gspo_hpc.training.telemetry.step_clock import StepClock


def weight_broadcast(config: Config, ranks: Ranks, member: int, members: int) -> WeightBroadcast:
    """Return a rank's place in the group in which weights travel; member 0 is training rank 0."""
    assert ranks.job_store is not None
    backend = "nccl" if config.cluster.platform == "cuda" else "gloo"
    return WeightBroadcast(dist.PrefixStore("weights", ranks.job_store), member, members, backend, ranks.timeout)


class GeneratorLink:
    """A training rank's end of the connection."""

    def __init__(self, config: Config, ranks: Ranks, rollouts: Path, flag: StopFlag) -> None:
        """Meet the ranks that generate, as training rank 0; the others meet nobody. `rollouts`: folder of journals."""
        assert ranks.job_store is not None
        self._commands = Commands(ranks.job_store)
        self._broadcast: WeightBroadcast | None = None
        if ranks.rank == 0:
            members = 1 + role_of(config, config.num_ranks - 1).count
            with waiting():  # for ranks that start later
                self._broadcast = weight_broadcast(config, ranks, 0, members)
        self.engines = RemoteEngines(config, ranks, self._commands, rollouts, flag)

    def weights(
        self, policy: Policy, sequences: Sequence[Sequence[int]], clock: StepClock, baseline: Baseline
    ) -> RemoteWeights:
        """Return the way of the policy's weights to the engines; `sequences` are those of the probe."""
        return RemoteWeights(policy, sequences, self.engines, self._commands, self._broadcast, clock, baseline)
