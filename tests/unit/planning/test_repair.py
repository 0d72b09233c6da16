"""Repairs of plans with several independent faults (10 s): each makes the plan valid, or says what is left.

They would catch a repair that ends in a dead end, changes a setting into what it was or changes one needlessly, and
none at all where the GPUs that train cannot be counted.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.fixes.change import Change, Fix, with_changes
from gspo_hpc.planning.fixes.nearest import Nearest
from gspo_hpc.planning.fixes.search import Search
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.settings import value_of, with_value

SOUND: dict[str, dict[str, Any]] = {
    "cluster": {"gpus_per_node": 8, "gpu": "H100"},
    "batch": {"micro_batch_tokens": 4096, "global_batch_size": 32, "steps_per_generation": 8, "num_generations": 8},
    "rollout": {"max_prompt_length": 1024, "max_response_length": 2048},
}
FAULTS: list[tuple[str, str, Any]] = [
    ("batch", "num_generations", 7),
    ("batch", "micro_batch_tokens", 1000),
    ("rollout", "tensor_parallel_size", 3),
    ("parallel", "virtual_pipeline_model_parallel_size", 2),
    ("algorithm", "aggregation", "token"),
]


def faulty(faults: list[tuple[str, str, Any]]) -> dict[str, dict[str, Any]]:
    raw = {name: dict(section) for name, section in SOUND.items()}
    for section, key, value in faults:
        raw.setdefault(section, {})[key] = value
    return raw


@pytest.mark.parametrize("without", [*range(len(FAULTS)), None])
def test_four_or_five_faults_are_repaired_one_after_another(without: int | None) -> None:
    faults = [fault for number, fault in enumerate(FAULTS) if number != without]
    config = from_dict(faulty(faults))
    assert not search.find(config), "one or two changes are enough"
    found = repair.find(config)
    assert found is not None and found.left == () and len(found.changes) == len(faults)
    for change in found.changes:
        assert change.before == value_of(from_dict(faulty(faults)), change.key), "as it was before the whole repair"
        config = with_value(config, change.key, change.value)
    assert make_plan(config).valid
    assert repair.find(config) is None


def test_a_repair_of_six_settings_is_found_where_fewer_would_change_more() -> None:
    """With five the longest prompt would be halved: a larger budget of tokens needs a lighter layout (5 s)."""
    raw = {
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": "Qwen/Qwen3-4B"},
        "parallel": {"tensor_model_parallel_size": 3},
        "batch": {"num_generations": 7, "global_batch_size": 128, "micro_batch_tokens": 16384},
        "rollout": {"max_prompt_length": 60000, "max_response_length": 4096, "tensor_parallel_size": 3},
    }
    found = repair.find(from_dict(raw))
    assert found is not None and found.left == () and len(found.changes) == 6
    assert {change.key: change.value for change in found.changes}["rollout.max_prompt_length"] == 40960 - 4096


FEW = {"model": {"path": "Qwen/Qwen3-4B"}, "cluster": {"gpus_per_node": 8, "gpu": "H100"}}
UNEVEN = {"global_batch_size": 500, "num_generations": 6}
TOO_MUCH = {"engine": {"gpu_memory_utilization": 1.2}}


@pytest.mark.parametrize(("nodes", "batch_size"), [(1, 504), (2, 480)])
def test_every_value_of_a_repair_is_the_nearest_beside_the_others(nodes: int, batch_size: int) -> None:
    """With fewer data-parallel ranks, which memory needs, more batch sizes are whole than with those of the config."""
    raw: dict[str, Any] = {
        **FEW,
        "cluster": {**FEW["cluster"], "nodes": nodes},
        "batch": UNEVEN | {"micro_batch_size": 4},
        "rollout": {"max_response_length": 8192},
    }
    for rollout in (raw["rollout"], raw["rollout"] | TOO_MUCH):
        sizes = [
            change.value
            for fix in repair.offered(from_dict(raw | {"rollout": rollout}))
            for change in fix.changes
            if change.key == "batch.global_batch_size"
            and any(one.key == "parallel.tensor_model_parallel_size" for one in fix.changes)
        ]
        assert sizes[:1] == [batch_size], sizes


def test_a_warning_that_goes_makes_up_for_none_that_comes() -> None:
    """More updates of a rollout are no part of a repair, though with one update the plan warns of the clip range."""
    found = repair.offered(from_dict({**FEW, "batch": UNEVEN, "rollout": TOO_MUCH}))
    assert found and not any(change.key == "batch.steps_per_generation" for fix in found for change in fix.changes)
    assert "batch.global_batch_size=480" in str(found[0])


SIZES = {f"parallel.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")}


@pytest.mark.parametrize(
    ("model", "nodes", "parallel"),
    [
        ("Qwen/Qwen3-235B-A22B", 16, {"tensor_model": 4, "pipeline_model": 4, "expert_model": 8}),
        ("Qwen/Qwen3-235B-A22B", 16, {"tensor_model": 2, "pipeline_model": 8, "expert_model": 4}),
        ("Qwen/Qwen3-30B-A3B", 2, {"tensor_model": 2, "pipeline_model": 1, "expert_model": 8}),
        ("Qwen/Qwen2.5-72B", 4, {"tensor_model": 8, "pipeline_model": 2}),
    ],
)
@pytest.mark.parametrize("budget", [None, 1000])
def test_sizes_that_can_be_kept_are_kept(model: str, nodes: int, parallel: dict[str, int], budget: int | None) -> None:
    raw = {
        "model": {"path": model},
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "gpu": "H100"},
        "parallel": {f"{name}_parallel_size": size for name, size in parallel.items()},
        "rollout": {"max_response_length": 8192},
        "batch": {"global_batch_size": 512, "micro_batch_tokens": budget},
    }
    offered = repair.offered(from_dict(raw))
    kept = [fix for fix in offered if SIZES.isdisjoint(change.key for change in fix.changes) and not fix.left]
    assert kept and kept[0] is offered[0], [*map(str, offered)]


RANDOM_FAULTS: list[tuple[str, str, list[Any]]] = [
    ("batch", "num_generations", [3, 5, 7, 9, 11]),
    ("batch", "micro_batch_tokens", [100, 1000, 2000]),
    ("batch", "global_batch_size", [17, 30, 33, 100]),
    ("batch", "steps_per_generation", [5, 7]),
    ("rollout", "tensor_parallel_size", [3, 5, 6, 16]),
    ("rollout", "max_response_length", [2047]),
    ("parallel", "tensor_model_parallel_size", [3, 5, 7]),
    ("parallel", "pipeline_model_parallel_size", [3, 5, 7]),
    ("parallel", "virtual_pipeline_model_parallel_size", [2, 3, 4]),
    ("parallel", "context_parallel_size", [3, 5]),
    ("parallel", "expert_model_parallel_size", [3, 4]),
    ("parallel", "overlap_param_gather", [True]),
    ("memory", "recompute_modules", [["mlpp"]]),
    ("algorithm", "aggregation", ["token"]),
    ("run", "max_epochs", [1]),
    ("data", "train_ratio", [0.5]),
    ("slurm", "signal_seconds", [60000]),
    ("slurm", "cpus_per_task", [1]),
    ("cluster", "nodes", [3]),
]


# With 14, 33 and 50 a change was needless, with 20, 27 and 68 server mode without engines was a dead end.
@pytest.mark.parametrize("seed", [*range(12), 14, 20, 27, 33, 50, 68])
def test_random_faults_are_repaired_with_no_change_too_many(seed: int) -> None:
    draw, raw = random.Random(seed), faulty([])
    raw |= {"run": {"max_steps": 10}, "data": {"eval": "held_out.jsonl"}}
    for section, key, values in draw.sample(RANDOM_FAULTS, draw.randint(3, 5)):
        raw.setdefault(section, {})[key] = draw.choice(values)
    config = from_dict(raw)
    found = repair.find(config)
    if found is None:
        assert make_plan(config).valid
        return
    assert found.left == ()

    def plan_with(changes: list[Change]) -> Plan:
        changed = config
        for change in changes:
            changed = with_value(changed, change.key, change.value)
        return make_plan(changed)

    assert plan_with(list(found.changes)).valid
    for change in found.changes:
        assert change.before == value_of(config, change.key) != change.value
        assert not plan_with([one for one in found.changes if one is not change]).valid, f"{change} is needless"


def test_stages_chunks_and_context_that_do_not_fit_end_on_the_same_machines() -> None:
    """Fifteen nodes keep the rule of the ranks at once, and are no repair of a config for one."""
    parallel = {
        "pipeline_model_parallel_size": 5,
        "context_parallel_size": 3,
        "virtual_pipeline_model_parallel_size": 2,
    }
    for more in ({}, {"model": {"path": "Qwen2.5-7B"}}, {"rollout": SOUND["rollout"] | {"tensor_parallel_size": 3}}):
        found = repair.find(from_dict(faulty([]) | {"parallel": parallel} | more))
        assert found is not None and found.left == ()
        assert all(not change.key.startswith("cluster.") for change in found.changes), str(found)


def test_a_setting_that_is_changed_twice_is_told_from_its_first_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a repair starts from the config of the step before, and the reader from the first one."""
    values = iter([6, 4])

    def scripted(config: Config, rows: int | None, plan: Plan) -> list[Fix]:
        key = "batch.num_generations"
        return [Fix((Change(key, value_of(config, key), next(values)),))]

    config = from_dict(faulty([("batch", "num_generations", 7)]))
    monkeypatch.setattr(repair, "_nexts", scripted)
    found = repair._one_by_one(config, None)
    assert found is not None and [(one.before, one.value) for one in found.changes] == [(7, 4)]


