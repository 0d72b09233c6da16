"""Rollouts that end early, one after the other: real journals and a real sampler, and engines that do what a draw says.

It takes ten seconds. It would catch a group that is lost or trained on twice, tokens that are lost, doubled or
misplaced on their way from one rollout to the next, a group that is carried further than it may be, and a rollout
that has another end after it was killed.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.prompts import Position, PromptStream
from gspo_hpc.data.records import UNFINISHED, Completion, Group, Prompt
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.rollout.worker import Generated
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.recipe import PromptData
from gspo_hpc.training.sampling import carrying
from gspo_hpc.training.sampling.colocated import ColocatedSampler

PROMPTS, SAMPLES, WANTED, ROLLOUTS = 40, 2, 4, 5


class Killed(Exception):
    """The process is killed here."""


class Engines:
    """Engines that finish groups in an order of their own; `kill` says after how many groups of a call they die."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.ranks = SimpleNamespace(exchange=Exchange(), rank=0)
        self.engine: Any = object()
        self.models = None  # of rewards
        self.kill: int | None = None
        self._folder, self._chance = folder, chance

    def generate(self, request: Any, journal: Any, progress: Any) -> Generated:
        chance, enough = self._chance, request.enough
        finished, left = dict[int, Group](), dict[int, Group]()
        order = list(request.slots)
        chance.shuffle(order)
        counted = 0
        for slot in order:
            group = self._begun(request, slot)
            over = counted >= enough.groups and enough.required <= finished.keys()
            if over and chance.random() < 0.3:
                continue  # nobody took it
            if over or (slot not in enough.required and chance.random() < 0.3):
                left[slot] = self._grown(group, whole=False).with_piece(request.weights_version)
                continue
            if self.kill is not None and len(finished) >= self.kill:
                raise Killed
            group = self._grown(group, whole=True).with_piece(request.weights_version)
            journal.append([group])
            finished[slot] = group
            has_signal = len({one.reward for one in group.completions}) > 1
            counted += has_signal or not enough.signal
        if counted < enough.groups:  # then all are waited for
            for slot, group in left.items():
                whole = self._grown(group, whole=True).with_piece(request.weights_version)
                journal.append([whole])
                finished[slot] = whole
            for slot in set(order) - finished.keys():
                whole = self._grown(self._begun(request, slot), whole=True).with_piece(request.weights_version)
                journal.append([whole])
                finished[slot] = whole
            left = {}
        return Generated(finished, {}, 0.0, left)

    def _begun(self, request: Any, slot: int) -> Group:
        if (place := request.begun.get(slot)) is not None:
            group = CarriedFiles(self._folder).read(place)
            assert group is not None and group.prompt.index == request.prompts[slot].index
            return replace(group, slot=slot)
        empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "", UNFINISHED, 0)
        return Group(slot, request.prompts[slot], (empty,) * SAMPLES)

    def _grown(self, group: Group, *, whole: bool) -> Group:
        """The group with more tokens, each of which has its own place as its number."""
        reward = self._chance.choice([0.0, 1.0])

        def more(index: int, one: Completion) -> Completion:
            if one.finish_reason != UNFINISHED:
                return one
            count = len(one.tokens) + self._chance.randint(1, 5)
            ends = whole or (index == 0 and self._chance.random() < 0.3)
            return replace(
                one,
                tokens=np.arange(count, dtype=np.int32),
                logprobs=np.zeros(count, np.float32),
                finish_reason="stop" if ends else UNFINISHED,
                reward=reward if index else 1.0,
                reward_parts={"number_match": reward if index else 1.0},
            )

        return group.with_completions(tuple(more(i, one) for i, one in enumerate(group.completions)))


def make(folder: Path, engines: Engines, rollout: dict[str, Any]) -> Any:
    config = from_dict(
        {
            "rollout": {"unfinished": "continue", **rollout},
            "batch": {"num_generations": SAMPLES},
            "reward": {"functions": [{"function": "number_match"}]},
        }
    )
    recipe: Any = SimpleNamespace(
        config=config,
        objective=objective.resolve(config.algorithm),
        num_rollout_prompts=WANTED,
        samples_at_once=config.rollout.unfinished != "continue",
    )
    prompts = [Prompt(100 + number, np.ones(2, np.int32), "", {}) for number in range(PROMPTS)]
    data = PromptData(PromptStream(PROMPTS, 3, shuffle=False, window=WANTED), prompts, (), {})
    weights: Any = SimpleNamespace(sync=lambda: SimpleNamespace(fingerprint="f"), sleep=lambda: None)
    clock: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), seconds={})
    progress = contextlib.nullcontext(lambda *progress: None)
    observers: Any = SimpleNamespace(rollout=lambda *rollout: progress, note=lambda text: None)
    made: Any = ColocatedSampler(recipe, data, engines, weights, folder, observers, clock)  # type: ignore[arg-type]
    made._rollout = lambda cursor, own, after, metrics, version: SimpleNamespace(
        groups=own, after=after, metrics=metrics | carrying.metrics(own, Exchange(), version)
    )
    return made


def check(groups: list[Group]) -> None:
    assert sorted(group.slot for group in groups) == list(range(WANTED))
    for group in groups:
        assert len(group.completions) == SAMPLES
        for one in group.completions:
            assert one.finish_reason == "stop" and one.tokens.tolist() == list(range(len(one.tokens)))
            assert sum(count for _, count in one.pieces) == len(one.tokens) == len(one.logprobs)
            assert [version for version, _ in one.pieces] == sorted({version for version, _ in one.pieces})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(1, 3),
    st.floats(1.25, 4.0),
    st.dictionaries(st.integers(0, ROLLOUTS - 1), st.integers(0, 4)),
)
def test_every_group_is_trained_on_once_or_carried_on(
    seed: int, dynamic: bool, continuations: int, factor: float, kills: dict[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, chance = Path(name), random.Random(seed)
        engines = Engines(folder, chance)
        rollout = {"max_continuations": continuations, "dynamic_sampling": dynamic, "max_num_gen_batches": 4}
        rollout["oversampling_factor"] = min(factor, 1.0 + continuations)  # more is refused by a rule
        start, trained, drawn = Position(), Counter[int](), 0
        began: dict[int, int] = {}
        for number in range(ROLLOUTS):
            cursor = Cursor(step=number, rollout=number)
            engines.kill = kills.get(number)
            if engines.kill is not None:
                with contextlib.suppress(Killed):
                    make(folder, engines, rollout).sample(cursor, start)
                engines.kill = None
            found = make(folder, engines, rollout).sample(cursor, start)
            again = make(folder, engines, rollout).sample(cursor, start)
            assert [g.to_json() for g in again.groups] == [g.to_json() for g in found.groups], "it has another end now"
            assert again.after == found.after and again.metrics == found.metrics | {}
            check(found.groups)
            before = {one.prompt for one in start.carried}
            fresh = (found.after.offset - start.offset) % PROMPTS
            for place in range(start.offset, start.offset + fresh):
                began[place % PROMPTS] = number
            drawn += fresh
            for group in found.groups:
                prompt = group.prompt.index - 100
                trained[prompt] += 1
                assert number - began[prompt] <= continuations
                assert prompt in before or began[prompt] == number
            for one in found.after.carried:
                assert one.began == began[one.prompt] > number - continuations - 1
            start = found.after
            if drawn > PROMPTS // 2:
                return  # prompts come again in the next epoch
            if not dynamic:
                assert sum(trained.values()) + len(start.carried) == drawn and max(trained.values()) == 1
                assert not {prompt for prompt in trained} & {one.prompt for one in start.carried}
