"""The memory that a rank keeps of a micro-batch for its backward pass, and what it works on for a moment.

Counted as autograd saves it for the layers of policy/model.py:
a norm keeps its input and its output (torch's composite one on the CPU the normalised input as well),
attention its inputs and its result, an MLP both halves of its first product and what is made of them: the product of
the two, and where SwiGLU is not fused also its factors. Attention keeps no scores. Where adapters are trained, a
layer without one keeps none of its inputs, and what has a gradient begins with the first adapter, which the embedding
may have. The idea is that of Korthikanti et al., arXiv:2205.05198; the terms are this model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from gspo_hpc.config.derived import fuses_swiglu, trains_adapters
from gspo_hpc.config.schema import Config, Memory
from gspo_hpc.models.adapter_table import EMBEDDING
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import adapters

# Experts are not used evenly: the fullest of several ranks is taken to have this many times the average.
IMBALANCE = 1.2

_ROPE = 4  # sines and cosines, for queries and for keys, are kept by every layer
_HALVES = 2  # of an MLP's first product, in inner sizes
_UNGATED = 2  # without a gate: the first product, and what the activation makes of it
_PRODUCT = 1  # of the halves, which the second matrix takes
_INTO_ATTENTION, _INTO_MLP = frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})
_FACTORS = 2  # unless SwiGLU is fused: what the activation makes of one half, and a copy of the other

# Bytes of a token and expert while a router works: logits and weights in fp32, the map, and the places of its sort.
_ROUTING = 4 + 4 + 1 + 16


class Layer(NamedTuple):
    """Elements that one layer keeps of one token, by what computes them. What selective recomputation names can go."""

    norms: float  # inputs of norms: they stay
    norm_outputs: float
    attention: float
    core: float  # what attention keeps beside its inputs and the result that goes on
    mlp: float  # of an MLP, or of a shared expert
    experts: float
    gates: float  # of the experts' part, what is made of their two halves

    @property
    def total(self) -> float:
        """The sum of all of them."""
        return self.norms + self.norm_outputs + self.attention + self.core + self.mlp + self.experts + self.gates


def layer(arch: Architecture, config: Config, number: int) -> Layer:
    """Return what layer `number`, counted from 0 over all stages, keeps on one rank of each of its own tokens."""
    parallel, cpu = config.parallel, config.cluster.platform == "cpu"
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    own = 1 / tp if parallel.sequence_parallel else 1.0  # of the tokens between tensor-parallel regions
    hidden, queries = arch.hidden_size, arch.num_attention_heads * arch.head_dim / tp
    keys = max(arch.num_key_value_heads, tp) * arch.head_dim / tp
    mixed = gathered_product(arch, tp) or queries + 2 * keys  # what queries, keys and values are views of, or copies
    again = config.memory.recompute_granularity == "selective" and "core_attn" in config.memory.recompute_modules
    seen = cp + 0.5 if cp > 1 else 1.0  # keys of a rank's two pieces, in its own tokens
    targets, frozen = adapters.targets(config), trains_adapters(config)
    result = queries * (not frozen or "o_proj" in targets)  # that the next matrix keeps
    attention = queries + result + 2 * keys * seen + _ROPE * arch.head_dim
    if arch.qk_norm:
        attention += mixed + queries * (arch.num_key_value_heads > tp) + (queries + keys) * (cpu and not frozen)
    elif cp == 1 and (again or not cpu):
        attention += mixed - keys  # the values are a view
    if arch.mixers:
        attention = arch.mixers[number].kept / tp + _ROPE * arch.head_dim
    core = queries * (cpu or not result)
    fused = fuses_swiglu(config)
    product = _PRODUCT * (not frozen or "down_proj" in targets)
    gated = product if fused else _FACTORS + product
    norms, outputs = hidden * own * (2 + 2 * cpu), 2 * hidden * own
    if frozen:
        low = adapters.low(config)
        halves = (_HALVES + gated) * arch.ffn_hidden_size / tp
        # Is there no gradient before this layer?
        first = number == 0 and config.memory.recompute_granularity is None and EMBEDDING not in targets
        dark = first and not targets & _INTO_ATTENTION  # up to attention's last matrix
        darker = dark and "o_proj" not in targets  # up to the MLP
        darkest = darker and not targets & _INTO_MLP
        dense = Layer(
            hidden * own * ((not first) + (not darker)),
            hidden * own * (bool(targets & _INTO_ATTENTION) + bool(targets & _INTO_MLP)),
            (result if dark else attention) + low.attention + low.projection * own,
            core * (not dark),
            (product * arch.ffn_hidden_size / tp if darkest else halves) + low.mlp + low.down * own,
            0.0,
            0.0,
        )
        return _frozen_mixture(arch, config, dense, darker) if arch.has_experts(number) else dense
    if not arch.has_experts(number):
        inner = _HALVES + gated if arch.mlp_matrices == 3 else _UNGATED
        return Layer(norms, outputs, attention, core, inner * arch.ffn_hidden_size / tp, 0.0, 0.0)
    mixture = arch.experts
    assert mixture is not None
    etp = parallel.expert_tensor_parallel_size or tp
    uneven = IMBALANCE if parallel.expert_model_parallel_size > 1 else 1.0
    routed = mixture.top_k * own * uneven  # copies of a token, before expert-tensor ranks gather them
    shared = mixture.shared_ffn_hidden_size
    return Layer(
        norms,
        outputs,
        attention,
        core,
        ((_HALVES + gated) * shared / tp + hidden * own) * bool(shared),
        routed * (hidden * etp + _HALVES * mixture.ffn_hidden_size),
        routed * (gated + (not fused)) * mixture.ffn_hidden_size,  # the router's weight is a factor of its own
    )


def of_embedding(config: Config) -> float:
    """Return the elements that the embedding's adapter keeps of a token between its two matrices, if it has one."""
    parallel = config.parallel
    own = 1 / parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1.0
    return config.adapter.rank * own * (EMBEDDING in adapters.targets(config))


