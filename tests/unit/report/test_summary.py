"""The head of the report page. Takes milliseconds; catches numbers that stand on the wrong side, and wrong tones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.report.summary import Fact, summary, tone
from gspo_hpc.runs.reader import read_run
from tests.unit.report.test_page import make_run, record


@pytest.mark.parametrize(("last", "change", "trend"), [(0.75, "+0.500", "up"), (0.125, "−0.125", "down")])
def test_the_head_compares_the_end_of_a_run_with_its_start(
    last: float, change: str, trend: str, tmp_path: Path
) -> None:
    steps = [record(step, reward=step / 32) for step in range(1, 21)]
    records = [{"step": 0, "eval/accuracy": 0.25}, *steps[:-1], steps[-1] | {"eval/accuracy": last}]
    facts = {fact.name: fact for fact in summary(read_run(make_run(tmp_path / "run", records).path)).facts}
    assert facts["Accuracy"] == Fact("Accuracy", f"{last:.3f}", "0.250", "", change, trend, "on unseen prompts")
    assert facts["Reward"] == Fact("Reward", "0.609", "0.047", note="first and last 2 steps")
    assert facts["Completion tokens"].value == "107"  # 20 x 800 tokens in 150 s: not the mean over steps


def test_every_end_has_its_tone() -> None:
    tones = {reason: tone(reason) for reason in ("done", "failed", "refused", "running", "preempted", "unheard of")}
    assert list(tones.values()) == ["good", "bad", "bad", "", "mid", ""]
