"""Packed attention against a dense mask in float64, and planted leaks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_hpc.ops import attention
from gspo_hpc.ops.attention import attend
from tools.acceptance.references import Layout, dense, table, visible

Leaves = tuple[Tensor, Tensor, Tensor]


def inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (4, 2)) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads[0], 8), (tokens, heads[1], 8), (tokens, heads[1], 8)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def grads(out: Tensor, leaves: Leaves) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


layouts = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(
    layouts,
    st.booleans(),
    st.sampled_from([0, 0, 1, 17]),
    st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.sampled_from([1 << 22, 600, 7]),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_dense_mask(
    layout: Layout, share: bool, shared_prefix: int, heads: tuple[int, int], limit: int
) -> None:
    segments, tokens = table(layout, share, shared_prefix)
    leaves = inputs(tokens, 0, heads=heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASK_ELEMENTS", limit)  # small limits: completions are taken in slices
        attention._plan.cache_clear()
        out = attend(*leaves, segments, 0.3)
        attention._plan.cache_clear()
    expected = dense(*leaves, visible(segments, tokens), 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(grads(out, leaves), grads(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision_is_near(dtype: torch.dtype, tolerance: float) -> None:
    segments, tokens = table([(30, [5, 17, 40]), (70, [1, 0, 33]), (12, [60])], True)
    leaves = inputs(tokens, 1, dtype)
    q, k, v = (x.double() for x in leaves)
    expected = dense(q, k, v, visible(segments, tokens), 0.3)
    out = attend(*leaves, segments, 0.3)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < tolerance


def owners(layout: Layout, share: bool, shared_prefix: int) -> list[set[tuple[int, int]]]:
    """Whose output may depend on each token: (group, completion), a shared prompt being all of its group's."""
    result = [{(g, i) for g, (_, responses) in enumerate(layout) for i in range(len(responses))}] * shared_prefix
    for g, (prompt, responses) in enumerate(layout):
        everybody = {(g, i) for i in range(len(responses))}
        if share:
            result += [everybody] * prompt
            for i, response in enumerate(responses):
                result += [{(g, i)}] * response
        else:
            for i, response in enumerate(responses):
                result += [{(g, i)}] * (prompt + response)
    return result


def overwritten(leaves: Leaves, where: Tensor, value: float) -> Leaves:
    """The same q, k, v with one value at some tokens."""
    q, k, v = (torch.where(where[:, None, None], torch.full_like(x, value), x) for x in leaves)
    return q, k, v


LEAKY: Layout = [(9, [5, 12, 3]), (9, [8, 8]), (20, [4, 0, 30])]


@pytest.mark.parametrize("share, shared_prefix", [(True, 0), (False, 0), (True, 18)])
@pytest.mark.parametrize("poison", [100.0, float("nan"), float("inf")])
def test_no_sample_sees_another_bit_for_bit(share: bool, shared_prefix: int, poison: float) -> None:
    segments, tokens = table(LEAKY, share, shared_prefix)
    whose = owners(LEAKY, share, shared_prefix)
    q, k, v = inputs(tokens, 2, torch.float32)
    clean = attend(q, k, v, segments, 0.3).detach()
    for victim in sorted(set(itertools.chain(*whose))):
        foreign = torch.tensor([victim not in w for w in whose])
        mine = torch.tensor([w == {victim} for w in whose])
        if not share:
            assert bool((foreign ^ mine).all())
        out = attend(*overwritten((q, k, v), foreign, poison), segments, 0.3)
        assert torch.equal(out[mine], clean[mine]), victim
        shared_prompt = torch.tensor([victim in w and len(w) > 1 for w in whose])
        assert torch.equal(out[shared_prompt], clean[shared_prompt]), victim


def test_the_future_is_invisible_bit_for_bit() -> None:
    segments, tokens = table([(20, [30, 18])], True, shared_prefix=16)
    q, k, v = inputs(tokens, 3, torch.float32)
    clean = attend(q, k, v, segments, 0.3)
    for start, end, cut in ((0, 16, 9), (16, 36, 23), (36, 66, 47), (66, 84, 68)):
        later = torch.zeros(tokens, dtype=torch.bool)
        later[cut:end] = True
        out = attend(*overwritten((q, k, v), later, 50.0), segments, 0.3)
        assert torch.equal(out[start:cut], clean[start:cut])


