"""`device_groups`, with which `swift rlhf` gives GPUs to the roles of a run on Ray (under 1 s)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from gspo_hpc.importers.convert import Converted, convert

RUN = {
    "rlhf_type": "grpo",
    "model": "m/m",
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
}


def _groups(ranks: Any, each: Any = 4, name: str = "default", **more: Any) -> dict[str, Any]:
    return {"nproc_per_node": each, name: {"device": "GPU", "ranks": ranks, "workers": ["default"], **more}}


def _of(groups: dict[str, Any], ray: bool = True, **more: Any) -> Converted:
    return convert(yaml.safe_dump({**RUN, "use_ray": ray, "device_groups": groups, **more}))


@pytest.mark.parametrize(
    ("ranks", "each", "expected"),
    [
        ("list(range(0, 8))", 4, (2, 4)),
        ("list(range(4, 8))", 4, (1, 4)),  # the second node alone
        ("range(16)", 8, (2, 8)),
        (2, 4, (1, 2)),
        ("8", 4, (2, 4)),
        ([0, 1, 4, 5], 4, (2, 2)),
        ("[0, 1]", 4, (1, 2)),
    ],
)
def test_ranks_that_train_are_the_gpus_of_the_cluster(ranks: Any, each: int, expected: tuple[int, int]) -> None:
    found = _of(_groups(ranks, each))
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == expected
    assert found.config.batch.global_batch_size == 8 * expected[0] * expected[1]
    carried = {item.name: item.keys for item in found.carried}
    assert carried["device_groups"] == ("cluster.nodes", "cluster.gpus_per_node")
    assert not found.strange and not any("1 GPU is assumed" in line for line in found.assumed)


def test_the_json_of_a_command_line_is_the_same() -> None:
    command = f"swift rlhf --rlhf_type grpo --per_device_train_batch_size 8 --device_groups '{json.dumps(_groups(8))}'"
    config = convert(f"{command} --use_ray true").config
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (_groups(4, workers=["sampler"]), "device_groups.default: its workers are sampler"),
        (_groups(4, name="rm", workers=["default", "prm"]), "device_groups.rm: its workers are default, prm"),
        (_groups(4) | {"x": {"device": "GPU", "ranks": 4, "workers": ["orm"]}}, "device_groups.x: its workers are orm"),
        (_groups(4) | {"x": {"device": "GPU", "ranks": 4, "workers": ["default"]}}, "stands in two groups"),
        (_groups(4, device="CPU"), "device CPU"),
        (_groups("some"), "ranks some"),
        (_groups([0, 0]), "ranks [0, 0]"),
        (_groups(6), "4, 2 GPUs of its nodes train"),
        (_groups(4, each="many"), "nproc_per_node many"),
        ({"nproc_per_node": 4}, "no group has the role default"),
        ({"nproc_per_node": 4, "default": 3}, "a group has device, ranks and workers"),
    ],
)
def test_groups_that_have_no_counterpart_are_refused_by_name(groups: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        _of(groups)
    assert expected in str(refused.value) and str(refused.value).startswith("device_groups")


def test_groups_that_are_not_read_there_decide_nothing_here() -> None:
    left = {item.name: item.why for item in _of(_groups(8), ray=False).left}
    assert left["device_groups"] == "ms-swift reads it with use_ray true only"
    megatron = f"megatron rlhf --rlhf_type grpo --lr 1e-6 --device_groups '{json.dumps(_groups(8))}'"
    left = {item.name: item.why for item in convert(megatron).left}
    assert "Megatron-SWIFT does not read it" in left["device_groups"]


def test_the_trainer_has_the_arguments_of_its_own_group_and_the_engines_theirs() -> None:
    text = (
        "rlhf_type: grpo\nmodel: /m\nnum_generations: 8\nglobal_batch_size: 64\nlr: 1.0e-6\ntemperature: 1.0\n"
        "vllm_max_num_seqs: 16\n"
        "train: {gpus: 4, lr: 2.0e-6, tensor_model_parallel_size: 2, vllm_max_num_seqs: 32}\n"
        "rollout: {gpus: 4, lr: 3.0e-6, temperature: 0.7, vllm_tensor_parallel_size: 2, seed: 9}\n"
    )
    found = convert(text, name="run.yaml")
    assert (found.config.optimizer.lr, found.config.rollout.temperature) == (2e-6, 1.0)
    assert found.config.rollout.tensor_parallel_size == 2 and found.config.rollout.engine["max_num_seqs"] == 16
    left = {item.given for item in found.left}
    assert {"rollout.lr=3e-06", "rollout.temperature=0.7", "rollout.seed=9", "train.vllm_max_num_seqs=32"} <= left


@pytest.mark.parametrize(("group", "refused"), [("rollout", False), ("ref", True)])
def test_groups_that_ms_swift_does_not_have_share_no_gpus(group: str, refused: bool) -> None:
    text = yaml.safe_dump({**RUN, "train": {"gpus": 4}, "rollout": {"gpus": 4}, "colocate_groups": [["train", group]]})
    if refused:
        with pytest.raises(ValueError, match="ms-swift has the groups train, rollout and teacher, and no ref"):
            convert(text, source="ms-swift")
    else:
        assert convert(text, source="ms-swift").config.rollout.mode == "colocate"
