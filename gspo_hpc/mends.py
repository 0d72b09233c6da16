"""What mends a refused plan: the smallest changes of one setting, then of two, after which every rule holds.

Floor 1. Whether a change mends is asked of the rules themselves, so none that is offered breaks another. Which values
are tried is in mend_values.py.
"""

from __future__ import annotations

import bisect
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gspo_hpc import devices, mend_values
from gspo_hpc.config import Config
from gspo_hpc.mend_values import ENGINE, LENGTHS, candidates, value_of, with_value
from gspo_hpc.plan import MEMORY_RULE, Models, Plan, judge, make_plan
from gspo_hpc.plan_book import Book, Broken

MAX_OFFERED = 6
_NEAREST = 6  # values of a setting that are tried together with those of another
_TRIED = 60  # values of a setting that are tried alone: the nearest, and some of the others
_ROOM = 1800  # pairs of changes that are looked at
_MEMORY_COST = 4  # pairs that take as long as one estimate of memory
_GROWN = (*LENGTHS, f"{ENGINE}max_num_batched_tokens")  # the largest that fits is wanted
_GROWTH = 16  # times that the distance to it is halved, at most ...
_GROWN_ENOUGH = 32  # ... until it is known to one in this many
_WEIGHTLESS = ("batch.steps_per_generation", "batch.generation_batch_size", "batch.num_generations")  # no memory in it
_COUNTS = frozenset({2, 3, 4, 5, 6, 7, 8, 9, 10, 15})  # rules of batch sizes and ranks; in these no rule counts:
_UNCOUNTED = ("memory.", ENGINE, "optimizer.", "model.", "moe.", "algorithm.", "cluster.gpu", "rollout.max_")
_OF_ENGINES = ("rollout.tensor_parallel_size", "rollout.engines_per_node")

# How much it changes what a run is: the distance of a change is this times the doublings.
_WEIGHTS: dict[str, float] = {
    "optimizer.distributed": 0.4,  # the same numbers, another place
    "memory.recompute_granularity": 0.6,
    "memory.offload_optimizer": 0.8,
    "memory.offload_trainer": 0.8,
    "rollout.sleep_level": 0.5,
    "checkpoint.async_save": 0.8,
    "moe.token_dispatcher": 0.5,
    "optimizer.grad_reduce_in_fp32": 2.5,
    "batch.micro_batch_size": 0.9,  # the same run in other pieces
    "batch.micro_batch_tokens": 0.9,
    "batch.global_batch_size": 1.0,
    "batch.generation_batch_size": 1.0,
    "batch.steps_per_generation": 1.1,
    "batch.num_generations": 1.2,
    "rollout.engines_per_node": 1.3,
    "rollout.tensor_parallel_size": 1.4,
    "rollout.max_prompt_length": 1.6,
    "rollout.max_response_length": 1.5,
    "parallel.sequence_parallel": 0.5,
    "parallel.expert_tensor_parallel_size": 1.7,
    "parallel.expert_model_parallel_size": 1.8,
    "parallel.context_parallel_size": 2.2,
    "parallel.tensor_model_parallel_size": 2.0,
    "parallel.pipeline_model_parallel_size": 2.1,
    "parallel.virtual_pipeline_model_parallel_size": 1.5,
    "rollout.engine.gpu_memory_utilization": 0.8,
    "rollout.engine.max_num_batched_tokens": 0.8,
    "rollout.engine.max_num_seqs": 0.8,
    "rollout.dtype": 1.0,
    "rollout.mode": 3.0,
    "cluster.nodes": 3.0,  # what one has is harder to change
    "cluster.gpus_per_node": 3.2,
    "cluster.gpu": 3.5,
    "model.path": 6.0,
}


@dataclass(frozen=True)
class Change:
    """One setting, by its dotted name. `value` None is the default of the setting, written null."""

    key: str
    before: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={written(self.value)}"


def written(value: Any) -> str:
    """As it stands behind key= on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Mend:
    """Changes that belong together."""

    changes: tuple[Change, ...]
    warnings: int = 0  # that the plan has in addition

    def __str__(self) -> str:
        return " ".join(map(str, self.changes))

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, as `gspo-hpc plan --json` prints them."""
        return [vars(change) for change in self.changes]

    @property
    def distance(self) -> float:
        """0 for no change; every doubling or halving counts by the weight of its setting, and so does a new warning."""
        return sum(_distance(change) for change in self.changes) + 2.0 * self.warnings


