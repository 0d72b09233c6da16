"""Symptoms over made-up evidence: each is shown by numbers that have it, and by no others. No GPU has made the numbers
of a GPU (use, memory) here. Real runs are in tests/run/test_diagnose.py, run directories in test_diagnose.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.diagnose.evidence import AttemptEvidence, Evidence, Excerpt
from gspo_hpc.diagnose.registry import Symptom, find
from gspo_hpc.planning.plan import make_plan

CONFIG: dict[str, Any] = {
    "run": {"max_steps": 100},
    "cluster": {"gpus_per_node": 8},
    "batch": {"micro_batch_tokens": 8192, "global_batch_size": 128, "num_generations": 8, "steps_per_generation": 4},
}


def config(**sections: dict[str, Any]) -> Config:
    """CONFIG with keys over it."""
    return loader.from_dict({n: CONFIG.get(n, {}) | sections.get(n, {}) for n in CONFIG.keys() | sections.keys()})


def healthy(step: int, **changes: Any) -> dict[str, Any]:
    """The record of a step of a run with nothing wrong."""
    update = (step - 1) % 4
    record = {
        "step": step,
        "update": update,
        "attempt": 1,
        "reward": 0.3 + 0.003 * step,
        "reward_std": 0.45,
        "zero_variance_groups": 3,
        "failures": 0,
        "response_length": 400.0 + step,
        "response_length_max": 900,
        "truncated_fraction": 0.02,
        "ratio_deviation_max": 0.0 if update == 0 else 2e-3,
        "clip_fraction": 0.0 if update == 0 else 0.15,
        "logprob_gap_mean": 2e-3 + 1e-5 * (step % 3),
        "logprob_gap_max": 0.1,
        "probe_logprob_gap_mean": 2e-3,
        "grad_norm": 0.5 + 0.01 * (step % 5),
        "skipped": 0,
        "empty": 0,
        "seconds": 40.0,
        "seconds/generate": 25.0 if update == 0 else 0.0,
        "seconds/reward_wait": 0.3,
        "seconds/update": 12.0,
        "seconds/sync": 1.0,
        "seconds/waiting": 0.2,
        "seconds/computing": 10.0,
        "seconds/computing_most": 10.4,
        "rank_of_most_seconds": step % 8,
        "communication_over_computation": 0.15,
        "device_use": 0.9,
        "runtime_memory_gib": 60.0 + step % 4,
        "packing/imbalance": 1.004,
        "packing/micro_batches": 8.0,
        "packing/fill": 0.93,
        "engine_restarts": 0,
        "experts/imbalance_max": 1.4,
        "experts/tokens_min": 800.0,
        "experts/tokens_mean": 1000.0,
        "experts/tokens_max": 1400.0,
        "experts/idle": 0.0,
    }
    if update == 0:
        record |= {
            "seconds/engine_least": 23.0,
            "seconds/engine_most": 25.0,
            "seconds/generate_tail": 3.0,
            "engine_tokens_per_s_least": 9000.0,
            "engine_tokens_per_s_most": 9500.0,
        }
    if step % 50 == 0:
        record["seconds/save"] = 2.0
    return record | changes


def evidence(change: Callable[[int], dict[str, Any]] = lambda step: {}, steps: int = 40, **sections: Any) -> Evidence:
    """A healthy run of so many steps, with each record changed."""
    records = tuple(healthy(step, **change(step)) for step in range(1, steps + 1))
    done = AttemptEvidence(1, "done", steps=(1, steps))
    return Evidence("run", config(**sections), records, (done,))


def names(run: Evidence) -> list[str]:
    """What is found."""
    return [symptom.name for symptom in find(run)]


def only(run: Evidence) -> Symptom:
    """The one symptom that is found."""
    (symptom,) = find(run)
    return symptom


def test_a_healthy_run_shows_nothing() -> None:
    assert names(evidence()) == []
    assert names(evidence(steps=3)) == []
    assert names(Evidence("run", config())) == []


def later(step: int, **changes: Any) -> dict[str, Any]:
    """Changes of the last steps of forty."""
    return changes if step > 30 else {}


def test_a_reward_that_differs_around_zero_is_not_always_zero() -> None:
    assert "reward_always_zero" not in names(evidence(lambda step: {"reward": 0.0}))


def test_a_gap_is_a_mismatch_from_three_times_the_first_value() -> None:
    grown = [names(evidence(lambda s, g=g: {"logprob_gap_mean": 0.02 * (g if s > 20 else 1)})) for g in (2.9, 3.1)]
    assert grown == [[], ["train_inference_mismatch"]]


CASES: list[tuple[str, str, Callable[[int], dict[str, Any]], str, str]] = [
    # name, severity, what changes, a part of the evidence, a setting
    (
        "replaced_groups",
        "warning",
        lambda s: {"rollout/no_signal_fraction": 0.6, "rollout/prompts_drawn": 160, "rollout/filled_groups": 0},
        "60 % of the sampled groups had no signal, steps",
        "",
    ),
    (
        "replaced_groups",
        "problem",
        lambda s: {"rollout/no_signal_fraction": 0.4, "rollout/prompts_drawn": 160, "rollout/filled_groups": 4},
        "and 4 groups without signal filled them up",
        "rollout.max_num_gen_batches=20",
    ),
    ("zero_variance_groups", "problem", lambda s: {"zero_variance_groups": 14}, "88 %", "batch.num_generations=16"),
    ("zero_variance_groups", "warning", lambda s: {"zero_variance_groups": 9}, "56 %", "batch.num_generations=16"),
    ("reward_saturation", "warning", lambda s: {"reward": 0.99, "reward_std": 0.09}, "0.99", ""),
    ("reward_always_zero", "problem", lambda s: {"reward": 0.0, "reward_std": 0.0}, "was 0, steps 1 to 40", ""),
    ("reward_function_failures", "problem", lambda s: {"failures": 32}, "25 %", "reward.timeout=30"),
    ("reward_function_failures", "warning", lambda s: {"failures": 4}, "3.1 %", "reward.timeout=30"),
    (
        "clipping_never_active",
        "warning",
        lambda s: {"clip_fraction": 0.0, "ratio_deviation_max": 1e-5},
        "1e-05, the range is -0.0003 to +0.0004",
        "optimizer.lr=3e-06",
    ),
    (
        "overclipping",
        "warning",
        lambda s: {"clip_fraction": 0.7 if s % 4 != 1 else 0.0},
        "70 % of the ratios were clipped in the later updates",
        "batch.steps_per_generation=1",  # with two, 70 % of the second one's would be
    ),
    (
        "overclipping",
        "warning",
        lambda s: {"clip_fraction": 0.7 if s % 4 != 1 else 0.0},
        "the range is -0.0003 to +0.0004",
        "algorithm.clip_low=0.0016 algorithm.clip_high=0.0021",  # ratios leave it on both sides
    ),
    (
        "overclipping",
        "problem",
        lambda s: {"clip_fraction": 0.95, "grad_norm": 0.0} if s % 4 != 1 else {"clip_fraction": 0.0},
        "in 15 of these 15 updates the gradient was exactly 0",
        "optimizer.lr=2.7e-08",
    ),
    (
        "overclipping",
        "problem",
        lambda s: {"clip_fraction": 0.95, "grad_norm": 0.3 * (s % 4 == 2)} if s % 4 != 1 else {"clip_fraction": 0.0},
        "in 10 of these 15 updates the gradient was exactly 0",
        "optimizer.lr=2.7e-08",
    ),
    (
        "entropy_collapse",
        "warning",
        lambda s: {"entropy": 0.8 * 0.85**s, "reward": 0.5 - 0.005 * s},
        "in steps 1 to 10 and 0.0012 in step 40; in 17 of 20 steps it was below a twentieth of that, or no group "
        "differed; reward went from 0.472 to 0.322",
        "algorithm.entropy_coef=0.001",
    ),
    (
        "entropy_collapse",
        "note",
        lambda s: {"entropy": 0.8 * 0.85**s},
        "0.328 nats a token in steps 1 to 10",
        "optimizer.lr=3.33e-07",
    ),
    (
        "large_updates",
        "warning",
        lambda s: {"approx_kl": 0.08 if s % 4 != 1 else 0.0},
        "made 0.08 nats a token away from the policy that sampled it, steps 22 to 40",
        "batch.steps_per_generation=2",
    ),
    (
        "weight_variance",
        "warning",
        lambda s: {"logprob_gap_effective": 0.11, "logprob_gap_outside": 0.2},
        "count as 11 % of them, steps 21 to 40, and 20 % of the tokens",
        "algorithm.correction=truncated",
    ),
    (
        "weight_variance",
        "problem",
        lambda s: {"logprob_gap_effective": 0.09},
        "count as 9.0 % of them",
        "rollout.dtype=float32 model.dtype=float32",
    ),
    (
        "length_explosion",
        "problem",
        lambda s: {"response_length": 100.0 + 20 * s, "reward": 0.5 - 0.005 * s},
        "tokens on average in steps 1 to 10",
        "optimizer.lr=1e-07",
    ),
    ("truncation", "warning", lambda s: {"truncated_fraction": 0.2}, "20 %", "rollout.max_response_length=2048"),
    ("truncation", "problem", lambda s: {"truncated_fraction": 0.5}, "50 %", "rollout.max_response_length=2048"),
    (
        "train_inference_mismatch",
        "warning",
        lambda s: {"logprob_gap_mean": 2e-3 * 1.1**s},
        "logprob_gap_mean went from",
        "rollout.dtype=float32",
    ),
    (
        "train_inference_mismatch",
        "warning",
        lambda s: {"probe_logprob_gap_mean": 2e-3 * 1.1**s},
        "probe_logprob_gap_mean went from",
        "rollout.dtype=float32",
    ),
    (
        "rounded_logits",
        "warning",
        lambda s: {"probe_logit_step": 0.0625},
        "multiples of 0.0625",
        "rollout.engine.hf_overrides.head_dtype=float32",
    ),
    ("exploding_gradients", "warning", lambda s: {"grad_norm": 0.3 * 1.2**s}, "norm", "optimizer.lr=1e-07"),
    (
        "exploding_gradients",
        "problem",
        lambda s: {"grad_norm": None, "skipped": 1} if s in (17, 37) else {},
        "2 of 40 steps (steps 17, 37)",
        "optimizer.lr=1e-07",
    ),
    (
        "exploding_gradients",
        "warning",
        lambda s: {"grad_norm": None, "skipped": 1} if s == 17 else {},
        "1 of 40 steps (step 17)",
        "optimizer.lr=1e-07",
    ),
    (
        "unbalanced_experts",
        "warning",
        lambda s: {"experts/imbalance_max": 3.0, "experts/tokens_max": 3000.0},
        "least / mean / most 800 / 1,000 / 3,000",
        "moe.aux_loss_coeff=0.001",
    ),
    ("unbalanced_experts", "problem", lambda s: {"experts/imbalance_max": 6.0}, "6.0 times", "moe.z_loss_coeff=0.001"),
    ("low_device_use", "problem", lambda s: {"device_use": 0.4}, "generate", "parallel.overlap_grad_reduce=true"),
    (
        "low_device_use",
        "warning",
        lambda s: {"device_use": 0.7},
        "target above 80 %",
        "slurm.environment.CUDA_DEVICE_MAX_CONNECTIONS='1'",
    ),
    (
        "communication",
        "warning",
        lambda s: {"communication_over_computation": 0.5},
        "target below 0.3",
        "slurm.environment.CUDA_DEVICE_MAX_CONNECTIONS='1'",
    ),
    (
        "memory_swings",
        "warning",
        lambda s: {"runtime_memory_gib": 70.0 if s == 33 else 50.0},
        "70 GiB at step 33",
        "memory.recompute_granularity=full",
    ),
    ("slow_rewards", "problem", lambda s: {"seconds/reward_wait": 20.0}, "50 %", "reward.workers=8"),
    ("slow_checkpoints", "warning", lambda s: {"seconds/save": 8.0}, "17 %", "checkpoint.interval=100"),
    ("slow_checkpoints", "problem", lambda s: {"seconds/save": 30.0}, "43 %", "checkpoint.interval=100"),
    (
        "generation_tail",
        "warning",
        lambda s: {"seconds/generate_tail": 9.0} if s % 4 == 1 else {},
        "36 % of the generation (9.0 s per rollout",
        "rollout.max_response_length=512",
    ),
    (
        "unbalanced_engines",
        "warning",
        lambda s: {"engine_tokens_per_s_least": 4000.0} if s % 4 == 1 else {},
        "the slowest made 4,000 tokens/s",
        "batch.steps_per_generation=8",
    ),
    (
        "unbalanced_engines",
        "warning",
        lambda s: {"seconds/engine_least": 10.0} if s % 4 == 1 else {},
        "worked 10.0 s",
        "batch.steps_per_generation=8",
    ),
    (
        "unbalanced_packing",
        "problem",
        lambda s: {"packing/imbalance": 1.5},
        "1.50 times the mean tokens",
        "batch.global_batch_size=256",
    ),
    ("unbalanced_packing", "note", lambda s: {"packing/fill": 0.4}, "40 % full", "batch.micro_batch_tokens=16384"),
    (
        "stragglers",
        "warning",
        lambda s: {"seconds/computing_most": 16.0, "seconds/waiting": 6.0, "rank_of_most_seconds": 5},
        "rank 5 (node 0 of the job)",
        "tracking.profile_steps=[42]",
    ),
]


@pytest.mark.parametrize(("name", "severity", "change", "shown", "setting"), CASES)
def test_each_symptom_is_found_alone(
    name: str, severity: str, change: Callable[[int], dict[str, Any]], shown: str, setting: str
) -> None:
    symptom = only(evidence(change))
    assert (symptom.name, symptom.severity) == (name, severity)
    assert shown in " ".join(symptom.evidence), symptom.evidence
    assert any(character.isdigit() for character in " ".join(symptom.evidence)), "evidence has numbers"
    assert symptom.cause and (symptom.settings or symptom.look)
    assert all(" " in text for text in symptom.look), "the name of a file alone does not say what to do with it"
    assert not setting or setting in symptom.settings, symptom.settings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_settings_can_be_given(case: tuple[Any, ...]) -> None:
    """Each is one that the command line takes, changes something, and leaves the plan whole."""
    run = evidence(case[2])
    for setting in only(run).settings:
        changed = run.with_settings(setting)
        words = setting.split() if "={" not in setting and "=[" not in setting else [setting]
        assert changed != run.config and loader.load(None, words)


def test_parts_of_seconds_are_told_apart() -> None:
    """Both were 0.2 s."""
    run = evidence(lambda s: {"seconds/engine_least": 0.153, "seconds/engine_most": 0.241} if s % 4 == 1 else {})
    told = " ".join(text for finding in find(run) for text in finding.evidence)
    assert "the least busy engine worked 0.153 s, the busiest 0.241 s" in told


def test_a_setting_that_is_there_already_is_not_offered() -> None:
    run = evidence(lambda s: {"device_use": 0.4}, parallel={"overlap_grad_reduce": True})
    assert "parallel.overlap_grad_reduce=true" not in only(run).settings


@pytest.mark.parametrize(
    ("sections", "offered"),
    [
        ({"parallel": {"expert_model_parallel_size": 4}}, True),
        ({}, False),
        ({"parallel": {"expert_model_parallel_size": 4}, "cluster": {"platform": "cpu"}}, False),
        ({"parallel": {"expert_model_parallel_size": 4}, "moe": {"token_dispatcher": "flex"}}, False),
    ],
)
def test_the_flex_dispatcher_is_offered_where_it_can_be(sections: dict[str, dict[str, Any]], offered: bool) -> None:
    """After the losses, which make experts even."""
    found = find(evidence(lambda s: {"experts/imbalance_max": 3.0}, **sections))
    (symptom,) = [one for one in found if one.name == "unbalanced_experts"]
    assert symptom.settings[:2] == ("moe.aux_loss_coeff=0.001", "moe.z_loss_coeff=0.001")
    assert symptom.settings[2:] == (("moe.token_dispatcher=flex",) if offered else ())


def test_a_setting_with_which_the_plan_would_break_is_not_offered() -> None:
    """Sixteen completions a group would leave ranks without a prompt."""
    run = evidence(lambda s: {"zero_variance_groups": 1}, batch={"global_batch_size": 16})
    assert only(run).settings == ("rollout.dynamic_sampling=true",)


def test_replacing_groups_is_not_offered_to_a_run_that_does() -> None:
    wasted = lambda s: {"zero_variance_groups": 14}  # noqa: E731
    asked = "rollout.dynamic_sampling=true"
    assert asked in only(evidence(wasted)).settings
    assert asked not in only(evidence(wasted, rollout={"dynamic_sampling": True})).settings
    apart = {"mode": "server", "engines_per_node": 4}
    assert asked in only(evidence(wasted, rollout=apart)).settings


def test_whether_a_run_may_go_on_with_the_settings_is_told() -> None:
    assert only(evidence(lambda s: {"seconds/save": 8.0})).resumable
    assert not only(evidence(lambda s: {"truncated_fraction": 0.2})).resumable


@pytest.mark.parametrize(("best", "found"), [(0.55, True), (0.6, False), (2.0, False)])
def test_rewards_that_hardly_differ_are_no_saturation_far_below_the_best_seen(best: float, found: bool) -> None:
    """A tenth below the best step is near it; a run that has collapsed to a low reward has another trouble."""
    run = evidence(lambda s: {"reward": best if s == 3 else 0.5, "reward_std": 0.01})
    assert ("reward_saturation" in names(run)) == found


@pytest.mark.parametrize(("seconds", "found"), [(40.0, True), (4000.0, False)])
def test_a_tail_of_a_generation_that_takes_no_time_is_none(seconds: float, found: bool) -> None:
    """Answers of half the length would make steps no shorter where something else takes nearly all of them."""
    tail = {"seconds/generate_tail": 12.0}
    run = evidence(lambda s: {"seconds": seconds, **(tail if s % 4 == 1 else {})})
    assert ("generation_tail" in names(run)) == found


def test_updates_without_a_signal_are_no_updates_whose_ratios_were_clipped_away() -> None:
    run = evidence(
        lambda s: {"empty": 1, "grad_norm": 0.0, "clip_fraction": None} if s % 4 == 3 else {"clip_fraction": 0.7}
    )
    (found,) = [one for one in find(run) if one.name == "overclipping"]
    assert len(found.evidence) == 1 and "gradient" not in found.evidence[0], found.evidence


def test_a_clip_range_that_is_offered_begins_above_zero() -> None:
    """A ratio is above 0, so a range of 1 and more below it would be none."""
    run = evidence(lambda s: {"clip_fraction": 0.7 * (s % 4 != 1)}, algorithm={"clip_low": 0.4, "clip_high": 0.5})
    (found,) = [one for one in find(run) if one.name == "overclipping"]
    assert "algorithm.clip_low=0.9 algorithm.clip_high=2.7" in found.settings, found.settings


def drawn(scale: float, low: float, high: float, lr: float = 1.0) -> Evidence:
    """A run whose ratios are at exponential distances from 1, 64 an update, to the side that its advantage asks for."""
    draw = random.Random(7)

    def change(step: int) -> dict[str, Any]:
        if step % 4 == 1:
            return {}
        distances = [lr * draw.expovariate(1.0 / scale) for _ in range(64)]
        clipped = sum(one > (low if place % 2 else high) for place, one in enumerate(distances))
        return {"clip_fraction": clipped / 64, "ratio_deviation_max": max(distances)}

    batch = {"global_batch_size": 64, "num_generations": 8, "steps_per_generation": 4}
    return evidence(change, algorithm={"clip_low": low, "clip_high": high}, batch=batch, optimizer={"lr": 1e-6})


@pytest.mark.parametrize("scale", [0.0008, 0.003, 0.02, 0.2])
def test_what_is_advised_against_overclipping_ends_it(scale: float) -> None:
    """A range and a rate that follow from the run's own ratios: three times the range was far too little for most."""
    clip = {"low": 0.0003, "high": 0.0004}
    (found,) = [one for one in find(drawn(scale, **clip)) if one.name == "overclipping"]
    wider, steps, rate = found.settings
    low, high = (float(word.partition("=")[2]) for word in wider.split())
    lr = float(rate.partition("=")[2]) / 1e-6
    assert steps == "batch.steps_per_generation=1"
    for better in (drawn(scale, low, high), drawn(scale, **clip, lr=lr)):
        assert "overclipping" not in names(better)
        clipped = [record["clip_fraction"] for record in better.records if record["update"]]
        assert 0.05 < sum(clipped) / len(clipped) < 0.3
    assert high / low == pytest.approx(4 / 3, rel=0.1), "as much wider above as below as it was"


