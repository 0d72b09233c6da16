"""Every setting that a broken rule names is tried, and no fix is another run (10 s).

Catches settings that no search knows, such as cluster.generation_nodes, of which only other ones were offered.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import checks
from gspo_hpc.models import catalog
from gspo_hpc.planning.builder import Broken
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.mentions import mentioned
from gspo_hpc.planning.plan import PlanError, make_plan
from gspo_hpc.planning.rules import registry

# Settings that a rule names and that have no other value to try, with the reason.
EXCEPTIONS = {
    "cluster.platform": "another machine",
    "slurm.environment": "free-form",
    "slurm.sbatch": "free-form",
    "slurm.generation_sbatch": "free-form",
    "rollout.engine": "free-form; its arguments are tried one by one",
    "model.path": "another run; models that fit are tried apart",
    "data.sources": "sections of a file, which have no place on a command line",
    "data.eval_sets": "sections of a file, too; without them nothing would be evaluated",
    "run.seed": "no rule depends on it; an argument of vLLM is said to follow from it",
    "reward.models": "sections of a file, too",
    "reward.functions": "sections of a file, too",
}


def texts(rule: registry.Rule) -> list[str]:
    """Return the texts of a rule's file, from which its messages are made."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(rule.check)))  # type: ignore[arg-type]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = next(node for node in functions if node.name == rule.check.__name__)
    return [node.value for node in ast.walk(own) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("name", sorted(registry.rules()))
def test_every_setting_that_a_rule_names_is_tried(name: Any) -> None:
    rule, config = registry.rules()[name], Config()
    plan = make_plan(config)
    for text in texts(rule):
        broken = dataclasses.replace(plan, broken=(Broken(name, text),))
        tried = search.Search(config, None, broken).values()
        for key in mentioned(text):
            if key in EXCEPTIONS or key.startswith(("algorithm.", "rollout.engine.")):
                continue  # the other values of the last two depend on what is given
            assert tried.get(key), f"{name} names {key}, and no value of it is tried: {text}"


def test_no_fix_leaves_out_what_is_evaluated_or_trained_on() -> None:
    """plan offered data.eval_sets=[] where two sets had one name."""
    twice = [{"name": "hard", "files": "b.jsonl"}] * 2
    for key in ("sources", "eval_sets"):
        config = from_dict({"data": {key: twice}})
        assert f"data.{key}" not in search.Search(config, None, make_plan(config)).values()


SHARE = "gpu_memory_utilization"


def run(**sections: Any) -> Config:
    """Return a run of 8 GPUs on each node."""
    base: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "batch": {"num_generations": 8, "global_batch_size": 128, "micro_batch_tokens": 16384},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 8192},
        "optimizer": {"distributed": True},
        "memory": {"recompute_granularity": "full", "offload_trainer": True},
    }
    return from_dict({name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


def offered(config: Config) -> list[dict[str, Any]]:
    return [{change.key: change.value for change in fix.changes} for fix in repair.offered(config)]


@pytest.mark.parametrize(
    ("nodes", "generating", "wanted"),
    [
        (2, 2, [{"cluster.generation_nodes": 1}, {"cluster.nodes": 3}]),
        (4, 5, [{"cluster.generation_nodes": 3}, {"cluster.nodes": 6}]),
        (1, 1, [{"cluster.nodes": 2}]),
    ],
)
def test_nodes_that_generate_and_nodes_are_offered_where_none_is_left_to_train(
    nodes: int, generating: int, wanted: list[dict[str, int]]
) -> None:
    """Only one more node than brings a comfortable layout was offered, and no other part that generates."""
    cluster = {"nodes": nodes, "generation_nodes": generating, "gpu": "H200"}
    found = offered(run(cluster=cluster, rollout={"mode": "server"}))
    assert all(one in found for one in wanted), found
    assert found[0] == wanted[0] or nodes == 1


@pytest.mark.parametrize(("prompt", "response"), [(4096, 8192), (4096, 2048), (8000, 1000), (3000, 3000)])
def test_lengths_that_fit_together_are_offered_where_neither_does_alone(prompt: int, response: int) -> None:
    config = run(
        model={"path": "Qwen/Qwen2.5-Math-7B"}, rollout={"max_prompt_length": prompt, "max_response_length": response}
    )
    given = {"rollout.max_prompt_length": prompt, "rollout.max_response_length": response}
    found = [one for one in offered(config) if one.keys() <= given.keys()]
    assert found
    lengths = given | found[0]
    assert 2048 < sum(lengths.values()) <= 4096


@pytest.mark.parametrize(("name", "least"), [("max_num_batched_tokens", 1024), ("max_num_seqs", 32)])
def test_the_smallest_number_of_an_engine_that_is_tried_is_offered_where_only_it_is_enough(
    name: str, least: int
) -> None:
    """The share of the card is the smallest with which that number leaves room for a sequence."""

    def engine(share: float, **numbers: int) -> Config:
        return run(
            cluster={"gpus_per_node": 8, "gpu": "H100"},
            model={"path": "Qwen/Qwen2.5-7B"},
            rollout={"max_response_length": 3072, "engine": {SHARE: share, **numbers}},
        )

    few, enough = 0.05, 0.5
    while enough - few > 1e-5:
        middle = (few + enough) / 2
        few, enough = (few, middle) if make_plan(engine(middle, **{name: least})).valid else (middle, enough)
    assert not make_plan(engine(enough, **{name: 2 * least})).valid
    assert {f"rollout.engine.{name}": least} in [
        {change.key: change.value for change in fix.changes} for fix in search.find(engine(enough))
    ]


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-Math-7B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-2-7b-hf"])
def test_another_model_is_of_the_family_or_about_as_large_and_the_last_fix(path: str) -> None:
    """Qwen3-Coder-480B was offered in the place of a model with 7 billion parameters."""
    config = run(model={"path": path}, rollout={"max_prompt_length": 32768, "max_response_length": 131072})
    fixes = repair.offered(config)
    models = ["model.path" in {change.key for change in fix.changes} for fix in fixes]
    assert models == sorted(models)
    own = search.distances.parameters_of(path)
    for fix in fixes[models.index(True) :] if any(models) else ():
        other = search.distances.parameters_of(fix.changes[0].value)
        assert own and other and other <= 2 * own


def test_a_model_that_is_not_beside_a_local_one_has_its_name_on_the_hub(tmp_path: Path) -> None:
    own = tmp_path / "Qwen3-8B"
    assert catalog.beside(str(own), "Qwen3-4B") == str(tmp_path / "Qwen3-4B")  # nor is its own folder there
    own.mkdir()
    assert catalog.beside(str(own), "Qwen3-4B") == "Qwen/Qwen3-4B"
    (tmp_path / "Qwen3-4B").mkdir()
    assert catalog.beside(str(own), "Qwen3-4B") == str(tmp_path / "Qwen3-4B")


def test_train_names_the_fix_that_plan_lists_first() -> None:
    config = run(
        model={"path": "Qwen/Qwen2.5-Math-7B"}, rollout={"max_prompt_length": 4096, "max_response_length": 8192}
    )
    with pytest.raises(PlanError) as raised:
        checks._planned(config)
    assert f"nearest fix: {repair.offered(config)[0]} (" in str(raised.value)
