"""The time of a step, phase by phase, estimated before there is a GPU: data sheets, operations, bytes, few constants.

engines.py has generation, passes.py what the trainer does, rates.py the constants. docs/estimates.md holds the estimate
against published runs, says where it misses, and where the range comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.config.derived import offload_trainer, passes_needed, teacher_config, updates_per_rollout
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, engines, parameters, passes, rates
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.serving import reward_models
from gspo_hpc.planning.estimates.work import Sizes, Talk, Work, sizes, work

if TYPE_CHECKING:
    from gspo_hpc.planning.plan import Plan

__all__ = ["Sizes", "Talk", "Times", "Work", "estimate", "generating", "of_plan", "sizes", "sizes_of", "work"]


class Conversations(NamedTuple):
    """Conversations of a rollout, as they are supposed to be: averages, in tokens and seconds."""

    turns: float  # messages of the model
    sampled_tokens: float  # of the model, in a conversation
    reply_tokens: float  # of the environment and tools, in a conversation
    answer_seconds: float  # of one answer
    waiting_seconds: float  # in which a conversation waits for answers
    group_tokens: float  # of a prompt and all conversations about it
    engine_steps: float  # of the engine with the longest conversation


@dataclass(frozen=True)
class Times:
    """Seconds of one rollout with all its updates, by phase, and what follows from them."""

    seconds: dict[str, float]
    updates: int  # optimizer steps of the rollout
    tokens: float  # prompts and responses that are trained on, once
    gpus: int  # all
    trainers: int  # of them, GPUs that train: fewer where some are set apart for engines
    model_flops: float  # of the updates, without what is computed again
    peak: float  # operations a second of one GPU
    steps: int | None = None  # of the whole run
    side_by_side: bool = False  # whether generation goes on while the trainer works
    talk: Conversations | None = None  # where completions are conversations

    @property
    def rollout(self) -> float:
        """Seconds from one rollout to the next."""
        total = sum(self.seconds.values())
        generation = self.seconds["generation"] + self.seconds.get("reward_model", 0.0)  # on the same ranks
        if not self.side_by_side:
            return total
        between = self.seconds["sync"] + self.seconds["other"]
        return max(generation, total - generation - between) + between

    @property
    def range(self) -> tuple[float, float]:
        """The seconds of a rollout, if this estimate is no farther off than for the runs whose lengths are known."""
        low, high = rates.RANGE
        return self.rollout * low, self.rollout * high

    def to_json(self, price: float | None = None) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc plan --json` prints them. `price` is that of one GPU for one hour."""
        hours = None if self.steps is None else self.steps / self.updates * self.rollout / 3600.0
        gpu_hours = None if hours is None else hours * self.gpus
        return {
            "seconds_per_rollout": self.rollout,
            "seconds_per_rollout_range": list(self.range),
            "seconds_per_step": self.rollout / self.updates,
            "side_by_side": self.side_by_side,
            "phases": self.seconds,
            "tokens_per_s_per_gpu": self.tokens / self.rollout / self.gpus,
            "update_mfu": self.model_flops / (self.seconds["update"] * self.trainers * self.peak),
            "hours": hours,
            "gpu_hours": gpu_hours,
            "cost": None if price is None or gpu_hours is None else price * gpu_hours,
            "conversations": None if self.talk is None else self.talk._asdict(),
        }


def sizes_of(config: Config) -> Sizes:
    """Return the sizes of the model of a config whose sizes are known."""
    arch = architecture.find(config)
    assert arch is not None, config.model.path
    return sizes(arch, config)