@pytest.mark.parametrize(
    ("shares", "batch", "advised"),
    [
        ((0.1, 0.7, 0.9), {"steps_per_generation": 4}, "batch.steps_per_generation=2"),
        ((0.1, 0.2, 0.9, 0.95), {"steps_per_generation": 5}, "batch.steps_per_generation=3"),
        ((0.6, 0.6, 0.6), {"steps_per_generation": 4}, "batch.steps_per_generation=1"),
        ((0.1, 0.8, 0.9), {"generation_batch_size": 512}, "batch.generation_batch_size=256"),
        ((0.1, 0.8, 0.9), {"steps_per_generation": 2, "num_iterations": 2}, "batch.steps_per_generation=1"),
        (
            (0.8, 0.8, 0.9),
            {"steps_per_generation": 2, "num_iterations": 2},
            "batch.num_iterations=1 batch.steps_per_generation=1",
        ),
    ],
)
def test_as_many_updates_are_advised_as_clip_little(
    shares: tuple[float, ...], batch: dict[str, int], advised: str
) -> None:
    def change(step: int) -> dict[str, Any]:
        update = (step - 1) % (len(shares) + 1)
        return {"update": update, "clip_fraction": shares[update - 1] if update else 0.0}

    run = evidence(change, batch={"global_batch_size": 128, "num_generations": 8, "steps_per_generation": None} | batch)
    (found,) = [one for one in find(run) if one.name == "overclipping"]
    assert found.settings[1] == advised


