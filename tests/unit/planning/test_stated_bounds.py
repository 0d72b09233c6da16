"""Bounds of the planner that decide what is offered or warned of, on both of their sides (a second).

Each was moved on purpose, and no other test saw it.
"""

from __future__ import annotations

import pytest

from gspo_hpc.config import paths
from gspo_hpc.config.loader import from_dict, load
from gspo_hpc.models import architecture
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import phases
from gspo_hpc.planning.fixes import distances
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.suggest import cuts, remedies

CONFIGS = paths.PACKAGE.parent / "configs"


@pytest.mark.parametrize(
    ("headroom", "risk"),
    [
        (0.1, "comfortable"),
        (0.099, "tight"),
        (0.0, "tight"),
        (-0.001, "may run out of memory"),
    ],
)
def test_the_risk_of_a_layout_is_that_of_the_page(headroom: float, risk: str) -> None:
    """docs/plan.md: comfortable from 10 %, tight from 0 %."""
    assert phases.risk(headroom) == risk


def test_pipelines_of_up_to_32_stages_are_looked_at() -> None:
    config = load(CONFIGS / "llama3.1_70b_tp8_pp8.yaml", ["cluster.nodes=16"])
    arch = architecture.find(config)
    assert arch is not None
    stages = {cut.parallel.pipeline_model_parallel_size for cut in cuts.every(arch, config, frozenset(), Models())}
    assert {1, 2, 4, 8, 16} <= stages and max(stages) == 32


def test_responses_are_halved_down_to_256_tokens() -> None:
    config = from_dict({"rollout": {"max_response_length": 4096}})
    tried = [one.changes["rollout.max_response_length"] for one in remedies._shorter_responses(config)]
    assert tried == [2048, 1024, 512, 256]


@pytest.mark.parametrize(
    ("key", "of_machines"),
    [("cluster.nodes", True), ("cluster.gpu", True), ("model.path", True), ("batch.global_batch_size", False)],
)
def test_other_machines_and_other_models_are_not_what_one_has(key: str, of_machines: bool) -> None:
    """Fixes that need these come with a layout that makes do with what there is."""
    assert distances.is_of_machines(key) is of_machines


def test_budgets_are_lowered_with_the_responses_that_they_hold() -> None:
    """Else the micro-batches of shorter responses would be as large as before, and nothing would fit that did not."""
    config = from_dict(
        {"rollout": {"max_prompt_length": 512, "max_response_length": 4096}, "batch": {"micro_batch_tokens": 9216}}
    )
    budgets = [one.changes["batch.micro_batch_tokens"] for one in remedies._shorter_responses(config)]
    assert budgets == [2560, 1536, 1024, 768]
    assert not any(
        "batch.micro_batch_tokens" in one.changes
        for one in remedies._shorter_responses(from_dict({"batch": {"micro_batch_size": 4}}))
    )


@pytest.mark.parametrize(("stages", "warned"), [(4, False), (8, True)])
def test_a_long_pipeline_that_keeps_its_activations_is_warned_of(stages: int, warned: bool) -> None:
    """Above 4 stages, as the warning itself says; recomputation ends it."""

    def warns(granularity: str | None) -> bool:
        parallel = {"pipeline_model_parallel_size": stages}
        memory = {"recompute_granularity": granularity}
        plan = make_plan(from_dict({"cluster": {"gpus_per_node": 8}, "parallel": parallel, "memory": memory}))
        return any("pipeline_model_parallel_size" in text for text in plan.warnings)

    assert warns(None) is warned and not warns("full")
