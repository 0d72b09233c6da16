"""Everything that this room uses of Megatron-Core and torch.distributed beyond their public interfaces.

No other file of this room names one of their attributes with a leading underscore or replaces one of Megatron's
functions. Each function here says what it relies on, why, since which version, and what to check on an upgrade;
``tests/torch/policy/test_compat.py`` lists the versions that these names were checked against and finds each of them in
the sources of the installed one.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]  # makes a function from the one that it stands for


class HiddenStates:
    """A mixin that makes a GPTModel return its hidden states [T, 1, H] in place of logits or a loss.

    Relies on ``GPTModel._postprocess(hidden_states, ...)`` being the last step of ``forward`` (megatron-core 0.16 to
    0.19); with ``post_process=False`` the model would also leave out the final norm and the output layer's weight. It
    stands before GPTModel in the list of base classes. On an upgrade check that ``forward`` still returns its result.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def set_rotary(model: Any, rotary: torch.nn.Module) -> None:
    """Replace the rotary embedding of a GPTModel by `rotary`.

    Relies on the attribute ``GPTModel.rotary_pos_emb``, of which ``forward`` calls ``get_rotary_seq_len(...)`` and then
    the module itself (0.16 to 0.19): Megatron's own has no way to take positions other than 0..T-1. On an upgrade check
    what ``GPTModel._preprocess`` calls it with.
    """
    model.rotary_pos_emb = rotary


def bind_reduce_scatter(function: Any) -> None:
    """Have Megatron scatter sums with `function`, which takes the arguments of torch's ``reduce_scatter_tensor``.

    Relies on the name ``dist_reduce_scatter_func``, under which three modules keep torch's function from their import
    on (0.16 to 0.19). On an upgrade look for other modules that keep a collective of torch under a name of their own.
    """
    for module in (mappings, layers, param_and_grad_buffer):
        module.dist_reduce_scatter_func = function


