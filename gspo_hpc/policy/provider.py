"""Providers of the model and its weights: this package for the families that it knows, mcore-bridge for others.

Either gives chunks: Megatron GPTModels whose last stage returns hidden states, with two methods more. `inputs`
is what the forward pass is called with for a micro-batch, and `output_weight` is the head's local shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops.constants import Constants
from gspo_hpc.ops.weight_parts import Memory, Part
from gspo_hpc.policy import bridged, expert_weights, model, weight_stream


class Provider(Protocol):
    """A maker of this rank's part of the model. All ranks call each method together."""

    def build(self, device: torch.device) -> list[Any]:
        """Return the chunks, without weights yet: one, or several with a virtual pipeline."""

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """Fill the chunks from a Hugging Face folder; raise ValueError if it is not one of this model."""

    def stream(self, chunks: Sequence[Any], memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Yield every Hugging Face tensor, full, in a fixed order, on every rank, in `memory` if that is given.

        Without it, use parts before asking for the next.
        """

    def expert_sums(self, chunks: Sequence[Any], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the sums [layers, experts, NUMBERS] of all experts' weights in `dtype`; None if they are not known.

        See :mod:`gspo_hpc.ops.expert_sums`.
        """

    def constants(self, chunks: Sequence[Any]) -> Constants | None:
        """Return the numbers beside its weights by which the model computes; None if they are not known."""


class Own:
    """The provider of this package: :mod:`gspo_hpc.policy.model` and :mod:`gspo_hpc.policy.weight_stream`."""

    def __init__(self, arch: Architecture, config: Config) -> None:
        self._arch = arch
        self._config = config

    def build(self, device: torch.device) -> list[Any]:
        """See Provider."""
        return list(model.build(self._arch, self._config, device))

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """See Provider."""
        weight_stream.load(chunks, self._arch, folder)

    def stream(self, chunks: Sequence[Any], memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """See Provider."""
        return weight_stream.stream(chunks, self._arch, memory)

    def expert_sums(self, chunks: Sequence[Any], dtype: torch.dtype) -> torch.Tensor | None:
        """See Provider."""
        return expert_weights.sums(chunks, self._arch, dtype)

    def constants(self, chunks: Sequence[Any]) -> Constants:
        """See Provider."""
        return model.constants(chunks[0], self._arch)


def make(arch: Architecture, config: Config) -> Provider:
    """Return the provider that the configuration names."""
    return bridged.Bridged(config) if config.model.provider == "mcore_bridge" else Own(arch, config)