@pytest.mark.parametrize("shared_prefix", [0, 18])
@pytest.mark.parametrize("leak", ["neighbour", "future", "prompt_hidden"])
def test_a_wrong_mask_is_caught(leak: str, shared_prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above does notice a single wrong entry in a mask."""
    segments, tokens = table(LEAKY, True, shared_prefix)
    right = attention._call

    def wrong(chosen: list[attention.Lane], *rest: object) -> attention.Call:
        call = right(chosen, *rest)  # type: ignore[arg-type]
        if call.mask is None:
            return call
        if leak == "neighbour":  # one key of the first lane is another completion's token
            call.keys[0, -1] = (call.keys[0, -1] + chosen[0].length) % tokens
            call.mask[0, 0, -1, -1] = True
        elif leak == "future":
            call.mask[0, 0, 0, -call.queries.shape[1] + 1] = True
        else:
            call.mask[0, 0, :, 0] = False
        return call

    monkeypatch.setattr(attention, "_call", wrong)
    attention._plan.cache_clear()
    leaves = inputs(tokens, 4)
    out = attend(*leaves, segments, 0.3)
    attention._plan.cache_clear()
    assert (out - dense(*leaves, visible(segments, tokens), 0.3)).abs().max() > 1e-4


def test_overlapping_or_missing_segments_are_refused() -> None:
    q, k, v = inputs(10, 5)
    with pytest.raises(AssertionError, match="two segments"):
        attend(q, k, v, torch.tensor([[0, 5, 5, 3, 0], [0, 5, 7, 3, 0]], dtype=torch.int32), 1.0)
    with pytest.raises(AssertionError, match="no segment"):
        attend(q, k, v, torch.tensor([[0, 4, 5, 5, 0]], dtype=torch.int32), 1.0)


@settings(max_examples=40, deadline=None)
@given(
    layout=st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 25), min_size=1, max_size=4)), max_size=4),
    shared=st.booleans(),
    size=st.integers(2, 4),
    padding=st.integers(0, 3),
)
def test_context_parallel_ranks_together_are_one(layout: Layout, shared: bool, size: int, padding: int) -> None:
    """Values, and gradients of what all ranks have in common."""
    segments, tokens = table(layout, shared)
    q, k, v = leaves = inputs(tokens, 8)
    expected = dense(*leaves, visible(segments, tokens), 0.3)
    parts = torch.zeros_like(expected)
    for rank in range(size):
        own = torch.from_numpy(attention.own_tokens(segments, rank, size))
        mine = torch.cat((q[own], torch.full((padding, *q.shape[1:]), torch.nan, dtype=q.dtype)))
        out = attend(mine, k, v, segments, 0.3, (rank, size))
        assert out.shape[0] == len(own) + padding and not out[len(own) :].any()
        parts = parts.index_add(0, own, out[: len(own)])
    torch.testing.assert_close(parts, expected, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(grads(parts, leaves), grads(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_context_parallel_ranks_have_the_same_to_do(size: int) -> None:
    rng = random.Random(3)
    layout = [(rng.randint(20, 200), [rng.randint(1, 4000) for _ in range(4)]) for _ in range(4)]
    segments, tokens = table(layout, True)
    pairs = torch.zeros(tokens, dtype=torch.int64)  # how many tokens each sees
    for prompt_start, prompt, start, response, _ in segments.tolist():
        pairs[prompt_start : prompt_start + prompt] = torch.arange(1, prompt + 1)
        pairs[start : start + response] = torch.arange(prompt + 1, prompt + response + 1)
    work = [int(pairs[attention.own_tokens(segments, rank, size)].sum()) for rank in range(size)]
    count = [len(attention.own_tokens(segments, rank, size)) for rank in range(size)]
    assert sum(count) == tokens and max(count) <= 1.02 * min(count), count
    assert max(work) <= 1.02 * min(work), work


def test_an_empty_micro_batch_has_a_gradient() -> None:
    leaves = inputs(1, 6)
    out = attend(*leaves, torch.zeros(0, 5, dtype=torch.int32), 0.3)
    torch.testing.assert_close(out, leaves[2].repeat_interleave(2, 1))
    assert all(g.shape == x.shape for g, x in zip(grads(out, leaves), leaves, strict=True))


def test_long_sequences_alone_have_no_mask_and_shared_ones_a_bounded_one() -> None:
    rng = random.Random(0)
    for layout, share in (([(500, [7000])], True), ([(500, [3000, 7000])], False)):
        segments, tokens = table(layout, share)
        calls, _ = attention._plan(segments.numpy().tobytes(), (0, 1), torch.device("cpu"))
        assert all(call.mask is None for call in calls)
    segments, tokens = table([(2000, [rng.randint(1, 6000) for _ in range(4)])], True)
    calls, order = attention._plan(segments.numpy().tobytes(), (0, 1), torch.device("cpu"))
    assert all(call.mask is None or call.mask.numel() <= attention.MASK_ELEMENTS for call in calls)
    assert len(order) == tokens


def test_padding_is_little_and_calls_are_few() -> None:
    rng = random.Random(1)
    layout = [(60, [rng.randint(10, 24) for _ in range(8)]) for _ in range(16)]
    segments, tokens = table(layout, True)
    calls, _ = attention._plan(segments.numpy().tobytes(), (0, 1), torch.device("cpu"))
    assert len(calls) <= 4
    assert sum(call.queries.numel() for call in calls) <= 1.3 * tokens


def test_the_same_bits_from_run_to_run() -> None:
    rng = random.Random(2)
    segments, tokens = table([(rng.randint(5, 90), [rng.randint(0, 50) for _ in range(5)]) for _ in range(6)], True)
    results = []
    for _ in range(3):
        attention._plan.cache_clear()
        leaves = inputs(tokens, 7, torch.float32)
        out = attend(*leaves, segments, 0.3)
        results.append([out.detach(), *grads(out, leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "grouped"), [(OnGpu, False), (Tensor, True)])
def test_no_kernel_on_a_gpu_gets_heads_in_groups(
    kind: type[Tensor], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, bool]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        assert k.shape == v.shape
        found.append((k.shape[1], enable_gqa))
        return kernel(q, k, v, enable_gqa=enable_gqa, **options)

    kernel = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    q, k, v = (torch.randn(5, heads, 8).as_subclass(kind) for heads in (6, 2, 2))
    attend(q, k, v, torch.tensor([[0, 2, 2, 3, 0]], dtype=torch.int32), 0.3)
    assert set(found) == {(2, True) if grouped else (6, False)}


def test_heads_that_are_shared_may_as_well_be_repeated() -> None:
    """As on GPUs in fp32, where torch has no kernel for shared heads but the one that keeps all scores."""
    q, k, v = (torch.randn(5, heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    segments = torch.tensor([[0, 2, 2, 3, 0]], dtype=torch.int32)
    expected = attend(q, k, v, segments, 0.3)
    repeated = attend(q, attention.ungrouped(k, 6), attention.ungrouped(v, 6), segments, 0.3)
    torch.testing.assert_close(repeated, expected)
    assert attention.ungrouped(k, 2) is k
