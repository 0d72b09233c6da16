"""Refuse a run that cannot work, on the machine of the user and before anything is started."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.config.derived import only_planned
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import Plan, make_plan


def require(config: Config) -> Plan:
    """Return the plan of a config that can be run. Raises ValueError for missing settings and for every broken rule."""
    if missing := config.missing():
        raise ValueError(f"to train, give also: {', '.join(missing)}")
    if planned_only := only_planned(config):
        why, instead = planned_only
        raise ValueError(f"{why}: give {instead}")
    plan = make_plan(config)
    nearest = search.find(config, limit=1) if plan.broken else []
    plan.require(f"nearest fix: {nearest[0]} (gspo-hpc plan shows others)" if nearest else "")
    return plan


def check_inputs(config: Config) -> None:
    """Raise ValueError for a missing model folder, malformed rows and reward functions that cannot be loaded."""
    from gspo_hpc.data import prompts
    from gspo_hpc.rewards import registry  # numpy comes with them, which plan and help can do without

    if config.model.path is not None and not Path(config.model.path).is_dir():  # a plan needs no model folder
        raise ValueError(f"model.path {config.model.path} does not exist: it must be a Hugging Face model folder")
    registry.check(config.reward)
    for path in (config.data.train, config.data.eval):
        if path is not None:
            prompts.load_rows(path, config.data)
