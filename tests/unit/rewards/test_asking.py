"""Reward functions of every kind: with tokens, the whole group, asynchronous, batched, repeated after a failure.

It takes about five seconds, most of them for three pools of worker processes. It would catch a grader that gets the
tokens or the group of another completion, values of a batched grader that go to the wrong completions, a wrong number
of values that is taken, and a failure that is repeated too often, too seldom, or without a delay.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards import trial
from gspo_hpc.rewards.calls import Sampled, loaded
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.registry import check
from gspo_hpc.rewards.results import RewardResult

GRADERS = """
import asyncio, os

async def later(completion, *, prompt, fields):
    first, second = await asyncio.gather(asyncio.sleep(0, 1.0), asyncio.sleep(0, len(completion)))
    return first + second

async def hangs(completion, *, prompt, fields):
    await asyncio.sleep(1000)

def tokens(completion, *, prompt, fields, response_tokens, response_length):
    assert len(response_tokens) == response_length
    return sum(response_tokens)

def longest(completion, *, prompt, fields, group_completions, group_index):
    assert group_completions[group_index] == completion
    return float(len(completion) == max(map(len, group_completions)))

def ranks(completions, *, prompt, fields, response_length, response_tokens):
    assert [len(one) for one in response_tokens] == response_length
    order = sorted(completions)
    return [order.index(one) for one in completions]

async def ranks_later(completions, *, prompt, fields):
    return ranks(completions, prompt=prompt, fields=fields, response_length=[], response_tokens=[])

def shape(completions, *, prompt, fields, how):
    values = {"short": [1.0], "long": [1.0] * 9, "text": "abc", "number": 1.0, "none": None, "dict": {0: 1, 1: 2}}
    if how == "raises":
        raise RuntimeError("no service")
    if how == "one":
        return [1.0, float("nan"), "2"]
    return values[how]

def around(completion, *, prompt, fields, time_limit, reward_processes):
    return time_limit + 100 * reward_processes

async def some(completions, *, prompt, fields):
    async def one(text):
        if text == "bad":
            raise ConnectionError("no service")
        if text == "late":
            raise TimeoutError("no answer")
        return 2.0
    return await asyncio.gather(*map(one, completions), return_exceptions=True)

def flaky(completion, *, prompt, fields, file):
    with open(file, "a") as tries:
        tries.write("x")
    if os.path.getsize(file) <= fields["failures"]:
        if fields.get("mistake"):
            raise TypeError("unsupported operand")
        raise ConnectionError("refused")
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graders") / "graders.py"
    path.write_text(GRADERS)
    return str(path)


def graded(terms: list[RewardFunction], texts: list[str], fields: Any = None, **keys: Any) -> list[RewardResult]:
    """The results of one group, in its order."""
    config = Reward(functions=tuple(terms), **{"workers": 2, "timeout": 5.0, **keys})
    check(config)
    sampled = [Sampled(text, len(text), tuple(map(ord, text))) for text in texts]
    got: dict[Any, RewardResult] = {}
    with RewardPool(config) as pool:
        pool.submit_group(list(range(len(texts))), sampled, "", fields or {})
        until = time.monotonic() + 60
        while pool.pending and time.monotonic() < until:
            for key, result in pool.poll(timeout=1.0):
                assert key not in got
                got[key] = result
    return [got[index] for index in range(len(texts))]


def test_each_kind_of_function_gets_what_it_asks_for(file: str) -> None:
    names = [f"{file}:{name}" for name in ("later", "tokens", "longest", "ranks", "ranks_later")]
    texts = ["bb", "a", "ccc", "b"]
    results = graded([RewardFunction(function=name) for name in (*names, "exact_match")], texts, {"answer": "a"})
    order = sorted(texts)
    for text, result in zip(texts, results, strict=True):
        values = [1.0 + len(text), sum(map(ord, text)), float(text == "ccc"), order.index(text), order.index(text)]
        assert result.failure is None and result.parts == dict(
            zip((*names, "exact_match"), (*values, float(text == "a")), strict=True)
        )


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("short", "returned 1 values for 3 completions"),
        ("long", "returned 9 values for 3 completions"),
        ("text", "returned str, not a list of 3 numbers"),
        ("number", "returned float, not a list of 3 numbers"),
        ("none", "returned NoneType, not a list of 3 numbers"),
        ("dict", "returned dict, not a list of 3 numbers"),
        ("raises", "RuntimeError: no service"),
    ],
)
def test_a_batched_function_that_fails_costs_its_group(file: str, how: str, why: str) -> None:
    function = loaded(RewardFunction(function=f"{file}:shape", args={"how": how}))
    with pytest.raises((TypeError, RuntimeError)) as caught:
        function.call_batched([Sampled("a", 1)] * 3, "", {})
    assert why in f"{caught.type.__name__}: {caught.value}"


