"""Completions that are stopped in the middle and continued, against a real vLLM on the CPU.

It takes five seconds beside the shared engine. It would catch tokens or log-probs that are lost, doubled or shifted
where a completion was continued, ones of the wrong weights, and a response that grows longer than it may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_hpc.data.records import UNFINISHED, Completion, Group
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings, Sampling
from gspo_hpc.ops.weight_parts import stream_of
from tests.engine.test_engine import EOS, LONG, bits, check_logprobs, collect, prompt, reference_logprobs, seeds

GREEDY = replace(LONG, temperature=0.0)


def stopped(
    engine: Engine, steps: int, sampling: Sampling, begun: dict[int, Sequence[Completion]] | None = None
) -> dict[int, Group]:
    """Groups 0 to 2 after so many steps, finished or not."""
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), sampling, begun=(begun or {}).get(slot, ()), may_stop=True)
    done = {group.slot: group for _ in range(steps) for group in engine.step()}
    left = {group.slot: group for group in engine.stop()}
    assert engine.pending == engine.running == 0 and engine.step() == []
    assert {*done, *left} == {0, 1, 2} and not {*done} & {*left}
    return done | left


def completions(groups: dict[int, Group]) -> dict[int, Sequence[Completion]]:
    return {slot: group.completions for slot, group in groups.items()}


def test_what_was_sampled_goes_on_as_if_it_had_not_been_stopped(engine: Engine, reference: Any) -> None:
    """Without randomness the whole is what one call gives; the log-probs are those of the whole sequence."""
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), GREEDY)
    whole = collect(engine)
    before = engine.tokens_generated
    first = stopped(engine, 7, GREEDY)
    assert all(c.finish_reason == UNFINISHED and len(c.tokens) in (6, 7) for g in first.values() for c in g.completions)
    second = stopped(engine, 20, GREEDY, completions(first))
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), GREEDY, begun=second[slot].completions, may_stop=True)
    found = collect(engine)
    assert engine.tokens_generated - before == sum(len(c.tokens) for g in found.values() for c in g.completions)
    for slot, group in found.items():
        check_logprobs(group, reference)
        for ours, theirs in zip(group.completions, whole[slot].completions, strict=True):
            assert (ours.tokens.tolist(), ours.text, ours.finish_reason) == (
                theirs.tokens.tolist(),
                theirs.text,
                theirs.finish_reason,
            )
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
            assert len(ours.tokens) == LONG.max_tokens or ours.tokens[-1] == EOS
        assert [c.num_cached_tokens for c in group.completions] == [
            c.num_cached_tokens for c in first[slot].completions
        ], "of the prompt, not of what was sampled behind it"


def test_a_continuation_depends_on_its_seeds_alone(engine: Engine) -> None:
    first = stopped(engine, 9, LONG)
    again = [stopped(engine, 400, LONG, completions(first)) for _ in range(2)]
    assert bits(again[0]) == bits(again[1])
    for slot, group in again[0].items():
        for before, after in zip(first[slot].completions, group.completions, strict=True):
            assert after.finish_reason != UNFINISHED
            count = len(before.tokens)
            assert after.tokens[:count].tolist() == before.tokens.tolist()
            assert after.logprobs[:count].tobytes() == before.logprobs.tobytes(), "they are not computed again"


def test_finished_completions_of_a_group_stay_as_they_are_and_cost_nothing(engine: Engine) -> None:
    whole = stopped(engine, 400, LONG)
    kept = whole[0].completions
    mixed = (
        *kept[:2],
        *(replace(c, tokens=c.tokens[:3], logprobs=c.logprobs[:3], finish_reason=UNFINISHED) for c in kept[2:]),
    )
    engine.submit(0, prompt(0), seeds(0), LONG, begun=mixed, may_stop=True)
    engine.submit(1, prompt(1), seeds(1), LONG, begun=whole[1].completions, may_stop=True)
    (ready,) = engine.step()
    assert ready.slot == 1 and bits({1: ready}) == bits({1: whole[1]}), "nothing was left to be sampled"
    assert engine.running == 2
    found = collect(engine)[0]
    first_two = replace(found, completions=found.completions[:2])
    assert bits({0: first_two}) == bits({0: replace(found, completions=kept[:2])})


def test_older_tokens_keep_the_log_probs_of_their_weights(
    engine: Engine, weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor], reference: Any
) -> None:
    first = stopped(engine, 9, LONG)
    engine.update_weights(stream_of(other_weights.items()))
    try:
        found = stopped(engine, 400, LONG, completions(first))
    finally:
        engine.update_weights(stream_of(weights.items()))
    for slot, group in found.items():
        for before, after in zip(first[slot].completions, group.completions, strict=True):
            tokens = [*group.prompt.tokens.tolist(), *after.tokens.tolist()]
            ours = reference_logprobs(reference, tokens)[len(group.prompt.tokens) - 1 :]
            old = len(before.tokens)
            np.testing.assert_allclose(after.logprobs[:old], ours[:old], rtol=0, atol=1e-4)
            if len(tokens) > old + 20:
                assert np.abs(after.logprobs[old:] - ours[old:]).max() > 1e-2, "other weights sampled these"


def test_weights_that_come_in_the_middle_sample_the_rest(
    engine: Engine, weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor], reference: Any
) -> None:
    """An in-flight update: held completions go on behind what they have, under the new weights, and say so."""
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), LONG, may_stop=True)
    before = engine.tokens_generated
    done = [group for _ in range(9) for group in engine.step()]
    assert not done and engine.running
    engine.hold(4)
    assert engine.running == 0 and engine.pending == 3
    engine.update_weights(stream_of(other_weights.items()))
    try:
        engine.cached_tokens(prompt(0).tokens.tolist())  # as the probe does, while groups wait
        engine.resubmit()
        found = collect(engine)
    finally:
        engine.update_weights(stream_of(weights.items()))
    assert engine.tokens_generated - before == sum(len(c.tokens) for g in found.values() for c in g.completions)
    switched = 0
    for slot, group in found.items():
        for ours, seed in zip(group.completions, seeds(slot), strict=True):
            ((version, old),) = ours.pieces  # what follows is told when the group is finished
            assert version == 4 and old in (8, 9) and ours.finish_reason != UNFINISHED
            tokens = [*group.prompt.tokens.tolist(), *ours.tokens.tolist()]
            theirs = reference_logprobs(reference, tokens)[len(group.prompt.tokens) - 1 :]
            np.testing.assert_allclose(ours.logprobs[:old], theirs[:old], rtol=0, atol=1e-4)
            if len(ours.tokens) > old + 20:
                switched += 1
                assert np.abs(ours.logprobs[old:] - theirs[old:]).max() > 1e-2, "other weights sampled these"
            assert (ours.seed != seed) == (len(ours.tokens) > old), "the same random numbers would come twice"
    assert switched


def test_an_engine_that_dies_goes_on_where_a_group_was_submitted(engine: Engine) -> None:
    first = stopped(engine, 9, LONG)
    expected = stopped(engine, 400, LONG, completions(first))
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), LONG, begun=first[slot].completions, may_stop=True)
    for _ in range(5):
        engine.step()
    engine.suspend()  # as where another engine is filled
    engine.wake_up()
    engine.resubmit()
    assert bits(collect(engine)) == bits(expected)
    for slot in range(3):
        engine.submit(slot, prompt(slot), seeds(slot), LONG, begun=first[slot].completions, may_stop=True)
    engine.step()
    assert engine._client is not None
    engine._client.kill("planted")
    left = engine.stop()
    try:
        assert bits({group.slot: group for group in left}) == bits(first), "what the dead engine sampled is lost"
        with pytest.raises(EngineDied):
            engine.cached_tokens(prompt(0).tokens.tolist())
    finally:
        engine.restart()


def test_long_beginnings_that_do_not_fit_into_one_step_wait_for_their_turn(
    settings: EngineSettings, engine: Engine
) -> None:
    """vLLM computed a part of them, and died: a generator of a CPU has no offset (10 s)."""
    first = {slot: group for slot, group in stopped(engine, 60, LONG).items()}
    expected = stopped(engine, 400, LONG, completions(first))
    narrow = replace(settings, engine_args={**settings.engine_args, "max_num_batched_tokens": settings.max_model_len})
    with contextlib.closing(Engine(narrow)) as other:
        other.start()
        assert sum(len(prompt(slot).tokens) + 60 for slot in range(3)) * 4 > 2 * settings.max_model_len
        assert bits(stopped(other, 400, LONG, completions(first))) == bits(expected)
