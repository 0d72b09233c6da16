"""Words for what a run trains of its model, by which pages name adapters."""

from __future__ import annotations

from gspo_hpc.config.derived import engine_dtype, keeps_weights, trains_adapters
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.adapter_table import EMBEDDING, TARGETS
from gspo_hpc.planning.estimates import activations, adapters, parameters
from gspo_hpc.system.text import gib


def adapter(config: Config) -> str | None:
    """Return the adapters that a run trains, with their share of the model's parameters where its sizes are known.

    Returns None for a run that trains the whole model.
    """
    if not trains_adapters(config):
        return None
    targets = adapters.targets(config)
    every, named = targets.issuperset(TARGETS), [one for one in TARGETS if one in targets]
    where = ", ".join((["all linear layers"] if every else named) + ["the embedding"] * (EMBEDDING in targets))
    arch = architecture.find(config) if where else None
    where = where or f"{', '.join(config.adapter.targets)}, which names no layer that can have one"
    words = f"LoRA of rank {config.adapter.rank} on {where}"
    if arch is None:
        return words
    return f"{words} ({adapters.of_model(arch, config) / parameters.parameters(arch):.2%} of the parameters)"


def in_engines(config: Config) -> str:
    """Return how engines get the adapters of a run, as a clause."""
    arch, dtype = architecture.find(config), engine_dtype(config)
    if not adapters_beside_weights(config, experts=arch is not None and arch.experts is not None):
        rounds = "" if dtype == "float32" else f", which rounds what they add to {dtype} (docs/lora.md)"
        return f"engines get it merged into the weights{rounds}"
    clause = "engines get it beside their weights, as vLLM's own"
    if arch is None:
        return clause
    every = parameters.parameters(arch) * activations.itemsize(config)
    sent = gib(adapters.travelling(arch, config))
    if keeps_weights(config):
        return f"{clause}: {sent} travel at a weight sync instead of {gib(every)}"
    return (
        f"{clause}: {sent} travel at a weight sync, beside {gib(every)} of weights that engines drop while they "
        "sleep; with rollout.sleep_level=1 these wait in host memory"
    )
