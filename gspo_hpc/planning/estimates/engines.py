"""The time of generation: a roofline, token by token, while sequences end one after the other.

A token takes as long as what must be read of weights and cache or computed, what tensor-parallel ranks tell each other,
and what a step costs however small it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

from gspo_hpc.config.derived import engine_over_nodes, engines_per_node
from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import rates
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.work import Sizes, Work

_QUANTILES = 64
_POINTS = [(i + 0.5) / _QUANTILES for i in range(_QUANTILES)]


def lengths(given: Work) -> list[float]:
    """Return response lengths at equally likely points: log-normal, cut at the longest, with the mean that is given."""
    scale = _scale(given)
    return [_cut(given, scale, point) for point in _POINTS]


def longest_of(given: Work) -> float:
    """Return the length that all wait for: one completion in as many as there are would be longer."""
    return _cut(given, _scale(given), 1.0 - 0.5 / given.completions)


@cache
def _scale(given: Work) -> float:
    """Return the median of the distribution before it is cut, by bisection."""
    low, high = 0.0, given.longest * 1e3
    longest, spreads = float(given.longest), [_spread(point) for point in _POINTS]
    for _ in range(40):
        middle = (low + high) / 2
        mean = sum(min(longest, middle * spread) for spread in spreads) / _QUANTILES
        low, high = (middle, high) if mean < given.response_tokens else (low, middle)
    return high


def _cut(given: Work, scale: float, point: float) -> float:
    return min(float(given.longest), scale * _spread(point))


def _spread(point: float) -> float:
    """Return a quantile of the distribution, as a multiple of its median."""
    return math.exp(rates.SPREAD * NormalDist().inv_cdf(point))


def count(config: Config) -> int:
    """Return the engines of all nodes."""
    cluster, rollout = config.cluster, config.rollout
    nodes = (cluster.generation_nodes if rollout.mode == "server" else 0) or cluster.nodes
    if engine_over_nodes(config) and not rollout.engines_per_node:
        return max(1, nodes * config.gpus_per_engine_node // rollout.tensor_parallel_size)
    return nodes * engines_per_node(config)


def generation(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> float:
    """Return the seconds until the completions of a rollout have ended, prompts left out.

    They are all that it draws, or with rollout.unfinished drop as many groups as it needs. With continue, engines stay
    as full as they are: what has not ended goes on in the next rollout.
    """
    return max(_sampling(model, config, device, given, cache_tokens) + waiting(given), _answering(config, given))


def waiting(given: Work) -> float:
    """Return the seconds in which a conversation waits for answers: the last of a rollout has nothing beside it."""
    return given.answers * given.answer_seconds


def _answering(config: Config, given: Work) -> float:
    """Return the seconds that the processes of environments take for all answers of a rollout."""
    return given.completions * waiting(given) / (config.environment.workers * count(config))


def steps(config: Config, given: Work, cache_tokens: float) -> float:
    """Return the steps of the engine that has the longest completion: each samples a token of all its sequences."""
    each = given.completions / count(config)
    at_once = _at_once(config, given, each, cache_tokens)
    return given.sampled * ((each - at_once) * given.response_tokens / at_once + longest_of(given))


def _sampling(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> float:
    """Return the seconds of the engines' steps. Replies of an environment cost none: they are read at once."""
    return sum(seconds for seconds, _, _ in _course(model, config, device, given, cache_tokens))


def _course(
    model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float
) -> Iterator[tuple[float, float, float]]:
    """Yield the parts of generation: seconds, sequences of an engine, and the tokens that each has on average."""
    rollout = config.rollout
    drawn = 1.0 if rollout.unfinished == "wait" else rollout.oversampling_factor
    each = drawn * given.completions / count(config)
    at_once = _at_once(config, given, each, cache_tokens)
    if rollout.unfinished == "continue":
        mean = given.response_tokens
        tokens = given.sampled * each / drawn * mean
        yield tokens / at_once * step_seconds(model, config, device, at_once, mean / 2, given), at_once, mean / 2
        return
    ends = lengths(given)
    last_group = drawn ** (-1.0 / given.completions_per_prompt)  # share of the completions that have ended by then
    # While others wait, every sequence that ends makes room for one more.
    mean = sum(ends) / len(ends)
    full = given.sampled * (each - at_once) * mean / at_once
    yield full * step_seconds(model, config, device, at_once, mean / 2, given), at_once, mean / 2
    begin = 0.0
    for number, end in enumerate(ends):
        if rollout.unfinished == "drop" and number >= last_group * len(ends):
            return
        alive, middle = max(1.0, at_once * (len(ends) - number) / len(ends)), (begin + end) / 2
        yield given.sampled * (end - begin) * step_seconds(model, config, device, alive, middle, given), alive, middle
        begin = end
    last = longest_of(given) - begin  # of all engines, the one that has the longest
    yield given.sampled * last * step_seconds(model, config, device, 1.0, begin, given), 1.0, begin


