"""Which weights sample a rollout in server mode, and what a checkpoint says of them, without engines or ranks.

It takes seconds. It would catch a checkpoint that forgets which weights sampled a rollout, or that cannot be resumed
because weights that are gone would have to sample the rest of one, a group that is missing and not missed, and a prompt
that is asked although a rollout before has retired it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.prompts import Position, PromptStream
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.retired import Retirement
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.rollout.resampling import Starved
from gspo_hpc.rollout.worker import JudgesOverBudget
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.runs.journal import Journal
from gspo_hpc.training.checkpoint_state import SampledBy
from gspo_hpc.training.recipe import PromptData
from gspo_hpc.training.serving.engines import Answer, RemoteEngines, sizes
from gspo_hpc.training.serving.sampler import RemoteSampler

PROMPTS = 2  # of a rollout


class Weights:
    """The policy's weights, which engines get when they are asked for: a name takes the place of a fingerprint."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, ""

    def sync(self, version: int, *, in_flight: bool) -> Any:
        self.sent = self.name
        return SimpleNamespace(fingerprint=self.name)

    def has_weights(self, fingerprint: str) -> bool:
        return self.name == self.sent == fingerprint


class Engines:
    """Engines that sample at once what they are asked for, into the journal, but leave some rollouts unfinished.

    Both completions of a prompt have a reward of 1, but where the number of the prompt is a multiple of three.
    """

    def __init__(self, unfinished: dict[int, int]) -> None:
        self.ranks = SimpleNamespace(exchange=Exchange(), rank=0)
        self.asked: list[tuple[int, str, int]] = []  # rollout, weights, groups
        self.prompts: list[list[int]] = []  # of each call
        self._unfinished = unfinished

    def start(self, request: Any, folder: Path, fingerprint: str) -> Any:
        self.asked.append((request.rollout, fingerprint, len(request.slots)))
        self.prompts.append([request.prompts[slot].index for slot in request.slots])
        writer = Journal(folder, 0, fingerprint=fingerprint, rollout=request.rollout)
        for slot in request.slots[: len(request.slots) - self._unfinished.get(request.rollout, 0)]:
            prompt, tokens = request.prompts[slot], np.zeros(1, np.int32)
            rewards = (0.0, 1.0) if prompt.index % 3 == 0 else (1.0, 1.0)
            completions = tuple(
                Completion(tokens, np.zeros(1, np.float32), "", "stop", 0, one, {"number_match": one})
                for one in rewards
            )
            writer.append([Group(slot, prompt, completions)])
        writer.close()
        return SimpleNamespace(request=request, folder=folder, fingerprint=fingerprint, path=writer.path)

    def wait(self, call: Any, progress: Any = None) -> Answer:
        return Answer(call.request.rollout in self._unfinished, {}, 0.5, sizes([call.path]))

    def read(self, call: Any, answer: Answer) -> dict[int, Group]:
        return RemoteEngines.read(self, call, answer)  # type: ignore[arg-type]


def take(start: Position, count: int) -> tuple[dict[int, Prompt], Position]:
    prompts = {slot: Prompt(start.offset + slot, np.zeros(1, np.int32), "", {}) for slot in range(count)}
    return prompts, Position(0, start.offset + count)


def sampler(
    folder: Path,
    weights: Weights,
    ahead: dict[int, SampledBy] | None = None,
    rollout: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **unfinished: int,
) -> Any:
    """A sampler one rollout ahead; its engines leave so many groups of rollout N unfinished, given as _N."""
    own = {"mode": "server", "max_staleness": 1} | (rollout or {})
    reward = {"functions": [{"function": "number_match"}]}
    config = from_dict({"rollout": own, "batch": {"num_generations": 2}, "reward": reward, "data": data or {}})
    terms = objective.resolve(config.algorithm)
    recipe: Any = SimpleNamespace(config=config, objective=terms, num_rollout_prompts=PROMPTS, num_rollouts=9)
    places: Any = lambda start, count: ([*range(count)], take(start, count)[1])  # noqa: E731
    prompts: Any = SimpleNamespace(take=take, places=places, stream=None, left=lambda retired: PROMPTS)
    clock: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext(), seconds={})
    observers: Any = SimpleNamespace(rollout=lambda *rollout: contextlib.nullcontext(lambda *progress: None))
    engines: Any = Engines({int(name[1:]): count for name, count in unfinished.items()})
    made: Any = RemoteSampler(recipe, prompts, engines, weights, folder, observers, clock, ahead or {})  # type: ignore[arg-type]
    made._rollout = lambda cursor, own, after, metrics, version: SimpleNamespace(
        slots=[group.slot for group in own], after=after, metrics=metrics, weights_version=version
    )
    made.asked, made.prompts = engines.asked, engines.prompts
    return made


