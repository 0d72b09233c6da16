"""The plan: worked cases with their exact numbers, and every rule against an independent restatement in integers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.derived import Passes, pass_sizes, passes_needed
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import PlanError, make_plan, max_steps


def config(world: int = 8, tp: int = 1, pp: int = 1, cp: int = 1, **batch: Any) -> Config:
    return from_dict(
        {
            "cluster": {"nodes": world},
            "parallel": {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
            },
            "batch": batch,
        }
    )


# Rules about prompts: those of a rollout, and those of an update.
DIVIDE, REACH = "rollout_prompts_divide_over_dp", "rollout_prompts_reach_every_dp_group"
FILL = "rollout_prompts_fill_micro_batches"
UPDATE_REACH, UPDATE_FILL = "update_prompts_reach_every_dp_group", "update_prompts_fill_micro_batches"


def sizes(mbs: int, gbs: int, spg: int, group: int) -> dict[str, int]:
    return {
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "steps_per_generation": spg,
        "num_generations": group,
    }


def rules(c: Config, rows: int | None = None) -> set[str]:
    return {str(item.rule) for item in make_plan(c, rows).broken}


def messages(c: Config) -> str:
    return "\n".join(item.message for item in make_plan(c).broken)


CASES: dict[str, tuple[int, int, tuple[int, int, int, int], set[str], dict[str, int | float]]] = {
    "E1": (8, 2, (1, 16, 2, 4), set(), {"dp_size": 4, "generation_batch_size": 32, "num_rollout_prompts": 8}),
    "E1 per group": (
        8,
        2,
        (1, 16, 2, 4),
        set(),
        {"num_rollout_prompts_per_dp_group": 2, "num_prompts_per_dp_group": 1, "gradient_accumulation_steps": 4},
    ),
    "E2": (
        16,
        2,
        (1, 16, 2, 4),
        {UPDATE_REACH},
        {
            "dp_size": 8,
            "num_rollout_prompts": 8,
            "num_rollout_prompts_per_dp_group": 1,
            "num_prompts_per_dp_group": 0.5,
        },
    ),
    "E2a": (16, 2, (1, 32, 1, 4), set(), {"num_rollout_prompts": 8, "num_prompts_per_dp_group": 1}),
    "E2b": (16, 2, (1, 16, 4, 4), {UPDATE_REACH}, {"num_prompts_per_dp_group": 0.5, "num_rollout_prompts": 16}),
    "E2c": (16, 2, (1, 32, 2, 4), set(), {"num_rollout_prompts": 16, "num_prompts_per_dp_group": 1}),
    "E3": (
        8,
        1,
        (2, 32, 2, 4),
        {UPDATE_FILL},
        {"num_rollout_prompts": 16, "num_rollout_prompts_per_dp_group": 2, "num_prompts_per_dp_group": 1},
    ),
    "E3a": (8, 1, (2, 64, 2, 4), set(), {"num_prompts_per_dp_group": 2, "num_iters_per_step": 2}),
    "E3b": (8, 1, (2, 32, 2, 2), set(), {"num_prompts_per_dp_group": 2, "num_train_prompts": 16}),
    # Half a prompt per device fills no micro-batch, either.
    "Q1": (
        8,
        1,
        (1, 16, 1, 4),
        {DIVIDE, REACH, FILL, UPDATE_REACH},
        {"num_rollout_prompts": 4, "num_prompts_per_dp_group": 0.5, "per_device_generation_batch_size": 2},
    ),
    "Q1 with steps_per_generation 2": (8, 1, (1, 16, 2, 4), {UPDATE_REACH}, {"num_rollout_prompts": 8}),
    "Q1 with global_batch_size 32": (8, 1, (1, 32, 1, 4), set(), {"num_rollout_prompts": 8}),
    "Q3": (
        4,
        1,
        (2, 16, 3, 4),
        {FILL, UPDATE_FILL},
        {"num_rollout_prompts_per_dp_group": 3, "num_iters_per_step": 1.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_worked_cases(case: str) -> None:
    world, tp, batch, broken, expected = CASES[case]
    plan = make_plan(config(world, tp, **sizes(*batch)))
    assert {item.rule for item in plan.broken} == broken
    assert plan.valid == (not broken)
    assert {name: plan.quantities[name] for name in expected} == expected
    for name in expected:  # a whole number is an int: 8, not 8.0
        assert type(plan.quantities[name]) is type(expected[name])


def test_messages_keep_the_words_that_users_search_for() -> None:
    q1 = messages(config(8, **sizes(1, 16, 1, 4)))
    assert (
        "num_rollout_prompt (4) = generation_batch_size (16) // num_generations (4) must be divisible by dp_size (8)"
        in q1
    )
    assert "per_device_num_rollout_prompt (0) must be" in q1
    assert "Per-device rollout prompt count (3) must be divisible by micro_batch_size (2)" in messages(
        config(4, **sizes(2, 16, 3, 4))
    )
    assert "num_prompts_per_dp_group (1) must be divisible by micro_batch_size (2)" in messages(
        config(8, **sizes(2, 32, 2, 4))
    )
    assert "global_batch_size must be a multiple of 64" in messages(config(8, **sizes(2, 32, 2, 4)))


def test_every_broken_rule_is_listed_at_once() -> None:
    plan = make_plan(config(12, 8, micro_batch_size=1, global_batch_size=8, generation_batch_size=9, num_generations=1))
    assert [item.rule for item in plan.broken] == [
        "world_size_divides",
        "expert_world_size_divides",
        "rollout_updates_whole",
        "group_has_two_completions",
        "rollout_reaches_every_gpu",
    ]
    with pytest.raises(PlanError) as caught:
        plan.require()
    assert caught.value.broken == plan.broken
    assert str(caught.value).count("\n") == 4
    assert "rule group_has_two_completions: num_generations (1) must be at least 2" in str(caught.value)


def test_a_valid_plan_is_not_refused() -> None:
    make_plan(config(8, 2, **sizes(1, 16, 2, 4))).require()


# ---- against an independent restatement ----------------------------------------------------------

small = st.integers(1, 4)


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, int]:
    """Sizes that fit by construction, then with up to two of them changed."""
    s = {name: draw(small) for name in ("tp", "pp", "cp", "ep", "mbs", "spg", "iterations")}
    s["etp"], s["group"] = draw(st.sampled_from([1, s["tp"]])), draw(st.integers(2, 6))
    dp = draw(small) * s["ep"] * s["etp"]
    s["world"] = s["tp"] * s["pp"] * s["cp"] * dp
    s["gbs"] = s["group"] * dp * s["mbs"] * draw(small)
    s["gen"] = s["gbs"] * s["spg"]
    for name in draw(st.lists(st.sampled_from(["world", "mbs", "gbs", "gen", "group", "spg", "ep"]), max_size=2)):
        s[name] = draw(st.integers(1, 24))
    return s


def as_config(s: dict[str, int], **more: Any) -> Config:
    return from_dict(
        {
            "cluster": {"nodes": s["world"]},
            "parallel": {
                "tensor_model_parallel_size": s["tp"],
                "pipeline_model_parallel_size": s["pp"],
                "context_parallel_size": s["cp"],
                "expert_model_parallel_size": s["ep"],
                "expert_tensor_parallel_size": s["etp"],
            },
            "rollout": {"max_prompt_length": 24, "max_response_length": 24},  # 48: divisible by 2 x cp
            "batch": {
                "micro_batch_size": s["mbs"],
                "global_batch_size": s["gbs"],
                "generation_batch_size": s["gen"],
                "steps_per_generation": s["spg"],
                "num_generations": s["group"],
                "num_iterations": s["iterations"],
            },
        }
    )


def broken_by_hand(s: dict[str, int]) -> set[str]:
    """The rules in integers, without a quotient: a/b >= 1 is a >= b, (a/b) % c == 0 is a % (b c) == 0."""
    world, group, gbs, gen, mbs = s["world"], s["group"], s["gbs"], s["gen"], s["mbs"]
    ranks, expert_ranks = s["tp"] * s["pp"] * s["cp"], s["etp"] * s["ep"] * s["pp"]
    found = {
        "world_size_divides": world % ranks != 0,
        "expert_world_size_divides": world % expert_ranks != 0,
        "rollout_groups_whole": gen % group != 0,
        "rollout_updates_whole": gen % gbs != 0,
        "group_has_two_completions": group < 2,
        "rollout_reaches_every_gpu": gen < world,
        "generation_batch_size_agrees": gen != gbs * s["spg"],
        "update_groups_whole": gbs % group != 0,
    }
    if world % ranks == 0:
        dp = world // ranks
        found[DIVIDE] = gen % group == 0 and gen // group % dp != 0
        found[REACH] = gen < group * dp
        found[FILL] = gen % (group * dp * mbs) != 0
        found[UPDATE_REACH] = gbs < group * dp
        found[UPDATE_FILL] = gbs >= group * dp and gbs % (group * dp * mbs) != 0
        found["update_fills_micro_batches"] = gbs % (mbs * dp) != 0
    return {rule for rule, is_broken in found.items() if is_broken}


@settings(max_examples=300, deadline=None)
@given(settings_of_a_run())
def test_exactly_the_rules_that_do_not_hold_are_broken(s: dict[str, int]) -> None:
    plan = make_plan(as_config(s))
    assert {item.rule for item in plan.broken} == broken_by_hand(s)
    assert plan.valid == (not broken_by_hand(s))


@settings(max_examples=200, deadline=None)
@given(settings_of_a_run())
def test_quantities_multiply_back_together(s: dict[str, int]) -> None:
    c = as_config(s)
    plan = make_plan(c)
    q = plan.quantities
    near = pytest.approx
    assert q["world_size"] == s["world"] == c.world_size
    assert q["num_rollout_prompts"] * s["group"] == near(q["generation_batch_size"]) == near(s["gen"])
    assert q["num_train_prompts"] * s["group"] == near(s["gbs"])
    assert q["per_device_generation_batch_size"] * s["world"] == near(s["gen"])
    if "dp_size" in q:
        assert q["dp_size"] * s["tp"] * s["pp"] * s["cp"] == s["world"]
        assert q["gradient_accumulation_steps"] * s["mbs"] * q["dp_size"] == near(s["gbs"])
        assert q["num_rollout_prompts_per_dp_group"] * q["dp_size"] == near(q["num_rollout_prompts"])
        assert q["num_prompts_per_dp_group"] * q["dp_size"] == near(q["num_train_prompts"])
        assert q["num_iters_per_step"] * s["mbs"] == near(q["num_rollout_prompts_per_dp_group"])
    else:
        assert "world_size_divides" in {item.rule for item in plan.broken}
    if "expert_dp_size" in q:
        assert q["expert_dp_size"] * s["etp"] * s["ep"] * s["pp"] == s["world"]
    if plan.valid:
        fractions = {name for name, value in q.items() if not isinstance(value, int)}
        assert fractions <= {"per_device_generation_batch_size"}  # with CP or TP a GPU may have 1.5 completions
        assert q["steps_per_generation"] * q["global_batch_size"] == q["generation_batch_size"]
    assert json.loads(json.dumps(plan.to_json()))["valid"] is plan.valid


# ---- two ways to say one thing, token budgets, passes --------------------------------------------


def test_generation_batch_size_and_steps_per_generation() -> None:
    by_size = {"micro_batch_size": 1, "global_batch_size": 32, "generation_batch_size": 64, "num_generations": 4}
    plan = make_plan(config(8, **by_size))
    assert plan.valid and plan.quantities["steps_per_generation"] == 2
    assert rules(config(8, **by_size, steps_per_generation=2)) == set()
    assert rules(config(8, **by_size, steps_per_generation=4)) == {"generation_batch_size_agrees"}
    assert "generation_batch_size (64) and steps_per_generation (4) disagree" in messages(
        config(8, **by_size, steps_per_generation=4)
    )


def test_with_a_token_budget_nothing_fills_micro_batches_and_the_plan_says_so() -> None:
    batch = {"global_batch_size": 32, "steps_per_generation": 3, "num_generations": 4}
    fixed = make_plan(config(8, micro_batch_size=2, **batch))
    assert {item.rule for item in fixed.broken} == {FILL, UPDATE_FILL}
    packed = make_plan(config(8, micro_batch_tokens=2048, **batch))
    assert packed.valid
    assert any("up to micro_batch_tokens tokens, so rules on how many prompts" in note for note in packed.notes)
    assert not any("Packing" in note for note in fixed.notes)
    assert "gradient_accumulation_steps" not in packed.quantities  # no invented numbers
    assert "num_iters_per_step" not in packed.quantities
    assert packed.quantities["micro_batch_tokens"] == 2048
    for gpus, broken in ((16, True), (8, False)):  # one completion a rank is enough
        found = rules(config(gpus, micro_batch_tokens=2048, global_batch_size=8, num_generations=4))
        assert ("update_reaches_every_dp_rank" in found) is broken


def test_an_update_is_made_of_whole_groups_even_with_a_token_budget() -> None:
    assert rules(
        config(2, micro_batch_tokens=2048, global_batch_size=6, steps_per_generation=4, num_generations=4)
    ) == {"update_groups_whole"}


def test_a_token_budget_holds_the_longest_sequence() -> None:
    def c(tokens: int) -> Config:
        return from_dict(
            {
                "batch": {"micro_batch_tokens": 4096, "logprob_micro_batch_tokens": tokens},
                "rollout": {"max_prompt_length": 100, "max_response_length": 200},
            }
        )

    assert rules(c(300)) == set()
    assert rules(c(299)) == {"token_budget_holds_longest_sequence"}
    assert "logprob_micro_batch_tokens (299) must hold the longest sequence" in messages(c(299))


def test_a_size_and_a_budget_exclude_each_other() -> None:
    assert rules(config(1, micro_batch_size=1, micro_batch_tokens=4096)) == {"one_size_per_pass"}
    assert rules(config(1, reference_micro_batch_size=1, reference_micro_batch_tokens=4096)) == {"one_size_per_pass"}
    assert rules(config(1, micro_batch_size=1, reference_micro_batch_tokens=4096)) == set()


def test_each_pass_has_its_own_size() -> None:
    own = from_dict(
        {
            "batch": {
                "micro_batch_size": 1,
                "logprob_micro_batch_size": 3,
                "reference_micro_batch_tokens": 4096,
                "num_iterations": 2,
            },
            "algorithm": {"kl_beta": 0.1},
        }
    )
    found = {name: (s.needed, s.micro_batch_size, s.micro_batch_tokens) for name, s in make_plan(own).passes.items()}
    assert found == {"update": (True, 1, None), "old_logprobs": (True, 3, None), "reference": (True, None, 4096)}
    shared = pass_sizes(config(1, micro_batch_tokens=2048))
    assert {s.micro_batch_tokens for s in shared.values()} == {2048}
    assert [s.needed for s in shared.values()] == [True, False, False]


@pytest.mark.parametrize("size", ["size", "tokens"])
@pytest.mark.parametrize(
    ("given", "takers"),
    [
        ("logprob_", {"old_logprobs"}),
        ("reference_", {"reference"}),
        ("", {"update", "old_logprobs", "reference"}),
    ],
)
def test_a_size_reaches_the_passes_that_have_none_of_their_own_only_from_the_update(
    given: str, takers: set[str], size: str
) -> None:
    sizes = pass_sizes(config(1, **{f"{given}micro_batch_{size}": 4096}))
    assert {name for name, one in sizes.items() if 4096 in (one.micro_batch_size, one.micro_batch_tokens)} == takers


@pytest.mark.parametrize(
    ("batch", "beta", "expected"),
    [
        ({}, 0.0, Passes(False, False)),
        ({"steps_per_generation": 1, "num_iterations": 1}, 0.01, Passes(False, True)),
        ({"steps_per_generation": 2}, 0.0, Passes(True, False)),
        ({"num_iterations": 2}, 0.0, Passes(True, False)),
        ({"global_batch_size": 8, "generation_batch_size": 8}, 0.0, Passes(False, False)),
        ({"global_batch_size": 8, "generation_batch_size": 16}, 0.5, Passes(True, True)),
    ],
)
def test_passes_needed(batch: dict[str, int], beta: float, expected: Passes) -> None:
    assert passes_needed(from_dict({"batch": batch, "algorithm": {"kl_beta": beta}})) == expected


@pytest.mark.parametrize("beside", [{}, {"correction": "bypass"}])
def test_entropies_of_tokens_need_the_pass_of_old_logprobs(beside: dict[str, str]) -> None:
    algorithm = {"name": "grpo", "top_entropy_quantile": 0.2, **beside}
    assert passes_needed(from_dict({"algorithm": algorithm})) == Passes(True, False)


# ---- steps, partial configs, objective -----------------------------------------------------------


def test_max_steps_of_the_worked_case() -> None:
    assert max_steps(8000, 8, 8, 6, 2, num_iterations=2, train_share=0.99) == 1320
    assert max_steps(8000, 8, 8, 6, 2, num_iterations=1, train_share=0.99) == 660
    assert max_steps(7, 1, 2, 1, 1) == 3  # an incomplete last step does not count


def test_steps_rollouts_epochs_and_what_is_carried_over() -> None:
    c = from_dict({"run": {"max_steps": 10}, "batch": sizes(1, 8, 4, 4)})
    plan = make_plan(c, rows=20)  # 8 prompts a rollout
    q = plan.quantities
    assert (q["max_steps"], q["num_rollouts"], q["num_completions"], q["num_epochs"]) == (10, 3, 96, 1.2)
    assert (q["num_rows"], q["steps_per_epoch"]) == (20, 10)
    assert any("its last 4 prompts are carried over" in note for note in plan.notes)
    assert any("after 2 of the 4 updates" in note for note in plan.notes)
    even = make_plan(from_dict({"run": {"max_steps": 8}, "batch": sizes(1, 8, 4, 4)}), rows=16)
    assert even.notes == () and even.quantities["num_epochs"] == 1
    assert (
        rules(c, rows=7) == {"data_fills_rollout"}
        and rules(c, rows=0) == {"data_fills_rollout"}
        and rules(c, rows=8) == set()
    )
    twice = from_dict({"run": {"max_steps": 8}, "batch": sizes(1, 8, 4, 4) | {"num_iterations": 2}})
    assert make_plan(twice, rows=16).quantities["num_rollouts"] == 1
    assert make_plan(twice, rows=16).quantities["steps_per_epoch"] == 16


def test_partial_configs_are_planned_as_far_as_they_go() -> None:
    nothing = make_plan(Config())
    assert nothing.valid and nothing.quantities["world_size"] == nothing.quantities["dp_size"] == 1
    assert make_plan(config(8, global_batch_size=16)).quantities["generation_batch_size"] == 16
    some = make_plan(config(8, generation_batch_size=16, num_generations=4))
    assert some.quantities["num_rollout_prompts"] == 4 and "num_train_prompts" not in some.quantities
    assert {item.rule for item in some.broken} == {DIVIDE, REACH}
    assert rules(config(8, num_generations=1)) == {"group_has_two_completions"}


def test_the_objective_is_checked_too() -> None:
    assert rules(from_dict({"algorithm": {"aggregation": "token"}})) == {"objective_consistent"}
    assert len(make_plan(from_dict({"algorithm": {"aggregation": "token"}})).broken) == 1
    assert any("clipping is inert" in text for text in make_plan(Config()).warnings)


def test_a_cut_distribution_needs_temperature_one() -> None:
    """vLLM and the trainer measure log-probs of the same distribution then, and only then."""
    assert rules(from_dict({"rollout": {"top_p": 0.9, "temperature": 0.7}})) == {"logprobs_comparable"}
    assert rules(from_dict({"rollout": {"top_k": 50, "temperature": 1.1}})) == {"logprobs_comparable"}
    for allowed in ({"top_p": 0.9, "top_k": 50}, {"temperature": 0.7}):
        assert rules(from_dict({"rollout": allowed})) == set()
    noted = "leave unlikely tokens out"
    assert any(noted in note for note in make_plan(from_dict({"rollout": {"top_k": 50}})).notes)
    assert not any(noted in note for note in make_plan(Config()).notes)


def test_json_has_only_plain_values() -> None:
    plan = make_plan(config(16, 2, **sizes(1, 16, 2, 4)))
    found = json.loads(json.dumps(plan.to_json()))
    assert found["valid"] is False
    assert (
        found["broken"][0]["rule"] == UPDATE_REACH and "num_prompts_per_dp_group (0.5)" in found["broken"][0]["message"]
    )
    assert found["quantities"]["num_prompts_per_dp_group"] == 0.5
    assert found["layout"]["data_parallel_size"] == 8
    assert {"valid", "quantities", "broken", "layout"} <= found.keys()
    assert found["memory"] is None  # of no GPU that is named


@pytest.mark.parametrize(("name", "given", "whole"), [("top_k", 20, -1), ("top_p", 0.9, 1.0)])
def test_both_ways_to_sample_the_whole_distribution_are_offered(name: str, given: float, whole: float) -> None:
    """One of them gave no fix, for sizes are above 0 and -1 is none."""
    fixes = search.find(from_dict({"rollout": {name: given, "temperature": 0.8}}))
    assert {str(fix) for fix in fixes[:2]} == {f"rollout.{name}={whole}", "rollout.temperature=1.0"}