def test_the_largest_ratio_of_a_heavy_tail_says_nothing_of_the_range() -> None:
    """One token with 30 times the probability would ask for a range of several, which clips nothing."""
    run = evidence(
        lambda s: {"clip_fraction": 0.6 * (s % 4 != 1), "ratio_deviation_max": 30.0 * (s % 4 != 1)},
        algorithm={"name": "grpo", "clip_low": 0.2, "clip_high": 0.2},
    )
    (found,) = [one for one in find(run) if one.name == "overclipping"]
    assert found.settings[0] == "algorithm.clip_low=0.74 algorithm.clip_high=0.74"


def test_ratios_of_tokens_are_more_than_those_of_completions() -> None:
    """The largest of more of them is farther out, so the same one asks for a narrower range."""

    def advised(name: str) -> float:
        run = evidence(
            lambda s: {"clip_fraction": 0.9 * (s % 4 != 1), "ratio_deviation_max": 0.5 * (s % 4 != 1)},
            algorithm={"name": name, "clip_low": 0.001, "clip_high": 0.001},
        )
        (found,) = [one for one in find(run) if one.name == "overclipping"]
        return float(found.settings[0].split()[0].partition("=")[2])

    assert 1.5 < advised("gspo") / advised("grpo") < 3.0


@pytest.mark.parametrize(
    ("weight", "late", "severity", "setting"),
    [
        (0, 0.3, None, ""),
        (0, 0.42, "warning", "optimizer.lr=3.33e-07"),
        (0, 0.9, "problem", "optimizer.lr=3.33e-07"),
        (1, 0.9, "warning", "algorithm.kl_beta=0.3"),
    ],
)
def test_a_policy_that_comes_no_nearer_to_its_teacher(
    weight: int, late: float, severity: str | None, setting: str
) -> None:
    functions = [{"function": "number_match", "weight": weight}]
    sections = {"algorithm": {"teacher": "models/big", "kl_beta": 0.1}, "reward": {"functions": functions}}
    run = evidence(lambda s: {"reference_kl": 0.4 if s <= 20 else late}, **sections)
    found = [one for one in find(run) if one.name == "away_from_teacher"]
    assert [one.severity for one in found] == [severity] * (severity is not None)
    for one in found:
        assert "models/big was 0.4 nats a token in steps 1 to 10" in one.evidence[0] and setting in one.settings
        assert f"is {late} in steps 31 to 40" in one.evidence[0]
    near = evidence(lambda s: {"reference_kl": 0.001 if s <= 20 else 0.005}, **sections)
    assert "away_from_teacher" not in names(near), "so near, it is noise"
    assert "away_from_teacher" not in names(replace(run, config=config(algorithm={"kl_beta": 0.1})))


