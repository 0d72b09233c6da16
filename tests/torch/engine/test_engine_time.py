"""What is logged of the engines of a rollout."""

from __future__ import annotations

import pytest

from gspo_hpc.rollout.timing import EngineTime, added_up, engine_extremes, engine_metrics


def metrics(*engines: EngineTime | None) -> dict[str, float]:
    """Metrics that are logged of the engines of these ranks."""
    return engine_metrics([max(values) for values in zip(*map(engine_extremes, engines), strict=True)])


def test_the_tail_is_what_a_tenth_of_the_completions_takes() -> None:
    engine = EngineTime(tokens=300)
    for seconds, running in ((1.0, 0), (1.0, 40), (2.0, 30), (1.0, 5), (3.0, 4), (2.0, 1)):
        engine.add(seconds, running)
    assert (engine.busy, engine.tail, engine.fullest) == (10.0, 5.0, 40)


def test_the_least_and_the_most_of_all_engines() -> None:
    found = metrics(EngineTime(4.0, 1.0, 400, 9), None, EngineTime(8.0, 3.0, 400, 9))
    assert found["seconds/engine_least"] == 4.0 and found["seconds/engine_most"] == 8.0
    assert found["seconds/generate_tail"] == 3.0
    assert found["engine_tokens_per_s_least"] == pytest.approx(50.0)
    assert found["engine_tokens_per_s_most"] == pytest.approx(100.0)


def test_waiting_for_an_environment_is_no_work_of_an_engine() -> None:
    engine = EngineTime(tokens=300)
    engine.add(3.0, 4, waited=2.0)
    engine.add(1.0, 4, waited=0.0)
    assert (engine.busy, engine.environment) == (2.0, 2.0)
    found = metrics(engine, EngineTime(1.0, 0.0, 10, 1, environment=0.5))
    assert found["seconds/environment_wait"] == 2.0 and found["engine_tokens_per_s_most"] == pytest.approx(150.0)
    assert added_up([found, found])["seconds/environment_wait"] == 4.0
    assert "seconds/environment_wait" not in metrics(EngineTime(1.0, 0.0, 10, 1))


def test_engines_that_had_nothing_to_do() -> None:
    """One of two counts as idle; where none had anything, nothing is logged."""
    assert str(metrics(EngineTime(), EngineTime(2.0, 0.0, 100, 4))["seconds/engine_least"]) == "0.0"
    assert metrics(EngineTime(), EngineTime()) == {} == metrics(None)


def test_one_engine_is_as_fast_as_itself_however_many_calls_a_rollout_takes() -> None:
    """Groups that are replaced are sampled in a call of their own, of fewer completions: a tenth as fast here."""
    calls = [metrics(EngineTime(8.0, 1.0, 800, 9)), {}, metrics(EngineTime(2.0, 1.0, 20, 1))]
    found = added_up(calls)
    assert found["seconds/engine_least"] == found["seconds/engine_most"] == 10.0
    assert found["engine_tokens_per_s_least"] == found["engine_tokens_per_s_most"] == pytest.approx(82.0)
    assert found["seconds/generate_tail"] == 2.0 and added_up([{}, {}]) == {} == added_up([])


def test_the_slower_of_two_engines_is_slower_over_all_calls() -> None:
    found = added_up([metrics(EngineTime(4.0, 0.0, 400, 9), EngineTime(4.0, 0.0, 200, 9))] * 2)
    assert found["engine_tokens_per_s_least"] == pytest.approx(50.0)
    assert found["engine_tokens_per_s_most"] == pytest.approx(100.0)
