"""The best layouts for a model on given GPUs, ranked, each with its headroom, its risk and its reasons.

Every layout that is looked at keeps the rules of the plan and fits by the memory estimate. The time estimate ranks
them, with two corrections (`counted`): a layout that leaves less of the GPU than peaks may need counts as slower, the
less it leaves, and among layouts that are about as fast, tensor parallelism within a node goes before experts on ranks
of their own, these before context parallelism, and that before pipelines; fewer cuts go before more, and fewer ways to
save memory before more. Where a correction changes the order of times, a reason says so, with what it counts.
suggest/cuts.py has the layouts, suggest/savings.py what is recomputed and offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, time
from gspo_hpc.planning.estimates.memory import Estimate
from gspo_hpc.planning.estimates.phases import HEADROOM, exceeds, percent, risk, shown
from gspo_hpc.planning.plan import holds, judge
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import batches, cuts, savings
from gspo_hpc.system.text import in_gib

ALIKE = 1.03  # times that differ by less than estimates can tell: preference decides
RISK = 0.5  # a layout that leaves nothing of the GPU counts as slower by this share, one that leaves enough by nothing
_TENSOR, _PIPELINE, _EXPERT, _CONTEXT = 0.3, 0.5, 0.4, 0.45  # what a doubling of each counts against a layout, of ALIKE
_SAVED = 0.5  # what each way to save memory counts against one that does without: more can go wrong, and peaks can grow
_NARROW = 1.0  # the same of sums of gradients in 16 bits, with which the run learns a little differently

_CHOSEN = (*cuts.KEYS, "memory.recompute_granularity", "memory.offload_optimizer")  # of every layout, and printed
KEYS = (*_CHOSEN, *(key for key in savings.KEYS if key not in _CHOSEN))  # that are chosen, where they are not kept
# Settings that a layout cannot keep, or that follow from another one: they are printed if a suggestion changes them.
_GIVEN_UP = (
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.num_layers_in_first_pipeline_stage",
    "parallel.num_layers_in_last_pipeline_stage",
    "memory.recompute_num_layers",
    "batch.logprob_micro_batch_tokens",
    "batch.reference_micro_batch_tokens",
)
PRINTED = (*KEYS, *_GIVEN_UP)


@dataclass(frozen=True)
class Layout:
    """One suggestion."""

    settings: dict[str, Any]  # dotted key -> value: what is chosen, and what a layout cannot keep of the config
    seconds: float  # of an optimizer step, its share of the rollout included
    counted_seconds: float  # the figure by which layouts are ranked: seconds, corrected for headroom and preference
    tokens_per_s_per_gpu: float
    headroom: float  # share of the card that passes leave
    risk: str  # the same in words
    reasons: tuple[str, ...]
    batches: tuple[batches.Advice, ...]  # that suit this layout, given as advice: `settings` leave batch sizes alone
    rates_of: str | None = None  # the card whose rates the times assume, where only the memory of the GPU is given

    def __str__(self) -> str:
        return " ".join(f"{key}={written(value)}" for key, value in self.settings.items())

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc suggest --json` prints them."""
        advice = [one.to_json() for one in self.batches]
        return {**vars(self), "reasons": list(self.reasons), "batches": advice}