def test_one_unusable_value_of_a_batch_costs_its_completion_alone(file: str) -> None:
    term = RewardFunction(function=f"{file}:shape", args={"how": "one"})
    first, second, third = graded([term], ["a", "b", "c"])
    assert (first.value, first.failure) == (1.0, None)
    assert "returned nan" in (second.failure or "") and "returned str" in (third.failure or "")
    assert [list(one.outcomes.values()) for one in (first, second, third)] == [[], ["failed"], ["failed"]]


def test_a_batched_function_that_raises_is_told_for_each_completion(file: str) -> None:
    term = RewardFunction(function=f"{file}:shape", args={"how": "raises"})
    results = graded([term, RewardFunction(function="exact_match")], ["a", "b"], {"answer": "a"})
    assert [one.parts for one in results] == [{"exact_match": 1.0}, {"exact_match": 0.0}]
    assert all("raised RuntimeError: no service" in (one.failure or "") for one in results)


@pytest.mark.parametrize(("failures", "tries", "passes"), [(0, 1, True), (2, 3, True), (9, 3, False)])
def test_a_failed_call_is_repeated_later(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, tries: int, passes: bool
) -> None:
    monkeypatch.setattr("gspo_hpc.rewards.pool.FIRST_DELAY", 0.1)
    term = RewardFunction(function=f"{file}:flaky", args={"file": str(tmp_path / "tries")}, retries=2)
    began = time.monotonic()
    (result,) = graded([term], ["a"], {"failures": failures}, workers=1)
    assert len((tmp_path / "tries").read_text()) == tries
    assert (result.failure is None) == passes and (passes or "ConnectionError: refused" in (result.failure or ""))
    assert time.monotonic() - began >= (0.3 if tries == 3 else 0.0)  # 0.1 s and 0.2 s, at least


def test_an_error_of_the_code_is_not_repeated(file: str, tmp_path: Path) -> None:
    term = RewardFunction(function=f"{file}:flaky", args={"file": str(tmp_path / "tries")}, retries=5)
    (result,) = graded([term], ["a"], {"failures": 1, "mistake": True}, workers=1)
    assert "raised TypeError" in (result.failure or "") and (tmp_path / "tries").read_text() == "x"


def test_a_function_knows_its_time_limit_and_how_many_processes_call_it(file: str) -> None:
    config = Reward(functions=(RewardFunction(function=f"{file}:around"),), workers=2, timeout=7.0)
    check(config)
    with RewardPool(config, pools=3) as pool:
        pool.submit(0, "", 0, "", {})
        ((_, result),) = pool.poll(timeout=None)
    assert result.value == 607.0


def test_an_error_among_the_values_of_a_batch_costs_its_completion_alone(file: str) -> None:
    name = f"{file}:some"
    fine, bad, late = graded([RewardFunction(function=name)], ["a", "bad", "late"])
    assert (fine.value, fine.failure) == (2.0, None)
    assert "raised ConnectionError: no service" in (bad.failure or "") and bad.outcomes == {name: "failed"}
    assert "raised TimeoutError: no answer" in (late.failure or "") and late.outcomes == {name: "timed_out"}


def test_an_asynchronous_function_that_hangs_is_ended(file: str) -> None:
    (result,) = graded([RewardFunction(function=f"{file}:hangs")], ["a"], timeout=1.0, workers=1)
    assert list(result.outcomes.values()) == ["timed_out"] and "reward.timeout" in (result.failure or "")


def test_a_function_may_have_a_time_limit_of_its_own(file: str) -> None:
    """A judge needs minutes, and mathematics beside it must not hang as long; a shorter one holds as well."""
    hangs = f"{file}:hangs"
    slow = [RewardFunction(function=hangs, timeout=1.0)]
    (result,) = graded(slow, ["a"], timeout=500.0, workers=1)
    assert result.failure == f"{hangs}: gave no answer within 1 s (timeout of the function)"
    (told,) = graded([RewardFunction(function=f"{file}:around", timeout=9.0)], ["a"], timeout=7.0, workers=1)
    assert told.value == 109.0


def test_the_trial_before_a_run_knows_every_kind(file: str) -> None:
    names = ("later", "tokens", "longest", "ranks", "ranks_later")
    terms = [RewardFunction(function=f"{file}:{name}") for name in names]
    assert trial.run(terms, "", {}) == [trial.Outcome(None)] * len(names)
    wrong = RewardFunction(function=f"{file}:shape", args={"how": "short"})
    (outcome,) = trial.run([wrong], "", {})
    assert "returned 1 values for 2 completions" in (outcome.failure or "") and outcome.certain