@pytest.mark.parametrize(
    ("late", "reward", "severity"),
    [(0.9, 0.003, None), (1.1, 0.003, "warning"), (1.1, -0.003, "problem"), (0.4, -0.003, None)],
)
def test_a_policy_that_runs_away_from_the_reference(late: float, reward: float, severity: str | None) -> None:
    def change(step: int) -> dict[str, Any]:
        return {"reference_kl": 0.02 if step <= 20 else late, "reward": 0.5 + reward * step}

    run = evidence(change, algorithm={"kl_beta": 0.001}, optimizer={"lr": 1e-6})
    found = [one for one in find(run) if one.name == "runaway_kl"]
    assert [one.severity for one in found] == [severity] * (severity is not None)
    for one in found:
        assert "was 0.02 nats a token in step 1 and is 1.1 in steps 31 to 40; reward went" in one.evidence[0]
        assert one.settings == ("algorithm.kl_beta=0.003", "optimizer.lr=3.33e-07")
    nearer = evidence(lambda s: {"reference_kl": 3.0 - 0.01 * s}, algorithm={"kl_beta": 0.001})
    assert "runaway_kl" not in names(nearer), "it comes nearer, as where the reference is another model"
    only_measured = evidence(lambda s: {"reference_kl": s / 10}, algorithm={"kl_beta": 1e-6})
    assert "algorithm.kl_beta=0.001" in only(only_measured).settings, "three times nothing would hold nothing"
    early = evidence(lambda s: {"reference_kl": 0.0 if s == 1 else 30.0 - s / 2}, algorithm={"kl_beta": 0.001})
    assert "runaway_kl" in names(early), "it was far away after a few steps"
    taught = {"teacher": "models/big", "kl_beta": 0.1}
    assert "runaway_kl" not in names(replace(run, config=config(algorithm=taught))), "away_from_teacher says it"


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("truncated", "algorithm.correction_high=6"),
        ("masked", "algorithm.correction_low=0.167 algorithm.correction_high=15"),
        ("rejection", "algorithm.correction_low=0.97 algorithm.correction_high=1.03"),
    ],
)
def test_a_correction_that_drops_most_of_a_rollout(kind: str, setting: str) -> None:
    def run(share: float) -> Evidence:
        dtypes = {"model": {"dtype": "float32"}, "rollout": {"dtype": "bfloat16"}}
        return evidence(lambda s: {"correction_fraction": share}, algorithm={"correction": kind}, **dtypes)

    assert "overcorrection" not in names(run(0.49))
    for share, severity in ((0.5, "warning"), (0.89, "warning"), (0.91, "problem")):
        symptom = only(run(share))
        assert (symptom.name, symptom.severity) == ("overcorrection", severity)
        assert symptom.settings == (setting, "rollout.dtype=float32")
        assert f"{100 * share:.0f} % of the terms were bounded or dropped, steps 21 to 40" in symptom.evidence[0]


