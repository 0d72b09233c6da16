"""Memory that the trainer's passes take of a GPU at their worst moments: in a layer, in the head, at the embedding.

A pass is never in two of these places at once, so what they take is not added up. Only blocks
of logits in a pass without gradient, which are small, are counted beside what a layer works on.

Choices of experts that are repeated (``moe.router_replay``) wait in host memory, and :func:`choices` counts them there:
those of a rollout with its groups, and those of a pass with its micro-batches, on every rank that computes them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gspo_hpc.config.constants import PROBE_PROMPTS
from gspo_hpc.config.derived import (
    PassName,
    engines_per_node,
    has_own_layout,
    offloaded_parts,
    old_logprobs_are_the_engines,
    pass_size,
    router_replay,
    teacher_config,
    trains_adapters,
    updates_per_rollout,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import activations, adapters, engines, parameters
from gspo_hpc.planning.estimates.head import Head

_AT_EMBEDDING = 3  # times the hidden states, in the backward pass of an embedding
# Bytes of a choice of an expert on a GPU: one that is repeated, and one that is noted until its micro-batch has gone
# forward. In host memory: one in a micro-batch, or noted in a pass.
_GIVEN, _RECORDED, _PACKED = 2, 8, 2


def micro_batch_tokens(config: Config, name: PassName = "update") -> int:
    """The tokens of a micro-batch of that pass, at most: its budget, or as many of the longest samples as it has."""
    size = pass_size(config, name)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    return size.micro_batch_tokens or (size.micro_batch_size or 1) * longest


def in_flight(config: Config, stage: int) -> float:
    """Return how many micro-batches, in whole stages, a stage holds the activations of at once.

    That is what Megatron's warm-up lets in, one forward pass before the first backward one, interleaved or not; never
    more than an update has.
    """
    parallel, batch = config.parallel, config.batch
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    ahead = pp - stage - 1
    most = (2 * ahead + (chunks - 1) * pp + 1) / chunks if chunks > 1 else ahead + 1
    if batch.global_batch_size is None:
        return most
    replicas = config.world_size // (parallel.tensor_model_parallel_size * pp * parallel.context_parallel_size)
    completions = max(1, batch.global_batch_size // max(1, replicas))
    return min(most, completions / (batch.micro_batch_size or 1))


def of_update(arch: Architecture, config: Config, stage: int, state: parameters.Bytes) -> dict[str, dict[str, int]]:
    """Return what the passes of an update take of a GPU of a stage, at the worst moments in the head and in layers."""
    item, parallel = activations.itemsize(config), config.parallel
    size = micro_batch_tokens(config) / parallel.context_parallel_size * item  # bytes of an element of each token
    layers_here = parameters.layers_of(arch, config, stage)
    kept = activations.kept(arch, config, layers_here)
    last = stage == parallel.pipeline_model_parallel_size - 1
    ends = arch.hidden_size * (3.0 if last else 1.0)  # the last norm's input and output, and hidden states that leave
    ends += activations.of_embedding(config) if stage == 0 else 0.0
    micro_batch, flight = (kept.held + ends) * size, in_flight(config, stage)
    whole_again = config.memory.recompute_granularity == "full"  # then only the layer at work has copies
    micro_batch += adapters.joined(arch, config, layers_here[:1] if whole_again else layers_here) * item
    beside = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer * (not config.memory.offload_optimizer),
    } | _quantized(arch, config, stage, with_gradient=True)
    beside |= _given(arch, config, stage, flight)
    head = _head(arch, config, -(-_response_tokens(config, "update") // parallel.context_parallel_size))
    # The embedding's gradient is added to the head's where they are one matrix: it waits for the end of the pass.
    one_matrix = last and stage == 0 and arch.tie_word_embeddings
    waiting = {"head_gradient": head.gradient} if one_matrix and head.gradient else {}
    working = (kept.again + activations.working(arch, config)) * size
    moments = [{"activations": int(micro_batch * flight + working)} | waiting]
    if stage == 0 and not trains_adapters(config):
        # At its end the micro-batch has no activations: the embedding's gradient as it comes, gathered, and masked.
        rest = micro_batch * max(0.0, flight - 1.0) + _AT_EMBEDDING * arch.hidden_size * size
        moments.append({"activations": int(rest), "embedding_gradient": head.gradient} | waiting)
    unused = parameters.unused_gradients(arch, config, stage)  # dropped before the next micro-batch comes to the head
    layers = beside | ({"unused_gradients": unused} if unused else {})
    passes = {"update": layers | max(moments, key=lambda moment: sum(moment.values()))}
    if not last:
        return passes
    backward = {"head_input": head.inputs, "head_gradient": head.gradient, "logits": head.backward_blocks}
    backward = {name: taken for name, taken in backward.items() if taken}
    return {"head_backward": beside | {"activations": int(micro_batch * flight)} | backward} | passes


def of_logprobs(arch: Architecture, config: Config, stage: int, state: parameters.Bytes) -> dict[str, int]:
    """A forward pass keeps nothing but what one layer works on."""
    passes: tuple[PassName, ...] = ("old_logprobs", *(() if config.algorithm.has_teacher else ("reference",)))
    names = [name for name in passes if pass_size(config, name).needed] or [passes[0]]
    replay = _replay(config) if "old_logprobs" in names else "off"  # the reference chooses for itself
    most = max(micro_batch_tokens(config, name) for name in names)
    cp = config.parallel.context_parallel_size
    tokens = most / cp
    responses = max(-(-_response_tokens(config, name) // cp) for name in names)
    parts = {"weights": state.weights} | of_forward(arch, config, stage, tokens, responses)
    if arch.experts is not None and replay != "off":
        each = _RECORDED if replay == "old_logprobs" else _GIVEN  # of what is noted nothing is known before
        parts["experts"] = int(each * _choices(arch, config, stage, micro_batch_tokens(config, "old_logprobs")))
    moved = offloaded_parts(config)
    parts |= {} if "gradients" in moved else {"gradients": state.gradients}
    parts |= {} if "optimizer" in moved or config.memory.offload_optimizer else {"optimizer": state.optimizer}
    return parts


def of_teacher(config: Config, stage: int) -> dict[str, int]:
    """Return what the pass of the teacher takes of a GPU, beside what of the trainer stays there; empty without one."""
    arch = parameters.teacher(config)
    if arch is None:
        return {}
    own = teacher_config(config)
    cp = own.parallel.context_parallel_size
    tokens, responses = micro_batch_tokens(config, "reference") / cp, -(-_response_tokens(config, "reference") // cp)
    # In a layout of its own a rank has another stage of it than of the policy: the fullest stage is for all.
    stages = range(own.parallel.pipeline_model_parallel_size) if has_own_layout(config) else (stage,)
    each = (
        {"teacher": parameters.teacher_weights(config, one)} | of_forward(arch, own, one, tokens, responses)
        for one in stages
    )
    return max(each, key=lambda parts: sum(parts.values()))


def probe_tokens(config: Config) -> tuple[int, int]:
    """Return the tokens of the probe on one rank, at most, and how many are predicted: all but the first of each."""
    longest = min(max(2, config.rollout.probe_tokens), PROBE_PROMPTS * config.rollout.max_prompt_length)
    tokens = -(-longest // config.parallel.context_parallel_size)
    return tokens, tokens


def of_forward(arch: Architecture, config: Config, stage: int, tokens: float, responses: int) -> dict[str, int]:
    """Return what a forward pass over a micro-batch takes of a rank beside its weights."""
    last = stage == config.parallel.pipeline_model_parallel_size - 1
    elements = activations.working(arch, config, saved=False) + 2 * arch.hidden_size
    return {
        "activations": int(elements * tokens * activations.itemsize(config)),
        "logits": _head(arch, config, responses).forward_blocks * last,
    } | _quantized(arch, config, stage, with_gradient=False)


class Choices(NamedTuple):
    """Bytes of a node's own memory for choices of experts that are repeated, at the worst moment."""

    trainers: int = 0  # of ranks that train: with the groups of a rollout, and with the micro-batches of a pass
    generators: int = 0  # of ranks that only generate: with the groups of a rollout
    engines: int = 0  # of vLLM, for every token that its cache holds


