"""Rollouts that end early, as the planner sees them: their rules, their time, and whether they pay.

It takes seconds. It would catch a run that waits although it is told not to, one that loses what it needs of weights
that are gone, an estimate that another setting decides, and a verdict that is not that of the plans it compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli import main
from gspo_hpc.config.changes import refused_changes
from gspo_hpc.config.loader import load
from gspo_hpc.planning import exactness
from gspo_hpc.planning.plan import make_plan

CONFIGS = Path(__file__).parents[3] / "configs"
PRESET, MIXTURE = CONFIGS / "qwen3_8b_tp2_cp4_32k.yaml", CONFIGS / "qwen3_30b_a3b_ep8.yaml"
MORE = "rollout.oversampling_factor=1.5"


def broken(preset: Path, *settings: str) -> dict[str, str]:
    return {item.rule: item.message for item in make_plan(load(preset, list(settings))).broken}


@pytest.mark.parametrize("kind", ["drop", "continue"])
def test_a_rollout_that_ends_early_draws_more_than_it_trains_on(kind: str) -> None:
    found = broken(PRESET, f"rollout.unfinished={kind}")
    assert list(found) == ["unfinished_needs_oversampling"]
    assert "give 1.25, or rollout.unfinished=wait" in found["unfinished_needs_oversampling"]
    assert not broken(PRESET, f"rollout.unfinished={kind}", "rollout.oversampling_factor=1.25")
    prompts = int(make_plan(load(PRESET, [])).quantities["num_rollout_prompts"])
    assert prompts > 8
    just, more = (f"rollout.oversampling_factor={1 + share / prompts:.6f}" for share in (-0.4, 0.5))
    with pytest.raises(ValueError, match="must be 1 or more"):
        load(PRESET, [f"rollout.unfinished={kind}", just])
    assert not broken(PRESET, f"rollout.unfinished={kind}", more), "half a prompt more is one more"


def test_no_more_is_begun_than_rollouts_can_train_on_in_time() -> None:
    """Else groups would be carried on and on, whatever max_continuations says."""
    words = ("rollout.unfinished=continue", "rollout.oversampling_factor=2.5")
    assert "give at most 2, or max_continuations=2" in broken(PRESET, *words)["continued_groups_find_room"]
    assert not broken(PRESET, *words, "rollout.max_continuations=2")
    assert not broken(PRESET, "rollout.unfinished=continue", "rollout.oversampling_factor=2")
    assert not broken(PRESET, "rollout.unfinished=drop", "rollout.oversampling_factor=2.5")


@pytest.mark.parametrize(
    ("preset", "settings", "rule"),
    [
        (MIXTURE, ["moe.router_replay=rollout"], "continued_without_choices"),
        (MIXTURE, ["moe.router_replay=old_logprobs"], "continued_without_choices"),
        (PRESET, ["algorithm.name=gspo_token", "algorithm.top_entropy_quantile=0.2"], "continued_without_entropies"),
    ],
)
def test_what_needs_one_version_of_the_weights_is_refused_where_several_sample(
    preset: Path, settings: list[str], rule: str
) -> None:
    assert rule in broken(preset, "rollout.unfinished=continue", MORE, *settings)
    assert rule not in broken(preset, "rollout.unfinished=drop", MORE, *settings)
    assert rule not in broken(preset, *settings)
    assert rule not in broken(preset, "rollout.unfinished=continue", MORE, "moe.router_replay=off")


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["plan", str(PRESET), *words, "--json"]) == 3
    told: dict[str, Any] = json.loads(capsys.readouterr().out)["time"]
    return told


def test_a_line_says_whether_partial_rollouts_pay(capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds that it names are those of the plan that it names."""
    told = _told(capsys)
    words = told["partial_rollouts"].split(" would")[0].split()
    other = _told(capsys, *words)
    assert words[0] == "rollout.unfinished=continue"
    assert f"would take {other['seconds_per_rollout']:,.1f} s a rollout" in told["partial_rollouts"]
    assert told["partial_rollouts"].endswith("it pays") and other["seconds_per_rollout"] < told["seconds_per_rollout"]
    assert f"would take {told['seconds_per_rollout']:,.1f} s, these" in other["partial_rollouts"]
    # Where all answers are of one length, engines are as full as they can be anyway.
    even = ("--response-tokens", "30720")
    waits, goes_on = (_told(capsys, *even, *more)["phases"] for more in ((), ("rollout.unfinished=continue", MORE)))
    assert waits["generation"] < goes_on["generation"] < 1.02 * waits["generation"], "it is read again"


def test_the_time_of_a_rollout_that_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    def generation(*words: str) -> float:
        seconds: float = _told(capsys, *words, "--response-tokens", "4000")["phases"]["generation"]
        return seconds  # few answers of this mean are cut off, so the last of them are much longer

    waits = generation()
    assert generation(MORE) == waits, "what is not drawn takes no time"
    small, large = (generation("rollout.unfinished=continue", f"rollout.oversampling_factor={f}") for f in (1.25, 2))
    assert large < small < waits, "fuller engines are faster"
    twice = generation("batch.steps_per_generation=8")
    drops = generation("rollout.unfinished=drop", "rollout.oversampling_factor=2")
    assert drops < waits < twice, "the longest are not waited for"
    assert generation("rollout.unfinished=drop", "rollout.oversampling_factor=1.05") > waits, "of a group one is long"
    assert "old_logprobs" in _told(capsys)["phases"]
    assert "old_logprobs" not in _told(capsys, "rollout.unfinished=continue", MORE)["phases"]


@pytest.mark.parametrize(("kind", "exact"), [("wait", True), ("drop", False), ("continue", False)])
def test_the_grade_and_what_a_run_may_change(kind: str, exact: bool) -> None:
    config = load(CONFIGS / "tiny_cpu.yaml", [f"rollout.unfinished={kind}", MORE])
    found = exactness.assess(config)
    assert (found.grade, found.settings) == (
        ("bitwise", ()) if exact else ("journal-exact", ("rollout.unfinished=wait",))
    )
    other = load(CONFIGS / "tiny_cpu.yaml", [f"rollout.unfinished={kind}", "rollout.oversampling_factor=2"])
    assert (refused_changes(config, other) == []) is exact, "prompts that were drawn are used up"


def test_settings_without_effect_are_named() -> None:
    def notes(*settings: str) -> str:
        return "\n".join(make_plan(load(CONFIGS / "tiny_cpu.yaml", list(settings))).warnings)

    assert "rollout.oversampling_factor (1.5) changes nothing without rollout.dynamic_sampling" in notes(MORE)
    assert "oversampling_factor" not in notes(MORE, "rollout.unfinished=drop")
    kept = "rollout.max_continuations (3) changes nothing without rollout.unfinished=continue"
    assert kept in notes(MORE, "rollout.unfinished=drop", "rollout.max_continuations=3")
    assert "max_continuations" not in notes(MORE, "rollout.unfinished=continue", "rollout.max_continuations=3")