def test_a_trust_region_without_a_range_is_never_inert() -> None:
    """A gate has no bounds, and bounded weights are to be reached seldom: no alarm of those."""
    inert = lambda s: {"clip_fraction": 0.0, "ratio_deviation_max": 0.1}  # noqa: E731
    for name, found in (("grpo", True), ("gmpo", True), ("sapo", False), ("cispo", False), ("dppo", False)):
        assert ("clipping_never_active" in names(evidence(inert, algorithm={"name": name}))) == found, name


def test_a_few_sure_groups_are_no_collapse() -> None:
    """The entropy is of groups that differ: steps without any count once it was low, and one low step is none."""

    def run(low: int, empty: int) -> list[str]:
        def change(step: int) -> dict[str, Any]:
            if step > 40 - low:
                return {"entropy": 0.01}
            return {"entropy": None, "empty": 1} if step > 40 - low - empty else {"entropy": 0.8}

        return [name for name in names(evidence(change)) if name == "entropy_collapse"]

    assert run(9, 0) == [] and run(10, 0) == ["entropy_collapse"]
    assert run(0, 12) == [] and run(1, 8) == [] and run(1, 9) == ["entropy_collapse"]


def test_older_weights_that_make_weights_vary_are_named() -> None:
    late = {"mode": "server", "max_staleness": 2}
    run = evidence(lambda s: {"logprob_gap_effective": 0.3}, rollout=late, algorithm={"correction": "masked"})
    assert only(run).settings[0] == "rollout.max_staleness=1"
    assert not any("correction" in one for one in only(run).settings), "there is one already"