def find(
    config: Config,
    keep: frozenset[str] = frozenset(),
    limit: int = 5,
    response_tokens: float | None = None,
    others: frozenset[str] = frozenset(),
) -> list[Layout]:
    """The best layouts first, at most `limit`; none where nothing fits.

    `keep`: dotted keys of KEYS that stay as the config has them. ValueError names one that cannot be chosen anyway, and
    what is missing: GPUs, their name or their memory, or a model whose sizes are known. `others`: settings that no
    layout changes, and that reasons are not to name either.
    """
    search = Search(config, keep, response_tokens, others=others)
    found = search.ranked(limit)
    return [_layout(search, one, found[place + 1 :]) for place, one in enumerate(found)]


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its estimates."""

    config: Config
    memory: Estimate
    times: time.Times
    budget: int | None = None  # tokens of a micro-batch in the config that the layout is for

    @property
    def counted(self) -> float:
        """The seconds of a rollout, corrected: what layouts are ranked by."""
        return self.times.rollout * _short(self.memory.headroom) * ALIKE ** sum(self.costs.values())

    @property
    def costs(self) -> dict[str, float]:
        """The preferences against the layout besides its time, in steps of ALIKE, by what it does."""
        return _costs(self.config, self.budget)


class Least(NamedTuple):
    """The least that a cut takes of a GPU, in bytes."""

    peak: tuple[int, str]  # with the phase in which it is taken; generation is none of them
    passes: tuple[int, str]  # the same of the phases in which the trainer has the GPU to itself
    generation: int  # of an engine where that is too much, otherwise 0, for it fills what there is


@dataclass
class Search:
    """The layouts of one config."""

    config: Config
    keep: frozenset[str] = frozenset()
    response_tokens: float | None = None
    models: Models = field(default_factory=Models)
    others: frozenset[str] = frozenset()  # settings that no layout changes, and that nothing else is to change either

    def __post_init__(self) -> None:
        if unknown := sorted(self.keep - set(KEYS)):
            raise ValueError(
                f"{unknown[0]} is not chosen by suggest, so it stays as it is; suggest chooses: {', '.join(KEYS)}"
            )
        cluster = self.config.cluster
        if cluster.platform == "cpu":
            raise ValueError(
                "cluster.platform is cpu, and layouts are chosen for GPUs: give cluster.platform=cuda and cluster.gpu"
            )
        rated = devices.rated(cluster)
        if rated is None:
            raise ValueError(
                "for a card that is not known, give cluster.gpu_memory_gb; for others cluster.gpu says which GPUs "
                f"there are: give one of {devices.listed()}"
            )
        self.device, self.rates_of = rated
        arch = self.models.find(self.config)
        if arch is None:
            path = self.config.model.path
            raise ValueError(
                f"model.path {path}: the sizes of the model are not known, so no layout can be suggested"
                f"{_known_by(str(path), self.models)}"
            )
        self.arch: architecture.Architecture = arch
        self.sizes = time.sizes(arch, self.config)
        self._generating: dict[tuple[int, ...], float] = {}

    def ranked(self, limit: int) -> list[Candidate]:
        """Return the best layouts, best first, that the plan accepts."""
        best, found = sorted(self._best_of_each(), key=lambda one: one.counted), list[Candidate]()
        for one in best:
            if len(found) == limit:
                break
            if holds(one.config, models=self.models):
                found.append(one)
        return found

    @property
    def kept(self) -> frozenset[str]:
        """Settings that stay as the config has them."""
        return self.keep | self.others

    @cached_property
    def adapted(self) -> Candidate | None:
        """The best layout with LoRA adapters in place of the whole model; None if there is none, or no such choice."""
        if self.config.adapter.type is not None or "adapter.type" in self.others:
            return None
        changed = with_value(self.config, "adapter.type", "lora")
        return next(iter(Search(changed, self.keep, self.response_tokens, self.models).ranked(1)), None)

    def allowed(self) -> Iterator[Config]:
        """Yield every cut that keeps the rules that are not about memory."""
        return filter(self._is_allowed, cuts.every(self.arch, self.config, self.keep, self.models))

    def _is_allowed(self, wanted: Config) -> bool:
        return not judge(wanted, models=self.models, enough=0).broken

    def fitting(self, wanted: Config) -> Iterator[tuple[Config, Estimate]]:
        """Yield a cut with every way of saving memory with which it fits."""
        return savings.fitting(self.arch, self.device, wanted, self.keep)

    def least_memory(self, wanted: Config) -> Least:
        """Return what a cut takes of a GPU with all that saves memory."""
        found = savings.lightest(self.arch, self.device, wanted, self.keep)
        generation = found.phase("generation").total
        peak, passes = ((phase.total, phase.name) for phase in (found.peak, found.busiest))
        return Least(peak, passes, generation if generation > found.card else 0)

    def _best_of_each(self) -> Iterator[Candidate]:
        holds_sequence = partial(savings.engine_holds_sequence, self.arch, self.device, keep=self.keep)
        for wanted in cuts.every(self.arch, self.config, self.keep, self.models, holds_sequence):
            # Memory that certainly lacks is known sooner than that all rules are kept.
            if not savings.holds_state(self.arch, self.device, wanted, self.keep) or not self._is_allowed(wanted):
                continue
            budget = self.config.batch.micro_batch_tokens
            fitting = self.fitting(wanted)
            ways = (Candidate(chosen, found, self.times(chosen, found), budget) for chosen, found in fitting)
            best = min(ways, key=lambda one: one.counted, default=None)
            if best is not None:
                yield best

    def times(self, chosen: Config, found: Estimate) -> time.Times:
        """Return the times of a layout. Layouts with the same engines generate alike, which takes longest to count.

        Batch sizes that the config does not give are assumed, as `batches.assumed` tells.
        """
        chosen = batches.with_assumed(chosen)
        completions = batches.completions(chosen)
        work = time.work(chosen, completions, self.response_tokens)
        same = (chosen.rollout.tensor_parallel_size, chosen.world_size, found.cache_tokens, completions)
        if (seconds := self._generating.get(same)) is None:
            seconds = time.generating(self.sizes, chosen, self.device, work, found.cache_tokens)
            self._generating[same] = seconds
        return time.estimate(self.sizes, chosen, self.device, work, found.cache_tokens, seconds)


def _known_by(path: str, models: Models) -> str:
    """Return what would make the sizes of a model known, as the end of a sentence."""
    file = models.file(path)
    if file.error is not None:
        return f": {file.error}"
    if file.content is not None:
        try:
            architecture.counted(models.planned(path)[0] or {})
        except ValueError as error:
            return f": {error}"
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            return f": its config.json cannot be understood: {error}"
    near = catalog.nearest(path)
    known = f"; nearest model whose config comes with gspo_hpc: {near}" if near else ""
    return f": give a local folder with the model's config.json{known}"


def _layout(search: Search, one: Candidate, later: Sequence[Candidate]) -> Layout:
    config, chosen, told = search.config, one.config, one.times.to_json()
    settings = {key: value_of(chosen, key) for key in _CHOSEN}
    settings |= {
        key: value_of(chosen, key)
        for key in PRINTED
        if key not in settings and value_of(config, key) != value_of(chosen, key)
    }
    headroom = one.memory.headroom
    return Layout(
        settings,
        told["seconds_per_step"],
        one.counted / one.times.updates,
        told["tokens_per_s_per_gpu"],
        headroom,
        risk(headroom),
        tuple(_reasons(search, one, later)),
        tuple(batches.advise(search, one)),
        search.rates_of,
    )


def _reasons(search: Search, one: Candidate, later: Sequence[Candidate]) -> Iterator[str]:
    times, chosen, memory = one.times, one.config, one.memory
    if text := _before_faster(one, later):
        yield text
    phases = sorted(times.seconds.items(), key=lambda item: -item[1])
    beside = ", side by side" * times.side_by_side
    yield ", ".join(f"{shown(name)} {part / times.rollout:.0%}" for name, part in phases[:3]) + " of the time" + beside
    free = memory.card - memory.busiest.reserved
    left = f"{in_gib(free, 0)} GiB are left for peaks"
    if free < 0:
        left = f"{in_gib(-free, 2)} GiB more than it has, where fragmentation is counted"
    yield f"{shown(memory.busiest.name)} takes {in_gib(memory.busiest.reserved, 0)} GiB of a GPU; {left}"
    if memory.headroom < HEADROOM:
        yield from _watch(search, one)
    yield from _saved(search.config, chosen)
    replicas = chosen.world_size // (
        chosen.parallel.tensor_model_parallel_size
        * chosen.parallel.pipeline_model_parallel_size
        * chosen.parallel.context_parallel_size
    )
    if chosen.parallel.pipeline_model_parallel_size > 1 and (gbs := chosen.batch.global_batch_size):
        pipelines = "one pipeline" if replicas == 1 else f"each of {replicas} pipelines"
        yield f"{gbs // replicas} completions of an update go through {pipelines}"


def _before_faster(one: Candidate, later: Sequence[Candidate]) -> str:
    """Return why a layout goes before a faster one; empty if none of those behind it is faster.

    Of memory and preference, the reason is what outweighs the time alone, or both where neither does.
    """
    fastest = min(later, key=lambda other: other.times.rollout, default=one)
    slower = one.times.rollout / fastest.times.rollout
    if slower <= 1.0:
        return ""
    own, theirs = one.costs, fastest.costs
    room = _short(fastest.memory.headroom) / _short(one.memory.headroom)
    preference = ALIKE ** (sum(theirs.values()) - sum(own.values()))
    memory_alone = room >= slower
    reasons = []
    if room > 1.0 and (memory_alone or preference < slower):
        less = _leaves_less(fastest.memory.headroom, one.memory.headroom)
        reasons.append(f"{less} which counts {_share(room)} against it")
    if not memory_alone and preference > 1.0:
        more = [name for name, cost in theirs.items() if cost > own[name]]
        kinds = " and ".join(filter(None, [", ".join(more[:-1]), more[-1]]))
        reasons.append(f"has {kinds}, which counts {_share(preference)} against it")
    return f"ranks before a layout that is {_share(slower)} faster, because that one {' and '.join(reasons)}"


def _share(ratio: float) -> str:
    """Return how much more than 1 a ratio is, with as many digits as show that it is more."""
    more = ratio - 1.0
    return f"{more:.1%}" if more >= 0.0005 else f"{100 * more:.2g}%"


def _leaves_less(theirs: float, own: float) -> str:
    """Return in words that another layout leaves less of the GPU's memory than this one."""
    if theirs < 0:
        alike = own < 0 and percent(theirs) == percent(own)
        return f"exceeds the GPU's memory by {-theirs:.2%}, not {-own:.2%}," if alike else f"{exceeds(theirs)},"
    shown = percent(theirs) if percent(theirs) != percent(own) else f"{theirs:.2%}, not {own:.2%},"
    return f"leaves only {shown} of the GPU's memory,"


