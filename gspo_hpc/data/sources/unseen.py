"""Prompts of evaluations by their sets, as many of each as its setting allows."""

from __future__ import annotations

from collections.abc import Sequence

from gspo_hpc.config.derived import eval_of
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.sources.selection import FIELD


def by_set(prompts: Sequence[Prompt], config: Config) -> dict[str, list[Prompt]]:
    """Return the prompts that are evaluated, by the name of their set; those of no set come first, under ""."""
    names = ["", *(one.name for one in config.data.eval_sets)]
    found: dict[str, list[Prompt]] = {name: [] for name in names}
    for prompt in prompts:
        name = prompt.fields.get(FIELD) if config.data.eval_sets else ""
        found[name if name in names else ""].append(prompt)
    return {name: own[: eval_of(config, name).max_prompts] for name, own in found.items() if own}
