"""Words for what a run trains of its model, by which pages name adapters."""

from __future__ import annotations

from gspo_hpc.config.derived import trains_adapters
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.models.adapter_table import TARGETS
from gspo_hpc.planning.estimates import adapters, parameters


def adapter(config: Config) -> str | None:
    """Return the adapters that a run trains, with their share of the model's parameters where its sizes are known.

    Returns None for a run that trains the whole model.
    """
    if not trains_adapters(config):
        return None
    targets = adapters.targets(config)
    where = "all linear layers" if len(targets) == len(TARGETS) else ", ".join(t for t in TARGETS if t in targets)
    arch = architecture.find(config)
    words = f"LoRA of rank {config.adapter.rank} on {where}"
    if arch is None:
        return words
    return f"{words} ({adapters.of_model(arch, config) / parameters.parameters(arch):.2%} of the parameters)"
