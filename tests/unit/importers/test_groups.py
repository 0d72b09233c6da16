"""Groups without signal are replaced where the original replaces them (under a second).

It would catch a run that trains on groups which the original leaves out, a bound in other units, and a metric, a server
or a switch that changes what is left out and is not told.
"""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.planning.plan import make_plan

SWIFT = (
    "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 4 --max_steps 9 "
    "--model Qwen/Qwen2.5-7B "
)
MEGATRON = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type grpo --num_generations 4 --train_iters 9 "
DAPO = (
    "python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
)
FILTER = "algorithm.filter_groups"


def why(found: Converted) -> dict[str, str]:
    return {item.name: item.why for item in found.left}


@pytest.mark.parametrize("run", [SWIFT, MEGATRON])
@pytest.mark.parametrize(("given", "most"), [("", 3), ("--max_resample_times 5", 5), ("--max_resample_times 1", 2)])
def test_ms_swift_looks_at_as_many_batches_as_it_samples_times(run: str, given: str, most: int) -> None:
    found = convert(f"{run} --dynamic_sample true {given}")
    rollout = found.config.rollout
    assert (rollout.dynamic_sampling, rollout.max_num_gen_batches, rollout.oversampling_factor) == (True, most, 1.0)
    carried = {item.name: item.keys for item in found.carried}
    assert carried["dynamic_sample"] == ("rollout.dynamic_sampling",)
    assert carried.get("max_resample_times") == (("rollout.max_num_gen_batches",) if given else None)
    assert "the first batch as it was" in " ".join(found.text.replace("#", " ").split())
    assert not any("dynamic_sampling" in line for line in make_plan(found.config).errors)


@pytest.mark.parametrize("run", [SWIFT, MEGATRON])
def test_without_dynamic_sample_nothing_is_replaced(run: str) -> None:
    for given in ("", "--dynamic_sample false"):
        found = convert(f"{run} {given} --max_resample_times 5")
        assert not found.config.rollout.dynamic_sampling and found.config.rollout.max_num_gen_batches == 10
        assert why(found)["max_resample_times"] == "it is read with dynamic_sample only"


def test_groups_are_replaced_beside_a_server() -> None:
    found = convert(f"{SWIFT} --use_vllm true --vllm_mode server --dynamic_sample true --max_resample_times 5")
    rollout = found.config.rollout
    assert (rollout.mode, rollout.dynamic_sampling, rollout.max_num_gen_batches) == ("server", True, 5)


def test_filter_groups_of_the_dapo_recipe() -> None:
    filters = f"{FILTER}.enable=True {FILTER}.metric=seq_reward {FILTER}.max_num_gen_batches=10"
    found = convert(f"{DAPO} data.gen_batch_size=192 {filters}")
    rollout = found.config.rollout
    assert (rollout.dynamic_sampling, rollout.max_num_gen_batches, rollout.oversampling_factor) == (True, 30, 3.0)
    assert not any("filter_groups" in item.name or "gen_batch_size" in item.name for item in found.left)
    assert "too few groups end the run" in " ".join(found.text.replace("#", " ").split())
    plan = make_plan(found.config)
    assert plan.valid and plan.quantities["num_rollout_prompts"] == 64


@pytest.mark.parametrize(
    ("gen", "batches", "most", "factor"),
    [(64, 4, 4, 1.0), (100, 3, 5, 1.5625), (86, 1, 2, 1.34375), (32, 8, 4, 1.0), (67, 2, 3, 1.046875)],
)
def test_batches_of_another_size_are_counted_in_rollouts(gen: int, batches: int, most: int, factor: float) -> None:
    text = f"{DAPO} data.gen_batch_size={gen} {FILTER}.enable=True {FILTER}.max_num_gen_batches={batches}"
    found = convert(text)
    assert found.config.rollout.max_num_gen_batches == most
    assert found.config.rollout.oversampling_factor == factor
    assert ("data.gen_batch_size" in why(found)) is (gen <= 64)


