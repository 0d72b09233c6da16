"""The arithmetic of a run, before anything is allocated: sizes, layout, passes, steps, and every rule they must keep.

``make_plan`` works on whatever part of a config is there. quantities.py derives the quantities; the rules stand in
rules/, one file for each subject.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.derived import PassSize, pass_sizes
from gspo_hpc.config.reading.places import Places, together
from gspo_hpc.config.schema import Config
from gspo_hpc.planning import exactness, quantities, remarks
from gspo_hpc.planning.builder import Broken, Models, NotRun, Number, PlanBuilder, SourceShare
from gspo_hpc.planning.exactness import Exactness
from gspo_hpc.planning.quantities import max_steps
from gspo_hpc.planning.rules import memory as memory_rules
from gspo_hpc.planning.rules import planned_only, registry

if TYPE_CHECKING:
    from gspo_hpc.planning.estimates.memory import Estimate

__all__ = ["Broken", "Models", "NotRun", "Plan", "PlanError", "holds", "judge", "make_plan", "max_steps"]


class PlanError(ValueError):
    """A plan that breaks rules; ``broken`` lists them all, `hint` is one more line.

    With `places`, each rule is followed by where the settings that it speaks of stand.
    """

    def __init__(self, broken: tuple[Broken, ...], hint: str = "", places: Places | None = None) -> None:
        lines = [f"rule {item.rule}: {item.message}{_where(item, places or Places())}" for item in broken]
        super().__init__("\n".join([*lines, hint] if hint else lines))
        self.broken, self.hint = broken, hint


def _where(item: Broken, places: Places) -> str:
    from gspo_hpc.planning import mentions  # only here: most plans are valid

    found = together(mentions.given(item, places).values())
    return f" (set by {found})" if found else ""


@dataclass(frozen=True)
class Plan:
    """The plan of a config. A quantity that cannot be known from what is given is left out."""

    quantities: dict[str, Number] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    sources: tuple[SourceShare, ...] = ()  # where there are several, and their prompts can be counted
    passes: dict[str, PassSize] = field(default_factory=dict)  # update, old_logprobs, reference
    broken: tuple[Broken, ...] = ()
    not_run: tuple[NotRun, ...] = ()  # what this version can plan, but not run
    errors: tuple[str, ...] = ()  # lines on what a run would be refused for in the files of this machine, if asked for
    missing: tuple[str, ...] = ()  # keys that a run needs besides
    absent: tuple[str, ...] = ()  # keys that name what is not on this machine and has to be, if it was looked for
    downloads: tuple[str, ...] = ()  # keys that name what is not on this machine, and what a run downloads
    unknown_model: str | None = None  # model.path, where nothing says whether that model can be trained
    warnings: tuple[str, ...] = ()  # allowed, but hardly meant; those of memory last
    tight: tuple[str, ...] = ()  # of these, warnings of memory that fits only just
    notes: tuple[str, ...] = ()
    exactness: Exactness | None = None  # what is equal after a kill
    memory: Estimate | None = None  # where cluster.gpu and the model are known, and the layout is whole

    @property
    def valid(self) -> bool:
        """Return whether every rule that could be checked holds."""
        return not self.broken

    @property
    def runnable(self) -> bool | None:
        """Return whether `train` or `submit` would take the config, with the files that it names.

        None: nothing is wrong, but a file that the answer depends on is not here, be it that a run downloads it, or
        nothing is known of the model.
        """
        if self.broken or self.not_run or self.errors or self.missing:
            return False
        return None if self.unknown_model is not None or self.absent or self.downloads else True

    def require(self, hint: str = "") -> None:
        """Raise ValueError for what this version does not run; PlanError, with the hint, for all broken rules."""
        if self.not_run:
            raise ValueError("\n".join(item.reason for item in self.not_run))
        if self.broken:
            raise PlanError(self.broken, hint)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc plan --json` prints them."""
        return {
            "valid": self.valid,
            "runnable": self.runnable,
            "quantities": self.quantities,
            "broken": [{"rule": str(item.rule), "message": item.message} for item in self.broken],
            "errors": list(self.errors),
            "not_run": [item._asdict() for item in self.not_run],
            "missing": list(self.missing),
            "unknown_model": self.unknown_model,
            "absent": list(self.absent),
            "downloads": list(self.downloads),
            "layout": self.layout,
            "sources": [one._asdict() for one in self.sources],
            "passes": {name: size._asdict() for name, size in self.passes.items()},
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "exactness": None if self.exactness is None else self.exactness.to_json(),
            "memory": None if self.memory is None else self.memory.to_json(),
        }