def test_one_update_a_rollout_is_a_note() -> None:
    run = evidence(lambda s: {"update": 0, "clip_fraction": 0.0}, batch={"steps_per_generation": 1})
    assert (only(run).name, only(run).severity) == ("clipping_never_active", "note")
    for algorithm, rollout in (({"correction": "bypass"}, {}), ({}, {"unfinished": "continue"})):
        other = evidence(
            lambda s: {"update": 0, "clip_fraction": 0.1},
            batch={"steps_per_generation": 1},
            algorithm=algorithm,
            rollout=rollout,
        )
        assert "clipping_never_active" not in names(other), "ratios are to the engine's log-probs, and not 1"
    twice = evidence(
        lambda s: {"update": (s + 1) % 2, "clip_fraction": 0.1},
        batch={"steps_per_generation": 1, "num_iterations": 2},
    )
    assert "clipping_never_active" not in names(twice), "a rollout has two updates"


@pytest.mark.parametrize(
    ("rollout", "setting"),
    [
        ({"mode": "server", "max_staleness": 2}, "rollout.max_staleness=1"),
        ({"unfinished": "continue"}, "rollout.unfinished=wait"),
    ],
)
def test_older_weights_can_leave_the_clip_range_in_the_only_update(rollout: dict[str, Any], setting: str) -> None:
    run = evidence(lambda s: {"update": 0, "clip_fraction": 0.7}, batch={"steps_per_generation": 1}, rollout=rollout)
    (found,) = [one for one in find(run) if one.name == "overclipping"]
    assert found.evidence[0].startswith("70 % of the ratios were clipped, steps"), found.evidence
    assert setting in found.settings and not any("steps_per_generation" in one for one in found.settings)
    assert "older weights" in found.cause and any("optimizer.lr" in one for one in found.settings)
    alone = evidence(
        lambda s: {"update": 0, "clip_fraction": 0.7},
        batch={"steps_per_generation": 1},
        algorithm={"correction": "bypass"},
    )
    (found,) = [one for one in find(alone) if one.name == "overclipping"]
    assert found.settings and not any("optimizer.lr" in one for one in found.settings), "no update made the distance"