def _watch(search: Search, one: Candidate) -> Iterator[str]:
    """Yield what to watch where little is left, and what to lower if a run does run out of memory."""
    busiest = f"{math.ceil(100 * (1 - one.memory.headroom))}% of the GPU in {shown(one.memory.busiest.name)}"
    more = savings.roomier(search.arch, search.device, one.config, one.memory, search.models, search.kept)
    if more is not None:
        lower = f"{more[0]} leaves {percent(more[1])}"
    elif (adapted := search.adapted) is not None and adapted.memory.headroom > max(0.0, one.memory.headroom):
        lower = (
            f"with adapter.type=lora, at about ten times the learning rate, the best layout of the same GPUs leaves "
            f"{percent(adapted.memory.headroom)}; more GPUs, GPUs with more memory or a smaller model help, too"
        )
    else:
        lower = "more GPUs, GPUs with more memory or a smaller model help"
    watch = f"watch runtime_memory_gib of the first steps, and if memory runs out: {lower}"
    yield f"{risk(one.memory.headroom)}: {busiest}, estimated; {watch}"


def _saved(config: Config, chosen: Config) -> Iterator[str]:
    """Yield what a layout does to save memory, with what it does without."""
    if chosen.memory.recompute_granularity == "full":
        yield "layers are recomputed, because activations leave too little memory otherwise"
    if chosen.memory.offload_optimizer:
        yield "the optimizer's state waits in host memory, because it leaves too little on the GPU otherwise"
    if chosen.memory.offload_trainer != config.memory.offload_trainer:
        yield "the trainer moves to host memory while engines generate, because both do not fit on the GPU"
    if chosen.batch.micro_batch_tokens != config.batch.micro_batch_tokens:
        yield f"micro-batches have {chosen.batch.micro_batch_tokens:,} tokens, because larger ones need too much memory"
    if chosen.optimizer.grad_reduce_in_fp32 != config.optimizer.grad_reduce_in_fp32:
        yield "gradients are kept and summed in 16 bits, because nothing else saves enough memory"
    if chosen.rollout.sleep_level != config.rollout.sleep_level:
        yield "sleeping engines drop their weights, because slurm.mem does not hold them"
    if (share := value_of(chosen, savings.UTILIZATION)) != value_of(config, savings.UTILIZATION):
        yield f"engines take {share:.0%} of a GPU: room for the longest sequence beside what the trainer keeps there"


