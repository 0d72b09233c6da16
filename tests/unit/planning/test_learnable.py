"""Settings with which a run learns nothing are warned of, once each; published recipes are not. Takes two seconds.

It would catch a bound that is moved over a recipe, and a setting that passes in silence again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.planning import learnable
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.plan import make_plan

RUN = ("model.path=Qwen/Qwen2.5-7B", "cluster.gpus_per_node=8", "run.max_steps=100", "batch.steps_per_generation=4")


def warned(*words: str) -> list[str]:
    """Return the warnings of a plan with these settings that it has not without them."""
    usual = make_plan(loader.load(None, list(RUN))).warnings
    return [text for text in make_plan(loader.load(None, [*RUN, *words])).warnings if text not in usual]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rollout.top_k=1",), "rollout.top_k (1) nearly always takes the likeliest token"),
        (("rollout.top_p=1e-6",), "rollout.top_p (1e-06) nearly always takes"),
        (("rollout.top_k=4",), "rollout.top_k (4) nearly always takes the likeliest token"),
        (("rollout.temperature=0.01",), "rollout.temperature (0.01) nearly always takes"),
        (("rollout.top_p=0.1", "rollout.top_k=1"), "rollout.top_p (0.1) and rollout.top_k (1) nearly always take the"),
        (("rollout.max_response_length=1",), "max_response_length (1) cuts off nearly every completion"),
        (("rollout.max_response_length=3", "rollout.truncated=mask"), "rollout.truncated leaves those out of the loss"),
        (("reward.functions=[{function: number_match, weight: 0}]",), "every weight of reward.functions is 0"),
        (("reward.timeout=1e-6",), "reward.timeout (1e-06 s) ends calls"),
        (("reward.functions=[{function: number_match, timeout: 0.001}]",), "timeout of a reward function (0.001 s)"),
        (("algorithm.kl_beta=1",), "algorithm.kl_beta (1) holds the policy"),
        (("algorithm.clip_low=1e-9",), "a clip range of 1e-09 leaves nothing"),
        (("algorithm.name=grpo", "algorithm.top_entropy_quantile=0.001"), "top_entropy_quantile (0.001) is the share"),
        (("optimizer.lr=0",), "optimizer.lr (0) changes no weight"),
        (("optimizer.lr=1e-10",), "optimizer.lr (1e-10) is too small to change weights"),
        (("optimizer.lr=1",), "optimizer.lr (1) destroys a model"),
        (("optimizer.lr_warmup_steps=200",), "rises at its end, at 5e-07 of 1e-06"),
        (("optimizer.lr_warmup_steps=100",), "(100) is not below the 100 steps of the run"),
        (("optimizer.weight_decay=1e5",), "optimizer.weight_decay (100000) takes 10% off"),
        (("optimizer.adam_eps=1e-3",), "leaves a weight a gradient of about 1e-05, which is below optimizer.adam_eps"),
        (("optimizer.clip_grad=1e-4",), "optimizer.clip_grad (0.0001) leaves a weight a gradient of about 1e-09"),
    ],
)
def test_a_setting_that_learns_nothing_is_warned_of(words: tuple[str, ...], told: str) -> None:
    (text,) = warned(*words)
    assert told in text


@pytest.mark.parametrize(
    "words",
    [
        ("rollout.temperature=0.6",),
        ("rollout.top_p=0.8", "rollout.top_k=20"),
        ("rollout.max_response_length=8", "rollout.truncated=mask"),
        ("reward.functions=[{function: number_match}, {function: math_verify, weight: 0}]",),
        ("reward.functions=[{function: number_match, weight: -1}]",),
        ("algorithm.kl_beta=0.1",),
        ("algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"),
        ("algorithm.name=grpo", "algorithm.top_entropy_quantile=0.2"),
        ("optimizer.lr=1e-8",),
        ("optimizer.lr=1e-4",),
        ("optimizer.lr_warmup_steps=99",),
        ("optimizer.weight_decay=0.1",),
        ("optimizer.adam_eps=1e-15", "optimizer.clip_grad=0"),
        ("optimizer.clip_grad=0.1",),
    ],
)
def test_what_recipes_have_is_not(words: tuple[str, ...]) -> None:
    assert not list(learnable.warnings(PlanBuilder(loader.load(None, [*RUN, *words]), None)))


def test_a_narrow_clip_range_matters_only_after_the_first_update() -> None:
    words = ("batch.steps_per_generation=1", "algorithm.clip_low=1e-9")
    assert not [text for text in warned(*words) if "clip range" in text]


def test_a_loss_scale_that_megatron_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.initial_loss_scale must be 1(\.0)? or more; found 0"):
        loader.load(None, ["optimizer.initial_loss_scale=0"])


def test_no_preset_is_warned_of(project: Path) -> None:
    for path in sorted((project / "configs").glob("*.yaml")):
        assert not list(learnable.warnings(PlanBuilder(loader.load(str(path), []), None))), path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recompute_num_layers=4"], ["recompute_num_layers (4) changes nothing without", "granularity=full"]),
        (["recompute_granularity=selective", "recompute_method=block"], ["recompute_method (block)"]),
        (["recompute_granularity=full", "recompute_modules=[mlp]"], ["([mlp])", "granularity=selective"]),
        (["recompute_granularity=full", "recompute_num_layers=4"], []),
        (["recompute_granularity=selective", "recompute_modules=[mlp]"], []),
    ],
)
def test_settings_of_another_recomputation_are_told(words: list[str], told: list[str]) -> None:
    found = [line for line in warned(*(f"memory.{word}" for word in words)) if "changes nothing" in line]
    assert len(found) == bool(told) and all(part in found[0] for part in told), found


def refused(*words: str) -> list[str]:
    """Return why a plan with these settings is refused."""
    return [
        item.message for item in make_plan(loader.load(None, [*RUN, *words])).broken if item.rule == "reward_weights"
    ]


def test_weights_that_cancel_are_refused() -> None:
    both = "reward.functions=[{{function: number_match, weight: {}}}, {{function: number_match, weight: {}}}]"
    assert refused(both.format(0.3, -0.3)) == [
        "weights of reward.functions 0 and 1 (number_match with the same arguments) cancel: +0.3 -0.3 = 0; leave these "
        "terms out, or give other weights"
    ]
    assert not refused(both.format(0.3, -0.2)) and not refused(both.format(0, 0))
    assert not refused("reward.functions=[{function: number_match}, {function: exact_match, weight: -1}]")
    target = "{{function: length, weight: {}, args: {{target: {}, limit: 16}}}}"
    assert not refused(f"reward.functions=[{target.format(1, 4)}, {target.format(-1, 8)}]")
    three = "{function: number_match, weight: 0.1}, {function: number_match, weight: 0.2}"
    assert refused(f"reward.functions=[{three}, {{function: number_match, weight: -0.3}}]")


def test_dynamic_sampling_without_any_reward_is_refused() -> None:
    words = ("rollout.dynamic_sampling=true", "reward.functions=[{function: number_match, weight: 0}]")
    (told,) = refused(*words)
    assert told.startswith("rollout.dynamic_sampling replaces groups whose rewards are equal, and with every weight")
    assert not refused(words[1]) and not refused(words[0], "reward.functions=[{function: number_match}]")
    assert not refused(*words, "rollout.dynamic_sampling_metric=number_match")
    assert not refused(*words, "algorithm.teacher=big", "algorithm.kl_beta=1"), "another rule says that"