def find(config: Config, rows: int | None = None, limit: int = MAX_OFFERED, room: int = _ROOM) -> list[Mend]:
    """Mends of a configuration whose plan is refused, nearest first: of one setting, then of two; none if it is valid.

    `rows` as for make_plan. At most `limit` of each kind, of different settings before others of the same; of two
    changes at most about `room` pairs are looked at. Two are offered only where neither mends alone.
    """
    plan = make_plan(config, rows)
    return [] if plan.valid else _Search(config, rows, plan).found(limit, room)


class _Search:
    """All that is asked about one refused plan."""

    def __init__(self, config: Config, rows: int | None, plan: Plan) -> None:
        self.config, self.rows, self.models = config, rows, Models()
        self.broken = frozenset(item.rule for item in plan.broken)
        self.left, self.warnings = _left(plan.broken), len(plan.warnings)
        self.missing = set(config.missing())
        self.firsts: list[tuple[Change, Config, Book]] = []  # that do not mend alone

    def found(self, limit: int, room: int) -> list[Mend]:
        singles = self._singles()
        if not singles:
            singles = self._other_models()
        alone = {str(mend.changes[0]) for mend in singles}
        pairs = self._pairs(alone, room)
        farthest = 2.0 * singles[0].distance if singles else math.inf
        return _shown(singles, limit) + _shown([mend for mend in pairs if mend.distance <= farthest], limit)

    def _judge(self, config: Config) -> Book | None:
        """None where a run would miss something in addition."""
        if not self.missing.issuperset(config.missing()):
            return None
        return judge(config, self.rows, self.models, memory=True)

    def _mend(self, book: Book | None, *changes: Change) -> Mend | None:
        if book is None or book.broken:
            return None
        return Mend(changes, max(0, len(book.warnings) - self.warnings))

    def _alone(self, key: str, values: Iterable[Any], *, first: bool = False) -> list[Mend]:
        """Of these values those that mend; with `first`, the nearest others, and those that mend most, are kept as the
        first of two."""
        mends, others = list[Mend](), list[tuple[Change, Config, Book]]()
        for change in _nearest(self.config, key, values, _TRIED):
            changed = with_value(self.config, key, change.value)
            book = self._judge(changed)
            if mend := self._mend(book, change):
                mends.append(mend)
            elif first and book is not None and _left(book.broken) <= self.left:
                others.append((change, changed, book))
        near = len(devices.DEVICES) if key == "cluster.gpu" else _NEAREST
        best = sorted(others[near:], key=lambda other: _left(other[2].broken))[:2]
        self.firsts += others[:near] + [other for other in best if _left(other[2].broken) < self.left]
        return mends

    def _singles(self) -> list[Mend]:
        book = judge(self.config, self.rows, self.models)
        singles = []
        for key, values in candidates(self.config, book, self.broken, self.rows).items():
            mends = self._alone(key, values, first=True)
            if not mends and key == f"{ENGINE}gpu_memory_utilization" and self.broken == {MEMORY_RULE}:
                mends = self._alone(key, mend_values.finer_utilization())
            if mends and key in _GROWN:  # a smaller one is no better
                mends = (self._grown(key, mends) or mends)[:1]
            singles += mends
        return sorted(singles, key=_order)

    def _grown(self, key: str, mends: list[Mend]) -> list[Mend]:
        """The largest value that mends, about, between the nearest known one and the present one."""
        best, before = mends[0].changes[0].value, mends[0].changes[0].before
        unit = 2 * self.config.parallel.context_parallel_size if key in LENGTHS else 1
        if not (isinstance(best, int) and isinstance(before, int) and best < before):
            return []
        good, bad, found = best, before, list[Mend]()
        for _ in range(_GROWTH):
            middle = good + (bad - good) // 2 // unit * unit
            if middle in (good, bad) or bad - good <= good // _GROWN_ENOUGH:
                break
            if mend := self._alone(key, [middle]):
                good, found = middle, mend
            else:
                bad = middle
        return found

    def _other_models(self) -> list[Mend]:
        """Where nothing else mends alone."""
        values = mend_values.models(self.config) if self.broken & {11, MEMORY_RULE} else set()
        return sorted(self._alone("model.path", values), key=_order)

    def _pairs(self, alone: set[str], room: int) -> list[Mend]:
        # What leaves fewer rules broken comes first: its other half is nearest.
        self.firsts.sort(key=lambda first: (_left(first[2].broken) >= self.left, _distance(first[0])))
        known: dict[frozenset[str], Mend | None] = {}
        for change, changed, second in self._seconds(alone):
            both = frozenset((str(change), str(second)))
            if both in known:
                continue
            if room <= 0:
                break
            book = self._judge(with_value(changed, second.key, second.value))
            room -= 1 + _MEMORY_COST * (book is not None and book.memory_judged)
            known[both] = self._mend(book, *sorted((change, second), key=_distance))
        return sorted((mend for mend in known.values() if mend is not None), key=_order)

    def _seconds(self, alone: set[str]) -> Iterator[tuple[Change, Config, Change]]:
        """The nearest values of each setting behind every first change: two at first where that mends nothing."""
        later = []
        for first, changed, book in self.firsts:
            broken = frozenset(item.rule for item in book.broken)
            better = _left(book.broken) < self.left
            for key, values in candidates(changed, book, broken, self.rows).items():
                if key == first.key or _has_no_part(key, broken, server=book.server):
                    continue
                most = len(devices.DEVICES) if key == "cluster.gpu" and better else _NEAREST
                soon = most if most > _NEAREST else 3 if better else 2
                near = [change for change in _nearest(changed, key, values, most) if str(change) not in alone]
                yield from ((first, changed, second) for second in near[:soon])
                later += [(first, changed, second) for second in near[soon:]]
        yield from later


