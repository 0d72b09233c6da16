"""The private names of Megatron-Core and torch that policy.compat relies on."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gspo_hpc.policy import compat
from tests.sources import missing, require_checked

MEGATRON = ("0.16.1", "0.19.2")
TORCH = ("2.13.0",)

_CORE, _MOE = "megatron/core", "megatron/core/transformer/moe"
COMPAT = {
    f"{_CORE}/models/gpt/gpt_model.py: GPTModel._postprocess": ("self", "hidden_states"),
    f"{_CORE}/models/gpt/gpt_model.py: GPTModel.rotary_pos_emb": (),
    f"{_CORE}/models/common/embeddings/rotary_pos_embedding.py: RotaryEmbedding.get_rotary_seq_len": ("self",),
    f"{_MOE}/router.py: TopKRouter.router_replay": (),
    f"{_MOE}/router.py: TopKRouter._apply_expert_bias": ("self", "routing_map"),
    f"{_MOE}/router_replay.py: RouterReplay.get_replay_topk": (
        *("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
    ),
    f"{_MOE}/moe_utils.py: te_general_gemm": (),
    f"{_CORE}/models/gpt/moe_module_specs.py: get_moe_module_spec": ("use_te", "num_experts", "moe_grouped_gemm"),
    f"{_CORE}/pipeline_parallel/p2p_communication.py: P2PCommunicator._communicate_shapes": (
        *("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
    ),
    f"{_CORE}/pipeline_parallel/schedules.py: get_schedule_table": (
        *("num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"),
    ),
    f"{_CORE}/parallel_state.py: create_group": ("ranks", "timeout", "backend", "pg_options"),
    f"{_CORE}/parallel_state.py: _global_process_group_list": (),
    f"{_CORE}/tensor_parallel/random.py: _get_cuda_rng_state": ("device",),
    f"{_CORE}/tensor_parallel/random.py: _set_cuda_rng_state": ("new_state",),
    f"{_CORE}/tensor_parallel/mappings.py: _gather_along_first_dim": ("input_", "group", "output_split_sizes"),
    f"{_CORE}/tensor_parallel/mappings.py: _reduce_scatter_along_first_dim": ("input_", "group", "input_split_sizes"),
    f"{_CORE}/tensor_parallel/mappings.py: dist_reduce_scatter_func": (),
    f"{_CORE}/tensor_parallel/layers.py: dist_reduce_scatter_func": (),
    f"{_CORE}/distributed/param_and_grad_buffer.py: dist_reduce_scatter_func": (),
    f"{_MOE}/moe_utils.py: maybe_move_tensor_to_cpu": ("tensor", "as_numpy", "record_stream"),
    f"{_MOE}/token_dispatcher.py: maybe_move_tensor_to_cpu": (),  # imported there, where it is replaced
}


def test_names_of_megatron() -> None:
    root = require_checked(["megatron-core"], MEGATRON, "gspo_hpc/policy/compat.py", COMPAT)
    assert missing(root, COMPAT) == []


def test_weights_in_8_bits_are_dropped() -> None:
    """Of every layer that keeps some, at any depth; one that quantizes anew has its dictionary still."""
    inner, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner._fp8_workspaces = kept = {"weight": torch.zeros(2)}  # type: ignore[assignment]
    compat.drop_quantized_weights([torch.nn.Sequential(torch.nn.Sequential(inner), plain)])
    assert inner._fp8_workspaces is kept and not kept


def test_names_of_torch() -> None:
    names = {
        "torch/distributed/distributed_c10d.py: _World.pg_map": ("self",),
        "torch/distributed/distributed_c10d.py: _world": (),
        "torch/distributed/distributed_c10d.py: _get_default_store": (),
        "torch/utils/_device.py: _device_constructors": (),
        "torch/_C/__init__.pyi: _cuda_clearCublasWorkspaces": (),  # builds for the CPU name it, and leave it out
    }
    root = require_checked(["torch"], TORCH, "gspo_hpc/policy/compat.py", names)
    assert missing(root, names) == []
    assert not inspect.signature(dist.distributed_c10d._get_default_store).parameters


def test_a_name_that_is_gone_or_takes_something_else_is_found() -> None:
    root = require_checked(["megatron-core"], MEGATRON, "gspo_hpc/policy/compat.py", COMPAT)
    file = f"{_CORE}/parallel_state.py"
    wrong = {f"{file}: no_such_group": (), f"{file}: create_group": ("timeout",), "megatron/none.py: f": ()}
    gone, other, absent = missing(root, wrong)
    assert (gone, absent) == (f"{file}: no_such_group is not there", "megatron/none.py: f is not there")
    assert other.startswith(f"{file}: create_group takes ('ranks', 'timeout', ")


def test_submodules_of_both_forms_of_a_specification() -> None:
    parts = SimpleNamespace(router=None)
    assert compat.moe_submodules(SimpleNamespace(submodules=parts)) is parts
    assert compat.moe_submodules(partial(dict, submodules=parts)) is parts


def test_a_model_returns_its_hidden_states() -> None:
    class Model(compat.HiddenStates):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self._postprocess(hidden, None, labels=None)

    hidden = torch.ones(3, 1, 2)
    assert Model().forward(hidden) is hidden
