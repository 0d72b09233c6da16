"""What a variable-length kernel is told, with a kernel that is the textbook's, against the dense mask of all tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_hpc.ops import attention, varlen
from gspo_hpc.ops.attention import own_tokens
from tests.torch.ops.test_attention import Layout, dense, grads, inputs, layouts, table, visible


def textbook(q: Tensor, k: Tensor, v: Tensor, told: varlen.Sequences, scale: float) -> Tensor:
    """Each sequence by itself. Causal as FlashAttention has it from 2.1 on: the last query sees the last key."""
    queries, keys = told.cu_queries.tolist(), told.cu_keys.tolist()
    assert told.max_queries == max(b - a for a, b in zip(queries, queries[1:], strict=False))
    assert told.max_keys == max(b - a for a, b in zip(keys, keys[1:], strict=False))
    assert told.cu_queries.dtype == told.cu_keys.dtype == torch.int32
    parts = [q[:0]]
    for n in range(len(queries) - 1):
        mine, theirs = slice(queries[n], queries[n + 1]), slice(keys[n], keys[n + 1])
        rows, columns = mine.stop - mine.start, theirs.stop - theirs.start
        mask = torch.ones(rows, columns).tril(columns - rows).bool()
        if rows:
            parts.append(dense(q[mine], k[theirs], v[theirs], mask, scale))
    return torch.cat(parts)


@given(layouts, st.booleans(), st.sampled_from([0, 0, 1, 17]), st.sampled_from([(4, 2), (3, 1), (2, 2)]))
@settings(max_examples=60, deadline=None)
def test_equals_the_dense_mask(layout: Layout, share: bool, opening: int, heads: tuple[int, int]) -> None:
    segments, tokens = table(layout, share, opening)
    leaves = inputs(tokens, 0, heads=heads)
    out = varlen.attend(*leaves, segments, 0.3, kernel=textbook)
    expected = dense(*leaves, visible(segments, tokens), 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(grads(out, leaves), grads(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@given(layouts, st.booleans(), st.sampled_from([2, 3, 4]), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_context_parallel_rank_computes_its_tokens(layout: Layout, shared: bool, size: int, padding: int) -> None:
    segments, tokens = table(layout, shared, 5)
    q, k, v = inputs(tokens, 3)
    whole = dense(q, k, v, visible(segments, tokens), 0.3)
    for rank in range(size):
        own = torch.from_numpy(own_tokens(segments, rank, size))
        mine = torch.cat((q[own], q.new_ones(padding, *q.shape[1:])))
        out = varlen.attend(mine, k, v, segments, 0.3, (rank, size), textbook)
        torch.testing.assert_close(out[: len(own)], whole[own], rtol=1e-9, atol=1e-11)
        assert out.shape == mine.shape and not out[len(own) :].any()


def test_an_empty_micro_batch_has_a_gradient() -> None:
    segments, tokens = table([], True)
    leaves = inputs(tokens, 0)
    out = varlen.attend(*leaves, segments, 1.0, kernel=textbook)
    torch.testing.assert_close(out, attention.attend(*leaves, segments, 1.0))
    assert all(torch.isfinite(grad).all() for grad in grads(out, leaves))
    without = varlen.attend(*leaves, segments, 1.0, (3, 4), textbook)  # a rank that has no token of it
    assert without.shape == leaves[0].shape and not without.any()


@pytest.mark.parametrize(
    ("major", "installed", "chosen"),
    [
        (8, {"flash_attn_interface", "flash_attn.cute"}, None),
        (9, {"flash_attn_interface", "flash_attn.cute"}, "FA3"),
        (9, {"flash_attn.cute"}, "FA4"),
        (9, set(), None),
        (10, {"flash_attn_interface", "flash_attn.cute"}, "FA4"),
        (10, {"flash_attn_interface"}, None),
        (12, {"flash_attn.cute"}, None),
    ],
)
def test_the_newest_kernel_is_one_that_is_installed_and_made_for_the_gpu(
    major: int, installed: set[str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert varlen.newest_kernel(major) == chosen
    if chosen is not None:
        assert chosen in torch.nn.attention.list_flash_attention_impls(), "torch knows it by this name"


@pytest.mark.parametrize(("capability", "there"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_before_ampere_have_no_kernel(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention would refuse a T4 in the first forward pass; attention by SDPA runs on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert varlen.available(torch.device("cuda", 0), torch.float16) == there
    assert not varlen.available(torch.device("cuda", 0), torch.float32)


def test_a_kernel_that_does_not_match_this_torch_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "newest_kernel", lambda major: "FA3")  # whose module is not there
    assert varlen.use_newest_kernel(torch.device("cuda", 7)) is None
    assert "FA3 is installed, and does not work here" in capsys.readouterr().out
    assert torch.nn.attention.current_flash_attention_impl() is None
