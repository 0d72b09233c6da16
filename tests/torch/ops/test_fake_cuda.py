"""The kernels' calls for GPUs, with tensors that have a device, a dtype and a shape, but no memory.

torch checks of each call what it knows before it starts a kernel: names and types of arguments, shapes, dtypes,
devices. `bash tools/lanes.sh torch` runs forward and backward passes on builds for CUDA; on a build for the CPU only
the forward pass of the variable-length kernel can run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel

from gspo_hpc.algorithms.loss import policy_loss
from gspo_hpc.algorithms.objective import Objective, Ratio
from gspo_hpc.ops import attention, varlen
from gspo_hpc.ops.batch import PackedBatch
from gspo_hpc.ops.logprobs import token_logprobs

HAS_CUDA = torch.version.cuda is not None  # autograd asks the build for the device, also of tensors without memory
GPU = torch.device("cuda", 0)
WIDE = torch.bfloat16
ROWS = [[4, 6, 10, 5, 4], [4, 6, 15, 7, 4], [22, 3, 25, 0, 4]]  # of the segment table
TOKENS, HEADS, GROUPS, SIZE, VOCABULARY = 25, 4, 2, 64, 300


class Table:
    """The segment table, whose values attention reads on the CPU."""

    def contiguous(self) -> Table:
        return self

    def numpy(self) -> Any:
        return np.array(ROWS, dtype=np.int32)


def taken(x: Tensor, index: Any) -> Tensor:
    """Index a tensor by functions: a build for the CPU refuses to index what is on a GPU, before it looks at it."""
    dimension = 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is None:
            x = x.unsqueeze(dimension)
        elif isinstance(part, slice):
            start, stop, step = part.indices(x.shape[dimension])
            assert step == 1
            x = x.narrow(dimension, start, max(0, stop - start))
        elif isinstance(part, Tensor):
            x = x.index_select(dimension, part)
        else:
            x, dimension = x.select(dimension, part), dimension - 1
        dimension += 1
    return x


def planned(function: Any) -> Any:
    """Return a function that plans a call with real numbers, and gives its tensors on the GPU without them."""

    def plan(table: bytes, share: tuple[int, int], device: torch.device) -> Any:
        with unset_fake_temporarily():
            found = function.__wrapped__(table, share, torch.device("cpu"))
        return placed(found)

    return plan


def placed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=GPU)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: placed(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return type(value)(map(placed, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(varlen, "sequences", planned(varlen.sequences))
    monkeypatch.setattr(attention, "_plan", planned(attention._plan))
    # Where code asks a GPU for values: all gradients count.
    monkeypatch.setattr(Tensor, "nonzero", lambda x: torch.arange(x.shape[0], device=x.device)[:, None])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else torch makes a tensor on it first
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    if not HAS_CUDA:
        monkeypatch.setattr(Tensor, "__getitem__", taken)
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # to choose among its kernels, torch asks the GPU for its kind
        yield


def test_the_build_is_the_one_that_was_asked_for() -> None:
    asked = os.environ.get("GSPO_HPC_LANE_TORCH")
    assert asked is None or (HAS_CUDA and torch.__version__.partition("+")[0] == asked)


def made(*shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype, requires_grad=HAS_CUDA)


def require_gradients(out: Tensor, *leaves: Tensor) -> None:
    """Run the backward pass, if this build has one for GPUs: each leaf gets a gradient like itself."""
    if HAS_CUDA:
        for leaf, gradient in zip(leaves, torch.autograd.grad(out.float().sum(), leaves), strict=True):
            assert (gradient.shape, gradient.dtype, gradient.device) == (leaf.shape, leaf.dtype, GPU)


def in_a_lane(test: Any) -> Any:
    """Collect this test with a build for CUDA only: one for the CPU refuses numbers beside tensors on a GPU."""
    test.__test__ = HAS_CUDA
    return test


@pytest.mark.parametrize("share", [(0, 1), (1, 2)], ids=["whole", "context parallel"])
@pytest.mark.parametrize("attend", [varlen.attend, attention.attend] if HAS_CUDA else [varlen.attend])
@pytest.mark.parametrize("groups", [GROUPS, HEADS], ids=["grouped", "as many"])
def test_attention(attend: Any, groups: int, share: tuple[int, int]) -> None:
    with unset_fake_temporarily():
        queries = len(attention.own_tokens(torch.tensor(ROWS), *share)) + 1  # a row of padding
    q, k, v = made(queries, HEADS, SIZE), made(TOKENS, groups, SIZE), made(TOKENS, groups, SIZE)
    assert varlen.available(q.device, q.dtype)
    out = attend(q, k, v, Table(), SIZE**-0.5, share)
    assert (out.shape, out.dtype, out.device) == (q.shape, WIDE, GPU)
    require_gradients(out, q, k, v)


@in_a_lane
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])
def test_logprobs(dtype: torch.dtype, entropy: bool) -> None:
    hidden, weight = made(40, 32, dtype=dtype), made(VOCABULARY + 4, 32, dtype=dtype)
    targets = torch.zeros(40, dtype=torch.int64, device=GPU)
    options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 16, "vocab_size": VOCABULARY}
    logprobs, found = token_logprobs(hidden, weight, targets, with_entropy=entropy, check=False, **options)
    assert (logprobs.shape, logprobs.dtype, logprobs.device) == (targets.shape, torch.float32, GPU)
    assert (found is not None) == entropy
    require_gradients(logprobs, hidden, weight)


@in_a_lane
@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "token"])
def test_loss(ratio: Ratio) -> None:
    """From the log-probs on; all that it needs of a batch is on the GPU."""
    leaf = made(12, dtype=torch.float32)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=GPU)

    batch = PackedBatch(
        tokens=some(16, dtype=torch.int64),
        positions=some(16, dtype=torch.int64),
        segments=torch.tensor(ROWS),
        head_index=some(12, dtype=torch.int64),
        cu_seqlens=some(4, dtype=torch.int32),
        targets=some(12, dtype=torch.int64),
        seq_ids=some(12, dtype=torch.int64),
        loss_mask=some(12, dtype=torch.bool),
        advantages=some(3),
        rollout_logprobs=some(12),
        old_logprobs=some(12),
        reference_logprobs=some(12),
        keys=((0, 0), (0, 1), (1, 0)),
    )
    result = policy_loss(leaf, batch, Objective(ratio, 0.1, 0.1, "sequence", True, 0.1), denominator=3.0)
    assert all(value.device == GPU for value in [result.loss, *result.sums.values(), *result.maxima.values()])
    require_gradients(result.loss, leaf)
