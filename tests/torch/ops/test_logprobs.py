"""Chunked log-probs against log_softmax: values, gradients, memory, and two vocabulary-parallel ranks."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_hpc.ops import logprobs
from gspo_hpc.ops.logprobs import token_logprobs
from tools.acceptance.references import log_softmax as naive


def inputs(r: int, h: int, v: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [r, h], weight [v, h], targets [r]; logits of a few units."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(r, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=generator, dtype=torch.float64) * 2 / h**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (r,), generator=generator)


def gradients(values: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(values, leaves, upstream.to(values.dtype)))


@given(
    r=st.integers(0, 9),
    h=st.integers(1, 6),
    v=st.integers(1, 23),
    temperature=st.sampled_from([1.0, 0.5, 1.7]),
    chunk=st.sampled_from([None, 1, 2, 4]),
    block_bytes=st.sampled_from([8, 64, 200, 1 << 20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_equals_log_softmax_for_all_blocks(
    r: int, h: int, v: int, temperature: float, chunk: int | None, block_bytes: int, seed: int
) -> None:
    hidden, weight, targets = inputs(r, h, v, seed, torch.float64)
    upstream = torch.randn(r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    upstream[::3] = 0.0  # those tokens are left out of the backward pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.BLOCK_BYTES, "cpu", block_bytes)
        values, entropy = token_logprobs(
            hidden, weight, targets, temperature=temperature, chunk_tokens=chunk, with_entropy=True
        )
        ours = gradients(values, [hidden, weight], upstream)
    expected, expected_entropy = naive(hidden, weight, targets, temperature)
    theirs = gradients(expected, [hidden, weight], upstream)
    assert entropy is not None and not entropy.requires_grad and values.dtype == torch.float64
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-11)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.BLOCK_BYTES, "cpu", 8 * 2 * 3)
    hidden, weight, targets = inputs(5, 3, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.8, chunk_tokens=2, vocab_size=7)[0], (hidden, weight)
    )


def test_the_entropy_has_its_gradient_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside that of log-probs, alone, and for some tokens only; blocks are cut in both directions."""
    monkeypatch.setitem(logprobs.BLOCK_BYTES, "cpu", 8 * 2 * 3)
    hidden, weight, targets = inputs(5, 3, 7, dtype=torch.float64)

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(
            h, w, targets % 6, temperature=0.8, chunk_tokens=2, vocab_size=6, with_entropy=True, entropy_gradient=True
        )

    assert torch.autograd.gradcheck(both, (hidden, weight))
    for first, second in ((1.0, 0.5), (0.0, 1.0), (1.0, 0.0)):
        upstream = torch.tensor([0.0, first, 0.0, first, first]), torch.tensor([second, second, 0.0, 0.0, second])
        found = []
        for values in (both(hidden, weight), naive(hidden, weight[:6], targets % 6, 0.8)):
            total = sum((v * u).sum() for v, u in zip(values, upstream, strict=True) if v is not None)
            assert isinstance(total, Tensor)
            found.append(torch.autograd.grad(total, [hidden, weight]))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_fp32_is_within_1e_5() -> None:
    hidden, weight, targets = inputs(700, 64, 5000)
    values, entropy = token_logprobs(hidden, weight, targets, with_entropy=True)
    expected, expected_entropy = naive(hidden, weight, targets)
    assert values.dtype == torch.float32 and entropy is not None
    assert (values - expected).abs().max() <= 1e-5
    assert (entropy - expected_entropy).abs().max() <= 1e-5
    upstream = torch.randn(700, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        gradients(values, [hidden, weight], upstream), gradients(expected, [hidden, weight], upstream), strict=True
    ):
        assert (ours - theirs).abs().max() <= 1e-5


def test_bf16_inputs_are_accumulated_in_fp32() -> None:
    hidden, weight, targets = inputs(600, 32, 900, dtype=torch.bfloat16)
    values, _ = token_logprobs(hidden, weight, targets, chunk_tokens=64)
    expected, _ = naive(hidden, weight, targets)
    assert values.dtype == torch.float32
    assert (values - expected).abs().max() <= 1e-5  # the inputs are rounded, nothing after them is
    upstream = torch.ones(600)
    grad_hidden, grad_weight = gradients(values, [hidden, weight], upstream)
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    for ours, theirs in zip((grad_hidden, grad_weight), gradients(expected, [hidden, weight], upstream), strict=True):
        # Both are rounded to bf16 once, at the end.
        assert torch.equal(ours, theirs) or (ours - theirs).abs().max() <= 2**-8 * theirs.abs().max()