@pytest.mark.parametrize(("minutes", "signal"), [(2, 120), (2, 300), (5, 300), (60, 7200), (2, 130)])
def test_a_job_that_is_proposed_has_time_to_work(minutes: int, signal: int) -> None:
    slurm = {"time_minutes": minutes, "signal_seconds": signal}
    first, *others = search.find(from_dict({"slurm": slurm}))
    assert str(first) == f"slurm.time_minutes={-(-3 * signal // 60)}"
    for fix in (first, *others):
        slurm = slurm | {change.key.removeprefix("slurm."): change.value for change in fix.changes}
        assert slurm["time_minutes"] * 60 >= 3 * slurm["signal_seconds"], str(fix)
        slurm = {"time_minutes": minutes, "signal_seconds": signal}


def test_what_cannot_be_repaired_is_left_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of the page, or of the JSON, must not take it for a fix of everything."""
    path = tmp_path / "run.yaml"
    too_large = {"model": {"path": "Qwen/Qwen3-235B-A22B"}}  # no setting puts it on one node
    path.write_text(json.dumps(faulty(FAULTS[:3]) | too_large))
    assert main(["plan", str(path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["fixes"] == [] and {change["key"] for change in told["partial_fix"]["changes"]} >= {
        "batch.micro_batch_tokens",
        "rollout.tensor_parallel_size",
    }
    (left,) = told["partial_fix"]["left"]
    assert left == "trainer_fits_gpu_memory"
    assert main(["plan", str(path)]) == 2
    shown = capsys.readouterr().out.split("Fixes (", 1)[1]
    assert "still broken then:" in shown and left in shown


def test_no_node_is_proposed_that_nobody_builds() -> None:
    """A board of H100 has 8 GPUs: 32 on a node keep the rules, and help nobody."""
    raw = {"batch": {"micro_batch_size": 1, "global_batch_size": 96, "num_generations": 3, "steps_per_generation": 1}}
    parallel = {"tensor_model_parallel_size": 3}
    for cluster, least in (({"gpus_per_node": 8, "gpu": "H100"}, 0), ({"gpus_per_node": 8, "gpu": "GB200"}, 9)):
        refused = from_dict(raw | {"cluster": cluster, "parallel": parallel})
        found = [c.value for fix in search.find(refused, limit=1000) for c in fix.changes if "gpus_per_node" in c.key]
        assert found and max(found) >= least and (least or max(found) <= 8), found


def test_nodes_that_are_larger_than_a_board_may_be_proposed_where_one_has_them() -> None:
    """Fifteen GPUs are a slip or a bad share of a node of sixteen: fourteen are nearer than the eight of a board."""
    raw = {"batch": {"micro_batch_tokens": 4096, "global_batch_size": 224, "num_generations": 8}}
    cluster, parallel = {"gpus_per_node": 15, "gpu": "H100"}, {"tensor_model_parallel_size": 2}
    fixes = search.find(from_dict(raw | {"cluster": cluster, "parallel": parallel}))
    assert "cluster.gpus_per_node=14" in [str(fix) for fix in fixes]


def test_part_is_repaired_where_the_gpus_that_train_cannot_be_counted() -> None:
    """Nothing was said: no change of one setting leaves nodes enough to train, and none was taken that left a rest."""
    cluster = {"nodes": 1, "gpus_per_node": 2, "gpu": "B300", "generation_nodes": 1}
    parallel = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}
    rollout = {"max_prompt_length": 2048, "max_response_length": 16384, "mode": "server"}
    batch = {"num_generations": 4, "global_batch_size": 8, "steps_per_generation": 2, "micro_batch_tokens": 32768}
    sections = {"cluster": cluster, "parallel": parallel, "rollout": rollout, "batch": batch}
    config = from_dict({"model": {"path": "Qwen3-235B-A22B"}, **sections})
    assert "experts_need_sequence_parallel" in {item.rule for item in make_plan(config).broken}
    (found,) = repair.find_all(config)
    assert {"parallel.tensor_model_parallel_size=1", "cluster.nodes=5"} < {*str(found).split()}
    assert found.left == ("trainer_fits_gpu_memory",), "four nodes beside the one that generates have a rank an expert"


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_changes_of_which_one_is_enough_the_nearer_is_left(first: int) -> None:
    """Each was made for a rule that the other one mends as well, once a third change is made."""
    lengths = {"max_prompt_length": 1024, "max_response_length": 3074}
    config = from_dict(faulty([]) | {"rollout": lengths})
    near, far = Change("batch.micro_batch_tokens", 4096, 4098), Change("rollout.max_response_length", 3074, 1024)
    assert near.distance < far.distance
    changes = (near, far) if first else (far, near)
    found = repair._needed(config, repair._Way(changes=changes), make_plan(with_changes(config, changes)), None)
    assert found.changes == (near,) and found.left == ()


def test_a_change_that_mends_alone_is_offered_alone() -> None:
    """Two changes were found together, of which one only makes up for the other."""
    config = from_dict({"batch": {"global_batch_size": 33, "num_generations": 8, "micro_batch_size": 4}})
    plan = make_plan(config)
    assert {str(item.rule) for item in plan.broken}
    alone = Change("batch.global_batch_size", 33, 32)
    beside = Change("batch.micro_batch_size", 4, 8)
    found = Nearest(Search(config, None, plan), 100, machines=False)._needed(Fix((alone, beside), 0))
    assert found.changes == (alone,)
