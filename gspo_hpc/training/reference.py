"""The reference model of the KL term: the policy's own modules with the weights of the start swapped in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Group
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training.update import logprob_pass, with_values


class Reference:
    """The model as it was at the start, kept in host memory and swapped in for its pass."""

    def __init__(self, policy: Policy) -> None:
        self._weights = [p.detach().cpu().clone() for p in policy.parameters()]

    def with_logprobs(
        self, policy: Policy, groups: Sequence[Group], config: Config, *, monitor: PassMonitor | None = None
    ) -> list[Group]:
        """Return the groups with the log-probs of all completions under the reference's weights. Collective.

        Tokens go to the experts that the reference chooses.
        """
        policy.settle()
        parameters = list(policy.parameters())
        with torch.no_grad():
            current = [p.detach().cpu().clone() for p in parameters]
            try:
                _copy(parameters, self._weights)
                passed = logprob_pass(policy, groups, "reference", config, replay=False, monitor=monitor)
            finally:
                _copy(parameters, current)
        return with_values(groups, passed.logprobs, lambda c, v: replace(c, reference_logprobs=v))


def _copy(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
