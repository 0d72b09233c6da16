"""Metrics of a step by the sources of its prompts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.derived import rewards_count
from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import Position
from gspo_hpc.data.sources.stream import MixedStream
from gspo_hpc.data.table import EXCLUDED, TRUNCATED, GroupTable, source_mark
from gspo_hpc.evaluation.evaluate import are_right


def source_metrics(table: GroupTable, config: Config) -> dict[str, float]:
    """Return the metrics of each source that has completions in the step; empty without sources."""
    metrics: dict[str, float] = {}
    right = np.array(are_right(table, config), np.bool_) if config.data.sources and config.reward.functions else None
    for one in config.data.sources:
        chosen = table.rows["source"] == source_mark(one.name)
        rows = table.rows[chosen]
        if not len(rows):
            continue
        name, groups = one.name, len(np.unique(rows["slot"]))
        metrics |= {
            f"source/{name}/groups": groups,
            f"source/{name}/response_length": float(rows["sampled_len"].mean()),
            f"source/{name}/truncated_fraction": float(((rows["flags"] & TRUNCATED) != 0).mean()),
        }
        if right is not None:
            metrics[f"source/{name}/accuracy"] = float(right[chosen].mean())
        if rewards_count(config):
            moving = len(np.unique(rows["slot"][rows["advantage"] != 0.0]))
            metrics[f"source/{name}/no_signal_fraction"] = 1 - moving / groups
            if len(kept := rows[(rows["flags"] & EXCLUDED) == 0]):
                metrics[f"source/{name}/reward"] = float(kept["reward"].mean())
    return metrics


def source_epochs(stream: object, after: Position) -> Mapping[str, float]:
    """Return how often each source has been gone through, the rollout that ends at `after` included."""
    if not isinstance(stream, MixedStream):
        return {}
    return {f"source/{name}/epoch": epochs for name, epochs in stream.epochs(after).items()}


def graded_rows(table: GroupTable, name: str, config: Config) -> npt.NDArray[np.bool_]:
    """Return True for every row of whose source a reward function grades completions: of all without sources."""
    found = np.ones(len(table), np.bool_)
    for one in config.data.sources:
        if one.rewards is not None and name not in one.rewards:
            found &= table.rows["source"] != source_mark(one.name)
    return found