class _PassTokens(NamedTuple):
    """The tokens of one rank in a pass that repeats or notes choices, at most."""

    fetched: int  # each prompt once
    packed: int  # each prompt once in a micro-batch, or with every completion


def choices(arch: Architecture, config: Config, cache_tokens: int) -> Choices:
    """Return what choices of experts take of a node, for completions that are as long as they may be.

    `cache_tokens`: those that the cache of an engine holds, as vLLM has a place for the choices of each. Groups are
    counted as if all engines were equally fast. Not counted: what one micro-batch or one group takes for a moment, and
    groups that dynamic sampling draws in vain.
    """
    replay, sampled = _replay(config), _completions(config)
    if arch.experts is None or replay == "off" or not sampled:
        return Choices()
    rollout, of_token = config.rollout, arch.num_layers * arch.experts.top_k
    kept = of_token * (1 if arch.experts.count <= 256 else 2)  # bytes of a token, with its group
    ranks, prompts = config.training_gpus_per_node, sampled // _per_prompt(config)
    group = rollout.max_prompt_length + _per_prompt(config) * (rollout.max_response_length - 1)
    alone = config.world_size == 1  # then nothing is sent
    moved, passed = _moved(config, sampled), pass_size(config, "old_logprobs").needed
    update = _tokens(config, "update", config.batch.global_batch_size or 0)
    updating = ranks * (kept * update.fetched * (not alone) + _PACKED * of_token * update.packed)
    if replay == "rollout":
        held = kept * group * _held_prompts(config, prompts)
        again = _tokens(config, "old_logprobs", _of_pass(config, sampled) * passed)
        packing = kept * again.fetched * (not alone) + _PACKED * of_token * again.packed
        generates = config.rollout.mode == "server"
        here = -(-prompts * engines_per_node(config) // engines.count(config))
        return Choices(
            held + max(updating, ranks * packing),
            kept * group * here * generates,
            kept * cache_tokens * engines_per_node(config),
        )
    held = kept * group * _held_prompts(config, moved // _per_prompt(config))
    noted = _tokens(config, "old_logprobs", _of_pass(config, sampled))
    parallel = config.parallel
    stages = range(parallel.pipeline_model_parallel_size)
    own = max(_choices(arch, config, stage, noted.packed) for stage in stages)
    whole, found = _PACKED * of_token * noted.packed, kept * noted.fetched
    passing = max(int(_PACKED * own) + whole, whole + found)  # as a pass ends, and as its samples are told apart
    return Choices(max(ranks * passing, held + ranks * found * (not alone), held + updating))


def _replay(config: Config) -> str:
    """Return whose choices the updates repeat, as `router_replay` does; "off" where a pass that they need is none."""
    replay = router_replay(config)
    moves = updates_per_rollout(config.batch) > 1 and _moved(config, 2 * (config.batch.global_batch_size or 0)) > 0
    return "off" if replay == "old_logprobs" and not moves else replay


def _per_prompt(config: Config) -> int:
    return config.batch.num_generations or 1


def _completions(config: Config) -> int:
    """Return the completions of a rollout; 0 where that is not known."""
    batch = config.batch
    return (batch.global_batch_size or 0) * (updates_per_rollout(batch) // batch.num_iterations)


def _moved(config: Config, sampled: int) -> int:
    """Return the completions of a rollout whose old log-probs a pass finds: not those of its first update."""
    if old_logprobs_are_the_engines(config):
        return 0
    first = config.batch.global_batch_size or 0
    return sampled - first if config.batch.num_iterations == 1 else sampled


def _of_pass(config: Config, sampled: int) -> int:
    """Return the completions that the pass for old log-probs computes: all, if it says which tokens are trained."""
    return sampled if config.algorithm.top_entropy_quantile < 1 else _moved(config, sampled)


def _held_prompts(config: Config, prompts: int) -> int:
    """Return how many of so many groups a node's ranks hold that train.

    That is what their engines sampled. In server mode they read it, a file of an engine each in turn, and where
    rewards or the clock choose the groups also what is sampled ahead.
    """
    count = engines.count(config)
    if config.rollout.mode != "server":
        return -(-prompts * engines_per_node(config) // count)
    rounds, rest = divmod(count, max(1, config.world_size))
    ranks = config.training_gpus_per_node
    files = rounds * ranks + min(rest, ranks)
    chosen = config.rollout.dynamic_sampling or config.rollout.unfinished != "wait"
    ahead = config.rollout.max_staleness if chosen else 1
    return -(-prompts * files // count) * max(1, ahead)


def _tokens(config: Config, name: PassName, completions: int) -> _PassTokens:
    """Return the tokens of one rank in a pass over so many completions, which the ranks share evenly."""
    parallel, size, rollout = config.parallel, pass_size(config, name), config.rollout
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    mine, each = -(-completions // max(1, config.world_size // model)), _per_prompt(config)
    together, response = min(each, mine), rollout.max_response_length - 1
    if not mine:
        return _PassTokens(0, 0)
    groups = -(-mine // together)
    if not config.batch.share_prompts:
        prompts = mine
    elif size.micro_batch_tokens:  # parts of a group that a budget splits
        fit = (size.micro_batch_tokens - rollout.max_prompt_length) // max(1, response)
        prompts = groups * -(-together // max(1, fit))
    else:  # a micro-batch begins in the middle of a group, unless one size divides the other
        count = size.micro_batch_size or 1
        prompts = groups + -(-mine // count) - mine // math.lcm(together, count)
    tokens = mine * response
    return _PassTokens(*(tokens + number * rollout.max_prompt_length for number in (groups, prompts)))


def _given(arch: Architecture, config: Config, stage: int, flight: float) -> dict[str, int]:
    """Return what choices that an update repeats take of a GPU: of micro-batches whose layers are computed again."""
    if arch.experts is None or _replay(config) == "off":
        return {}
    granularity, modules = config.memory.recompute_granularity, config.memory.recompute_modules
    again = granularity == "full" or (granularity == "selective" and "moe" in modules)
    held = flight if again else 1.0  # a router keeps what it was given last
    return {"experts": int(_GIVEN * held * _choices(arch, config, stage, micro_batch_tokens(config)))}


def _choices(arch: Architecture, config: Config, stage: int, tokens: int) -> float:
    """Return how many choices routers of a rank repeat or note for so many tokens of whole micro-batches."""
    if arch.experts is None:
        return 0.0
    layers = parameters.with_experts(arch, parameters.layers_of(arch, config, stage))
    parallel = config.parallel
    sharers = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return tokens / parallel.context_parallel_size / sharers * layers * arch.experts.top_k


def _head(arch: Architecture, config: Config, responses: int) -> Head:
    """Return the head of a rank of the last stage, which gets so many response tokens."""
    rows = -(-arch.vocab_size // config.parallel.tensor_model_parallel_size)
    bonus = config.algorithm.entropy_coef > 0 or config.algorithm.entropy_target > 0
    return Head(responses, arch.hidden_size, rows, activations.itemsize(config), bonus, trains_adapters(config))


def _response_tokens(config: Config, name: PassName) -> int:
    """Return the response tokens of a micro-batch of that pass, at most: with a budget, prompts may be short."""
    size = pass_size(config, name)
    return size.micro_batch_tokens or (size.micro_batch_size or 1) * config.rollout.max_response_length


def _quantized(arch: Architecture, config: Config, stage: int, *, with_gradient: bool) -> dict[str, int]:
    size = parameters.quantized(arch, config, stage, with_gradient=with_gradient)
    return {"fp8_weights": size} if size else {}
