"""Fixes of the presets: one setting changed so that the plan is refused is fixed by one setting, among those shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import load
from gspo_hpc.config.schema import Config
from gspo_hpc.models import catalog
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.fixes import candidates, search
from gspo_hpc.planning.plan import holds, judge, make_plan
from gspo_hpc.planning.settings import value_of, with_value

CONFIGS = Path(__file__).parents[3] / "configs"
BASES = {path.stem: load(path) for path in sorted(CONFIGS.glob("*.yaml")) if "gpu:" in path.read_text()}
KEYS: dict[str, list[Any]] = {  # what a person may get wrong, and what brute force tries
    "cluster.gpu": [*devices.DEVICES, "H1000", "A100-8OGB"],
    "cluster.gpus_per_node": [*range(1, 17)],
    "cluster.nodes": [*range(1, 40), 64, 128],
    "model.path": [f"models/{name}" for name in catalog.names()],
    "parallel.tensor_model_parallel_size": [1, 2, 3, 4, 6, 8, 16],
    "parallel.pipeline_model_parallel_size": [1, 2, 3, 4, 5, 8, 16],
    "parallel.context_parallel_size": [1, 2, 3, 4, 8],
    "parallel.expert_model_parallel_size": [1, 2, 3, 4, 8, 16, 32, 64],
    "parallel.sequence_parallel": [True, False],
    "batch.global_batch_size": [1, 16, 100, 128, 256, 500, 512, 1024],
    "batch.num_generations": [1, 2, 3, 4, 7, 8, 16],
    "batch.steps_per_generation": [1, 2, 3, 4],
    "batch.micro_batch_tokens": [512, 4096, 8192, 10_000, 16_384, 32_768, 262_144],
    "rollout.mode": ["colocate", "server"],
    "rollout.dtype": [None, "float32"],
    "rollout.tensor_parallel_size": [1, 2, 3, 4, 8, 16],
    "rollout.engines_per_node": [None, 1, 2, 3, 4, 8],
    "rollout.max_prompt_length": [512, 1024, 2048, 2049, 30_000],
    "rollout.max_response_length": [1024, 2048, 4096, 8192, 20_001, 50_000],
    "rollout.engine.gpu_memory_utilization": [share / 100 for share in range(30, 99, 2)],
    "rollout.engine.max_num_batched_tokens": [1024, 8192, 65_536, 999_999],
    "rollout.engine.max_num_seqs": [64, 256, 4096, 100_000],
    "model.dtype": ["bfloat16", "float32"],
    "memory.offload_optimizer": [True, False],
    "memory.recompute_granularity": [None, "full"],
    "memory.recompute_modules": [("core_attn",), ("mlpp",), ("core_attn", "layer_norm")],
    "memory.recompute_num_layers": [1, 999],
    "optimizer.distributed": [True, False],
}
ROWS = (None, 64, 100, 1000)


def check(base: Config, key: str, value: Any, rows: int | None) -> bool:
    """Return whether the change was refused; if so, check that it is fixed as promised."""
    refused = with_value(base, key, value)
    valid = holds(refused, rows)
    assert valid == make_plan(refused, rows).valid
    if valid:
        return False
    shown = search.find(refused, rows, room=0)
    for fix in shown:
        after = refused
        for change in fix.changes:
            assert value_of(after, change.key) == change.before != change.value
            after = with_value(after, change.key, change.value)
        assert make_plan(after, rows).valid, str(fix)
    singles = [fix.changes[0] for fix in shown if len(fix.changes) == 1]
    if make_plan(base, rows).valid and (key != "model.path" or search.may_replace(value, str(base.model.path))):
        assert singles, (key, value, rows)
    return True


SLIPS = [(key, value) for key in KEYS for value in KEYS[key]]


@pytest.mark.parametrize("name", BASES)
def test_one_slip_is_fixed_by_one_change_that_is_shown(name: str) -> None:
    """A third of the slips for each preset, every slip for a third of the presets: all of them take three minutes."""
    first = [*BASES].index(name) % 3
    refused = sum(check(BASES[name], key, value, None) for key, value in SLIPS[first::3])
    assert refused > 6


def is_a_fix(base: Config, after: Config, rows: int | None) -> bool:
    """Return whether every rule holds, and this version runs all that it runs of the config before."""
    plan = judge(after, rows, memory=True, enough=0)
    if plan.broken:
        return False
    return {item.feature for item in plan.not_run} <= {item.feature for item in judge(base, rows).not_run}


@settings(max_examples=100, deadline=None)  # others in every run
@given(st.data())
def test_of_two_slips_a_single_change_is_offered_where_brute_force_finds_one(data: st.DataObject) -> None:
    """Also in settings of engines, other GPUs and models, and with data that is too small."""
    base, rows = BASES[data.draw(st.sampled_from(sorted(BASES)))], data.draw(st.sampled_from(ROWS))
    for key in data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2, unique=True)):
        base = with_value(base, key, data.draw(st.sampled_from(KEYS[key])))
    tried = data.draw(st.sampled_from(sorted(KEYS)))
    if make_plan(base, rows).valid:
        assert search.find(base, rows) == []
        return
    shown = search.find(base, rows, room=60)
    for fix in shown:
        after = base
        for change in fix.changes:
            after = with_value(after, change.key, change.value)
        assert make_plan(after, rows).valid, str(fix)
    values = KEYS[tried]
    if tried == "cluster.gpus_per_node":  # no larger node is proposed than boards have
        values = [value for value in values if value <= candidates._most_gpus(base)]
    if tried == "model.path":  # nor a model that has nothing to do with the one that is given
        values = [value for value in values if search.may_replace(str(base.model.path), value)]
    works = [value for value in values if is_a_fix(base, with_value(base, tried, value), rows)]
    singles = [fix for fix in shown if len(fix.changes) == 1]
    assert singles or not works, (tried, works)


@pytest.mark.parametrize(
    ("preset", "setting", "fix"),
    [
        ("qwen3_235b_a22b_tp4_pp2_ep32", "rollout.engine.gpu_memory_utilization=0.5", "rollout.engine.gpu_memory_util"),
        ("qwen2.5_7b_tp2", "cluster.gpu=H1000", "cluster.gpu=H100-80GB"),
        ("llama3.1_70b_tp8_pp8", "rollout.mode=server", "rollout.mode=colocate"),
        ("qwen3_8b_tp2_cp4_32k", "rollout.max_response_length=50000", "rollout.max_response_length=30720"),
        ("qwen2.5_7b_tp2_pp2", "memory.recompute_modules=[mlpp]", "memory.recompute_modules=[mlp]"),
    ],
)
def test_what_is_undone_is_shown(preset: str, setting: str, fix: str) -> None:
    path = CONFIGS / f"{preset}.yaml"
    texts = [str(found) for found in search.find(load(path, [setting]))]
    (text, *_) = [text for text in texts if text.startswith(fix)] or [None]
    assert text is not None, texts
    assert make_plan(load(path, [setting, *text.split()])).valid


def test_the_largest_length_that_fits_is_searched_for() -> None:
    base = BASES["qwen2.5_7b_tp2"]
    found = [
        fix.changes[0].value
        for fix in search.find(with_value(base, "rollout.max_response_length", 30_000))
        if fix.changes[0].key == "rollout.max_response_length" and len(fix.changes) == 1
    ]
    longer = with_value(base, "rollout.max_response_length", int(found[0] * 1.05))
    assert found and not make_plan(longer).valid


def test_models_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = Path.exists

    def counted(path: Path) -> bool:
        read.append(str(path))
        return whole(path)

    monkeypatch.setattr(Path, "exists", counted)
    refused = with_value(BASES["qwen3_235b_a22b_tp4_pp2_ep32"], "cluster.nodes", 2048)
    assert search.find(refused)
    assert sum(path.endswith("Qwen3-235B-A22B") for path in read) <= 8