@pytest.mark.parametrize(
    ("rollout", "settings"),
    [
        ({"temperature": 0.3}, ["rollout.temperature=1.0"]),
        ({"top_k": 1}, ["rollout.top_k=-1"]),
        ({"top_p": 0.1}, ["rollout.top_p=1.0"]),
        ({"top_p": 0.95, "top_k": 20}, []),
    ],
)
def test_groups_that_are_alike_are_put_down_to_the_sampling_that_makes_them_so(
    rollout: dict[str, Any], settings: list[str]
) -> None:
    """Easier prompts would not help a run that samples the likeliest token only."""
    (found,) = [
        one for one in find(evidence(lambda s: {"zero_variance_groups": 15}, rollout=rollout)) if "zero_var" in one.name
    ]
    for key in rollout if settings else ():
        assert f"nearly identical, because rollout.{key} is {rollout[key]:g}" in found.cause
    assert settings or "too easy or too hard" in found.cause
    offered = [one for one in map(str, found.settings) if one.startswith("rollout.")]
    assert offered == (settings or ["rollout.dynamic_sampling=true"])


@pytest.mark.parametrize(("least", "found"), [(8.1, False), (7.9, True)])
def test_memory_that_varies_by_more_than_a_fifth_is_told(least: float, found: bool) -> None:
    run = evidence(lambda s: {"runtime_memory_gib": 10.0 if s % 2 else least})
    assert ("memory_swings" in names(run)) == found


def test_on_a_cpu_the_targets_of_gpus_are_not_asked_for() -> None:
    swings = evidence(
        lambda s: {"runtime_memory_gib": float(s)}, cluster={"platform": "cpu"}, model={"dtype": "float32"}
    )
    assert "memory_swings" not in names(swings)
    slow = evidence(lambda s: {"communication_over_computation": 2.0}, cluster={"platform": "cpu"})
    assert (only(slow).name, only(slow).severity) == ("communication", "note")


def test_what_came_with_more_work_is_no_straggler() -> None:
    change = {"seconds/computing_most": 16.0, "seconds/waiting": 6.0, "rank_of_most_seconds": 5}
    assert "stragglers" in names(evidence(lambda s: change))
    more = change | {"packing/imbalance": 1.6}
    assert names(evidence(lambda s: more)) == ["unbalanced_packing"]
    assert names(evidence(lambda s: change | {"rank_of_most_seconds": s % 8})) == []  # bad luck, each time another's


def test_one_restart_of_an_engine_does_not_make_engines_uneven() -> None:
    run = evidence(lambda s: {"engine_tokens_per_s_least": 300.0} if s == 33 else {})
    assert names(run) == []


def test_loss_scaling_finds_its_scale() -> None:
    run = evidence(lambda s: {"skipped": int(s < 3)}, model={"dtype": "float16"})
    assert names(run) == []
    run = evidence(lambda s: {"skipped": int(s % 4 == 0)}, model={"dtype": "float16"})
    assert "model.dtype=bfloat16" in only(run).settings


def test_a_run_that_logs_nothing_more_is_told() -> None:
    run = evidence()
    run = Evidence(run.path, run.config, run.records, (AttemptEvidence(1, "running"),), seconds_since_step=100.0)
    assert names(run) == []
    run = Evidence(run.path, run.config, run.records, run.attempts, seconds_since_step=2000.0)
    assert only(run).name == "no_progress" and "2000 s after step 40" in only(run).evidence[0]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(sorted(healthy(1)) + ["seconds/save"]),
            st.none() | st.floats() | st.integers(-10, 10**6) | st.text(max_size=3) | st.booleans(),
            max_size=12,
        ),
        max_size=30,
    )
)
def test_no_record_makes_a_symptom_raise(changes: list[dict[str, Any]]) -> None:
    """Whatever is in metrics.jsonl, there is an answer, and it is said in full."""
    records = tuple(healthy(n) | change | {"step": n} for n, change in enumerate(changes, 1))
    for symptom in find(Evidence("run", config(), records, (AttemptEvidence(1, "failed", "x"),))):
        assert symptom.to_json()["evidence"] and symptom.severity in ("problem", "warning", "note")


