"""The order in which fixes are offered: by the size of the change (5 s).

Catches another model, or more nodes, that are offered before a switch, a model whose only fault hides another, and
other machines that are offered alone where one more setting would do without.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.fixes.distances import Size, size
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import with_value

CONFIGS = Path(__file__).parents[3] / "configs"
PRESET = str(CONFIGS / "qwen2.5_7b_tp2.yaml")
QWEN = ["model.path=Qwen/Qwen3-235B-A22B", "parallel.sequence_parallel=false"]
DEEPSEEK = ["model.path=deepseek-ai/DeepSeek-V3-0324", "parallel.sequence_parallel=false"]
BRIDGE = ["model.provider=mcore_bridge", "batch.share_prompts=false"]
SEQUENCE_PARALLEL = {"key": "parallel.sequence_parallel", "before": False, "value": True}


def sizes(settings: list[str], preset: str = PRESET) -> list[tuple[Size, bool]]:
    """Return the sizes of the fixes that are offered, and whether each brings a warning."""
    fixes = search.find(load(preset, settings))
    return [(max(size(change.key) for change in fix.changes), fix.warnings > 0) for fix in fixes]


@pytest.mark.parametrize("nodes", [1, 16])
def test_what_mends_a_model_is_offered_before_another_model(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Sequence parallelism brings a lack of memory to light: it was not offered at all, since it is no fix alone."""
    eight = ["parallel.tensor_model_parallel_size=8", "rollout.tensor_parallel_size=8"] if nodes > 1 else []
    assert main(["plan", PRESET, *QWEN, *eight, f"cluster.nodes={nodes}", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    whole = [fix for fix in told["fixes"] if all(change["key"] != "model.path" for change in fix)]
    first = told["partial_fix"]["changes"] if nodes == 1 else whole[0]
    assert SEQUENCE_PARALLEL in first and (nodes == 1 or told["fixes"][0] == first)
    if nodes == 1:
        assert whole == [] and told["fixes"] and "trainer_fits_gpu_memory" in told["partial_fix"]["left"]
    assert main(["plan", PRESET, *QWEN, *eight, f"cluster.nodes={nodes}"]) == 2
    page = capsys.readouterr().out.split("Fixes (", 1)[1]
    assert page.index("parallel.sequence_parallel=true") < page.index("model.path=")


def test_a_layout_is_offered_where_only_a_switch_brings_the_lack_of_memory_to_light() -> None:
    config = load(PRESET, ["model.path=Qwen/Qwen3-30B-A3B", "parallel.sequence_parallel=false"])
    assert {item.rule for item in make_plan(config).broken} == {"experts_need_sequence_parallel"}
    fixes = search.find(config)
    layout = [fix for fix in fixes if len(fix.changes) > 2]
    assert len(layout) == 1 and any(change.key == "parallel.sequence_parallel" for change in layout[0].changes)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.path=Qwen/Qwen2.5-32B"],
        ["model.path=Qwen/Qwen3-30B-A3B", "parallel.sequence_parallel=false"],
        ["memory.recompute_granularity=null", "batch.micro_batch_tokens=24576"],
        ["rollout.engine.gpu_memory_utilization=0.15"],
        ["cluster.gpu=A100-40GB", "batch.micro_batch_tokens=20480"],
    ],
)
def test_a_switch_goes_before_a_layout_before_a_batch_before_hardware_before_a_model(settings: list[str]) -> None:
    found = sizes(settings)
    bare = [one for one, warned in found if not warned]
    assert len(found) > 1 and bare == sorted(bare)
    models = [one == Size.MODEL for one, _ in found]
    assert models == sorted(models), "a warning is never as large as another model"


def test_a_change_that_brings_a_warning_counts_as_one_of_the_next_size() -> None:
    """But a warning is no reason to take another model, nor, where batch sizes do not fit, to change something else."""
    of_memory = load(PRESET, ["model.path=Qwen/Qwen2.5-32B"])
    of_counts = load(None, ["cluster.gpus_per_node=8", *(f"batch.{one}" for one in SMALL)])
    changes = {
        "batch.micro_batch_tokens": Size.SWITCH,
        "parallel.pipeline_model_parallel_size": Size.LAYOUT,
        "batch.global_batch_size": Size.BATCH,
        "cluster.nodes": Size.HARDWARE,
    }
    for config, counts in ((of_memory, False), (of_counts, True)):
        found = search.Search(config, None, make_plan(config))
        for key, own in changes.items():
            bare, warned = (found.order(Fix((Change(key, 1, 2),), warnings)) for warnings in (0, 1))
            assert bare[0] == (max(own, Size.BATCH) if counts else own)
            assert warned[0] == (bare[0] if counts else min(own + 1, Size.HARDWARE)) and warned > bare