class ReplayableRouter(TopKRouter):
    """Megatron's router, with a replay of the caller's making and without the update of an expert bias.

    Relies on ``TopKRouter.router_replay``, whose ``get_replay_topk`` Megatron calls to choose experts, scores first
    (0.16 to 0.19): the setting ``moe_enable_routing_replay`` would make Megatron's own, which replays whole layers and
    knows no token without a choice. On an upgrade check ``moe_utils.topk_routing_with_score_function``.
    """

    def replay(self, with_: Any) -> None:
        """Choose experts by `with_`, an object with Megatron's method ``get_replay_topk``."""
        self.router_replay = with_

    def _apply_expert_bias(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no family here has such a bias.

        Megatron's method (0.16 to 0.19) does nothing without a bias either, but it is compiled first.
        """


def drop_quantized_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the copies in 8 bits that layers of Transformer Engine keep of their weights: one or two bytes a weight.

    Megatron has them kept from one micro-batch to the next, and made anew before the first of every pass. They would
    also stay between passes, where nothing reads them: in the memory that engines are to have. Relies on the dictionary
    ``_fp8_workspaces``, in which a layer looks before it quantizes its weight (Transformer Engine 2.17 to 2.20;
    ``tests/lanes/test_transformer_engine.py`` looks it up in the sources). On an upgrade look for other such caches.
    """
    for chunk in chunks:
        for module in chunk.modules():
            vars(module).get("_fp8_workspaces", {}).clear()


def accumulate_in_buffers(chunks: Iterable[torch.nn.Module]) -> None:
    """Have layers of Transformer Engine add gradients of weights to the gradient buffers in their matrix products.

    Else each product is rounded to the weights' 16 bits, and added in a kernel of its own. Megatron's setting for this,
    ``gradient_accumulation_fusion``, holds for all layers of a model, and its own ``ColumnParallelLinear`` refuses it
    without an extension of Apex; that is the output layer, of which we use the weight alone. So layers are told by the
    attribute ``fuse_wgrad_accumulation``, which they read in every forward pass (Transformer Engine 2.17 to 2.20;
    ``tests/lanes/test_transformer_engine.py`` looks it up in the sources). They add to ``main_grad`` of a weight, and
    say so by ``grad_added_to_main_grad``, after which Megatron's DistributedDataParallel ignores what autograd has for
    it (0.16 to 0.19): no weight of such a layer may be used outside of it.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 (an attribute torch lacks)


def drop_unused_gradients() -> None:
    """Free what layers give to autograd in place of gradients that are in the buffers already.

    Transformer Engine keeps one tensor of every shape of weights for that, which holds nothing, for the rest of the
    process: up to a gigabyte, in memory that engines are to have. Relies on the dictionary ``_dummy_wgrads`` of its
    ``pytorch.module.base``, in which it looks before it makes one (2.17 to 2.20; looked up as above).
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


def allow_routers_without_transformer_engine() -> None:
    """Define a name that Megatron's router reads, where Transformer Engine is not installed.

    ``moe_utils`` asks whether ``te_general_gemm`` is None, and 0.16.1 leaves the name undefined where its import of
    Transformer Engine fails. Later versions define it. Delete this with the support of 0.16.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def moe_submodules(spec: Any) -> Any:
    """Return the submodules of a specification that ``get_moe_module_spec`` made.

    0.16 returns a ModuleSpec. 0.19 returns a builder, a partial application of the layer's class, which has them as the
    keyword argument ``submodules``. Both are read here, since the router has to be replaced in either.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def process_groups() -> list[Any]:
    """Return all process groups of this process, the default one included.

    Relies on ``torch.distributed.distributed_c10d._world.pg_map`` (read in torch 2.13). Megatron only forgets its
    groups when it destroys a layout: their threads would go on, and it has no list of those that it made more than
    once.
    """
    return list(dist.distributed_c10d._world.pg_map)


def default_store() -> dist.Store:
    """Return the key-value store of the default process group.

    Relies on ``torch.distributed.distributed_c10d._get_default_store()`` (read in torch 2.13); no public function gives
    the store of a group that was made from MASTER_ADDR and MASTER_PORT.
    """
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def known_shapes(from_previous: Iterable[list[int]], from_next: Iterable[list[int]]) -> Iterator[None]:
    """Give the stages of a pipeline the shapes of what they receive in this block, in order, from either neighbour.

    Relies on ``P2PCommunicator._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)`` being
    asked once before every exchange, and returning the shapes of what comes from the previous and the next stage (0.16
    to 0.19). It would send each shape ahead of its tensor and wait for it on the host. On an upgrade check this, and
    that the schedules receive micro-batches in the order of ``get_schedule_table``.
    """
    previous, following, nothing = iter(from_previous), iter(from_next), [0, 0, 0]

    def known(
        self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(previous) if recv_prev else nothing, next(following) if recv_next else nothing

    asked = P2PCommunicator._communicate_shapes
    P2PCommunicator._communicate_shapes = known
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes = asked


def wrap_group_maker(wrapper: Wrapper) -> None:
    """Replace the function that makes each of Megatron's process groups.

    Relies on ``parallel_state.create_group(ranks, ...)`` (0.16 to 0.19). On an upgrade check that
    ``initialize_model_parallel`` makes all groups by it.
    """
    parallel_state.create_group = wrapper(parallel_state.create_group)


def has_groups() -> bool:
    """Return False until Megatron makes the first group of a layout, and after it has destroyed one.

    Relies on ``parallel_state._global_process_group_list`` being None then (0.16 to 0.19): no public function tells
    while groups are being made.
    """
    return parallel_state._global_process_group_list is not None


def change_layout(groups: dict[str, Any] | None) -> dict[str, Any]:
    """Give Megatron the groups, sizes and buffers of a layout, or none of any for None; return those that it had.

    Relies on ``parallel_state`` having all of them in globals with names in capitals, and in
    ``_global_process_group_list`` (0.16 to 0.19). On an upgrade check that ``initialize_model_parallel`` sets no other.
    """
    held = vars(parallel_state)
    names = [one for one in held if one.startswith("_") and (one.isupper() or one == "_global_process_group_list")]
    before = {name: held[name] for name in names}
    if groups is None:
        parallel_state.destroy_model_parallel()
    else:
        held.update(groups)
    return before


def wrap_exchanges_of_tokens(gather: Wrapper, reduce_scatter: Wrapper) -> None:
    """Replace the collectives by which Megatron gathers tokens and scatters their sums, pieces of unequal length too.

    Relies on ``mappings._gather_along_first_dim(input_, group, output_split_sizes)`` and on
    ``mappings._reduce_scatter_along_first_dim(input_, group, input_split_sizes)`` (0.16 to 0.19). On an upgrade check
    that nothing imports them by name before they are replaced.
    """
    mappings._gather_along_first_dim = gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = reduce_scatter(mappings._reduce_scatter_along_first_dim)


def replace_move_to_cpu(function: Callable[..., Any]) -> None:
    """Replace what moves the sizes of an exchange of tokens to the CPU.

    Relies on ``token_dispatcher.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)`` (0.16 to 0.19), which would
    use a CUDA stream.
    """
    token_dispatcher.maybe_move_tensor_to_cpu = function


def replace_cuda_random_states(function: Callable[..., None]) -> None:
    """Replace what reads and sets the random state of a GPU where layers are computed again.

    Relies on ``random._get_cuda_rng_state`` and ``random._set_cuda_rng_state`` of ``tensor_parallel`` (0.16 to 0.19).
    """
    random._get_cuda_rng_state = random._set_cuda_rng_state = function


def remember_factories() -> None:
    """Let ``with torch.device(...)`` know torch's functions that make tensors, also after these are replaced.

    Relies on ``torch.utils._device._device_constructors()`` keeping what it finds when it is first called (read in
    torch 2.13).
    """
    torch.utils._device._device_constructors()


def free_workspaces() -> None:
    """Return to torch's allocator the memory that cuBLAS works in, which the next matrix product takes anew.

    A thread keeps 32 MiB for each of its streams on an H100, 8 MiB on older GPUs. Relies on
    ``torch._C._cuda_clearCublasWorkspaces()``, which torch's own CUDA graphs call (torch 2.11 to 2.14).
    """
    torch._C._cuda_clearCublasWorkspaces()
