"""Who makes the model and brings its weights: this package for the families that it knows, mcore-bridge for others.

Floor 3. Either gives chunks: Megatron GPTModels whose last stage returns hidden states, with two methods more. `inputs`
is what the forward pass is called with for a micro-batch, and `output_weight` is the head's local shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_hpc import bridged, model, weights
from gspo_hpc.config import Config
from gspo_hpc.model_config import Architecture


class Provider(Protocol):
    """Makes this rank's part of the model. All ranks call each method together."""

    def build(self, device: torch.device) -> list[Any]:
        """The chunks, without weights yet: one, or several with a virtual pipeline."""

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """Fill the chunks from a Hugging Face folder. ValueError where that is not one of this model."""

    def stream(self, chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every Hugging Face tensor, full, in a fixed order, on every rank; to be used before the next is asked for."""


class Own:
    """:mod:`gspo_hpc.model` and :mod:`gspo_hpc.weights`."""

    def __init__(self, arch: Architecture, config: Config) -> None:
        self._arch = arch
        self._config = config

    def build(self, device: torch.device) -> list[Any]:
        """See Provider."""
        return list(model.build(self._arch, self._config, device))

    def load(self, chunks: Sequence[Any], folder: str | Path) -> None:
        """See Provider."""
        weights.load(chunks, self._arch, folder)

    def stream(self, chunks: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """See Provider."""
        return weights.stream(chunks, self._arch)


def of(arch: Architecture, config: Config) -> Provider:
    """The one that the configuration names."""
    return bridged.Bridged(config) if config.model.provider == "mcore_bridge" else Own(arch, config)
