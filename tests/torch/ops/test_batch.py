"""Packed batches: every token where it belongs, and the way back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.ops import batch as batch_module
from gspo_hpc.ops.attention import lanes_of, own_tokens, seen_keys
from gspo_hpc.ops.batch import SHARED_PREFIX, build, part, split_by_sample, split_experts

BY_TOKEN = ("logprobs", "old_logprobs", "reference_logprobs", "selected")


def group(
    slot: int, prompt_len: int, lengths: list[int], seed: int, excluded: frozenset[int] = frozenset(), opening: int = 0
) -> Group:
    """A group whose arrays are all different, but for the first `opening` tokens of its prompt.

    Every second completion has tokens of an environment; the last one is the model's.
    """
    rng = np.random.default_rng(seed + 1000 * slot)

    def completion(i: int, n: int) -> Completion:
        environment = np.append(rng.integers(0, 2, n - 1), 0).astype(np.uint8) if i % 2 else None
        sampled = n if environment is None else int((environment == 0).sum())
        return Completion(
            tokens=rng.integers(0, 1 << 30, n).astype(np.int32),
            logprobs=rng.standard_normal(sampled).astype(np.float32),
            text="",
            finish_reason="stop",
            seed=0,
            excluded=i in excluded,
            advantage=float(rng.standard_normal()),
            old_logprobs=rng.standard_normal(sampled).astype(np.float32),
            reference_logprobs=rng.standard_normal(sampled).astype(np.float32),
            selected=rng.integers(0, 2, sampled).astype(np.uint8),
            experts=rng.integers(0, 300, (n - 1, 3, 2)).astype(np.uint16),
            environment=environment,
        )

    completions = tuple(completion(i, n) for i, n in enumerate(lengths))
    prompt = np.concatenate((np.arange(opening), rng.integers(1 << 20, 1 << 30, prompt_len))).astype(np.int32)
    experts = rng.integers(0, 300, (opening + prompt_len, 3, 2)).astype(np.uint16)
    experts[:opening] = np.arange(opening)[:, None, None]  # alike, too
    return Group(slot, Prompt(0, prompt, "", {}), completions, experts)


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[int, Group], list[Sample]]:
    groups, samples = {}, []
    opening = draw(st.sampled_from([0, SHARED_PREFIX - 1, SHARED_PREFIX, 40]))
    for slot in draw(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=5)):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        excluded = draw(st.frozensets(st.integers(0, 4)))
        groups[slot] = group(slot, draw(st.integers(1, 9)), lengths, 0, excluded, opening)
        for index in draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1)):
            samples.append(Sample(slot, index, len(groups[slot].prompt.tokens), lengths[index]))
    return groups, draw(st.permutations(samples))


@given(batches(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_token_is_where_it_belongs(made: tuple[dict[int, Group], list[Sample]], share: bool) -> None:
    groups, samples = made
    batch = build(groups, samples, share)
    assert sorted(batch.keys) == sorted((s.slot, s.index) for s in samples)
    if not share:
        assert list(batch.keys) == [(s.slot, s.index) for s in samples]
    prompts = {s.slot: groups[s.slot].prompt.tokens.tolist() for s in samples}
    common = 0  # tokens that all prompts begin with
    while len(prompts) > 1 and len({tuple(p[: common + 1]) for p in prompts.values()}) == 1:
        common += 1
    shared = common if share and common >= SHARED_PREFIX else 0
    starts: dict[int, set[int]] = {}
    covered = set(range(shared))
    for s, (slot, index) in enumerate(batch.keys):
        prompt, completion = groups[slot].prompt.tokens.tolist(), groups[slot].completions[index]
        response = completion.tokens.tolist()
        prompt_start, prompt_len, start, fed, opening = batch.segments[s].tolist()
        assert opening == shared and prompt_len >= 1
        place = [*range(opening), *range(prompt_start, prompt_start + prompt_len)]
        assert batch.tokens[place].tolist() == prompt
        assert batch.positions[place].tolist() == list(range(len(prompt)))
        assert batch.tokens[start : start + fed].tolist() == response[:-1]
        assert batch.positions[start : start + fed].tolist() == list(
            range(len(prompt), len(prompt) + len(response) - 1)
        )
        assert batch.experts is not None and groups[slot].prompt_experts is not None
        assert np.array_equal(batch.experts[place].numpy(), groups[slot].prompt_experts)
        assert np.array_equal(batch.experts[start : start + fed].numpy(), completion.experts)
        a, b = batch.cu_seqlens[s : s + 2].tolist()
        flags = [0] * len(response) if completion.environment is None else completion.environment.tolist()
        sampled = [place for place, flag in enumerate(flags) if not flag]
        assert batch.targets[a:b].tolist() == [response[place] for place in sampled]
        # Each token that the model sampled is predicted from the token before it, at the position before it.
        assert batch.tokens[batch.head_index[a:b]].tolist() == [[prompt[-1], *response[:-1]][one] for one in sampled]
        assert batch.positions[batch.head_index[a:b]].tolist() == [len(prompt) - 1 + place for place in sampled]
        assert set(batch.seq_ids[a:b].tolist()) == {s}
        assert set(batch.loss_mask[a:b].tolist()) == {not completion.excluded}
        assert batch.advantages[s].item() == np.float32(completion.advantage)
        for tensor, array in (
            (batch.rollout_logprobs, completion.logprobs),
            (batch.old_logprobs, completion.old_logprobs),
            (batch.reference_logprobs, completion.reference_logprobs),
            (batch.selected, completion.selected),
        ):
            assert tensor is not None and array is not None
            assert np.array_equal(tensor[a:b].numpy(), array)
        starts.setdefault(slot, set()).add(prompt_start)
        covered |= set(range(prompt_start, prompt_start + prompt_len)) | set(range(start, start + fed))
    assert covered == set(range(len(batch.tokens)))  # no padding
    assert seen_keys(batch.segments) == int((batch.positions + 1).sum())  # every token sees what is before it
    slots = [slot for slot, _ in batch.keys]
    if share:
        assert all(len(found) == 1 for found in starts.values())
        assert sum(a != b for a, b in zip(slots, slots[1:], strict=False)) == len(starts) - 1  # adjacent rows
    else:
        assert sum(map(len, starts.values())) == len(samples)


@given(batches(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_experts_go_back_to_their_completions(made: tuple[dict[int, Group], list[Sample]], share: bool) -> None:
    groups, samples = made
    batch = build(groups, samples, share)
    assert batch.experts is not None
    found = split_experts(batch.experts.int(), batch)
    assert found.keys() == {key for s in samples for key in ((s.slot, s.index), (s.slot, -1))}
    for (slot, index), array in found.items():
        expected = groups[slot].prompt_experts if index < 0 else groups[slot].completions[index].experts
        assert expected is not None and array.shape == expected.shape and np.array_equal(array, expected)


def test_tokens_whose_experts_are_not_known() -> None:
    made = group(0, 4, [4, 3], 0)
    without = dataclasses.replace(made.completions[1], experts=None)
    samples = [Sample(0, 0, 4, 4), Sample(0, 1, 4, 3)]
    batch = build({0: made.with_completions((made.completions[0], without))}, samples, True)
    assert batch.experts is not None
    assert (batch.experts[:7] >= 0).all() and (batch.experts[7:] == -1).all()
    nobody = dataclasses.replace(made, prompt_experts=None).with_completions((without, without))
    assert build({0: nobody}, [Sample(0, 0, 4, 3)], True).experts is None


def test_the_picture_in_the_legend() -> None:
    made = group(0, 4, [4, 3, 2], 0)
    plain = dataclasses.replace(made.completions[1], environment=None, **dict.fromkeys(BY_TOKEN, np.zeros(3)))
    made = made.with_completions((made.completions[0], plain, made.completions[2]))
    batch = build({0: made}, [Sample(0, i, 4, n) for i, n in enumerate((4, 3, 2))], True)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 4]
    assert batch.segments.tolist() == [[0, 4, 4, 3, 0], [0, 4, 7, 2, 0], [0, 4, 9, 1, 0]]
    assert batch.head_index.tolist() == [3, 4, 5, 6, 3, 7, 8, 3, 9]
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 9]


def test_the_picture_of_an_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "SHARED_PREFIX", 2)
    groups = {0: group(0, 2, [3], 0, opening=2), 1: group(1, 1, [2], 0, opening=2)}
    batch = build(groups, [Sample(0, 0, 4, 3), Sample(1, 0, 3, 2)], True)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 2, 3]
    assert batch.segments.tolist() == [[2, 2, 4, 2, 2], [6, 1, 7, 1, 2]]
    assert batch.head_index.tolist() == [3, 4, 5, 6, 7]


def test_a_prompt_that_is_the_others_opening_keeps_a_token_of_its_own() -> None:
    groups = {slot: group(slot, 0, [2], 0, opening=20 + slot) for slot in (0, 3)}
    batch = build(groups, [Sample(0, 0, 20, 2), Sample(3, 0, 23, 2)], True)
    assert batch.segments.tolist() == [[19, 1, 20, 1, 19], [21, 4, 25, 1, 19]]


def test_dtypes_and_devices() -> None:
    batch = build({0: group(0, 4, [3], 0)}, [Sample(0, 0, 4, 3)], True)
    for name in ("tokens", "positions", "head_index", "targets", "seq_ids"):
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.segments.dtype == batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.bool
    assert batch.advantages.dtype == batch.rollout_logprobs.dtype == torch.float32
    moved = batch.to("meta")
    assert moved.segments.device.type == "cpu"
    assert moved.tokens.device.type == moved.old_logprobs.device.type == "meta"  # type: ignore[union-attr]


@given(batches(), st.booleans(), st.integers(1, 4), st.sampled_from([1, 2, 4, 32]))
def test_parts_of_a_micro_batch_are_equal_with_little_padding(
    made: tuple[dict[int, Group], list[Sample]], share: bool, size: int, multiple: int
) -> None:
    """Fewer than two tokens of padding for each run of causal tokens, and what the multiple takes."""
    whole = build(*made, share)
    parts = [part(whole, rank, size, multiple) for rank in range(size)]
    own = [own_tokens(whole.segments, rank, size) for rank in range(size)]
    (length,) = {len(one.tokens) for one in parts}
    runs = len(lanes_of(whole.segments, (0, 1))) if size > 1 else 0
    assert length % multiple == 0 and length * size - len(whole.tokens) < size * (2 * runs + multiple)
    for one, index in zip(parts, own, strict=True):
        assert torch.equal(one.tokens[: len(index)], whole.tokens[index])
        assert not one.tokens[len(index) :].any() and not one.positions[len(index) :].any()
    assert sorted(np.concatenate(own)) == list(range(len(whole.tokens)))


def test_an_empty_micro_batch() -> None:
    batch = build({}, [], True)
    assert batch.tokens.tolist() == batch.positions.tolist() == [0]
    assert batch.segments.shape == (0, 5) and batch.cu_seqlens.tolist() == [0] and batch.keys == ()
    for name in ("head_index", "targets", "seq_ids", "loss_mask", "advantages", "rollout_logprobs"):
        assert getattr(batch, name).shape == (0,), name
    assert batch.seq_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
    assert batch.old_logprobs is None and split_by_sample(torch.zeros(0), batch) == {}


def test_results_go_back_to_their_completions() -> None:
    groups = {3: group(3, 2, [4, 1, 2], 0), 1: group(1, 5, [2], 0)}
    samples = [Sample(3, 2, 2, 2), Sample(1, 0, 5, 2), Sample(3, 0, 2, 4)]
    batch = build(groups, samples, True)
    result = split_by_sample(batch.rollout_logprobs.double(), batch)
    assert set(result) == {(3, 2), (1, 0), (3, 0)}
    for (slot, index), array in result.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, groups[slot].completions[index].logprobs)


def test_old_logprobs_for_all_or_for_none() -> None:
    made = group(0, 2, [2, 3], 0)
    without = dataclasses.replace(made.completions[1], old_logprobs=None, reference_logprobs=None)
    samples = [Sample(0, 0, 2, 2), Sample(0, 1, 2, 3)]
    mixed = {0: made.with_completions((made.completions[0], without))}
    with pytest.raises(AssertionError, match="1 of 2 samples"):
        build(mixed, samples, True)
    alone = build(mixed, samples[1:], True)
    assert alone.old_logprobs is None and alone.reference_logprobs is None


def test_a_sample_that_is_not_of_its_group_is_refused() -> None:
    with pytest.raises(AssertionError):
        build({0: group(0, 2, [2, 3], 0)}, [Sample(0, 1, 2, 2)], True)