def test_where_batch_sizes_do_not_fit_the_nearest_comes_first_whatever_it_is() -> None:
    """The guide's case: a doubled update is nearer than another cut of the model."""
    found = search.find(load(None, ["cluster.gpus_per_node=8", *(f"batch.{one}" for one in SMALL)]))
    assert str(found[0]) == "batch.global_batch_size=32"
    assert any(size(fix.changes[0].key) == Size.LAYOUT for fix in found)
    hardware = [size(fix.changes[0].key) == Size.HARDWARE for fix in found if len(fix.changes) == 1]
    assert any(hardware) and hardware == sorted(hardware)


SMALL = ["micro_batch_size=1", "global_batch_size=16", "steps_per_generation=1", "num_generations=4"]


def test_a_repair_cuts_experts_within_a_node_and_uses_the_layout_that_suggest_finds() -> None:
    eight = ["parallel.tensor_model_parallel_size=8", "rollout.tensor_parallel_size=8"]
    config = load(PRESET, [*DEEPSEEK, *BRIDGE, *eight, "cluster.nodes=16"])
    found = repair.find(config)
    assert found is not None and found.left == ()
    for change in found.changes:
        config = with_value(config, change.key, change.value)
        assert change.key != "parallel.expert_tensor_parallel_size" or change.value <= 8
    assert make_plan(config).valid


def test_where_only_other_machines_help_a_layout_and_a_smaller_model_are_offered_too() -> None:
    """Not everybody has a B300."""
    config = load(str(CONFIGS / "qwen3_0.6b_1gpu.yaml"), ["model.path=Qwen/Qwen3-8B"])
    texts = [str(fix) for fix in search.find(config)]
    machines = [text.partition("=")[0] for text in texts]
    assert {"cluster.gpus_per_node", "cluster.gpu"} <= {*machines} and machines[-1] == "model.path"
    config = load(
        PRESET, ["model.path=Qwen/Qwen2.5-14B", "memory.recompute_granularity=null", "batch.micro_batch_tokens=65536"]
    )
    fixes = search.find(config)
    assert len(fixes[0].changes) > 1 and max(size(change.key) for change in fixes[0].changes) < Size.HARDWARE


def test_a_node_with_too_little_memory_is_given_all_that_it_has() -> None:
    """Without slurm.mem Slurm gives the cluster's default, which may be less."""
    assert [str(fix) for fix in search.find(load(PRESET, ["slurm.mem=50G"]))] == ["slurm.mem=0"]


def test_a_length_that_is_off_by_one_is_offered_before_a_layout_for_memory_that_comes_to_light_after_it() -> None:
    """The layout that `suggest` finds was first: it cut the model in eight other ways, so that no length was wrong."""
    lengths = {"max_prompt_length": 1024, "max_response_length": 8191}
    batch = {"num_generations": 8, "global_batch_size": 512, "steps_per_generation": 4, "micro_batch_tokens": 16384}
    parallel = {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    cluster = {"gpus_per_node": 8, "gpu": "H100"}
    model = {"path": "Qwen3-8B"}
    config = from_dict({"model": model, "cluster": cluster, "rollout": lengths, "batch": batch, "parallel": parallel})
    assert {item.rule for item in make_plan(config).broken} == {"context_parallel_sequence"}
    numbers = [len(fix.changes) for fix in search.find(config)]
    assert max(numbers) > 2 and numbers[0] == 2


def test_one_more_setting_is_no_reason_to_offer_other_machines_alone() -> None:
    """Nodes of six GPUs are what somebody has. With experts cut in three the run fits them, for one more small change;
    where a change beside the first counted twice as much, nodes of eight GPUs were all that was offered."""
    preset = str(CONFIGS / "qwen3_30b_a3b_tp2_ep4_etp2.yaml")
    fixes = repair.offered(load(preset, ["cluster.gpus_per_node=6", "slurm.signal_seconds=3600"]))
    assert {change.key for change in fixes[0].changes} == {
        "parallel.expert_tensor_parallel_size",
        "batch.global_batch_size",
        "slurm.time_minutes",
    }
    assert "cluster.gpus_per_node=8" in str(fixes[1])