def at(**where: int) -> tuple[Cursor, Position]:
    """A cursor, and where its prompts begin."""
    cursor = Cursor(**where)
    return cursor, Position(cursor.epoch, cursor.offset)


def request(rollout: int) -> Any:
    """A request for all groups of a rollout."""
    return SimpleNamespace(rollout=rollout, slots=range(PROMPTS), prompts=take(Position(0, 0), PROMPTS)[0])


def test_a_stop_in_the_first_update_keeps_what_older_weights_sampled(tmp_path: Path) -> None:
    weights = Weights("w0")
    first = sampler(tmp_path, weights)
    first.sample(*at(rollout=0))
    weights.name = "w1"
    first.sample(*at(step=2, rollout=1))
    assert first.asked == [(0, "w0", PROMPTS), (1, "w0", PROMPTS), (2, "w1", PROMPTS)]
    assert first.is_settled(Cursor(step=2, rollout=1)), "rollout 2 is of weights that the checkpoint has"
    again = sampler(tmp_path, Weights("w1"), first.ahead())
    assert again.sample(*at(step=2, rollout=1)).slots == [0, 1]
    assert again.asked == [], "rollouts 1 and 2 are there, of the weights that sampled them at first"


def test_the_version_is_that_of_the_weights_that_sampled(tmp_path: Path) -> None:
    """A run that is made longer has sampled nothing beyond its old end: no weights from before are left for that."""
    weights = Weights("w0")
    first = sampler(tmp_path, weights)
    first._recipe.num_rollouts = 2
    assert first.sample(*at(rollout=0)).weights_version == 0
    weights.name = "w1"
    assert first.sample(*at(step=2, rollout=1)).weights_version == 0
    assert first.ahead() == {1: SampledBy("w0", 0)}
    longer = sampler(tmp_path, Weights("w2"), first.ahead())
    assert longer.sample(*at(step=4, rollout=2)).weights_version == 4
    assert longer.ahead() == {2: SampledBy("w2", 4), 3: SampledBy("w2", 4)}


def test_a_save_between_updates_waits_though_no_update_has_changed_the_weights(tmp_path: Path) -> None:
    stopped = sampler(tmp_path, Weights("w0"), _1=1)
    stopped.sample(*at(rollout=0))
    assert not stopped.is_settled(Cursor(step=1, update=1)), (
        "after an empty step: rollout 1 could not be finished later"
    )
    assert stopped.is_settled(Cursor(rollout=0)), "before the first update it could"


def test_a_rollout_is_resampled_by_the_weights_that_are_there_if_those_are_its_own(tmp_path: Path) -> None:
    """Another layout rounds differently, so what an earlier attempt has sampled of it does not count."""
    resumed = sampler(tmp_path, Weights("rounded"), {1: SampledBy("w0", 0), 2: SampledBy("w1", 2)})
    for rollout, name in ((1, "w0"), (2, "w1")):
        Engines({2: 1}).start(request(rollout), tmp_path / f"{rollout:06d}", name)
    resumed.sample(*at(step=2, rollout=1))
    assert resumed.asked == [(2, "rounded", PROMPTS)]


def test_what_weights_that_are_gone_left_unfinished_is_refused(tmp_path: Path) -> None:
    Engines({1: 1}).start(request(1), tmp_path / "000001", "w0")
    with pytest.raises(RuntimeError, match="1 of 2 groups are missing"):
        sampler(tmp_path, Weights("w1"), {1: SampledBy("w0", 0)}).sample(*at(step=2, rollout=1))


def test_a_group_that_cannot_be_read_is_missed(tmp_path: Path) -> None:
    made = sampler(tmp_path, Weights("w0"), _0=1)
    # It says that all were finished.
    made._engines.wait = lambda call, progress=None: Answer(False, {}, 0.0, sizes([call.path]))
    with pytest.raises(RuntimeError, match="1 of 2 groups can be read"):
        made.sample(*at(rollout=0))


