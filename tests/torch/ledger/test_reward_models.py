"""Engines of reward models take turns with the policy's and the trainer, and take what the plan says of them.

Costs a quarter of a minute. Catches: a reward model that is awake beside an engine that generates or beside an update,
one that stays awake, ranks that do not wait for the engine of their neighbour, a plan that forgets what sleeps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader, paths
from gspo_hpc.engine.engine import Engine
from gspo_hpc.planning.estimates.serving import reward_models
from gspo_hpc.rollout.scoring import RewardModels
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training.sync import EngineWeights
from tests.torch.ledger.node import CardFull
from tests.torch.ledger.runs import EVENTS, agree, host_of, job_of, run

SCRIPT = {1: "death", 3: "death", 6: "stop"}
CASES = {
    "one": ("qwen2.5_7b_tp2", "[{name: a, path: Qwen2.5-7B}]", ()),
    "two, over two GPUs": (
        "qwen2.5_7b_tp2",
        "[{name: a, path: Qwen2.5-14B, tensor_parallel_size: 2, gpu_memory_utilization: 0.6},"
        "{name: b, path: Qwen2.5-7B, gpu_memory_utilization: 0.4}]",
        ("rollout.tensor_parallel_size=4", "memory.offload_parts=[optimizer,gradients]"),
    ),
    "engines that keep their weights": (
        "qwen3_4b_lora_1gpu",
        "[{name: a, path: Qwen3-4B}]",
        ("rollout.sleep_level=1",),
    ),
}
FUNCTIONS = {1: "[{function: reward_model}]"}
FUNCTIONS[2] = "[{function: reward_model, args: {model: a}}, {function: reward_model, args: {model: b}}]"


@pytest.fixture
def model(tiny_folder: Path) -> Path:
    return tiny_folder / "model"


def config_of(case: str, *more: str) -> Any:
    preset, models, own = CASES[case]
    functions = FUNCTIONS[1 + models.count("},{")]
    settings = [*EVENTS, f"reward.models={models}", f"reward.functions={functions}", *own, *more]
    return loader.load(paths.PRESETS / f"{preset}.yaml", settings)


@pytest.mark.parametrize("case", CASES)
def test_reward_models_take_turns_with_all_others(case: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    job = job_of(config_of(case), model, 1, SCRIPT)
    end = run(job, Cursor(), monkeypatch, model)
    again = job_of(job.config, model, 2, {})
    assert run(again, end, monkeypatch, model).step == 9
    assert job.node.peaks["reward_model"] > 0.3 * job.node.card
    for plan in job.estimate.phases:
        peak = max(job.node.peaks[plan.name], again.node.peaks[plan.name])
        if plan.name in job.node.peaks or plan.name != "logprobs":
            assert agree(job, plan, peak), (plan.name, peak / 2**30, plan.total / 2**30)
    host = host_of(job)
    assert job.estimate.host["reward_weights_asleep"] > 2**30
    assert again.node.host == pytest.approx(host, abs=job.world.size), (again.node.host / 2**30, host / 2**30)


@pytest.mark.parametrize("fault", ["policy", "trainer", "wait"])
def test_faults_in_the_order_of_events_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    large = "{name: a, path: Qwen2.5-7B, tensor_parallel_size: 4, gpu_memory_utilization: 0.9}"
    more = ["rollout.engine.gpu_memory_utilization=0.9", "rollout.tensor_parallel_size=4"]
    config = config_of("one", *more, f"reward.models=[{large}]")
    if fault == "policy":  # the policy's engines are awake while the reward model scores
        monkeypatch.setattr(EngineWeights, "sleep", lambda self, level=None: None)
    elif fault == "trainer":  # the reward model stays awake
        rest = Engine.sleep
        monkeypatch.setattr(Engine, "sleep", lambda self, level=1: rest(self, level) if level == 2 else None)
    else:  # a rank does not wait for those that still score
        score = RewardModels.score
        monkeypatch.setattr(RewardModels, "score", lambda self, *a: score(replace(self, agree=list), *a))
    with pytest.raises((CardFull, ValueError, AssertionError), match="does not fit|Free memory on device|mapped a sec"):
        for seed in range(5):
            run(job_of(config, model, seed, {2: "stop"}), Cursor(), monkeypatch, model)


def test_a_plan_that_forgets_what_sleeps_is_caught(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(reward_models, "asleep", lambda config: {})
    job = job_of(config_of("one"), model, 1, {3: "stop"}, delay=1e-5)
    run(job, Cursor(), monkeypatch, model)
    wrong = {one.name for one in job.estimate.phases if not agree(job, one, job.node.peaks[one.name])}
    assert {"engine_start", "update", "sync", "generation", "reward_model", "save"} <= wrong
