"""Names of the planner's rules, and the topics that they belong to."""

from __future__ import annotations

from enum import Enum, StrEnum


class RuleId(StrEnum):
    """The name of a rule, as `plan` shows it and as it stands in JSON.

    Each file of this folder lists its names in an enum of its own, derived from this one, beside the rules themselves.
    """


class Topic(Enum):
    """The subject of a rule. Broken rules are listed in this order.

    The search for fixes tries those settings that have a part in the topics of the broken rules.
    """

    GRID = "how parallel sizes cut the GPUs into ranks"
    COUNTS = "batch sizes and the ranks that share them"
    OTHER = "the model, the data and what libraries support"  # any setting may have a part in it
    SEQUENCES = "micro-batches and the longest sequence"
    ENGINES = "engines and the GPUs of a node"
    OBJECTIVE = "the objective"
    MEMORY = "memory"
    ENGINE_ARGUMENTS = "arguments of vLLM in rollout.engine"