def read_again(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float, after: float) -> float:
    """Return the seconds in which engines read again what is unfinished `after` so many seconds of generation.

    They have dropped all keys and values: of prompts, which a group shares, and of what they have sampled.
    """
    for seconds, alive, tokens in _course(model, config, device, given, cache_tokens):
        after -= seconds
        if after < 0:
            read = alive * count(config) * (given.prompt_tokens / given.completions_per_prompt + tokens)
            return _reading(model, config, device, read)
    return 0.0


def steady(model: Sizes, config: Config, device: Device, given: Work, cache_tokens: float) -> float:
    """Return the seconds of a rollout where engines never wait: the next rollout's prompts take the free places.

    Other systems work so; tools/published_runs.py compares with them.

    Sequences go on while weights change, and so many rollouts are under way as their weights may be behind.
    """
    each = given.completions / count(config)
    at_once = _at_once(config, given, each * (1 + config.rollout.max_staleness), cache_tokens)
    mean = given.response_tokens
    return each * mean / at_once * step_seconds(model, config, device, at_once, mean / 2, given)


def _at_once(config: Config, given: Work, each: float, cache_tokens: float) -> float:
    """Return how many sequences an engine works on: what it has, its cache holds, and it takes."""
    held = max(1.0, cache_tokens / (given.prompt_tokens / given.completions_per_prompt + given.response_tokens))
    return min(each, held, engine_setting(config, "max_num_seqs"))


def prefill(model: Sizes, config: Config, device: Device, given: Work) -> float:
    """Return the seconds in which engines read the prompts of a rollout, each once a group, and all replies.

    With rollout.unfinished continue they read again what they have sampled of the completions that go on.
    """
    rollout = config.rollout
    drawn = 1.0 if rollout.unfinished == "wait" else rollout.oversampling_factor
    tokens = drawn * given.completions / given.completions_per_prompt * given.prompt_tokens
    tokens += drawn * given.completions * given.read_tokens
    if rollout.unfinished == "continue":
        tokens += (drawn - 1.0) * given.completions * given.response_tokens / 2
    return _reading(model, config, device, tokens)


def _reading(model: Sizes, config: Config, device: Device, tokens: float) -> float:
    """Return the seconds in which all engines read so many tokens."""
    operations = tokens * model.token_flops
    gpus = count(config) * config.rollout.tensor_parallel_size
    return operations / (gpus * device.sustained_flops * efficiency(device))


def efficiency(device: Device) -> float:
    """Return the share of what large products sustain that passes reach on a card."""
    return rates.EFFICIENCY * device.products


def step_seconds(model: Sizes, config: Config, device: Device, alive: float, generated: float, given: Work) -> float:
    """Return the seconds of one token of `alive` sequences of an engine, each with `generated` tokens so far."""
    tp = config.rollout.tensor_parallel_size
    seen = alive * (given.prompt_tokens + generated)
    used = 1.0 - (1.0 - model.top_k / model.experts) ** alive if model.experts else 0.0  # experts that have a token
    weights = 2.0 * (model.parameters - model.expert_parameters * (1.0 - used)) / tp
    kept = seen * model.cache_bytes / min(tp, model.cache_heads)
    reading = (weights + kept) / (device.memory_bytes_per_s * rates.BANDWIDTH * device.reads)
    computing = alive * (model.token_flops + model.output_flops) + seen * model.score_flops
    computing /= tp * device.sustained_flops * rates.EFFICIENCY * device.products
    launching = rates.STEP_SECONDS
    launching += model.layers * rates.LAYER_SECONDS + model.layers_with_experts * rates.EXPERTS_SECONDS
    if config.rollout.engine.get("enforce_eager") is True:
        launching += model.layers * rates.EAGER_SECONDS
    seconds = max(reading, computing) + launching * device.launching
    if tp > 1:
        wide = engine_over_nodes(config)
        latency, link = (
            (rates.NETWORK_LATENCY, device.network_bytes_per_s)
            if wide
            else (rates.NODE_LATENCY, device.node_bytes_per_s)
        )
        moved = 2.0 * (tp - 1) / tp * alive * model.hidden * 2.0
        seconds += 2 * model.layers * (latency + moved / (link * rates.LINK))
    return seconds
