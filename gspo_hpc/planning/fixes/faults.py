"""Faults of plans on the way to a fix: the topics of broken rules, and how much is left to mend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gspo_hpc.planning.builder import Broken
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.rules.registry import topic


def topics_of(broken: Iterable[Broken]) -> frozenset[Topic]:
    """Return the topics of broken rules."""
    return frozenset(topic(item.rule) for item in broken)


def left_of(broken: Sequence[Broken]) -> tuple[int, int]:
    """Return how much is broken, to be compared: rules about memory count only if no other rule is broken."""
    others = sum(topic(item.rule) is not Topic.MEMORY for item in broken)
    return others, 0 if others else len(broken)
