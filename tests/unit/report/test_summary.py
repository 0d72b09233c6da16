"""The head of the report page. Takes milliseconds; catches numbers that stand on the wrong side, and wrong tones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.report import compare, details
from gspo_hpc.report.scales import number
from gspo_hpc.report.summary import Fact, summary, tone
from gspo_hpc.runs.reader import read_run
from gspo_hpc.system.files import write_json
from gspo_hpc.training.telemetry import headlines
from tests.unit.report.test_page import make_run, record


@pytest.mark.parametrize(("last", "change", "trend"), [(0.75, "+0.500", "up"), (0.125, "−0.125", "down")])
def test_the_head_compares_the_end_of_a_run_with_its_start(
    last: float, change: str, trend: str, tmp_path: Path
) -> None:
    steps = [record(step, reward=step / 32) for step in range(1, 21)]
    records = [{"step": 0, "eval/accuracy": 0.25}, *steps[:-1], steps[-1] | {"eval/accuracy": last}]
    facts = {fact.name: fact for fact in summary(read_run(make_run(tmp_path / "run", records).path)).facts}
    assert facts["Accuracy"] == Fact("Accuracy", f"{last:.3f}", "0.250", "", change, trend, "on unseen prompts")
    assert facts["Reward"] == Fact("Reward", "0.609", "0.047", note="first and last rollout")
    assert facts["Completion tokens"].value == "107"  # 20 x 800 tokens in 150 s: not the mean over steps


def test_console_report_and_comparison_say_the_same_of_rewards(tmp_path: Path) -> None:
    """They had three definitions: a tenth of the rollouts, or of the steps."""
    steps = [record(step, reward=step**2 / 10000) for step in range(1, 41)]  # of 20 rollouts, so two at each end
    run = read_run(make_run(tmp_path / "run", steps).path)
    (fact,) = [one for one in summary(run).facts if one.name == "Reward"]
    (row,) = [one for one in compare._results([run]) if one.name.startswith("reward, ")]
    assert run.config is not None
    said = "\n".join(line for line, _ in headlines.closing(run.config, run.records, "done", run.path))
    first = (1 + 4 + 9 + 16) / 4 / 10000
    last = (37**2 + 38**2 + 39**2 + 40**2) / 4 / 10000
    assert f"reward {first:.3f} -> {last:.3f}" in said
    assert (fact.before, fact.value, fact.note) == (number(first), number(last), "first and last 2 rollouts")
    assert row.cells == (f"{number(first)} → {number(last)}",)


@pytest.mark.parametrize("failure", ["judge: no answer", ""])
def test_an_evaluation_that_was_not_graded_is_no_zero(failure: str, tmp_path: Path) -> None:
    """Records of earlier versions have a zero there, and no failure."""
    ungraded = {"eval/accuracy": None if failure else 0.0, "eval/ungraded": 1.0}
    ungraded |= {"eval/failure": failure} if failure else {}
    steps = [record(step) for step in range(1, 5)]
    records = [{"step": 0, "eval/accuracy": 0.25}, *steps[:-1], steps[-1] | ungraded]
    facts = {fact.name: fact for fact in summary(read_run(make_run(tmp_path / "run", records).path)).facts}
    assert facts["Accuracy"] == Fact("Accuracy", "not graded", "0.250", note=f"at step 4{failure and f': {failure}'}")


def test_quantities_of_the_plan_are_rounded_as_plan_rounds_them(tmp_path: Path) -> None:
    """num_epochs stood there with sixteen digits."""
    run = make_run(tmp_path / "run", [])
    write_json(run.plan, {"quantities": {"num_epochs": 8 / 980, "global_batch_size": 64, "num_rows": 25600}})
    (batch,) = [one for one in details.plan(read_run(run.path)).groups if one.title == "Batch"]
    assert {row.name: row.value for row in batch.rows} == {
        "num_epochs": "0.00816327",
        "global_batch_size": "64",
        "num_rows": "25,600",
    }


def test_every_end_has_its_tone() -> None:
    tones = {reason: tone(reason) for reason in ("done", "failed", "refused", "running", "preempted", "unheard of")}
    assert list(tones.values()) == ["good", "bad", "bad", "", "mid", ""]
