"""Everything that the constants of a model are read from in vLLM, beyond its public interfaces.

Each function says what it relies on and in which versions; ``tests/torch/engine/test_compat.py`` finds these names in
the sources of the installed one. What a layer does not have is left out, and so is not compared.
"""

from __future__ import annotations

from typing import Any

import torch


def rotary_embeddings(model: torch.nn.Module) -> list[Any]:
    """Return the modules of rotary embeddings that turn by a table of cosines and sines of real numbers.

    Relies on ``cos_sin_cache`` [positions, rotary_dim], ``rotary_dim`` and ``is_neox_style`` of RotaryEmbeddingBase
    (0.22 to 0.33).
    """
    return [
        module
        for module in model.modules()
        if isinstance(table := getattr(module, "cos_sin_cache", None), torch.Tensor)
        and table.is_floating_point()
        and table.dim() == 2
        and table.shape[1] == getattr(module, "rotary_dim", None)
        and isinstance(getattr(module, "is_neox_style", None), bool)
    ]


def attention(model: torch.nn.Module) -> set[tuple[float, int, float]]:
    """Return (scale, sliding window, bound of scores) of the attention layers; 0 where there is no window or bound.

    Relies on ``Attention.sliding_window``, ``Attention.impl`` and of this ``scale`` and ``logits_soft_cap``, which all
    backends for CPUs and CUDA have (0.22 to 0.33).
    """
    found = set()
    layers: list[Any] = list(model.modules())
    for module in layers:
        scale = getattr(getattr(module, "impl", None), "scale", None)
        if isinstance(scale, float) and hasattr(module, "sliding_window"):
            bound = getattr(module.impl, "logits_soft_cap", None)
            found.add((scale, int(module.sliding_window or 0), float(bound or 0.0)))
    return found


def norms(model: torch.nn.Module) -> set[float]:
    """Return what norms add to the mean square of their input.

    Relies on ``RMSNorm.variance_epsilon`` (0.22 to 0.33).
    """
    found = (getattr(module, "variance_epsilon", None) for module in model.modules())
    return {eps for eps in found if isinstance(eps, float)}


def logits(model: torch.nn.Module) -> set[tuple[float, float]]:
    """Return (scale, bound) of the logits; 0 where there is no bound.

    Relies on ``LogitsProcessor.scale`` and ``soft_cap`` (0.22 to 0.33).
    """
    layers: list[Any] = list(model.modules())
    return {
        (float(module.scale), float(module.soft_cap or 0.0))
        for module in layers
        if hasattr(module, "soft_cap") and isinstance(getattr(module, "scale", None), int | float)
    }