def test_preemptions_are_no_failures() -> None:
    ends = [AttemptEvidence(n, reason, steps=(n, n)) for n, reason in enumerate(("preempted", "time limit", "done"), 1)]
    symptom = only(Evidence("run", config(), evidence().records, tuple(ends)))
    assert (symptom.name, symptom.severity) == ("restarts", "note")
    assert "1 preempted, 1 time limit; 2 of these were not the run's fault" in symptom.evidence[0]
    assert "slurm.time_minutes=120" in symptom.settings


def test_a_failure_that_the_run_got_over_is_a_warning() -> None:
    told = Excerpt("attempts/0001/rank-3.log", "Traceback\n  f()\ntorch.OutOfMemoryError: CUDA out of memory.")
    failed = AttemptEvidence(1, "failed", "rank 3 on n1: OutOfMemoryError", steps=(1, 9), error=told)
    run = Evidence("run", config(), evidence().records, (failed, AttemptEvidence(2, "done", steps=(9, 40))))
    found = {symptom.name: symptom for symptom in find(run)}
    assert found.keys() == {"out_of_memory_in_update", "restarts"}
    assert {symptom.severity for symptom in found.values()} == {"warning"}
    assert "after step 9" in found["out_of_memory_in_update"].evidence[0]


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.13 GiB is free."
)


def out_of_memory(tensor_parallel: int, error: str = OOM, **cluster: Any) -> tuple[Evidence, Symptom]:
    """A run of Qwen2.5-7B whose update ran out of memory, and the symptom."""
    made = config(
        model={"path": "Qwen/Qwen2.5-7B"},
        rollout={"max_response_length": 3000},
        parallel={"tensor_model_parallel_size": tensor_parallel},
        batch=CONFIG["batch"] | {"micro_batch_tokens": 65536},
        cluster=CONFIG["cluster"] | cluster,
    )
    told = Excerpt("attempts/0001/rank-3.log", f"Traceback\n  f()\n{error}")
    failed = AttemptEvidence(1, "failed", f"rank 3 on n1: {error}", steps=(1, 9), error=told)
    run = Evidence("run", made, evidence().records, (failed,))
    return run, next(symptom for symptom in find(run) if symptom.name == "out_of_memory_in_update")


def largest_pass(run: Evidence, *settings: str) -> tuple[int, float]:
    """Its bytes on a GPU of 79 GiB, and the share of the GPU that it leaves."""
    memory = make_plan(run.with_settings("cluster.gpu_memory_gb=79", *settings)).memory
    assert memory is not None
    return memory.busiest.reserved, memory.headroom


def test_settings_against_lack_of_memory_fit_the_gpu() -> None:
    """The error says how large the GPU is; half the tokens would not fit, and a quarter does."""
    run, found = out_of_memory(tensor_parallel=4)
    assert largest_pass(run, "batch.micro_batch_tokens=32768")[1] < 0
    assert {"memory.recompute_granularity=full", "batch.micro_batch_tokens=16384"} == set(found.settings[:2])
    assert all(largest_pass(run, setting)[1] >= 0 for setting in found.settings[:2])
    assert all(largest_pass(run, setting)[0] < largest_pass(run)[0] for setting in found.settings)
    assert found.evidence[1].startswith("estimated memory of a GPU: ") and "none" not in found.evidence[1]
    assert found.new_run == (), "all of them only cut the same work into other pieces"


def test_where_no_setting_is_enough_alone_it_is_said() -> None:
    run, found = out_of_memory(tensor_parallel=2)
    sizes = [largest_pass(run, setting) for setting in found.settings]
    assert sizes == sorted(sizes) and all(headroom < 0 for _, headroom in sizes)
    assert "none of the settings is enough alone, all of them take" in found.evidence[1]


def test_without_the_size_of_the_gpu_nothing_is_estimated() -> None:
    _, found = out_of_memory(4, "torch.OutOfMemoryError: CUDA out of memory.")
    assert len(found.evidence) == 1 and "batch.micro_batch_tokens=32768" in found.settings
    _, found = out_of_memory(4, "torch.OutOfMemoryError: CUDA out of memory.", gpu="H100-80GB")
    assert len(found.evidence) == 2 and "batch.micro_batch_tokens=16384" in found.settings


def test_failures_of_reward_functions_are_quoted_and_more_time_is_offered_to_slow_ones() -> None:
    failing = evidence(lambda s: {"failures": 32})
    raised = {"exact: KeyError: 'answer'": 30, "format: RuntimeError: x": 2}
    found = only(replace(failing, reward_failures=raised))
    assert found.evidence[1:] == ("30 x exact: KeyError: 'answer'", "2 x format: RuntimeError: x")
    assert found.settings == ()
    slow = {"exact: gave no answer within 10 s (reward.timeout)": 5}
    assert only(replace(failing, reward_failures=raised | slow)).settings == ("reward.timeout=30",)