def test_what_a_rollout_retires_is_not_asked_by_those_ahead_and_the_end_waits_for_what_is_sampled(
    tmp_path: Path,
) -> None:
    """Six prompts in their order, of which 0 and 3 are half right: the others are retired by their first group."""
    prompts = [Prompt(index, np.zeros(1, np.int32), "", {}) for index in range(6)]
    data = PromptData(PromptStream(6, 0, False, PROMPTS), prompts, [], {})

    def made(folder: Path, rate: float, ahead: dict[int, SampledBy] | None = None, name: str = "w0") -> Any:
        one = sampler(folder, Weights(name), ahead, data={"no_resampling_pass_rate": rate})
        one._data = data
        one.decisions, one.notes = [], []
        one._observers.retired = lambda step, epoch, rows: one.decisions.append((step, epoch, rows))
        one._observers.note = one.notes.append
        return one

    def run(one: Any, number: int, start: Position) -> Position:
        one._remote_weights.name = f"w{number}"
        found: Position = one.sample(Cursor(step=number, rollout=number), start).after
        return found

    run_dir = made(tmp_path / "some", 0.9)
    start = Position()
    for number in range(5):
        start = run(run_dir, number, start)
    assert run_dir.prompts == [[0, 1], [2, 3], [4, 5], [0, 3], [0, 3], [0, 3]], "one rollout ahead"
    assert [(step, epoch, [one.prompt for one, _ in rows]) for step, epoch, rows in run_dir.decisions] == [
        (1, 0, [1]),
        (2, 0, [2]),
        (3, 0, [4, 5]),
    ]
    assert run_dir.decisions[2][2][0] == (Retirement(4, 2, 1.0), 4)
    assert run_dir.notes[0] == ("epoch 1 begins: 4 of 6 prompts are retired (data.no_resampling_pass_rate), 2 are left")
    # Killed after rollout 1, with what its checkpoint has: rollout 2 comes from its journal.
    first = made(tmp_path / "killed", 0.9)
    start = run(first, 1, run(first, 0, Position()))
    again = made(tmp_path / "killed", 0.9, first.ahead(), "w1")
    assert run(again, 2, Position.from_dict(start.to_dict())).retired.prompts[-1] == Retirement(5, 2, 1.0)
    assert again.prompts == [[0, 3]]

    every = made(tmp_path / "all", 0.5)
    start = Position()
    for number in range(3):
        start = run(every, number, start)
    assert every.prompts == [[0, 1], [2, 3], [4, 5]], "what is sampled is trained on before the run ends"
    with pytest.raises(Starved, match="6 prompts are retired, and the 0 that are left are fewer than the 2"):
        run(every, 3, start)


DYNAMIC = {"dynamic_sampling": True, "max_num_gen_batches": 10}


def test_rounds_of_a_rollout_are_sampled_by_its_own_weights(tmp_path: Path) -> None:
    """One prompt of three has signal: a rollout of two draws 2, 4 and 2 prompts more, and the next begins behind them.

    The rounds of a rollout ahead are finished before engines get other weights.
    """
    weights = Weights("w0")
    made = sampler(tmp_path, weights, rollout=DYNAMIC)
    first = made.sample(*at(rollout=0))
    assert made.prompts[:2] == [[0, 1], [2, 3]] and first.slots == [0, 3], "prompts 0 and 3"
    assert first.metrics["rollout/rounds"] == 2 and first.metrics["rollout/prompts_used"] == 4
    assert first.after == Position(0, 4) and made.prompts[2:] == [[4, 5]], "the first round of rollout 1 is under way"
    assert made._clock.seconds["reward_wait"] == 1.0, "of both rounds"
    weights.name = "w1"
    second = made.sample(*at(step=2, rollout=1, offset=4))
    assert second.weights_version == 0 and second.after == Position(0, 10), "prompts 6 and 9"
    assert {name for rollout, name, _ in made.asked if rollout == 1} == {"w0"}
    assert made.asked[-1] == (2, "w1", PROMPTS) and made.prompts[-1] == [10, 11]


def test_a_save_waits_for_all_rounds_and_a_resume_asks_for_none(tmp_path: Path) -> None:
    first = sampler(tmp_path, Weights("w0"), rollout=DYNAMIC)
    first.sample(*at(rollout=0))
    before = len(first.asked)
    assert first.is_settled(Cursor(step=1, update=1)) and len(first.asked) > before
    again = sampler(tmp_path, Weights("w1"), first.ahead(), rollout=DYNAMIC)
    found = again.sample(*at(step=2, rollout=1, offset=4))
    assert found.weights_version == 0 and found.after == Position(0, 10)
    assert [rollout for rollout, _, _ in again.asked] == [2]
    stopped = sampler(tmp_path / "other", Weights("w0"), rollout=DYNAMIC, _1=1)
    stopped.sample(*at(rollout=0))
    assert not stopped.is_settled(Cursor(step=1, update=1))


def test_a_call_that_no_budget_was_left_for_ends_the_run(tmp_path: Path) -> None:
    """The next rollout is sampled ahead; what was trained until then is saved if nothing older is unfinished."""
    made = sampler(tmp_path, Weights("w0"), _0=1)
    whole = made._engines.wait
    made._engines.wait = lambda call, progress=None: replace(whole(call), over_budget="judge: 5 of 5 requests")
    with pytest.raises(JudgesOverBudget, match="judge: 5 of 5 requests; judges.used_up is stop: raise the limit"):
        made.sample(*at(rollout=0))
    assert not made.is_settled(Cursor(step=1, update=1))