def _left(broken: Sequence[Broken]) -> tuple[int, int]:
    """How much is broken: what is wrong with memory is known only where nothing else is."""
    others = sum(item.rule != MEMORY_RULE for item in broken)
    return others, 0 if others else len(broken)


def _has_no_part(key: str, broken: frozenset[int], *, server: bool) -> bool:
    """Whether no value of the setting can mend these rules."""
    if broken == {MEMORY_RULE}:
        return key in _WEIGHTLESS
    if not broken <= _COUNTS or key == "cluster.gpus_per_node":
        return False
    return key.startswith(_UNCOUNTED) or key == "parallel.sequence_parallel" or (not server and key in _OF_ENGINES)


def _shown(mends: list[Mend], limit: int) -> list[Mend]:
    """`limit` of them, nearest first: the nearest of each setting, and if there is room others."""
    firsts: dict[frozenset[str], Mend] = {}
    for mend in mends:
        firsts.setdefault(frozenset(change.key for change in mend.changes), mend)
    chosen = list(firsts.values())[:limit]
    others = [mend for mend in mends if mend not in chosen]
    return sorted(chosen + others[: limit - len(chosen)], key=_order)


def _order(mend: Mend) -> tuple[float, str]:
    return mend.distance, str(mend)


def _distance(change: Change) -> float:
    weight, before, value = _WEIGHTS.get(change.key, 2.0), change.before, change.value
    if _is_number(before) and _is_number(value) and before > 0 and value > 0:
        return weight * abs(math.log2(value / before))
    if isinstance(before, str) and isinstance(value, str) and change.key in ("cluster.gpu", "model.path"):
        return _between_names(change.key, before, value)
    return weight


@cache
def _between_names(key: str, before: str, value: str) -> float:
    """GPUs that are known are as far apart as their memory; names are, where a slip of the hand is in the way."""
    unlike = 1.0 - difflib.SequenceMatcher(None, before.lower(), value.lower()).ratio()
    if key == "cluster.gpu":
        try:
            memory = devices.find(before).memory
        except ValueError:
            return unlike
        return _WEIGHTS[key] * abs(math.log2(devices.DEVICES[value].memory / memory)) + unlike
    return _WEIGHTS[key] * (0.5 + unlike)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nearest(config: Config, key: str, values: Iterable[Any], most: int) -> list[Change]:
    """Changes to these values, nearest first; of more than `most`, the nearest and, of many, some of the others."""
    before, chosen = value_of(config, key), set(values)
    if len(chosen) > most and _is_number(before):
        numbers = sorted(value for value in chosen if _is_number(value))
        at = bisect.bisect_left(numbers, before)
        near = {*numbers[max(0, at - most // 2 - 1) : at + most // 2 + 2]}
        far = numbers[:: -(-2 * len(numbers) // most)] if most > _NEAREST else []
        chosen = {value for value in chosen if not _is_number(value)} | near | {*far}
    changes = [Change(key, before, value) for value in chosen if value != before]
    changes.sort(key=lambda change: (_distance(change), str(change)))
    return changes if most > _NEAREST else changes[:most]