def test_extreme_logits() -> None:
    weight = torch.tensor([[-1e4], [0.0], [1e4], [3e4]])
    hidden = torch.ones(4, 1)
    values, entropy = token_logprobs(hidden, weight, torch.arange(4), with_entropy=True)
    assert values.tolist() == [-4e4, -3e4, -2e4, 0.0]
    assert entropy is not None and entropy.tolist() == [0.0] * 4
    flat, uniform = token_logprobs(torch.full((1, 1), 1e4), torch.ones(5, 1), torch.tensor([3]), with_entropy=True)
    assert flat.item() == pytest.approx(-math.log(5)) and uniform is not None
    assert uniform.item() == pytest.approx(math.log(5), rel=1e-6)


@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_rows_beyond_the_true_vocabulary_have_no_probability(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.BLOCK_BYTES, "cpu", block_bytes)
    hidden, weight, targets = inputs(6, 4, 11, dtype=torch.float64)
    with torch.no_grad():
        weight[9:] = math.nan
    values, entropy = token_logprobs(hidden, weight, targets % 9, vocab_size=9, with_entropy=True)
    expected, expected_entropy = naive(hidden, weight[:9], targets % 9)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    upstream = torch.ones(6)
    ours = gradients(values, [hidden, weight], upstream)
    theirs = gradients(expected, [hidden, weight], upstream)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1][:9], theirs[1][:9])
    assert (ours[1][9:] == 0).all()


@pytest.mark.parametrize("target, size", [(-1, None), (11, None), (9, 9)])
def test_a_target_outside_the_vocabulary_is_refused(target: int, size: int | None) -> None:
    hidden, weight, targets = inputs(3, 4, 11)
    targets[:] = 2
    targets[1] = target
    with pytest.raises(ValueError, match="the vocabulary has the tokens 0 to"):
        token_logprobs(hidden, weight, targets, vocab_size=size)


class Reads(TorchDispatchMode):
    """Counts how often a value of a tensor is read, for which a GPU is waited for."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(function) or "nonzero" in str(function)
        return function(*args, **kwargs or {})


def test_no_micro_batch_waits_for_its_forward_pass() -> None:
    """The targets of all are checked together, before the first; to read a value in each drains the GPU's queue."""
    hidden, weight, targets = inputs(5, 4, 11)
    with Reads() as reads:
        token_logprobs(hidden, weight, targets, with_entropy=True, check=False)
    assert reads.count == 0
    reading: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patched:
        as_list = Tensor.tolist
        patched.setattr(Tensor, "tolist", lambda tensor: reading.append(tensor) or as_list(tensor))
        logprobs.check_targets([targets, targets[:0], targets + 1], 12)
        with pytest.raises(ValueError, match="targets are -1 to 12, the vocabulary has the tokens 0 to 11"):
            logprobs.check_targets([targets * 0 - 1, targets * 0 + 12], 12)
    assert len(reading) == 2


def test_no_tokens() -> None:
    hidden, weight, targets = inputs(0, 4, 11)
    values, entropy = token_logprobs(hidden, weight, targets, with_entropy=True)
    assert values.shape == (0,) and entropy is not None and entropy.shape == (0,)
    grad_hidden, grad_weight = gradients(values, [hidden, weight], torch.zeros(0))
    assert grad_hidden.shape == (0, 4) and (grad_weight == 0).all()


