"""Turns at the memory of GPUs that trainer and engines share: one side leaves before the other comes.

An engine with tensor parallelism allocates on the GPUs of several ranks, and only one of these ranks talks to it. So no
rank may rely on what it has freed itself: all ranks leave, wait for each other, and then engines take the memory; all
engines sleep, ranks wait for each other, and then the trainer takes it.
"""

from __future__ import annotations

import torch

from gspo_hpc.config.derived import offload_trainer
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import barrier


def leave_to_engines(policy: Policy, *, keep_weights: bool = False) -> None:
    """Move the trainer of every rank to host memory, if that is configured, and return when all have. Collective.

    With `keep_weights` the weights stay where they are, for they are about to be sent.
    """
    if offload_trainer(policy.config):
        policy.offload(keep_weights=keep_weights)
    if policy.ranks.device.type == "cuda" and policy.config.rollout.mode == "colocate":
        torch.cuda.empty_cache()  # what torch keeps of freed memory is lost to an engine
    wait_for_all(policy)


def wait_for_all(policy: Policy) -> None:
    """Return when every rank has come here. Collective."""
    if policy.ranks.world_size > 1:
        barrier(policy.ranks.device)