def _frozen_mixture(arch: Architecture, config: Config, dense: Layer, darker: bool) -> Layer:
    """Return what a layer with experts and adapters keeps, from what it would keep with an MLP in their place.

    `darker`: nothing before the experts has a gradient. Else their router has one to hand on, of which each token's
    result before its weight is a factor; and the router keeps its input, frozen as it is.
    """
    parallel, mixture, fused = config.parallel, arch.experts, fuses_swiglu(config)
    assert mixture is not None
    tp, targets, low = parallel.tensor_model_parallel_size, adapters.targets(config), adapters.low(config)
    own = 1 / tp if parallel.sequence_parallel else 1.0
    etp, shared = parallel.expert_tensor_parallel_size or tp, mixture.shared_ffn_hidden_size
    routed = mixture.top_k * own * (IMBALANCE if parallel.expert_model_parallel_size > 1 else 1.0)
    into, product = bool(targets & _INTO_MLP), _PRODUCT * ("down_proj" in targets)
    halves, factors = (_HALVES, 0 if fused else _FACTORS) if into or not darker else (0, 0)
    weighed = int(not fused and not darker)  # the product that the router's weight is a factor of
    inputs = arch.hidden_size * own * (bool(targets & _INTO_ATTENTION) + (into and bool(shared) or not darker))
    of_shared = ((halves + factors + product) * shared / tp + low.mlp + low.down * own) * bool(shared)
    return dense._replace(
        norm_outputs=inputs,
        mlp=of_shared + arch.hidden_size * own * (bool(shared) and not darker),
        experts=routed * (etp * (arch.hidden_size * into + low.mlp + low.down) + halves * mixture.ffn_hidden_size),
        gates=routed * (factors + weighed + product) * mixture.ffn_hidden_size,
    )


