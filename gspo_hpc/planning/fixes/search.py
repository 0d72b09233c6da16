"""Fixes of a refused plan: the smallest changes of one setting, then of two, after which every rule holds.

Each change is checked against the rules themselves, so none that is offered breaks another. The values that are tried
come from candidates.py, and from by_type.py those of settings that a broken rule names and candidates.py does not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.fixes import beside, by_type, distances, moves, suggested
from gspo_hpc.planning.fixes import candidates as values_of
from gspo_hpc.planning.fixes.candidates import LENGTHS, candidates
from gspo_hpc.planning.fixes.change import (
    FEW,
    Change,
    Fix,
    Setting,
    is_near,
    is_nearly_alone,
    nearest,
    setting_of,
    settings_of,
    with_changes,
    without_repeated,
)
from gspo_hpc.planning.fixes.faults import left_of, topics_of
from gspo_hpc.planning.fixes.pairs import ROOM, Pairs
from gspo_hpc.planning.fixes.suggested import Suggested
from gspo_hpc.planning.mentions import mentioned
from gspo_hpc.planning.plan import Models, Plan, judge, make_plan
from gspo_hpc.planning.rules.ids import Topic
from gspo_hpc.planning.settings import ENGINE, value_of, with_value

MAX_OFFERED = 6
FARTHEST = 2.0  # times as far as the nearest fix: another one is hardly worth a look
_AS_LARGE, _AS_SMALL = 2.0, 0.125  # times the parameters of a model, between which one of another family is near
_MUCH_LARGER = 1.5  # times the parameters of a model of the same family, so that one of another family is offered, too
_TRIED = 60  # values of a setting that are tried alone: the nearest, and some of the others
_SET_APART = "rollout.engines_per_node"
_UTILIZATION = f"{ENGINE}gpu_memory_utilization"
# The largest that fits is wanted.
_GROWN = (*LENGTHS, f"{ENGINE}max_num_batched_tokens", "batch.micro_batch_tokens")
_BUDGET_UNIT = 1024  # tokens of a budget: round numbers are enough
_GROWTH = 16  # times that the distance to it is halved, at most ...
_GROWN_ENOUGH = 32  # ... until it is known to one in this many
_NUMBER = re.compile(r"\d[\d.,]*")
_ARITHMETIC = frozenset({Topic.COUNTS, Topic.SEQUENCES})  # topics in which batch sizes come first


def find(config: Config, rows: int | None = None, limit: int = MAX_OFFERED, room: int = ROOM) -> list[Fix]:
    """Return fixes of a configuration whose plan is refused, nearest first: of one setting, then of two.

    The list is empty for a valid plan. `rows` is that of make_plan. At most `limit` of each kind are returned, those of
    different settings before others of the same. About `room` pairs of changes are looked at, at most; a pair is
    offered only if neither of its changes is a fix alone.
    """
    plan = make_plan(config, rows)
    return [] if plan.valid else Search(config, rows, plan).found(limit, room)


def may_replace(own: str, path: str) -> bool:
    """Return whether a model may be offered in place of `own`: one of its family, or of about its size."""
    kin = catalog.kinship(own, path)
    before, after = (distances.parameters_of(one) for one in (own, path))
    if not before or not after:
        return kin <= catalog.Kinship.FAMILY
    least = 0.0 if kin <= catalog.Kinship.FAMILY else _AS_SMALL
    return least <= after / before <= _AS_LARGE


class Search:
    """The search for fixes of one refused plan."""

    def __init__(self, config: Config, rows: int | None, plan: Plan) -> None:
        self.config, self.rows, self.models = config, rows, Models()
        self.broken, self.topics = plan.broken, topics_of(plan.broken)
        self.left = left_of(plan.broken)
        self.warned, self.tight = _kinds(plan.warnings), len(plan.tight)
        self.counted = "world_size" in plan.quantities  # whether the GPUs that train are known
        self.missing = set(config.missing())
        self.not_run = {item.feature for item in plan.not_run}
        self.firsts: list[tuple[Change, Config, PlanBuilder]] = []  # that are no fix alone
        self.told = Suggested()  # what `suggest` finds, where it is asked
        self.near = math.inf  # distance of the nearest fix of one or two settings
        self.answered = False  # whether what `suggest` finds says all: memory is lacking, and nothing else

    def found(self, limit: int, room: int) -> list[Fix]:
        """Return fixes of one change and of two; for plans that lack memory, also what `suggest` finds for them.

        Where only machines are enough alone, also a layout that makes do with those that there are, and a model.
        """
        singles = self.singles()
        only_machines = all(distances.is_of_machines(fix.changes[0].key) for fix in singles)
        told = self.told = suggested.find(self) if suggested.is_asked(self) else Suggested()
        self.answered = self.topics == {Topic.MEMORY} and told.found
        if told.remedies:
            singles = told.without_others(singles)
        layout = list(told.layout or (self.layout() if only_machines and not told.remedies else ()))
        pairs = [] if self.answered and told.remedies else self._pairs(singles, limit, room, machines=not told.layout)
        models = self._other_models() if only_machines and not self.answered else []
        models = models[:1] if singles or layout or pairs else models
        few = [*self.shown(singles, limit), *pairs]
        self.near = min((fix.distance for fix in few), default=math.inf)
        found = sorted([*few, *layout, *models], key=self.order)
        alone = self._like_a_remedy() if self.answered and not singles else []
        machines = {fix for fix in told.remedies if any(distances.is_of_machines(one.key) for one in fix.changes)}
        here = [] if self.answered else [fix for fix in told.remedies if fix not in machines]
        # Another model comes last, also of remedies: the nearest first where one fits as it is.
        found = sorted(
            [*here, *found, *told.remedies, *alone],
            key=lambda fix: (of_model := _is_of_model(fix), fix.distance if of_model and alone else 0.0),
        )
        return without_repeated(beside.with_roomier(self, found), told.all)

    def _pairs(self, singles: list[Fix], limit: int, room: int, *, machines: bool) -> list[Fix]:
        """Return `limit` fixes of two changes that are not much farther than the nearest of one."""
        alone = {setting_of(fix.changes[0]) for fix in singles}
        farthest = FARTHEST * min(fix.distance for fix in singles) if singles else math.inf
        pairs = [
            fix
            for fix in Pairs(self, machines=machines).find(room, alone, farthest)
            if not is_nearly_alone(fix, singles)
        ]
        pairs = self.shown([fix for fix in pairs if fix.distance <= farthest], limit)
        pairs = [*dict.fromkeys(self._half(nearer := self.nearer(fix, alone)) or nearer for fix in pairs)]
        return [*dict.fromkeys(one for fix in pairs for one in (fix, *beside.of_fewer_machines(self, fix)))]

    def _half(self, pair: Fix) -> Fix | None:
        """Return one of two changes that is a fix alone and brings no more warnings, though it was not tried alone.

        Other cards are tried only where memory is lacking, as it may be once the given ones have a type that they take.
        """
        halves = (self.fix(self.judge(with_changes(self.config, [one])), one) for one in pair.changes)
        return next((fix for fix in halves if fix is not None and fix.warnings <= pair.warnings), None)

    def order(self, fix: Fix) -> tuple[float, ...]:
        """Return what fixes are sorted by: the size of the change, the number of changes, the distance.

        Where batch sizes do not fit each other or the ranks, neither a layout nor a switch goes before a nearer batch
        size; nor does a layout of `suggest`, where memory is not what is broken yet; one that is far comes last. A
        change that brings a warning counts as one of the next size, and of other machines those without come first. Of
        several changes, those that guess how many GPUs of every node engines take come after those that guess nothing.
        """
        if fix.moved:
            return distances.Size.SWITCH, 1, False, False, fix.distance
        size = int(max(distances.size(change.key) for change in fix.changes))
        unasked = Topic.MEMORY not in self.topics and len(fix.changes) > 2  # a layout of `suggest`
        if self.topics & _ARITHMETIC or unasked:
            far = unasked and fix.distance > FARTHEST * self.near
            size = max(size, distances.Size.HARDWARE if far else distances.Size.BATCH)
        elif fix.warnings:
            size = max(size, min(size + 1, distances.Size.HARDWARE))
        guessed = any(change.key == _SET_APART and change.before is None for change in fix.changes)
        tight = fix.warnings > 0 and size >= distances.Size.HARDWARE
        return size, len(fix.changes), guessed and len(fix.changes) > 1, tight, fix.distance

    def judge(self, config: Config, enough: int = 0, *, on_the_way: bool = False) -> PlanBuilder | None:
        """Return the plan of a changed config, with no more broken rules than show that they are more than `enough`.

        Return None if a run would then lack a setting that it has now, or use what this version only plans, unless more
        is to be changed (`on_the_way`): an engine that is larger than a node fits once nodes are larger.
        """
        if not self.missing.issuperset(config.missing()):
            return None
        plan = judge(config, self.rows, self.models, memory=True, enough=enough)
        return plan if on_the_way or self.is_run(plan) else None

    def is_run(self, plan: PlanBuilder) -> bool:
        """Return whether a plan uses nothing that this version only plans, beside what the refused one does."""
        return self.not_run.issuperset(item.feature for item in plan.not_run)

    def fix(self, plan: PlanBuilder | None, *changes: Change) -> Fix | None:
        """Return these changes as a fix, if the plan that they lead to breaks no rule.

        Of its warnings those count that the refused plan has none of: one that goes makes up for none that comes.
        """
        if plan is None or plan.broken:
            return None
        return Fix(changes, len(_kinds(plan.warnings) - self.warned) + max(0, len(plan.tight) - self.tight))

    def _alone(self, key: str, values: Iterable[Any], *, first: bool = False) -> list[Fix]:
        """Return the values that fix the plan on their own.

        With `first`, the nearest of the others, and those that leave the fewest rules broken, are kept as the first
        change of a pair.
        """
        fixes, others = list[Fix](), list[tuple[Change, Config, PlanBuilder]]()
        for change in nearest(self.config, key, values, _TRIED):
            changed = with_value(self.config, key, change.value)
            plan = self.judge(changed, self.left[0] if first else 0)
            if fix := self.fix(plan, change):
                fixes.append(fix)
            elif first and plan is not None and left_of(plan.broken) <= self.left:
                others.append((change, changed, plan))
        near = len(devices.DEVICES) if key == "cluster.gpu" else FEW
        best = sorted(others[near:], key=lambda other: left_of(other[2].broken))[:2]
        self.firsts += others[:near] + [other for other in best if left_of(other[2].broken) < self.left]
        return fixes

    def values(self) -> dict[str, set[Any]]:
        """Return the values that are tried alone, by setting: of known settings, then of others that rules name."""
        plan = judge(self.config, self.rows, self.models)
        known = candidates(self.config, plan, self.topics, self.rows)
        named = by_type.candidates(self.config, self.broken)
        return known | {key: named[key] for key in sorted(named.keys() - known.keys())}

    def singles(self) -> list[Fix]:
        """Return the changes of one setting that fix the plan, nearest first."""
        singles = []
        for key, values in self.values().items():
            fixes = self._alone(key, values, first=True)
            if key == _UTILIZATION and self.topics == {Topic.MEMORY}:
                fixes = self._finer(fixes) if fixes else self._alone(key, values_of.finer_utilization())
            if any(distances.is_rewritten(key, *_values(fix)) for fix in fixes):  # no need to guess
                fixes = [fix for fix in fixes if distances.is_rewritten(key, *_values(fix)) or _values(fix)[1] is None]
            elif fixes and key in _GROWN and distances.is_number(fixes[0].changes[0].start):
                fixes = (self._grown(key, fixes) or fixes)[:1]  # a smaller one is no better
            singles += fixes
        return sorted([*singles, *self._moved()], key=self.order)

    def _moved(self) -> list[Fix]:
        """Return the changes that give arguments of engines, by themselves, the name or place where they count."""
        fixes = (self.fix(self.judge(changed), *changes) for changed, changes in self._moves())
        return [replace(fix, moved=True) for fix in fixes if fix is not None]

    def renamed(self) -> Fix | None:
        """Return the first change of this kind that leaves fewer rules broken, even if it does not fix the plan."""
        for changed, changes in self._moves():
            plan = self.judge(changed, self.left[0])
            if plan is not None and left_of(plan.broken) < self.left:
                return Fix(tuple(changes), moved=True)
        return None

    def _moves(self) -> Iterator[tuple[Config, list[Change]]]:
        """Yield the changes that give arguments of engines another name or place, each with the config after it."""
        for wanted in moves.candidates(self.config) if Topic.ENGINE_ARGUMENTS in self.topics else ():
            changed, changes = self.config, list[Change]()
            for key, value in wanted:
                changes.append(Change(key, value_of(changed, key), value))
                changed = with_value(changed, key, value)
            yield changed, changes

    def best_firsts(self, most: int) -> list[Change]:
        """Return changes of different settings that leave fewer rules broken: the fewest first, then the nearest.

        Not those after which rules can no longer be checked, because the GPUs that train cannot be counted any more.
        To be called after :meth:`singles`.
        """
        better = [
            (left_of(plan.broken), change.distance, str(change), change)
            for change, _, plan in self.firsts
            if plan.world is not None or not self.counted
        ]
        ranked = sorted((item for item in better if item[0] < self.left), key=lambda item: item[:3])
        of_settings: dict[str, Change] = {}
        for *_, change in ranked:
            of_settings.setdefault(change.key, change)
        return list(of_settings.values())[:most]

    def _grown(self, key: str, fixes: list[Fix]) -> list[Fix]:
        """Return about the largest value that is a fix, between the nearest known one and the present one."""
        best, before = fixes[0].changes[0].value, fixes[0].changes[0].start
        unit = 2 * self.config.parallel.context_parallel_size if key in LENGTHS else 1
        unit = _BUDGET_UNIT if key == "batch.micro_batch_tokens" else unit
        if not (isinstance(best, int) and isinstance(before, int) and best < before):
            return []
        good, bad, found = best, before, list[Fix]()
        for _ in range(_GROWTH):
            middle = good + (bad - good) // 2 // unit * unit
            if middle in (good, bad) or bad - good <= good // _GROWN_ENOUGH:
                break
            fix = self._alone(key, [middle])
            if fix and fix[0].warnings <= fixes[0].warnings:  # one that may run out of memory is no better
                good, found = middle, fix
            else:
                bad = middle
        return found

    def _finer(self, fixes: list[Fix]) -> list[Fix]:
        """Return these shares of a card, in steps of a twentieth, behind the nearest hundredth that is a fix, too."""
        best, start = fixes[0].changes[0].value, fixes[0].changes[0].start
        step = 0.01 if best < start else -0.01
        nearer = {round(best + count * step, 2) for count in range(1, 5)}
        nearer = {value for value in nearer if (start - value) * step > 0}
        return self._alone(_UTILIZATION, nearer)[:1] + fixes

    def layout(self) -> list[Fix]:
        """Return the layout of the same GPUs that `suggest` finds, for plans that lack memory.

        Memory is looked at only where every other rule holds: it may come to light with a change that mends these. To
        be called after :meth:`singles`.
        """
        if Topic.MEMORY not in self.topics and all(left_of(plan.broken)[0] for _, _, plan in self.firsts):
            return []
        return [*suggested.find(self, remedies=False).layout]

    def _other_models(self) -> list[Fix]:
        """Return the nearest known model that fixes the plan, and the largest of all if that is much larger.

        They are for plans that nothing but machines fixes alone, and of the same family or about as large.
        """
        values = values_of.models(self.config) if self.topics & {Topic.OTHER, Topic.MEMORY} else set()
        values = {path for path in values if may_replace(str(self.config.model.path), path)}
        models = sorted(self._alone("model.path", values), key=self.order)
        if not models:
            return []
        sizes = [self._parameters(fix.changes[0]) for fix in models]
        largest = max(sizes)
        return models[:1] + ([models[sizes.index(largest)]] if largest > _MUCH_LARGER * sizes[0] else [])

    def _like_a_remedy(self) -> list[Fix]:
        """Return the models that fix the plan alone, where remedies name none, or one that needs another layout, too.

        They are of no farther kin than that one, or have no experts where it has, which suit other layouts. And they
        are not much smaller: the layout of the config may hold hardly anything.
        """
        changes = [change for fix in self.told.remedies for change in fix.changes if change.key == "model.path"]
        if not changes:
            return self._other_models()[:1] if self.told.remedies else []  # a layout of this model is enough
        own, first = str(self.config.model.path), changes[0]
        least, kin = _AS_SMALL * self._parameters(first), catalog.kinship(own, first.value)

        def is_like(change: Change) -> bool:
            akin = catalog.kinship(own, change.value) <= kin
            other_kind = self._has_experts(first) and not self._has_experts(change)
            return (akin or other_kind) and self._parameters(change) >= least

        return [fix for fix in self._other_models() if is_like(fix.changes[0])]

    def _has_experts(self, change: Change) -> bool:
        arch = architecture.find(with_value(self.config, change.key, change.value))
        return arch is not None and arch.experts is not None

    def _parameters(self, change: Change) -> int:
        """Return the number of parameters of the model that a change leads to; 0 if its sizes are not known."""
        arch = architecture.find(with_value(self.config, change.key, change.value))
        return parameters.parameters(arch) if arch is not None else 0

    def shown(self, fixes: list[Fix], limit: int) -> list[Fix]:
        """Return `limit` fixes: the first of each setting, then others that are near it if there is room."""
        firsts: dict[frozenset[str], Fix] = {}
        for fix in fixes:
            firsts.setdefault(frozenset(change.key for change in fix.changes), fix)
        chosen, others = list(firsts.values())[:limit], list[Fix]()
        for fix in fixes:
            of_settings = [one for one in (*chosen, *others) if settings_of(one) == settings_of(fix)]
            if of_settings and fix not in of_settings and is_near(fix, of_settings):
                others.append(fix)
        return chosen + others[: limit - len(chosen)]

    def nearer(self, fix: Fix, alone: Collection[Setting] = ()) -> Fix:
        """Return a fix with the nearest values of its settings, one after another, with which it still is one.

        What a setting can be may depend on the others: more batch sizes suit fewer data-parallel ranks. Fewer machines
        stay fewer, even if one more is nearer.
        """
        for place, change in enumerate(fix.changes):
            others = [*fix.changes[:place], *fix.changes[place + 1 :]]
            config = with_changes(self.config, others)
            if (plan := self.judge(config, self.left[0])) is None:
                continue
            values = candidates(config, plan, topics_of(plan.broken), self.rows).get(change.key, ())
            for near in nearest(config, change.key, values, _TRIED):
                if near.distance >= change.distance:
                    break
                if beside.is_more_machines(near) and not beside.is_more_machines(change):
                    continue
                changes = sorted((near, *others), key=lambda one: one.distance)
                found = self.fix(self.judge(with_value(config, near.key, near.value)), *changes)
                if found is not None and found.distance < fix.distance and setting_of(near) not in alone:
                    return self.nearer(found, alone)
        return fix


def _kinds(warnings: Iterable[str]) -> set[tuple[str, ...]]:
    """Return what warnings are about: the settings that they name, or their text without its numbers."""
    return {tuple(mentioned(text)) or (_NUMBER.sub("", text),) for text in warnings}


def _is_of_model(fix: Fix) -> bool:
    """Return whether a fix takes another model, with or without changes beside."""
    return "model.path" in settings_of(fix)


def _values(fix: Fix) -> tuple[Any, Any]:
    """Return what the first change of a fix changes, and into what."""
    return fix.changes[0].before, fix.changes[0].value