def generating(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> float:
    """Return the seconds of generation of a rollout, to the end of its last completion.

    `cache_tokens` are the tokens that the cache of one engine holds. Where generation is ahead of training, engines
    begin a rollout when the one before has ended, too.
    """
    prefill = engines.prefill(model, config, device, given)
    return prefill + engines.generation(model, config, device, given, cache_tokens)


def estimate(
    model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float, generation: float | None = None
) -> Times:
    """Return the times of a rollout. The layout must be one that the plan accepts.

    `generation` is what `generating` returns, for callers that know it already.
    """
    updates = updates_per_rollout(config.batch)
    needed = passes_needed(config)
    forward = passes.forward_flops(model, config, given)
    trained = given.completions * (given.prompt_tokens + given.response_tokens)
    if generation is None:
        generation = generating(model, config, device, given, cache_tokens)
    seconds = {"sync": passes.sync(model, config, device), "generation": generation}
    if scoring := reward_models.seconds(config, device, given):
        seconds["reward_model"] = scoring
    if needed.old_logprobs:
        whole = config.batch.num_iterations > 1 or config.algorithm.top_entropy_quantile < 1
        share = 1.0 if whole else 1.0 - 1.0 / updates  # the first update needs none
        seconds["old_logprobs"] = share * passes.seconds(model, config, device, forward, trained, 1, 1.0)
    if needed.reference:
        seconds["reference"] = _reference(model, config, device, given, trained)
    again = {"full": 1.0, "selective": 0.2}.get(config.memory.recompute_granularity or "", 0.0)
    rounds = config.batch.num_iterations
    factor = passes.update_factor(model)
    update = passes.seconds(model, config, device, forward, trained, updates // rounds, factor + again)
    seconds["update"] = rounds * update + updates * passes.optimizer(model, config, device)
    seconds["save"] = updates / config.checkpoint.interval * passes.save(model, config, device)
    leaves = config.cluster.platform == "cuda" and offload_trainer(config)
    seconds["other"] = rates.OVERHEAD_SECONDS + rates.SWITCH_SECONDS * leaves * device.launching
    if config.rollout.in_flight_updates:  # as soon as training on the rollout before is done
        sampling = generation + seconds.get("reward_model", 0.0)
        training = sum(seconds.values()) - seconds["sync"] - seconds["other"] - sampling
        seconds["generation"] += engines.read_again(model, config, device, given, cache_tokens, training)
    return Times(
        seconds,
        updates,
        trained,
        config.num_ranks,
        config.world_size,
        factor * forward * rounds,
        device.flops,
        config.run.max_steps,
        config.rollout.max_staleness > 0,
        _conversations(config, given, cache_tokens) if config.environment.talks else None,
    )


def _conversations(config: Config, given: Work, cache_tokens: float) -> Conversations:
    """Return what the conversations of a rollout are supposed to be."""
    return Conversations(
        given.turns,
        given.sampled * given.response_tokens,
        given.read_tokens,
        given.answer_seconds,
        engines.waiting(given),
        given.prompt_tokens + given.completions_per_prompt * given.response_tokens,
        engines.steps(config, given, cache_tokens),
    )


def _reference(model: Sizes, config: Config, device: Device, given: Work, trained: float) -> float:
    """Return the seconds of the pass of the reference, or of the teacher: its weights come to the GPU, and leave it."""
    own, arch = config, parameters.teacher(config)
    if arch is not None:
        own = teacher_config(config)
        model = sizes(arch, own)
    forward = passes.forward_flops(model, own, given)
    return passes.seconds(model, own, device, forward, trained, 1, 1.0) + passes.reference(model, own, device)


def of_plan(
    config: Config,
    plan: Plan,
    response_tokens: float | None = None,
    talk: Talk | None = None,
    *,
    assumed: bool = False,
) -> tuple[Times | None, float]:
    """Return the estimate of a plan that can have one, and the average tokens of a response that it is for.

    There is none where the layout is not whole, and where the model or the GPU is not known; a GPU of which only the
    memory is known does with rates that are `assumed`.
    """
    completions, arch = plan.quantities.get("generation_batch_size"), architecture.find(config)
    if plan.memory is None or arch is None or not completions or (rated := devices.rated(config.cluster)) is None:
        return None, 0.0
    device, like = rated
    if like is not None and not assumed:
        return None, 0.0
    given = work(config, int(completions), response_tokens, talk)
    return estimate(sizes(arch, config), config, device, given, plan.memory.cache_tokens), given.response_tokens
