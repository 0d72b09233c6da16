"""Memory that the trainer's passes take of a GPU at their worst moments: in a layer, in the head, at the embedding.

A pass is never in two of these places at once, so what they take is not added up. Only blocks
of logits in a pass without gradient, which are small, are counted beside what a layer works on.
"""

from __future__ import annotations

from gspo_hpc.config.constants import PROBE_PROMPTS
from gspo_hpc.config.derived import (
    PassName,
    offloaded_parts,
    pass_sizes,
    router_replay,
    teacher_config,
    trains_adapters,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import activations, adapters, parameters
from gspo_hpc.planning.estimates.head import Head

_AT_EMBEDDING = 3  # times the hidden states, in the backward pass of an embedding
# Bytes of a choice of an expert: one that is repeated, and one that is noted until its micro-batch has gone forward.
_GIVEN, _RECORDED = 2, 8


def micro_batch_tokens(config: Config, name: PassName = "update") -> int:
    """The tokens of a micro-batch of that pass, at most: its budget, or as many of the longest samples as it has."""
    size = pass_sizes(config)[name]
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
    ends = arch.hidden_size * (3 if last else 1)  # the last norm's input and output, and the hidden states that leave
    micro_batch, flight = (kept.held + ends) * size, in_flight(config, stage)
    whole_again = config.memory.recompute_granularity == "full"  # then only the layer at work has copies
    micro_batch += adapters.joined(arch, config, 1 if whole_again else len(layers_here)) * item
    if router_replay(config) != "off":
        micro_batch += _GIVEN * _choices(arch, config, stage, micro_batch_tokens(config))
    beside = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer * (not config.memory.offload_optimizer),
    } | _quantized(arch, config, stage, with_gradient=True)
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
    sizes = pass_sizes(config)
    passes: tuple[PassName, ...] = ("old_logprobs", *(() if config.algorithm.has_teacher else ("reference",)))
    names = [name for name in passes if sizes[name].needed] or [passes[0]]
    most = max(micro_batch_tokens(config, name) for name in names)
    cp = config.parallel.context_parallel_size
    tokens = most / cp
    responses = max(-(-_response_tokens(config, name) // cp) for name in names)
    parts = {"weights": state.weights} | of_forward(arch, config, stage, tokens, responses)
    if (replay := router_replay(config)) != "off":
        each = _GIVEN + _RECORDED * (replay == "old_logprobs")
        parts["activations"] += int(each * _choices(arch, config, stage, most))
    moved = offloaded_parts(config)
    parts |= {} if "gradients" in moved else {"gradients": state.gradients}
    parts |= {} if "optimizer" in moved or config.memory.offload_optimizer else {"optimizer": state.optimizer}
    return parts


def of_teacher(config: Config, stage: int) -> dict[str, int]:
    """Return what the pass of the teacher takes of a GPU, beside what of the trainer stays there; empty without one."""
    arch = parameters.teacher(config)
    if arch is None:
        return {}
    cp = config.parallel.context_parallel_size
    tokens, responses = micro_batch_tokens(config, "reference") / cp, -(-_response_tokens(config, "reference") // cp)
    own = teacher_config(config)
    return {"teacher": parameters.teacher_weights(config, stage)} | of_forward(arch, own, stage, tokens, responses)


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


def _choices(arch: Architecture, config: Config, stage: int, tokens: int) -> float:
    """Return how many choices of an expert routers of a rank make for so many tokens of a whole micro-batch."""
    if arch.experts is None:
        return 0.0
    layers = sum(map(arch.has_experts, parameters.layers_of(arch, config, stage)))
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
    size = pass_sizes(config)[name]
    return size.micro_batch_tokens or (size.micro_batch_size or 1) * config.rollout.max_response_length


def _quantized(arch: Architecture, config: Config, stage: int, *, with_gradient: bool) -> dict[str, int]:
    size = parameters.quantized(arch, config, stage, with_gradient=with_gradient)
    return {"fp8_weights": size} if size else {}
