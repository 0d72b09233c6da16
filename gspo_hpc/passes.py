"""Which passes a step makes, in what pieces, and what is done around them: what follows from the config alone.

Floor 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspo_hpc import algorithms
from gspo_hpc.config import Config


@dataclass(frozen=True)
class Passes:
    """Which passes besides the update a step needs."""

    old_logprobs: bool
    reference: bool


@dataclass(frozen=True)
class PassSize:
    """Micro-batches of one pass over a DP rank's completions: a fixed count, or a budget of tokens filled by packing.
    Neither: not given yet."""

    needed: bool
    micro_batch_size: int | None
    micro_batch_tokens: int | None


def passes_needed(config: Config) -> Passes:
    """The log-prob passes of a step: old log-probs only when the policy moves within a rollout, a reference only when
    the KL term has a weight."""
    return Passes(algorithms.updates_per_rollout(config.batch) > 1, config.algorithm.kl_beta > 0)


def offload_trainer(config: Config) -> bool:
    """Whether what a rank trains with goes to host memory while engines generate."""
    wanted = config.memory.offload_trainer
    if wanted is None:
        return config.cluster.platform == "cuda" and config.rollout.mode == "colocate"
    return wanted


def router_replay(config: Config) -> Literal["off", "rollout", "old_logprobs"]:
    """Whose choice of experts the updates repeat; "off": nobody's."""
    wanted = config.moe.router_replay
    if wanted == "auto":
        return "rollout" if config.cluster.platform == "cuda" else "old_logprobs"
    return wanted


def pass_sizes(config: Config) -> dict[str, PassSize]:
    """The size of every pass: its own where given, else the update's."""
    batch, needed = config.batch, passes_needed(config)
    update = (batch.micro_batch_size, batch.micro_batch_tokens)
    old = (batch.logprob_micro_batch_size, batch.logprob_micro_batch_tokens)
    reference = (batch.reference_micro_batch_size, batch.reference_micro_batch_tokens)
    return {
        "update": PassSize(True, *update),
        "old_logprobs": PassSize(needed.old_logprobs, *(old if any(old) else update)),
        "reference": PassSize(needed.reference, *(reference if any(reference) else update)),
    }
