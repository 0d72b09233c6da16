"""The phases of a run by the memory that they take of a GPU, and what their headroom means in words.

Within a phase, parts are what tensors and contexts take. In passes, torch's allocator reserves more than that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

HEADROOM = 0.1  # of the card, kept for peaks: experts are used unevenly, and estimates are not exact
# What torch's allocator reserves for a pass and does not use, as a share of the tensors: blocks that nothing fits into.
# It is the middle of what two published runs of dense models show (docs/estimates.md); mixtures have no part in it.
FRAGMENTATION = 0.14

OF_ENGINES = frozenset({"engine_weights", "engine_working", "engine_asleep", "kv_cache"})  # parts of generation
BESIDE_ENGINES = frozenset(
    {"engine_start", "generation", "evaluation", "reward_model"}
)  # phases whose memory vLLM fills by itself
PASSES = frozenset(
    {"head_backward", "update", "logprobs", "teacher", "optimizer_step"}
)  # of a step, over what it trains on
NOT_OF_ALLOCATOR = frozenset(
    {"cuda_and_nccl", "engine_asleep", "reward_asleep"}
)  # parts that the trainer's allocator does not hold


class Phase(NamedTuple):
    """The bytes that a GPU holds at the worst moment of a phase, by what they are for."""

    # "load", "engine_start", "head_backward", "update", "optimizer_step", "logprobs", "teacher" (its pass), "sync",
    # "probe", "generation", "evaluation", "reward_model" (its engine scores), "save". An update's passes take most in
    # layers ("update"), or where the head's gradient is made.
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def fragmentation(self) -> int:
        """Bytes that the allocator reserves beyond the tensors: 0 outside passes, where they hardly come and go."""
        if self.name not in PASSES:
            return 0
        return int(FRAGMENTATION * sum(size for name, size in self.parts.items() if name not in NOT_OF_ALLOCATOR))

    @property
    def reserved(self) -> int:
        """The bytes that are taken of the card: all parts, and what the allocator reserves beyond them."""
        return self.total + self.fragmentation

    @property
    def reserved_parts(self) -> dict[str, int]:
        """The parts of what is taken of the card."""
        return self.parts | ({"fragmentation": self.fragmentation} if self.fragmentation else {})


def risk(headroom: float) -> str:
    """Return in words what a share of the card that passes leave means."""
    if headroom >= HEADROOM:
        return "comfortable"
    return "tight" if headroom >= 0 else "may run out of memory"


def percent(headroom: float) -> str:
    """Return a share of the card that is left, rounded down, as the risk is judged: 9.6 % is no 10 %.

    It is below 0 where fragmentation takes more than there is.
    """
    return f"{math.floor(100 * headroom)}%"


def exceeds(headroom: float) -> str:
    """Return in words that a layout takes more than a GPU has, by a share of it that is below 0."""
    return f"exceeds the GPU's memory by {math.ceil(-1000 * headroom) / 10:g}%"


def left(headroom: float) -> str:
    """Return in words what a layout leaves of a GPU, or by how much it exceeds it."""
    return f"leaves {percent(headroom)} of a GPU" if headroom >= 0 else exceeds(headroom)


def shown(name: str) -> str:
    """A part or a phase as people read it."""
    return _SHOWN.get(name, name.replace("_", " "))


_SHOWN = {
    "logprobs": "log-probs",
    "old_logprobs": "old log-probs",
    "cuda_and_nccl": "CUDA and NCCL",
    "kv_cache": "KV cache",
    "gradient_copies": "gradients in fp32",
    "head_backward": "head backward",
    "head_input": "head's input",
    "head_gradient": "head's gradient",
    "embedding_gradient": "embedding's gradient",
    "fp8_weights": "weights in FP8",
}
