"""Zero, false, null and empty values say something of their own: none of them silently becomes a default (3 s)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.planning.settings import value_of

FALSY: tuple[Any, ...] = (0, 0.0, False, None, "", "null", [])
BASES: dict[str, dict[str, Any]] = {
    "trl": {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 10, "learning_rate": 2e-6},
    "swift": {"rlhf_type": "grpo", "num_generations": 4, "global_batch_size": 32, "train_iters": 10, "lr": 2e-6},
    "swift_hf": {"rlhf_type": "grpo", "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 10},
    "verl": {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.model.path": "/m",
    },
}
# Words of ours for nothing.
NOTHING = (0, False, None, "none", "off", "disabled", "alltoall", "drop", "error", (), -1, {})
# Arguments that are off by default, whose keys have another value for that.
OFF_BY_DEFAULT = ("fp16", "vllm_mode", "colocate_groups", "kl_in_reward", "split_dataset_ratio")
APART = ("config", "accelerate_config", "config_file", "defaults")


def read(source: str, values: dict[str, Any]) -> Converted:
    if source == "verl":
        nested: dict[str, Any] = {}
        for name, value in values.items():
            *above, last = name.split(".")
            place = nested
            for part in above:
                place = place.setdefault(part, {})
            place[last] = value
        values = nested
    return convert(json.dumps(values), source.partition("_")[0], gpus=8, rows=500, name="run.yaml")


def falsy_runs(source: str) -> list[tuple[str, Any]]:
    table = tables.load(source)
    names = sorted(name for name in table.known if name not in APART)
    read_by_name = {name for name in names if name not in table.blank and name not in table.reasons}
    return [(name, value) for name in names for value in (FALSY if name in read_by_name else FALSY[1:3])]


@pytest.mark.parametrize("source", BASES)
def test_a_falsy_value_is_carried_over_as_it_is_or_told(source: str) -> None:
    before = read(source, BASES[source]).config
    seen = 0
    for name, value in falsy_runs(source):
        try:
            found = read(source, BASES[source] | {name: value})
        except ValueError:
            continue
        told = {item.name for item in found.left if item.why} | {item.name for item in found.strange}
        carried = {item.name: item.keys for item in found.carried}
        assert name in told or name in carried, (name, value)
        if name in carried and name not in OFF_BY_DEFAULT and found.config == before:
            assert any(value_of(found.config, key) in NOTHING for key in carried[name]), (name, value, carried[name])
            seen += 1
        if value in (None, "", "null"):
            assert name not in carried or name in tables.load(source).nulls, (name, value, "a default is carried over")
    assert seen > 2


@pytest.mark.parametrize("source", ["trl", "swift", "swift_hf"])
def test_scale_rewards_false_divides_by_nothing(source: str) -> None:
    for value, divides in (
        (False, False),
        ("false", False),
        (0, False),
        ("none", False),
        (True, True),
        ("group", True),
    ):
        found = read(source, BASES[source] | {"scale_rewards": value})
        assert found.config.algorithm.normalize_advantage is divides, value
        assert "scale_rewards" in {item.name for item in found.carried}
    with pytest.raises(ValueError, match="scale_rewards"):
        read(source, BASES[source] | {"scale_rewards": "mean"})


def test_what_zero_and_null_mean() -> None:
    def of(**given: Any) -> Converted:
        return read("trl", BASES["trl"] | given)

    with pytest.raises(ValueError, match=r"num_train_epochs=0: must be above 0"):
        of(max_steps=-1, num_train_epochs=0)
    found = of(save_steps=0)
    assert found.config.checkpoint.interval is None or "save_steps" in {item.name for item in found.left}
    assert of(max_grad_norm=None).config.optimizer.clip_grad == 0 == of(max_grad_norm=0).config.optimizer.clip_grad
    found = of(max_completion_length=None)
    (told,) = [item.why for item in found.left if item.name == "max_completion_length"]
    assert told == "it is null in the original run, and rollout.max_response_length is 256 here"


@pytest.mark.parametrize("source", ["trl", "swift_hf"])
@pytest.mark.parametrize("style", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_warm_up_is_that_of_the_schedule_in_transformers(source: str, style: str) -> None:
    for name, value in (("warmup_ratio", 0.2), ("warmup_steps", 2)):
        found = read(source, BASES[source] | {"lr_scheduler_type": style, name: value})
        assert found.config.optimizer.lr_warmup_steps == (0 if style == "constant" else 2)
        assert (name in {item.name for item in found.carried}) is (style != "constant")


def test_a_constant_rate_of_megatron_warms_up() -> None:
    found = read("swift", BASES["swift"] | {"lr_decay_style": "constant", "lr_warmup_fraction": 0.2})
    assert found.config.optimizer.lr_warmup_steps == 2


def test_arguments_of_a_schedule_that_it_does_not_read() -> None:
    given = {"min_lr_rate": 0.1, "num_cycles": 2}
    for style, least in (
        ("cosine_with_min_lr", 2e-7),
        ("constant", 0.0),
        ("constant_with_warmup", 0.0),
        ("cosine", 0.0),
    ):
        found = read("trl", BASES["trl"] | {"lr_scheduler_type": style, "lr_scheduler_kwargs": given})
        assert found.config.optimizer.min_lr == pytest.approx(least)
        assert "lr_scheduler_kwargs" in {item.name for item in found.left}
    more = {"learning_rate": 5e-6, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": given}
    assert read("trl", BASES["trl"] | more).config.optimizer.min_lr == 5e-7, "no 5.000000000000001e-07"
    found = read(
        "trl", BASES["trl"] | {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-7}'}
    )
    assert found.config.optimizer.min_lr == 1e-7 and "lr_scheduler_kwargs" in {item.name for item in found.carried}


def test_warmup_style_of_verl_goes_before_lr_scheduler_type() -> None:
    optim = "actor_rollout_ref.actor.optim"
    found = read("verl", BASES["verl"] | {f"{optim}.warmup_style": "cosine", f"{optim}.lr_scheduler_type": "constant"})
    assert found.config.optimizer.lr_decay_style == "cosine"


def test_samples_of_verls_evaluation_are_greedy_unless_their_temperature_is_given() -> None:
    of = "actor_rollout_ref.rollout.val_kwargs"
    assert read("verl", BASES["verl"] | {f"{of}.n": 4, f"{of}.temperature": 0.6}).config.eval.temperature == 0.6
    for more in ({}, {f"{of}.temperature": 0}):
        found = read("verl", BASES["verl"] | {f"{of}.n": 4} | more)
        assert found.config.eval.samples == 1 and f"{of}.n" in {item.name for item in found.left}


def test_a_number_that_is_0_is_not_called_switched_off() -> None:
    dropped = read("trl", BASES["trl"] | {"dataloader_num_workers": 0, "push_to_hub": False}).dropped
    off = [line for line in dropped if line.startswith("switched off")]
    assert len(off) == 1 and "push_to_hub" in off[0] and "dataloader_num_workers" not in off[0], dropped
    assert any("dataloader_num_workers" in line for line in dropped)