def gathered_product(arch: Architecture, tp: int) -> float:
    """Return the elements of a token that ranks gather where they are more than key-value heads; else 0.

    Megatron-Core cuts the matrix of queries, keys and values into rows, and every rank takes its heads from the whole
    product.
    """
    whole = (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim
    return float(whole) if tp > arch.num_key_value_heads else 0.0


class Kept(NamedTuple):
    """Elements of one token that are kept."""

    held: float  # by every micro-batch that is under way, until its backward pass
    again: float  # by the one whose backward pass is under way: what is computed again for it


def kept(arch: Architecture, config: Config, layers: Sequence[int]) -> Kept:
    """Return what these layers of a stage keep."""
    memory = config.memory
    kinds, examples = _kinds(arch, tuple(layers), trains_adapters(config))
    alike = [layer(arch, config, number) for number in examples]
    totals = [part.total for part in alike]
    whole = [totals[kind] for kind in kinds]
    if memory.recompute_granularity == "full":
        return _full(arch, config, whole, memory)
    everything = sum(whole)
    if memory.recompute_granularity == "selective":
        selected = [_selected(part, memory.recompute_modules) for part in alike]
        gone = [selected[kind] for kind in kinds]
        return Kept(everything - sum(gone), max(gone, default=0.0))
    return Kept(everything, 0.0)


@lru_cache(maxsize=1024)
def _kinds(arch: Architecture, layers: tuple[int, ...], frozen: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the kind of each of these layers, counted from 0, and one layer of each kind: they are alike."""
    kinds = [
        (arch.has_experts(number), arch.mixers[number] if arch.mixers else None, frozen and not number)
        for number in layers
    ]
    examples = dict(zip(kinds, layers, strict=True))
    order = list(examples)
    return tuple(map(order.index, kinds)), tuple(examples.values())


def _full(arch: Architecture, config: Config, layers: list[float], memory: Memory) -> Kept:
    """Return what is kept of layers, of which each has this many elements, where whole layers are recomputed."""
    tp = config.parallel.tensor_model_parallel_size
    entry = arch.hidden_size / (tp if config.parallel.sequence_parallel else 1)
    count = memory.recompute_num_layers
    if memory.recompute_method == "uniform":  # groups of layers: the input of each, and all of the one at work
        groups = [layers[first : first + count] for first in range(0, len(layers), count)]
        return Kept(len(groups) * entry, max(map(sum, groups)))
    again, rest = layers[:count], layers[count:]
    held = len(again) * entry + sum(rest)
    return Kept(held, max(again, default=0.0))


def _selected(part: Layer, modules: tuple[str, ...]) -> float:
    """Return the elements that need not be kept, because these modules are recomputed."""
    gone = 0.0
    if "core_attn" in modules:
        gone += part.core
    if "mlp" in modules and not part.experts:
        gone += part.mlp
    if "shared_experts" in modules and part.experts:
        gone += part.mlp
    if "moe" in modules:
        gone += part.experts + part.gates + part.mlp * bool(part.experts)
    elif "moe_act" in modules:
        gone += part.gates
    if "layernorm" in modules:
        gone += part.norm_outputs
    return gone


def working(arch: Architecture, config: Config, *, saved: bool = True) -> float:
    """Return the elements of a token that live for a moment: the widest products of a layer, or their gradients.

    `saved`: what autograd keeps is counted elsewhere.
    """
    tp, mixture = config.parallel.tensor_model_parallel_size, arch.experts
    own = 1 / tp if config.parallel.sequence_parallel else 1.0
    halves = 2 * (arch.mlp_matrices - 1)
    if adapters.targets(config) & _INTO_MLP:  # the product of a frozen weight, an adapter's, their sum
        halves = 6
    widest = max(halves * arch.ffn_hidden_size, 2 * arch.num_attention_heads * arch.head_dim) / tp
    routing = 0.0
    if mixture is not None:
        copies = mixture.top_k * own * (IMBALANCE if config.parallel.expert_model_parallel_size > 1 else 1)
        routed = arch.hidden_size * _routed(config, mixture.top_k * own, copies, saved=saved)
        widest = max(widest, halves * mixture.ffn_hidden_size * copies, routed)
        routing = _ROUTING * mixture.count * own / itemsize(config)
    heads = 2 * gathered_product(arch, tp)  # as it arrives, and in the order of its rows
    return 2 * arch.hidden_size + max(widest, heads) + routing


def _routed(config: Config, sent: float, arrived: float, *, saved: bool) -> float:
    """Return how many copies of a token Megatron-Core holds when it puts the results of experts in their old order.

    MoELayer.forward (transformer/moe/moe_layer.py) keeps tokens as they are sent, and as they arrive, until it returns;
    routed_experts_compute keeps them sorted by expert, which autograd saves for the backward pass, and the result; and
    combine_preprocess (token_dispatcher.py) sorts that again. Where experts are sliced, it makes a copy in the dtype of
    the router's weights, and sums that over the slices. Gradients are fewer.
    """
    parallel = config.parallel
    slices = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    gathered = arrived * slices
    held = sent + arrived * (parallel.expert_model_parallel_size > 1) + (2 if saved else 3) * gathered
    if slices == 1:
        return held
    item = itemsize(config)
    wider = {"float32": 4, "float64": 8}.get(config.moe.router_dtype or "", item) / item
    return held + wider * (gathered * (wider != 1) + arrived)


def itemsize(config: Config) -> int:
    """Return the bytes of an element of the trained model."""
    return 4 if config.model.dtype == "float32" else 2