def _short(headroom: float) -> float:
    """Return by what a layout counts as slower for what it leaves of the GPU: 1 where that is enough."""
    return 1.0 + RISK * max(0.0, HEADROOM - headroom) / HEADROOM


def _costs(config: Config, budget: int | None) -> dict[str, float]:
    """Return the preferences against a layout besides its time, in steps of ALIKE, by what it does.

    `budget` is the token budget of a micro-batch that the layout could have had.
    """
    parallel, memory = config.parallel, config.memory
    doublings = {
        "tensor": (_TENSOR, parallel.tensor_model_parallel_size),
        "pipeline": (_PIPELINE, parallel.pipeline_model_parallel_size),
        "context": (_CONTEXT, parallel.context_parallel_size),
        "expert": (_EXPERT, parallel.expert_model_parallel_size),
    }
    costs = {f"more {name} parallelism": weight * _doublings(size) for name, (weight, size) in doublings.items()}
    return costs | {
        "recomputed layers": _SAVED * (memory.recompute_granularity is not None),
        "an offloaded optimizer": _SAVED * memory.offload_optimizer,
        "smaller micro-batches": _SAVED * ((config.batch.micro_batch_tokens or 0) < (budget or 0)),
        "gradients in 16 bits": _NARROW * (not config.optimizer.grad_reduce_in_fp32),
    }


def _doublings(size: int) -> int:
    return size.bit_length() - 1
