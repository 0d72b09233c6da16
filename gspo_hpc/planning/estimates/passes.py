"""The time of the trainer's passes: operations over a share of the peak, communication, pipeline bubbles, experts.

Experts cost more than their operations: tokens are copied, sent and sorted to and fro, each expert of a rank has
products of its own, and expert-tensor-parallel ranks gather the tokens of all of them for a slice of every product.
"""

from __future__ import annotations

from typing import NamedTuple

from gspo_hpc.config.constants import GATHER_BUCKET_BYTES, TRANSFER_BUCKET_BYTES
from gspo_hpc.config.derived import keeps_weights, offloaded_parts, overlaps, reference_is_base
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.config.schema import Config
from gspo_hpc.models import flops
from gspo_hpc.models.parts import divide_experts
from gspo_hpc.planning import divisions
from gspo_hpc.planning.estimates import moments, rates
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.engines import efficiency
from gspo_hpc.planning.estimates.work import Sizes, Work

_ITEM = 2.0  # bytes of an activation or a weight
_MERGING = 32.0  # bytes that are read and written of a weight: its copy in fp32, the product, the sum, its two results


class Grid(NamedTuple):
    """Sizes of the groups in which ranks share the model."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    replicas: int  # that have samples of their own
    node: int  # ranks of a node

    @property
    def model_ranks(self) -> int:
        """The ranks that share attention's weights."""
        return self.tp * self.pp


