"""The arithmetic of a run, before anything is allocated: sizes, layout, passes, steps, and every rule they must keep.

``make_plan`` works on whatever part of a config is there; the rules themselves are in plan_rules.py and
plan_limits.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gspo_hpc import devices, memory_advice, memory_estimate
from gspo_hpc.config import Config
from gspo_hpc.passes import PassSize, pass_sizes
from gspo_hpc.plan_book import Book, Broken, Models, Number, show
from gspo_hpc.plan_limits import apply_limits
from gspo_hpc.plan_rules import apply_rules

__all__ = ["Broken", "Models", "Plan", "PlanError", "judge", "make_plan", "max_steps"]


class PlanError(ValueError):
    """A plan that breaks rules; ``broken`` lists them all, `hint` is one more line."""

    def __init__(self, broken: tuple[Broken, ...], hint: str = "") -> None:
        lines = [f"rule {item.rule}: {item.message}" for item in broken]
        super().__init__("\n".join([*lines, hint] if hint else lines))
        self.broken = broken


MEMORY_RULE = 16
_LAYOUT_RULES = (1, 9, 11, 12, 13, 17)  # where one of them is broken there is no rank or no engine to speak of


@dataclass(frozen=True)
class Plan:
    """What a config amounts to. A quantity that cannot be known from what is given is left out."""

    quantities: dict[str, Number] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    passes: dict[str, PassSize] = field(default_factory=dict)  # update, old_logprobs, reference
    broken: tuple[Broken, ...] = ()
    warnings: tuple[str, ...] = ()  # allowed, but hardly meant
    notes: tuple[str, ...] = ()
    memory: memory_estimate.Estimate | None = None  # where cluster.gpu and the model are known, and the layout is whole

    @property
    def valid(self) -> bool:
        """Whether every rule that could be checked holds."""
        return not self.broken

    def require(self, hint: str = "") -> None:
        """Raises PlanError, with every broken rule and the hint, if there is one."""
        if self.broken:
            raise PlanError(self.broken, hint)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `gspo-hpc plan --json` prints them."""
        return {
            "valid": self.valid,
            "quantities": self.quantities,
            "broken": [vars(item) for item in self.broken],
            "layout": self.layout,
            "passes": {name: vars(size) for name, size in self.passes.items()},
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "memory": None if self.memory is None else self.memory.to_json(),
        }


def max_steps(
    num_prompts: int,
    num_generations: int,
    per_device_batch_size: int,
    dp_size: int,
    gradient_accumulation_steps: int,
    num_iterations: int = 1,
    train_share: float = 1.0,
) -> int:
    """Optimizer steps of one epoch: each rank makes num_prompts x num_generations / (per_device_batch_size x dp_size)
    x train_share micro-steps, and gradient_accumulation_steps of them are a step, num_iterations times over.
    An incomplete last step does not count."""
    micro_steps = Fraction(num_prompts * num_generations, per_device_batch_size * dp_size)
    micro_steps *= Fraction(str(train_share))  # 0.99 is 99/100, not the nearest binary number
    return math.floor(micro_steps / gradient_accumulation_steps * num_iterations)


def make_plan(config: Config, rows: int | None = None) -> Plan:
    """The plan of a config, or of the part of one that is there. `rows`: prompts in the training data, if known."""
    book = judge(config, rows)
    memory = _memory(book)
    if book.server:
        text = "rollout.mode server can be planned, but no run in it can be started yet: train and submit refuse it."
        book.notes.insert(0, f"{text} rollout.mode=colocate can be run.")
    book.broken.sort(key=lambda item: item.rule)
    return Plan(
        quantities=book.numbers(),
        layout=book.layout,
        passes=pass_sizes(config),
        broken=tuple(book.broken),
        warnings=tuple(book.warnings),
        notes=tuple(book.notes),
        memory=memory,
    )


def judge(config: Config, rows: int | None = None, models: Models | None = None, *, memory: bool = False) -> Book:
    """What the rules say, for those who judge many configs of one moment: with `models`, each model is read once. Of
    memory only if that is asked for, and only where every other rule holds: it is what takes longest."""
    book = Book(config, rows, models)
    apply_rules(book)
    apply_limits(book)
    _steps(book)
    if memory and not book.broken:
        book.memory_judged = _memory(book) is not None
    return book


def _memory(book: Book) -> memory_estimate.Estimate | None:
    """MEMORY_RULE. Of a layout that is whole: bytes of a rank that cannot be mean nothing."""
    cluster = book.config.cluster
    if cluster.gpu is None:
        return None
    try:
        device = devices.find(cluster.gpu, cluster.network_gb_per_s)
    except ValueError as error:
        book.check(MEMORY_RULE, False, str(error))
        return None
    if any(item.rule in _LAYOUT_RULES for item in book.broken):
        return None
    arch = book.models.find(book.config)
    if arch is None:
        book.notes.append("Memory and time are not estimated: the sizes of the model are not known.")
        return None
    found = memory_estimate.estimate(arch, book.config, device)
    refused, warned = memory_advice.judge(found, book.config, arch, device)
    for text in refused:
        book.check(MEMORY_RULE, False, text)
    book.warnings += warned
    return found


def _steps(book: Book) -> None:
    """Steps, rollouts, epochs and completions; what becomes of incomplete rollouts."""
    config, q = book.config, book.quantities
    gbs, group, rows = config.batch.global_batch_size, config.batch.num_generations, book.rows
    prompts, spg = q.get("num_rollout_prompts"), q.get("steps_per_generation")
    if rows is not None and group and prompts is not None:
        q["num_rows"] = rows
        text = f"the training data has {rows} prompts, one rollout needs num_rollout_prompts ({show(prompts)})"
        book.check(11, rows >= prompts, text)
        if gbs:  # per device x dp_size x gradient accumulation: the global batch, however it is cut
            q["steps_per_epoch"] = max_steps(rows, group, gbs, 1, 1, config.batch.num_iterations)
        if prompts.denominator == 1 and rows >= prompts and (rest := rows % int(prompts)):
            book.notes.append(
                f"An epoch of {rows} prompts ends inside a rollout of {prompts}: its last {rest} prompts are carried "
                "over into a rollout with the first of the next epoch; none is dropped."
            )
    if config.run.max_steps is None or spg is None or spg.denominator != 1:
        return
    updates = int(spg) * config.batch.num_iterations
    rollouts = -(-config.run.max_steps // updates)
    q |= {"max_steps": config.run.max_steps, "num_rollouts": rollouts}
    if gen := q.get("generation_batch_size"):
        q["num_completions"] = rollouts * gen
    if rows and prompts is not None:
        q["num_epochs"] = Fraction(rollouts * prompts, rows)
    if rest := config.run.max_steps % updates:
        book.notes.append(
            f"max_steps ({config.run.max_steps}) ends the run after {rest} of the {updates} updates of the last "
            "rollout; its other completions are left unused."
        )
