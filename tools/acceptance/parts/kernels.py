"""Kernels alone: attention over packed samples, log-probs, and the gradient of gathered rows, against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gspo_hpc.ops import attention, varlen
from gspo_hpc.ops.logprobs import token_logprobs

from ..environment import Environment
from ..references import Layout, dense, log_softmax, relative, table, visible
from ..rows import Recorder

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
Leaves = tuple[Tensor, Tensor, Tensor]

HEADS = (8, 2)  # of queries, and of keys and values
HEAD_DIM = 64
SCALE = HEAD_DIM**-0.5
# Relative errors. A bfloat16 has eight bits: one rounding is 2e-3, and a kernel rounds weights, outputs and gradients.
OUTPUT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
READERS = 16  # completions that share a prompt, in the test of gathered gradients


def run(env: Environment, record: Recorder) -> None:
    """Compare each kernel that there is on this device."""
    torch.manual_seed(0)
    for name, attend, dtype in _kernels(torch.device(env.device), record):
        for case, (layout, share, shared_prefix) in _layouts(env).items():
            _attention(env, record, f"attention, {name}, {case}", attend, dtype, table(layout, share, shared_prefix))
        _isolation(env, record, name, attend, dtype)
        _empty(env, record, name, attend, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        _logprobs(env, record, dtype)
    _gathered(env, record)


def _kernels(device: torch.device, record: Recorder) -> list[tuple[str, Attend, torch.dtype]]:
    found: list[tuple[str, Attend, torch.dtype]] = [
        ("plain, float32", attention.attend, torch.float32),
        ("plain, bfloat16", attention.attend, torch.bfloat16),
    ]
    if varlen.available(device, torch.bfloat16):
        found.append(("torch.nn.attention.varlen, bfloat16", varlen.attend, torch.bfloat16))
    elif device.type == "cuda":
        record.check("attention, torch.nn.attention.varlen", "not there", "there from torch 2.11 on", False)
    else:
        record.no_meaning("attention, torch.nn.attention.varlen")
    return found


def _layouts(env: Environment) -> dict[str, tuple[Layout, bool, int]]:
    """Return segment layouts by name: prompts with completions, shared or not, the length of the common prefix."""
    prompt, length = env.sizes.attention
    return {
        "shared prompts": ([(prompt, [length, 1, 0, length // 2]), (prompt // 2, [length // 3] * 8)], True, 0),
        "a prefix of all prompts": ([(prompt, [length, 3]), (2, [0, 0, length // 2])], True, 33),
        "own prompts": ([(prompt, [length, 0]), (1, [length // 4, 2])], False, 0),
    }


def _leaves(tokens: int, dtype: torch.dtype, device: str) -> Leaves:
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM, device=device).to(dtype) for heads in (HEADS[0], *[HEADS[1]] * 2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _attention(
    env: Environment,
    record: Recorder,
    what: str,
    attend: Attend,
    dtype: torch.dtype,
    case: tuple[Tensor, int],
) -> None:
    segments, tokens = case
    leaves = _leaves(tokens, dtype, env.device)
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    out = attend(*leaves, segments, SCALE)
    expected = dense(q, k, v, visible(segments, tokens).to(env.device), SCALE)
    upstream = torch.randn_like(expected).to(dtype)
    found = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream.double())
    record.at_most(f"{what}: output, relative error", relative(out, expected), OUTPUT[dtype])
    worst = max(relative(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    record.at_most(f"{what}: gradients, relative error", worst, GRADIENT[dtype])


def _isolation(env: Environment, record: Recorder, name: str, attend: Attend, dtype: torch.dtype) -> None:
    """Overwrite one completion: no other token's output may change by a single bit."""
    prompt, length = env.sizes.attention
    segments, tokens = table([(prompt, [length, length // 2]), (prompt, [length])], True)
    q, k, v = (x.detach() for x in _leaves(tokens, dtype, env.device))
    clean = attend(q, k, v, segments, SCALE)
    foreign = torch.zeros(tokens, dtype=torch.bool, device=env.device)
    foreign[prompt : prompt + length] = True
    q, k, v = (torch.where(foreign[:, None, None], torch.full_like(x, float("nan")), x) for x in (q, k, v))
    same = torch.equal(attend(q, k, v, segments, SCALE)[~foreign], clean[~foreign])
    record.check(f"attention, {name}: NaN in another sample changes", "nothing" if same else "bits", "nothing", same)


def _empty(env: Environment, record: Recorder, name: str, attend: Attend, dtype: torch.dtype) -> None:
    """Compute an empty micro-batch: one token that sees itself, with a gradient of the right shape."""
    leaves = _leaves(1, dtype, env.device)
    out = attend(*leaves, torch.zeros(0, 5, dtype=torch.int32), SCALE)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    gap = relative(out, leaves[2].repeat_interleave(HEADS[0] // HEADS[1], 1))
    record.at_most(f"attention, {name}, an empty micro-batch: relative error", gap, OUTPUT[dtype])


def _logprobs(env: Environment, record: Recorder, dtype: torch.dtype) -> None:
    tokens, hidden_size, vocabulary = 1000, 256, env.sizes.vocabulary
    hidden = torch.randn(tokens, hidden_size, device=env.device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, device=env.device) * 2 / hidden_size**0.5).to(dtype)
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=env.device)
    values, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, with_entropy=True)
    expected, expected_entropy = log_softmax(hidden, weight, targets, 0.7)
    upstream = torch.randn(tokens, device=env.device)
    found = torch.autograd.grad(values, (hidden, weight), upstream)
    wanted = torch.autograd.grad(expected, (hidden, weight), upstream.double())
    assert entropy is not None
    name = f"log-probs of {vocabulary} words, {str(dtype).removeprefix('torch.')}"
    # Inputs are rounded and nothing after them is: products are accumulated in float32.
    record.at_most(f"{name}: largest error", float((values - expected).detach().abs().max()), 1e-4, " nats")
    record.at_most(
        f"{name}: entropy, largest error", float((entropy - expected_entropy).detach().abs().max()), 1e-4, " nats"
    )
    worst = max(relative(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    record.at_most(f"{name}: gradients, relative error", worst, 1e-4 if dtype == torch.float32 else 1e-2)


def _gathered(env: Environment, record: Recorder) -> None:
    """Measure the gradient of shared rows: keys of a prompt are gathered once for each completion that sees it."""
    rows = 64 * env.sizes.attention[0]
    source = torch.randn(rows, 128, device=env.device)
    index = torch.arange(rows, device=env.device).repeat(READERS)
    upstream = torch.randn(READERS * rows, 128, device=env.device).to(torch.bfloat16)

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = source.to(dtype).requires_grad_()
        (found,) = torch.autograd.grad(leaf.index_select(0, index), leaf, upstream.to(dtype))
        return found

    exact, found = gradient(torch.float64), gradient(torch.bfloat16)
    what = f"index_select of rows that {READERS} samples share: gradient"
    record.at_most(f"{what} in float32, relative error", relative(gradient(torch.float32), exact), 1e-5)
    record.at_most(f"{what} in bfloat16, relative error", relative(found, exact), 2e-2)
    same = torch.equal(found, gradient(torch.bfloat16))
    record.figure(f"{what} in bfloat16, computed twice", "the same bits" if same else "other bits")
