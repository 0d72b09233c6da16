"""A whole step of the trainer on a GPU, with tensors that have a device, a dtype and a shape, but no memory.

Megatron's layers with our attention, log-probs and loss, forward and backward; its buffers of gradients; its
optimizers, shared by data-parallel ranks and not, on torch's fused Adam; and the clipping of gradients. torch checks
each call of a kernel for names, shapes, dtypes and devices. Collectives are those of torch's backend "fake", which
moves nothing. What depends on values is given: the gradient's norm, which is 1, and that all of it is finite. Nothing
is compiled, which would need a GPU (TORCHDYNAMO_DISABLE).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture
from gspo_hpc.ops import varlen
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.policy import passes, schedule
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks
from tests.torch.ops.test_fake_cuda import GPU, Table, no_memory

__all__ = ["no_memory"]  # no tensor of these tests has any
pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_TORCH" not in os.environ, reason="bash tools/lanes.sh torch")
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 304,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
TOKENS, RESPONSES = 25, 12  # of the segment table


@pytest.fixture(params=[1, 2], ids=["alone", "of two"])
def world(request: pytest.FixtureRequest, no_memory: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The first of so many data-parallel ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(varlen, "use_newest_kernel", lambda device: None)

    def gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    def moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                owner.register_buffer(name, buffer.to(device), persistent=False)
            for name, parameter in owner.named_parameters(recurse=False):
                owner.register_parameter(name, torch.nn.Parameter(parameter.detach().to(device)))
                made = vars(getattr(owner, name))
                made.update({key: value for key, value in vars(parameter).items() if key not in made})  # its marks
        return module

    monkeypatch.setattr(torch.nn.Module, "to", moved)  # torch cannot exchange parameters without memory
    monkeypatch.setattr(dist, "all_gather_object", gather_object)  # names of parameters, pickled
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather_object)
    # Where code asks a GPU for values.
    answers: dict[str, Any] = {
        "item": lambda x: 1.0 if x.is_floating_point() else 0,
        "__float__": lambda x: 1.0,
        "__bool__": lambda x: False,
        "tolist": lambda x: torch.ones(x.shape).tolist(),
    }

    def answer(name: str) -> None:
        real = getattr(Tensor, name)

        def answered(x: Tensor) -> Any:
            with unset_fake_temporarily():
                return answers[name](x) if isinstance(x, FakeTensor) else real(x)

        monkeypatch.setattr(Tensor, name, answered)

    for name in answers:
        answer(name)
    apart = SimpleNamespace(wait=lambda: None)  # collectives that are not made together, which has no fake
    monkeypatch.setattr(param_and_grad_buffer, "_coalescing_manager", lambda *a, **k: contextlib.nullcontext(apart))
    monkeypatch.setattr(passes, "any_rank", lambda value, device: value)
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield request.param
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def batch() -> PackedBatch:
    def some(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=GPU)

    table: Any = Table()
    return PackedBatch(
        tokens=some(TOKENS),
        positions=some(TOKENS),
        segments=table,
        head_index=some(RESPONSES),
        cu_seqlens=some(4, dtype=torch.int32),
        targets=some(RESPONSES),
        seq_ids=some(RESPONSES),
        loss_mask=some(RESPONSES, dtype=torch.bool),
        advantages=some(3, dtype=torch.float32),
        rollout_logprobs=some(RESPONSES, dtype=torch.float32),
        old_logprobs=some(RESPONSES, dtype=torch.float32),
        reference_logprobs=None,
        keys=((0, 0), (0, 1), (1, 0)),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "shared"])
def test_a_step(world: int, dtype: str, distributed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = from_dict(
        {
            "cluster": {"platform": "cuda", "nodes": 1, "gpus_per_node": world},
            "model": {"path": str(tmp_path), "dtype": dtype, "layers": "torch"},
            "optimizer": {"distributed": distributed, "clip_grad": 0.5},
        }
    )
    ranks = Ranks(0, world, 0, GPU, 0, world, 0, 1, 0, 1, 0, 1, 1)
    policy = Policy(architecture.read(tmp_path), config, ranks)
    policy.make_optimizer()
    monkeypatch.setattr(passes, "_forward_flops", lambda policy, batches: 0)  # it reads the segments
    steps: list[str] = []
    fused = torch._fused_adam_ if not hasattr(torch, "_fused_adamw_") else torch._fused_adamw_

    def adam(*args: Any, **kwargs: Any) -> Any:
        steps.append("adam")
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", adam)
    monkeypatch.setattr(torch, "_fused_adam_", adam)
    result = schedule.train_step(policy, [batch()], algorithms.resolve(config.algorithm), 3.0, 1.0)
    assert not result.skipped and result.grad_norm == 1.0 and steps
    for chained in policy.optimizer.chained_optimizers:
        masters = [p for group in chained.optimizer.param_groups for p in group["params"]]
        assert masters and all(p.dtype == torch.float32 and p.device == GPU for p in masters)
        for parameter in masters:
            state = chained.optimizer.state[parameter]
            assert all(state[key].shape == parameter.shape for key in ("exp_avg", "exp_avg_sq"))
    whole = sum(p.numel() for p in policy.parameters())
    groups = [group for chained in policy.optimizer.chained_optimizers for group in chained.optimizer.param_groups]
    held = sum(parameter.numel() for group in groups for parameter in group["params"])
    assert held == whole if not distributed else held <= -(-whole // world) + 4096
