"""Rounding that is not there: noise of its size, by which one learns how far log-probs can move for it alone.

Two programs that compute the same in 16 bits round in different places. How far that moves a log-prob depends on the
model and on the token: those that no rollout would contain move most. In a mixture of experts a token near a tie of a
router goes to another expert for it, and then its log-prob jumps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_OF_STEP = 0.5  # of the step of the type's grid: what a layer's roundings add up to, and a little more
_OF_STEP_BY_TIES = 1.0  # in a mixture, where few tokens of a probe lie near a tie, and one more or less counts


def size(dtypes: Sequence[torch.dtype], *, mixture: bool) -> float:
    """Return the size of noise, of a number, for programs that compute in these types."""
    return (_OF_STEP_BY_TIES if mixture else _OF_STEP) * max(torch.finfo(dtype).eps for dtype in dtypes)


@contextlib.contextmanager
def shaken(chunks: Sequence[Any], size: float) -> Iterator[None]:
    """Change what each layer is given by `size`, relative and at random, the same at each use, within the block.

    Tensor-parallel ranks that have the same numbers change them alike.
    """
    with contextlib.ExitStack() as hooks:
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                shake = functools.partial(_shake, size)
                hooks.callback(layer.register_forward_pre_hook(shake, with_kwargs=True).remove)
        yield


def _shake(
    size: float, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "hidden_states" in named:
        return arguments, named | {"hidden_states": _with_noise(named["hidden_states"], size, layer.layer_number)}
    first, *rest = arguments
    return (_with_noise(first, size, layer.layer_number), *rest), named


def _with_noise(hidden: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    drawn = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=drawn, device=hidden.device)
    return (hidden.float() * (1.0 + size * noise)).to(hidden.dtype)