def grid(config: Config) -> Grid:
    """Return how the ranks of a config share the model."""
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    replicas = max(1, config.world_size // (tp * pp * cp))
    return Grid(tp, pp, cp, ep, etp, replicas, max(1, config.training_gpus_per_node))


def forward_flops(model: Sizes, config: Config, given: Work) -> float:
    """Return the operations of all completions of a rollout; a shared prompt is computed once a group."""
    length = given.prompt_tokens + given.response_tokens
    prompts = given.completions / (given.completions_per_prompt if config.batch.share_prompts else 1)
    tokens = given.completions * given.response_tokens + prompts * given.prompt_tokens
    seen = given.completions * length * length / 2 * (1.0 + rates.SPREAD**2 / 4)
    outputs = given.completions * given.response_tokens * model.output_flops
    return tokens * model.token_flops + seen * model.score_flops + outputs


def update_factor(model: Sizes) -> float:
    """Return the operations of a forward and a backward pass, in forward passes.

    A frozen weight has no gradient, which is half of a backward pass; adapters have one.
    """
    if not model.adapters:
        return float(flops.FORWARD_AND_BACKWARD)
    return (
        flops.FORWARD_AND_BACKWARD_FROZEN + flops.FORWARD_AND_BACKWARD * 2.0 * model.active_adapters / model.token_flops
    )


def seconds(
    model: Sizes, config: Config, device: Device, forward: float, tokens: float, updates: int, work_factor: float
) -> float:
    """Return the seconds of a pass over all tokens: `work_factor` forward passes, in `updates` parts.

    Of these, a backward pass counts two, but it sends no more than a forward one.
    """
    at = grid(config)
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    batches = max(1.0, tokens / updates / at.replicas / moments.micro_batch_tokens(config))
    computing = work_factor * forward / (config.world_size * device.sustained_flops * efficiency(device))
    computing *= _unevenness(model, config)
    own = tokens / at.replicas / at.cp  # of one rank
    sending = work_factor - 1.0 if work_factor >= 3.0 else work_factor
    talking = work_factor * _talking(model, at, device, own)
    if model.layers_with_experts:
        handled = batches * updates
        computing += work_factor * _fullest(model, config) * _handling(model, config, at, device, own, handled)
        talking += sending * _dispatching(model, config, at, device, own)
    return (computing + talking) * (1.0 + (at.pp - 1) / (chunks * batches))


def _unevenness(model: Sizes, config: Config) -> float:
    """Return the operations of the busiest pipeline stage over those of the mean: the last has the output layer too."""
    every, output, stages = model.token_flops, model.output_flops, config.parallel.pipeline_model_parallel_size
    layers = divisions.layers_per_stage(model.layers, config.parallel)
    shares = [every / stages] * stages if layers is None else [count / model.layers * every for count in layers]
    return max(*shares[:-1], shares[-1] + output, 0.0) * stages / (every + output)


def _fullest(model: Sizes, config: Config) -> float:
    """Return the layers of the pipeline stage that has most of them over those of the mean."""
    stages, layers = (
        config.parallel.pipeline_model_parallel_size,
        divisions.layers_per_stage(model.layers, config.parallel),
    )
    return 1.0 if layers is None else max(layers) * stages / model.layers


def _talking(model: Sizes, at: Grid, device: Device, own: float) -> float:
    """Return the seconds in which the ranks of attention tell each other activations, in one forward pass."""
    tensor = 4.0 * (at.tp - 1) / at.tp * model.hidden * _ITEM * own * model.layers / at.pp
    if at.tp > model.cache_heads:  # queries, keys and values of all heads are gathered
        tensor += _ITEM * (at.tp - 1) / at.tp * (model.score_flops / 4 + model.cache_bytes / 2) * own / at.pp
    context = model.cache_bytes / min(at.tp, model.cache_heads) / at.pp * (at.cp - 1) * own
    return _over(device, at, tensor, at.tp) + _over(device, at, context, at.tp * at.cp)


def _copies(model: Sizes, config: Config, at: Grid, own: float) -> float:
    """Return the tokens that a rank sends to experts, over all layers of its stage, each as often as it has experts."""
    shared = at.tp if config.parallel.sequence_parallel else 1
    return own / shared * model.top_k * model.layers_with_experts / at.pp


def _dispatching(model: Sizes, config: Config, at: Grid, device: Device, own: float) -> float:
    """Return the seconds in which tokens go to experts and back: over expert ranks, then over those that share one."""
    moved = 2.0 * _copies(model, config, at, own) * model.hidden * _ITEM
    spread, group = moved * (at.ep - 1) / at.ep, at.ep * at.etp
    outside = max(0.0, 1.0 - at.node / group)  # of the ranks of a group, those that are on other nodes
    over = spread * outside / (device.network_bytes_per_s * rates.LINK)
    within = spread * (1.0 - outside) / (device.node_bytes_per_s * rates.LINK)
    return max(over, within) + _over(device, at, moved * (at.etp - 1), at.etp)


def _handling(model: Sizes, config: Config, at: Grid, device: Device, own: float, batches: float) -> float:
    """Return the seconds in which experts' tokens and weights are read and written, and products are launched.

    Thin slices show here: with expert tensor parallelism every rank reads all tokens for fewer columns, and with few
    tokens for each of many experts, weights are read and products launched for little.
    """
    copies = _copies(model, config, at, own)
    sorting = 4.0 * model.hidden * (1.0 + at.etp)  # read and written: before and after they are sent, there and back
    products = 2.0 * model.hidden * at.etp + 6.0 * model.expert_ffn
    experts = batches * model.experts / at.ep * model.layers_with_experts / at.pp
    weights = 3.0 * model.hidden * model.expert_ffn / at.etp
    moved = _ITEM * (copies * (sorting + products) + experts * weights)
    return (
        moved / (device.memory_bytes_per_s * rates.BANDWIDTH) + 2.0 * experts * rates.EXPERT_LAUNCH * device.launching
    )


def _over(device: Device, at: Grid, count: float, ranks: int) -> float:
    """Return the seconds in which bytes go over the links between so many neighbours."""
    link = device.node_bytes_per_s if ranks <= at.node else device.network_bytes_per_s
    return count / (link * rates.LINK)


def _adapters(model: Sizes, at: Grid) -> float:
    """Return the parameters of adapters of one rank, of which tensor-parallel ranks are taken to have all."""
    return (model.adapters - model.expert_adapters * (1.0 - 1.0 / at.ep)) / at.pp


def optimizer(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds in which gradients are summed over replicas, Adam steps, and weights are gathered."""
    at = grid(config)
    dense = (model.parameters - model.expert_parameters) / at.model_ranks
    owners = at.etp * at.ep * at.pp
    experts = model.expert_parameters / owners
    if model.adapters:
        dense, experts = (model.adapters - model.expert_adapters) / at.pp, model.expert_adapters / (at.ep * at.pp)
    own = dense + experts
    replicas = max(1, config.world_size // at.model_ranks)
    wide = config.optimizer.grad_reduce_in_fp32
    moved = (dense + experts * (config.world_size > owners)) * (4.0 if wide else 2.0) * 2.0
    link = device.network_bytes_per_s if config.world_size > at.node else device.node_bytes_per_s
    reducing = (
        moved / (link * rates.LINK) * (replicas > 1) * (rates.OVERLAPPED if overlaps(config).grad_reduce else 1.0)
    )
    state = own * 20.0 / (replicas if config.optimizer.distributed else 1)
    rate = device.host_bytes_per_s if config.memory.offload_optimizer else device.memory_bytes_per_s * rates.BANDWIDTH
    return reducing + state / rate


def reference(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds in which the reference and the policy change places, or a teacher comes and goes."""
    at = grid(config)
    own = _adapters(model, at) or model.parameters / at.model_ranks
    return 0.0 if reference_is_base(config) else 2.0 * own * _ITEM / device.host_bytes_per_s


def sync(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds in which all weights reach every engine, and offloaded state goes to the host and back."""
    at, whole = grid(config), model
    beside = adapters_beside_weights(config, experts=model.experts > 0)
    alone = beside and keeps_weights(config)  # nothing but adapters travels, and no layer is loaded again
    if alone:
        model = model._replace(parameters=model.adapters, expert_parameters=0, layers=0)
    weights = _ITEM * model.parameters
    gathering = _gathering(model, at, device)
    if model.adapters and not beside:
        gathering += _MERGING * model.parameters / at.model_ranks / (device.memory_bytes_per_s * rates.BANDWIDTH)
    keeping = 0.0
    if config.rollout.mode == "server":  # one bucket is broadcast while the next is gathered, and the last one copied
        apart = config.cluster.nodes > 1
        link = device.network_bytes_per_s if apart else device.node_bytes_per_s
        gathering = max(gathering, weights / (link * rates.SYNC_LINK))
        keeping = weights / device.host_bytes_per_s
    # A worker reads everything, writes its share beside the weights that it computes with, and copies it over them.
    moved_by_worker = weights * (1.0 + 4.0 / config.rollout.tensor_parallel_size)
    loading = moved_by_worker / (device.memory_bytes_per_s * rates.BANDWIDTH)
    loading += _messages(model, at) * rates.BUCKET_SECONDS + model.layers * rates.RELOAD_SECONDS
    taking = max(loading, keeping)  # both read what is there
    needed = max(gathering, taking)  # one bucket is gathered while the one before is loaded
    if 2.0 * _matrix(model) > TRANSFER_BUCKET_BYTES["cuda"]:
        # A parameter of an expert is more than a half of the memory: gathering and loading of experts take turns.
        needed += min(gathering, taking) * model.expert_parameters / model.parameters
    if moved := offloaded_parts(config):
        replicas = max(1, config.world_size // at.model_ranks)
        own = whole.parameters / at.model_ranks
        optimizer = 12.0 * (_adapters(whole, at) or own) / (replicas if config.optimizer.distributed else 1)
        each_way = _ITEM * own * ("weights" in moved) + optimizer * ("optimizer" in moved)
        needed += 2.0 * each_way / device.host_bytes_per_s
    shared = config.cluster.platform == "cuda" and config.rollout.mode == "colocate"
    return needed + rates.SYNC_SECONDS * (shared and not alone)


def _matrix(model: Sizes) -> int:
    """Return the bytes of a matrix of an expert, which has three: two are one parameter of the trainer."""
    return round(_ITEM * model.expert_ffn * model.hidden)


def _messages(model: Sizes, at: Grid) -> float:
    """Return the messages that tell an engine of all weights: one for each half of the memory, filled as it can be."""
    half = filled = TRANSFER_BUCKET_BYTES["cuda"]
    if matrix := _matrix(model):
        piece = max(one.size for one in divide_experts([2 * matrix, matrix], at.ep, half))
        if piece > GATHER_BUCKET_BYTES["cuda"]:
            filled = max(1, half // piece) * piece
    return _ITEM * ((model.parameters - model.expert_parameters) / half + model.expert_parameters / filled)


def _gathering(model: Sizes, at: Grid, device: Device) -> float:
    """Return the seconds in which every rank receives all weights: over stages its part, then all from its stage.

    The ranks of a stage that are on one node share what its adapters bring.
    """
    needed = 0.0
    experts = model.expert_parameters
    for parameters, group in ((model.parameters - experts, at.tp), (experts, at.ep * at.etp)):
        count, over = _ITEM * parameters, device.network_bytes_per_s * at.node
        link = min(device.node_bytes_per_s, over) if group > at.node else device.node_bytes_per_s
        needed += count * (group - 1) / group / (link * rates.SYNC_LINK)
        stages = device.network_bytes_per_s if group * at.pp > at.node else device.node_bytes_per_s
        needed += count / group * (at.pp > 1) / (stages * rates.SYNC_LINK)
    return needed


def save(model: Sizes, config: Config, device: Device) -> float:
    """Return the seconds that a save holds training up: those of a copy to the host if it is written in background.

    So long does a step wait that begins at once, or a trainer that leaves its memory to engines. All wait for the ranks
    that copy most. Of ranks that have the same weights one copies them, with their optimizer's state, unless they share
    that: then each copies its part. Of a model with adapters these alone are saved.
    """
    at = grid(config)
    replicas = max(1, config.world_size // at.model_ranks)
    own = (model.parameters - model.expert_parameters) / at.model_ranks
    own += model.expert_parameters / (at.etp * at.ep * at.pp)
    state = 12.0 * (model.parameters / config.world_size if config.optimizer.distributed else own)
    if model.adapters:
        own = _adapters(model, at)
        state = 12.0 * own / (replicas if config.optimizer.distributed else 1)
    return (_ITEM * own + state) / device.host_bytes_per_s * (1.0 if config.checkpoint.async_save else 10.0)