def test_zero_gradients_stay_zero_and_nan_ones_show() -> None:
    hidden, weight, targets = inputs(5, 4, 11)
    values, _ = token_logprobs(hidden, weight, targets)
    grad_hidden, grad_weight = torch.autograd.grad(values, [hidden, weight], torch.zeros(5), retain_graph=True)
    assert (grad_hidden == 0).all() and (grad_weight == 0).all()
    upstream = torch.tensor([0.0, 1.0, math.nan, 0.0, 0.0])
    grad_hidden, grad_weight = torch.autograd.grad(values, [hidden, weight], upstream)
    assert grad_hidden[2].isnan().all() and grad_weight.isnan().any()
    assert grad_hidden[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_asked_for(frozen: int) -> None:
    hidden, weight, targets = inputs(5, 4, 11, dtype=torch.float64)
    expected = gradients(naive(hidden, weight, targets)[0], [hidden, weight], torch.ones(5))
    leaves = [hidden, weight]
    leaves[frozen].requires_grad_(False)
    values, _ = token_logprobs(hidden, weight, targets)
    torch.testing.assert_close(gradients(values, [leaves[1 - frozen]], torch.ones(5))[0], expected[1 - frozen])


def test_without_entropy_there_is_none() -> None:
    assert token_logprobs(*inputs(3, 4, 11))[1] is None


MEMORY = r"""
import re, sys, torch
from gspo_hpc.ops.logprobs import token_logprobs
from tools.acceptance.references import log_softmax as naive
torch.set_num_threads(1)
r, h, v = 2048, 64, 16384
hidden, weight = torch.randn(r, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
targets = torch.randint(0, v, (r,))

def run(hidden, targets):
    if sys.argv[1] == "naive":
        values = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
    else:
        values, _ = token_logprobs(hidden, weight, targets, with_entropy=True)
    values.sum().backward()

run(hidden[:2], targets[:2])  # libraries set themselves up

def status(name):  # in MiB
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\s+(\d+) kB", file.read())[1]) / 1024

before = status("VmRSS")
run(hidden, targets)
print(status("VmHWM") - before)
"""


def test_memory_is_bounded_by_blocks() -> None:
    """Added peak memory in MiB, forward and backward. The logits of all tokens in fp32 would be 128 MiB."""

    def peak(kind: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, timeout=120, check=True
        )
        return float(done.stdout)

    assert peak("ours") < 48 < 128 < peak("naive")


RANK = """
import os, sys, torch, torch.distributed as dist
from gspo_hpc.ops import logprobs
from gspo_hpc.ops.logprobs import token_logprobs
from tools.acceptance.references import log_softmax as naive
rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
logprobs.BLOCK_BYTES["cpu"] = 8 * 4 * 5
results = {}
for name, case in torch.load(f"{folder}/cases.pt", weights_only=True).items():
    local = case["weight"].shape[0] // 2
    hidden = case["hidden"].requires_grad_()
    weight = case["weight"][rank * local : (rank + 1) * local].clone().requires_grad_()
    values, entropy = token_logprobs(
        hidden, weight, case["targets"], temperature=0.7, chunk_tokens=4, vocab_start=rank * local,
        vocab_size=case["size"], tp_group=dist.group.WORLD, with_entropy=True, entropy_gradient=name == "full",
    )
    if name == "full":
        values = values + 0.5 * entropy
        entropy = entropy.detach()
    grads = torch.autograd.grad(values, [hidden, weight], case["upstream"])
    results[name] = [values.detach(), entropy, *grads]
torch.save(results, f"{folder}/rank{rank}.pt")
os._exit(0)  # a thread of gloo that asks for the interpreter while it ends would abort the process
"""


def test_two_vocabulary_parallel_ranks(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {}
    # The true size leaves padding on the last rank; with 6, the last rank has nothing but padding.
    for name, size, tokens in (("padded", 11, 9), ("full", 12, 9), ("one_rank", 6, 9), ("empty", 12, 0)):
        hidden, weight, targets = inputs(tokens, 5, 12, dtype=torch.float64)
        weight = weight.detach()
        weight[0] *= 50.0  # maxima that differ between the ranks
        weight[size:] = math.nan
        upstream = torch.randn(tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        upstream[1:3] = 0.0
        cases[name] = {"hidden": hidden.detach(), "weight": weight, "targets": targets % size, "size": size}
        cases[name]["upstream"] = upstream
    torch.save(cases, tmp_path / "cases.pt")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
    both = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, case in cases.items():
        hidden, weight = case["hidden"].requires_grad_(), case["weight"][: case["size"]].requires_grad_()
        values, entropy = naive(hidden, weight, case["targets"], 0.7)
        if name == "full":  # where the entropy has a gradient, too
            values = values + 0.5 * entropy
        grad_hidden, grad_weight = gradients(values, [hidden, weight], case["upstream"])
        padding = torch.zeros(12 - case["size"], 5, dtype=torch.float64)
        for rank in (0, 1):
            assert torch.equal(both[0][name][0], both[1][name][0]), name
            ours = both[rank][name]
            torch.testing.assert_close(ours[0], values.detach(), msg=name)
            torch.testing.assert_close(ours[1], entropy.detach(), rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(ours[2], grad_hidden)
        joined = torch.cat((both[0][name][3], both[1][name][3]))
        torch.testing.assert_close(joined, torch.cat((grad_weight, padding)), msg=name)


def test_the_same_bits_from_run_to_run() -> None:
    results = []
    for _ in range(2):
        hidden, weight, targets = inputs(300, 32, 3000)
        values, entropy = token_logprobs(hidden, weight, targets, with_entropy=True)
        assert entropy is not None
        results.append([values.detach(), entropy, *gradients(values, [hidden, weight], torch.linspace(-1, 1, 300))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
