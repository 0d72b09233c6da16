"""The lines that begin and end a run. Takes milliseconds; catches a run that learnt nothing and looks healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.changes import refused_changes
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system.terminal import program
from gspo_hpc.training.telemetry.headlines import closing, opening

CONFIG = from_dict({"run": {"name": "demo", "max_steps": 8}})


def steps(rewards: list[float | None], **more: Any) -> list[dict[str, Any]]:
    """One rollout of two updates for each reward."""
    return [
        {"step": number + 1, "rollout": number // 2, "reward": rewards[number // 2], "seconds": 30.0, "empty": 0} | more
        for number in range(2 * len(rewards))
    ]


def test_a_run_begins_with_what_it_is(project: Path) -> None:
    config = load(project / "configs" / "qwen3_30b_a3b_ep8.yaml")
    run, what, plan = opening(config, make_plan(config), "runs/x, attempt 1, from the beginning", (7473, 1))
    assert run == "run qwen3_30b_a3b_ep8: runs/x, attempt 1, from the beginning"
    assert what == ("gspo trains Qwen/Qwen3-30B-A3B on 8 H200-141GBs (EP 8 x DP 8; 8 engines); 7,473 prompts, 1 unseen")
    assert plan.startswith("plan: 400 steps, rollouts of 1,024 completions (64 prompts x 16) with 4 updates; about ")
    assert plan.endswith(" hours")
    cpu = load(project / "configs" / "tiny_cpu.yaml")
    _, what, plan = opening(cpu, make_plan(cpu), "", (1, 0))
    assert "on 2 CPU ranks (DP 2; 1 engine); 1 prompt, 0 unseen" in what and plan.endswith("with 4 updates")


def test_a_run_ends_with_what_it_learnt(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "000008").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000008" / "COMMITTED").write_text("{}")
    records = [{"step": 0, "eval/accuracy": 0.25}, *steps([0.2, 0.4, 0.5, 0.9])]
    records[-1] |= {"eval/accuracy": 0.75}
    lines = list(closing(CONFIG, records, "done", tmp_path))
    assert [text for text, _ in lines][:3] == [
        "done: 8 steps in 4m00s",
        "reward 0.200 -> 0.900; accuracy on unseen prompts 0.250 -> 0.750",
        f"in {tmp_path}: checkpoint 8, metrics.jsonl, samples.jsonl",
    ]
    assert lines[3][0].startswith(f"next: {program()} report {tmp_path}, {program()} export") and len(lines) == 4
    assert not any(bad for _, bad in lines)
    stopped = list(closing(CONFIG, records[:4], "stopped", tmp_path))
    assert stopped[0][0] == "stopped after step 3 of 8, and saved; 1m30s of steps so far" and len(stopped) == 4
    assert stopped[3][0] == "next: the same command goes on from there"


@pytest.mark.parametrize(
    ("rewards", "more", "told"),
    [
        ([0.5, 0.4, 0.3, 0.2], {}, "reward 0.500 -> 0.200"),
        ([0.0, 0.0, 0.0, 0.0], {"empty": 1}, "8 of 8 steps had nothing to learn from"),
        ([0.1, 0.2, 0.3, 0.4], {"empty": 1}, "8 of 8 steps had nothing to learn from"),
        ([None, None], {}, "no completion got a reward"),
        ([0.0], {}, "reward 0.000 in the only rollout"),
    ],
)
def test_a_run_that_learnt_nothing_does_not_look_healthy(
    rewards: list[float | None], more: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _, (text, bad), *_ = closing(CONFIG, steps(rewards, **more), "done", tmp_path)
    assert bad and told in text and text.endswith(f": {program()} diagnose {tmp_path} names what to look at")


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    assert list(closing(CONFIG, [{"step": 0, "eval/accuracy": 0.1}], "stopped", tmp_path)) == [
        ("stopped: no step was made", True)
    ]


@pytest.mark.parametrize(
    ("style", "longer"),
    [("constant", "a higher run.max_steps goes on"), ("linear", "its weights as model.path begin a longer run")],
)
def test_a_longer_run_is_offered_as_it_can_be(style: str, longer: str, tmp_path: Path) -> None:
    """`run.max_steps` cannot change while the learning rate decays over the run."""
    config = from_dict({"run": {"name": "demo", "max_steps": 8}, "optimizer": {"lr_decay_style": style}})
    *_, (text, _) = closing(config, steps([0.1, 0.4, 0.5, 0.9]), "done", tmp_path)
    assert text.endswith(f"--out FOLDER; {longer}")
    epochs = from_dict({"run": {"name": "demo", "max_epochs": 2}, "optimizer": {"lr_decay_style": style}})
    *_, (text, _) = closing(epochs, steps([0.1, 0.4, 0.5, 0.9]), "done", tmp_path)
    assert text.endswith("begin a longer run")
    longer_run = from_dict({"run": {"name": "demo", "max_steps": 9}, "optimizer": {"lr_decay_style": style}})
    assert bool(refused_changes(config, longer_run)) is (style == "linear")


def test_only_whole_checkpoints_are_named(tmp_path: Path) -> None:
    """A copy that somebody made beside them, or a save under way, is none."""
    for name in ("000004", "000010.bak", "000012"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "000004" / "COMMITTED").write_text("{}")
    texts = [text for text, _ in closing(CONFIG, steps([0.1, 0.2]), "done", tmp_path)]
    assert texts[2].startswith(f"in {tmp_path}: ") and "10" not in texts[2].split(":")[1] and "12," not in texts[2]
