"""Rounding that is not there: noise of its size, by which one learns how far log-probs can move for it alone.

Two programs that compute the same in 16 bits round in different places. Mostly that moves a log-prob by little. In a
mixture of experts a token near a tie of a router goes to another expert for it, and then its log-prob jumps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

STEP = 2.0**-7  # of a number: twice the step of bfloat16's grid, for the several places where a layer rounds


@contextlib.contextmanager
def shaken(chunks: Sequence[Any]) -> Iterator[None]:
    """Change what each layer is given by STEP, relative and at random, the same at each use, within the block.

    Tensor-parallel ranks that have the same numbers change them alike.
    """
    with contextlib.ExitStack() as hooks:
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                hooks.callback(layer.register_forward_pre_hook(_shake, with_kwargs=True).remove)
        yield


def _shake(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "hidden_states" in named:
        return arguments, named | {"hidden_states": _with_noise(named["hidden_states"], layer.layer_number)}
    first, *rest = arguments
    return (_with_noise(first, layer.layer_number), *rest), named


def _with_noise(hidden: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=drawn, device=hidden.device)
    return (hidden.float() * (1.0 + STEP * noise)).to(hidden.dtype)