def test_the_first_round_has_as_many_prompts_as_there() -> None:
    """A third has no end in decimals, and rounded up it would draw one prompt more."""
    text = DAPO.replace("train_batch_size=64", "train_batch_size=3072").replace("batch_size=32", "batch_size=3072")
    factor = convert(f"{text} data.gen_batch_size=4096 {FILTER}.enable=True").config.rollout.oversampling_factor
    assert factor == 1.333333 and -(-3072 * 1333333 // 1000000) == 4096


@pytest.mark.parametrize("given", ["", f"{FILTER}.max_num_gen_batches=0"])
def test_no_bound_there_is_ours(given: str) -> None:
    found = convert(f"{DAPO} {FILTER}.enable=True {given}")
    assert found.config.rollout.max_num_gen_batches == 10
    assert why(found).get(f"{FILTER}.max_num_gen_batches", "").startswith("0 and less are no bound") is bool(given)


def test_a_metric_that_is_not_the_reward_is_told() -> None:
    found = convert(f"{DAPO} {FILTER}.enable=True {FILTER}.metric=acc")
    assert any(line.startswith(f"{FILTER}.metric=acc: a group needs an advantage here") for line in found.assumed)
    for whole in ("seq_reward", "seq_final_reward", "score"):
        again = convert(f"{DAPO} {FILTER}.enable=True {FILTER}.metric={whole}")
        assert not any("metric" in line for line in again.assumed) and f"{FILTER}.metric" not in why(again)


def test_filter_groups_that_is_off_changes_nothing() -> None:
    found = convert(f"{DAPO} {FILTER}.enable=False {FILTER}.metric=acc {FILTER}.max_num_gen_batches=10")
    assert not found.config.rollout.dynamic_sampling and found.config.rollout.max_num_gen_batches == 10
    assert why(found)[f"{FILTER}.metric"] == f"it is read with {FILTER}.enable only"
    keys = {item.name: item.keys for item in found.carried}
    assert keys[f"{FILTER}.enable"] == ("rollout.dynamic_sampling",)  # off there, and off here


PPO = DAPO.replace("recipe.dapo.main_dapo", "verl.trainer.main_ppo")
ON = f"{FILTER}.enable=True {FILTER}.metric=acc {FILTER}.max_num_gen_batches=4"


@pytest.mark.parametrize(
    "run", [f"{PPO} trainer.use_v1=False", PPO.replace("main_ppo", "main_ppo_v0"), f"{PPO} trainer.use_v1=false"]
)
def test_the_earlier_trainer_of_main_ppo_reads_no_filter_groups(run: str) -> None:
    found = convert(f"{run} {ON}")
    assert not found.config.rollout.dynamic_sampling and found.config.rollout.max_num_gen_batches == 10
    for name in ("enable", "metric", "max_num_gen_batches"):
        assert "groups without signal are kept" in why(found)[f"{FILTER}.{name}"]
    assert any(line.startswith(f"{FILTER}.enable=true: nothing in that trainer") for line in found.assumed)


def test_main_ppo_draws_single_prompts_without_a_bound() -> None:
    found = convert(f"{PPO} {ON} data.gen_batch_size=192")
    rollout = found.config.rollout
    assert (rollout.dynamic_sampling, rollout.max_num_gen_batches, rollout.oversampling_factor) == (True, 10, 1.0)
    assert "ignores it" in why(found)[f"{FILTER}.max_num_gen_batches"]
    assert "single prompts" in why(found)["data.gen_batch_size"]
    assert any("since verl 0.9 only" in line for line in found.assumed)
    assert "without a bound" in " ".join(found.text.replace("#", " ").split())


def test_the_recipe_reads_filter_groups_whatever_the_trainer() -> None:
    found = convert(f"{DAPO} {ON} trainer.use_v1=False")
    assert found.config.rollout.dynamic_sampling and found.config.rollout.max_num_gen_batches == 4
    assert not any("since verl 0.9 only" in line for line in found.assumed)