def make_plan(config: Config, rows: int | None = None) -> Plan:
    """Return the plan of a config, or of the part of one that is there.

    `rows`: prompts in the training data, if known.
    """
    plan = judge(config, rows)
    quantities.fill_in_steps(plan)
    quantities.fill_in_sources(plan)
    remarks.add(plan)
    _judge_memory(plan)
    return Plan(
        quantities=plan.numbers(),
        layout=plan.layout,
        sources=plan.sources,
        passes=pass_sizes(config),
        broken=registry.listed(plan.broken),
        not_run=tuple(plan.not_run),
        missing=tuple(config.missing()),
        unknown_model=config.model.path if plan.models.unknown(config) else None,
        warnings=(*plan.warnings, *plan.tight),
        tight=tuple(plan.tight),
        notes=tuple(plan.notes),
        exactness=exactness.assess(config),
        memory=plan.memory,
    )


def judge(
    config: Config,
    rows: int | None = None,
    models: Models | None = None,
    *,
    memory: bool = False,
    enough: int | None = None,
) -> PlanBuilder:
    """Return a plan with its quantities and broken rules, for callers that judge many configs in a row.

    With `models`, each model is read once. Rules about memory take longest: they are looked at only if `memory` asks
    for it and every other rule holds, and warnings only if all do; their messages then name no fix. Where more than
    `enough` rules are broken, the plan has just as many as show that, whichever they are: that takes a third of the
    time.
    """
    plan = PlanBuilder(config, rows, models)
    quantities.fill_in(plan)
    if enough is None:
        registry.apply(plan)
    else:
        registry.apply_until(plan, enough)
        if len(plan.broken) > enough:
            return plan
    plan.not_run += planned_only.found(plan)
    if memory and not plan.broken:
        plan.explained = False
        _judge_memory(plan)
        if not plan.broken:
            remarks.add(plan)
    return plan


def holds(config: Config, rows: int | None = None, models: Models | None = None) -> bool:
    """Return whether the plan of a config is valid, without the plan; quicker than making it."""
    return not judge(config, rows, models, memory=True, enough=0).broken


def _judge_memory(plan: PlanBuilder) -> None:
    """Estimate memory if the layout is whole, and look at the rules about it."""
    plan.memory = _estimate(plan)
    plan.case = memory_rules.case(plan)
    registry.apply(plan, memory=True)
    plan.tight += memory_rules.warnings(plan)


def _estimate(plan: PlanBuilder) -> Estimate | None:
    """Return the memory that phases take; None on a CPU, and where layout, GPU or model is not known."""
    cluster, arch = plan.config.cluster, plan.architecture
    known = cluster.gpu is not None or cluster.gpu_memory_gb is not None
    if known and cluster.platform == "cpu":
        plan.notes.append("cluster.platform is cpu, so the memory of a GPU is no limit, and no time is estimated.")
        return None
    if not known or not all(registry.rules()[item.rule].estimable for item in plan.broken):
        return None
    from gspo_hpc.planning.estimates import devices, memory  # only here: plans for a CPU do without

    try:
        device = devices.card(cluster)
    except ValueError:  # a rule says so
        return None
    if arch is None:
        plan.notes.append("Memory and time are not estimated: the sizes of the model are not known.")
        return None
    assert device is not None
    return memory.estimate(arch, plan.config, device)
