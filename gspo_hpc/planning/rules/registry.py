"""The register of the planner's rules: a function that is decorated in a file of this folder is a rule of the plan.

A rule looks at a plan whose quantities are known and yields one message for each way in which it is broken; it yields
nothing where it holds and where what it speaks of is not given. Nothing else needs to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gspo_hpc.planning.builder import Broken, PlanBuilder
from gspo_hpc.planning.rules.ids import RuleId, Topic

Check = Callable[[PlanBuilder], Iterator[str]]


class Rule(NamedTuple):
    """One rule of the planner."""

    id: RuleId
    meaning: str  # one line: what must hold
    topic: Topic
    estimable: bool  # whether memory can be estimated for a plan that breaks it: all sizes of its layout are whole
    check: Check


_registered: dict[RuleId, Rule] = {}


def rule(
    rule_id: RuleId, meaning: str, topic: Topic = Topic.OTHER, *, estimable: bool = False
) -> Callable[[Check], Check]:
    """Register the decorated function as the rule of that name."""

    def register(check: Check) -> Check:
        assert rule_id not in _registered, f"two rules have the name {rule_id}"
        _registered[rule_id] = Rule(rule_id, meaning, topic, estimable, check)
        return check

    return register


@cache
def rules() -> dict[RuleId, Rule]:
    """All rules of this folder's files by name, in the order in which broken ones are listed."""
    for module in sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])):
        importlib.import_module(f"gspo_hpc.planning.rules.{module}")
    order = list(Topic)
    found = sorted(_registered.values(), key=lambda one: order.index(one.topic))  # stable: by file, then as written
    return {one.id: one for one in found}


@cache
def _checked(*, memory: bool) -> tuple[Rule, ...]:
    return tuple(one for one in rules().values() if (one.topic is Topic.MEMORY) == memory)


def apply(plan: PlanBuilder, *, memory: bool = False) -> None:
    """Add what is broken to `plan`: of the rules about memory, or of all others."""
    for one in _checked(memory=memory):
        plan.broken += [Broken(one.id, message) for message in one.check(plan)]


@cache
def _lately_broken() -> list[Rule]:
    """Return the rules that are not about memory, to be put in the order in which they were last broken."""
    return list(_checked(memory=False))


def apply_until(plan: PlanBuilder, enough: int) -> None:
    """Add what is broken to `plan`, of the rules that are not about memory, until that is more than `enough`.

    Rules that were broken last are asked first: configs that are tried one after another break the same ones.
    """
    asked, stopping = _lately_broken(), list[Rule]()
    for one in asked:
        before = len(plan.broken)
        for message in one.check(plan):
            plan.broken.append(Broken(one.id, message))
        if len(plan.broken) > before:
            stopping.append(one)
            if len(plan.broken) > enough:
                break
    if stopping != asked[: len(stopping)]:
        asked[:] = stopping + [one for one in asked if one not in stopping]


def topic(rule_id: RuleId) -> Topic:
    """Return the topic of a rule."""
    return rules()[rule_id].topic


def listed(broken: list[Broken]) -> tuple[Broken, ...]:
    """Return broken rules in the order in which they are listed."""
    return tuple(sorted(broken, key=lambda item: _positions()[item.rule]))


@cache
def _positions() -> dict[RuleId, int]:
    return {rule_id: number for number, rule_id in enumerate(rules())}
