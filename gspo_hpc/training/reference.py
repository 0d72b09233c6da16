"""The reference model of the KL term: the policy's own modules with the weights of the start swapped in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from gspo_hpc.config.schema import Config
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training.update import logprob_pass, with_values


class Reference:
    """The model as it was at the start, kept in host memory and swapped in for its pass."""

    def __init__(self, policy: Policy) -> None:
        self._memory = HostMemory()
        self._weights = self._copies(policy.parameters())
        self._current: list[torch.Tensor] | None = None  # where the policy's own weights wait meanwhile

    def with_logprobs(
        self, policy: Policy, groups: ShardedGroups, config: Config, *, monitor: PassMonitor | None = None
    ) -> ShardedGroups:
        """Return the groups with the log-probs of all completions under the reference's weights. Collective.

        Tokens go to the experts that the reference chooses.
        """
        policy.settle()
        policy.before_change()
        parameters = list(policy.parameters())
        with torch.no_grad():
            if self._current is None:
                self._current = self._copies(parameters)
            else:
                _copy(parameters, self._current)
            try:
                _copy(self._weights, parameters)
                passed = logprob_pass(policy, groups, "reference", config, replay=False, monitor=monitor)
            finally:
                _copy(self._current, parameters)
        return with_values(groups, passed.logprobs, lambda c, v: replace(c, reference_logprobs=v))

    def _copies(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return copies of parameters in host memory."""
        values = [p.detach() for p in parameters]
        copies = [self._memory.empty(one.shape, one.dtype, locked=one.is_cuda) for one in values]
        _copy(values, copies)
        return copies


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors between host and GPU, and return when all have arrived."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
    if any(one.is_cuda for one in (*sources, *targets)):
        torch.cuda.current_stream().synchronize()
