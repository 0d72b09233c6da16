"""Changes of what a run cannot have enough of: another model, an engine over nodes (20 s).

It would catch a fix that ends in a model that this version does not train, or in one far smaller than needed.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.planning.fixes import candidates, search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import remedies

ENGINE = "rollout.tensor_parallel_size"


def made(model: str, nodes: int, gpus: int, gpu: str = "H100", **sections: Any) -> Config:
    base: dict[str, Any] = {
        "cluster": {"nodes": nodes, "gpus_per_node": gpus, "gpu": gpu},
        "model": {"path": model},
        "batch": {"micro_batch_tokens": 8192, "global_batch_size": 512, "num_generations": 16},
        "rollout": {"max_prompt_length": 1024, "max_response_length": 4096},
        "optimizer": {"distributed": True},
    }
    return from_dict({**base, **sections})


def size(config: Config) -> int:
    arch = architecture.find(config)
    assert arch is not None
    return parameters.parameters(arch)


def trained(path: str) -> bool:
    return architecture.untrained(path, "own") is None


@pytest.mark.parametrize(("model", "nearest"), [("Qwen3-8B", "Qwen3-4B"), ("Qwen2.5-7B", "Qwen2.5-3B")])
def test_a_smaller_model_is_the_largest_of_its_family_that_is_trained(model: str, nearest: str) -> None:
    """On one H100, where none of 7 B parameters fits: Qwen3.5-4B begins alike, and is only planned."""
    found = [
        one.changes["model.path"] for one in remedies.find(made(f"models/{model}", 1, 1)) if "model.path" in one.changes
    ]
    assert found == [f"models/{nearest}"] and trained(found[0])


def test_larger_models_of_a_family_come_first_then_those_of_others() -> None:
    config = made("Qwen3-32B", 1, 1)
    names = remedies._smaller(config, candidates.models(config))
    assert names[:2] == ["Qwen3-30B-A3B", "Qwen3-14B"] and all(name.startswith("Qwen3-") for name in names[:5])
    sizes = [size(with_value(config, "model.path", name)) for name in names]
    assert sizes[:5] == sorted(sizes[:5], reverse=True) and max(sizes) < size(config)


@pytest.mark.parametrize("model", ["Qwen3-32B", "Qwen2.5-72B", "Llama-3.1-70B"])
def test_no_model_that_is_offered_is_far_smaller_than_needed(model: str) -> None:
    """At most two, nearest in size; every model between the first and the config's own breaks a rule."""
    config = made(model, 1, 4)
    models = [fix.changes[0].value for fix in search.find(config) if fix.changes[0].key == "model.path"]
    assert 1 <= len(models) <= 2 and all(map(trained, models))
    nearest = size(with_value(config, "model.path", models[0]))
    for path in candidates.models(config):
        other = with_value(config, "model.path", path)
        if 2 * nearest < size(other) < size(config):
            assert not make_plan(other).valid, path


def test_engines_over_nodes_are_offered_where_nothing_smaller_holds_the_weights() -> None:
    """They are planned, and not run: `suggest` has them only where the config asks for one."""
    config = made("Qwen3-235B-A22B", 16, 4)
    assert not layouts.Search(config).fits()
    offered = remedies._first(config, frozenset(), remedies._engine_over_nodes)
    assert offered is not None and offered.changes == {ENGINE: 8} and "does not run" in offered.text
    assert offered in remedies.find(config, frozenset({"parallel.pipeline_model_parallel_size"}))
    assert not any(ENGINE in one.changes for one in remedies.find(config, frozenset({ENGINE})))
    sizes = {value_of(cut, ENGINE) for cut in layouts.Search(with_value(config, ENGINE, 8)).allowed()}
    assert sizes and min(sizes) == 8
