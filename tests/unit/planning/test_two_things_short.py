"""Changes that `suggest` offers where one alone is not enough, and models that exist under the offered name (15 s).

Catches a search that says nothing helps although two changes together do, or although a fuller node does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.settings import with_value
from gspo_hpc.planning.suggest import remedies, savings
from tests.unit.planning.test_smaller_models import ENGINE, made

BATCH = {"micro_batch_tokens": 8192, "global_batch_size": 128, "steps_per_generation": 2, "num_generations": 8}


def fits(config: Config, changes: dict[str, Any]) -> bool:
    for key, value in changes.items():
        config = with_value(config, key, value)
    return bool(layouts.Search(config).ranked(1))


def test_the_fewest_gpus_may_be_fuller_nodes() -> None:
    """As many nodes of two GPUs as there may be hold no engine; as many of eight do."""
    config = made("zai-org/GLM-4.5-Air", 4, 2, batch=BATCH | {"global_batch_size": 64, "steps_per_generation": 4})
    (machine,) = (one for one in remedies.find(config) if "cluster.gpus_per_node" in one.changes)
    assert machine.changes == {"cluster.gpus_per_node": 8} and fits(config, machine.changes)
    sizes = [nodes * gpus for nodes, gpus in remedies._machines(3, 2)]
    assert sizes == sorted(sizes) and min(sizes) > 6
    assert {(3, 8), (3, 4), (4, 2), (4, 8)} <= {*remedies._machines(3, 2)}


def test_two_things_are_short_at_once_and_pairs_of_changes_help() -> None:
    config = made("deepseek-ai/DeepSeek-V3", 3, 8, "A100-80GB", batch=BATCH)
    found = remedies.find(config)
    pairs = [one for one in found if "model.path" not in one.changes]
    assert {"cluster.nodes", ENGINE} in [one.changes.keys() for one in pairs] and len(pairs) == 2
    for one in pairs:
        assert len(one.changes) == 2 and fits(config, one.changes), one
        for key, value in one.changes.items():
            assert not fits(config, {key: value}), key
    short = remedies.lacking(layouts.Search(config))
    assert short.startswith("two things are short at once: the lightest layout takes 4") and "largest engine 1" in short
    kept = frozenset({ENGINE})
    assert not any(ENGINE in one.changes for one in remedies.find(config, kept))


def test_one_thing_that_is_short_is_said_alone() -> None:
    told = remedies.lacking(layouts.Search(made("Qwen3-14B", 1, 1)))
    assert told.startswith("the lightest layout takes ") and "two things" not in told
    engines = remedies.lacking(layouts.Search(made("Qwen3-235B-A22B", 32, 4)))
    assert engines.startswith("the lightest layout takes ") and "two things" not in engines


@pytest.mark.parametrize(("short", "said"), [(2 << 20, "0.0020"), (300 << 20, "0.3")])
def test_a_little_that_lacks_is_not_shown_as_nothing(short: int, said: str) -> None:
    """It said that the layout takes 139.8 GiB of a GPU which has 139.8."""
    config = with_value(made("Qwen3-14B", 1, 1), "cluster.gpu_memory_gb", 200)
    search = layouts.Search(config)
    (least,) = (search.least_memory(wanted) for wanted in search.allowed())
    enough = 200 * (least.peak[0] - short) / search.device.memory
    told = remedies.lacking(layouts.Search(with_value(config, "cluster.gpu_memory_gb", enough)))
    assert f", {said} more than its " in told


def test_nothing_that_helps_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "find", lambda config, keep, response_tokens: [])
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"batch": BATCH, "cluster": {"gpu": "A100-40GB", "nodes": 1, "gpus_per_node": 1}}))
    words = ["suggest", str(path), "model.path=moonshotai/Kimi-K2", "rollout.max_response_length=16"]
    assert main(words) == 2
    assert "alone and in pairs, and so were smaller models" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("path", "name", "beside"),
    [
        ("deepseek-ai/DeepSeek-V3", "Qwen2.5-72B", "Qwen/Qwen2.5-72B"),
        ("meta-llama/Llama-3.1-70B", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("somebody/Llama-3.1-70B", "Mixtral-8x7B", "mistralai/Mixtral-8x7B"),
        ("models/Qwen3-32B", "Llama-3.1-8B", "models/Llama-3.1-8B"),
        ("data/Qwen3-32B", "Llama-3.1-8B", "data/Llama-3.1-8B"),
        ("here/Qwen3-32B", "Llama-3.1-8B", "here/Llama-3.1-8B"),
        ("/data/Qwen3-32B", "Llama-3.1-8B", "/data/Llama-3.1-8B"),
        ("/Qwen3-32B", "Llama-3.1-8B", "/Llama-3.1-8B"),
        ("../a/Qwen3-32B", "Llama-3.1-8B", "../a/Llama-3.1-8B"),
        ("Qwen3-32B", "Llama-3.1-8B", "Llama-3.1-8B"),
    ],
)
def test_a_model_is_offered_under_a_name_that_it_has(
    path: str, name: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert catalog.beside(path, name) == beside


def test_every_model_that_is_offered_has_a_maker() -> None:
    trained = [name for name in catalog.names() if architecture.untrained(name, "own") is None]
    assert all(catalog.beside("somebody/model", name).split("/")[0] != "somebody" for name in trained)


def test_fixes_offer_models_by_the_names_of_their_makers() -> None:
    offered = search.find(made("meta-llama/Llama-3.1-70B", 1, 8, parallel={"tensor_model_parallel_size": 2}))
    models = [change.value for fix in offered for change in fix.changes if change.key == "model.path"]
    assert models and all(value.startswith(("Qwen/Qwen", "meta-llama/Llama")) for value in models)


@pytest.mark.parametrize(("distributed", "less"), [(True, False), (False, True)])
def test_the_lightest_layout_has_the_gradients_that_take_less(distributed: bool, less: bool) -> None:
    """Those in 16 bits take less, but for the copies in 32 bits while an optimizer that is not distributed steps."""
    raw: dict[str, dict[str, Any]] = {
        "cluster": {"gpus_per_node": 8, "gpu": "H100"},
        "model": {"path": "Qwen2.5-32B"},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "batch": {"micro_batch_tokens": 4096, "global_batch_size": 64, "num_generations": 8},
    }
    found: dict[bool | None, int] = {}
    for wide in (True, False, None):
        given = {} if wide is None else {"grad_reduce_in_fp32": wide}
        config = from_dict(raw | {"optimizer": {"distributed": distributed} | given})
        keep = frozenset[str]() if wide is None else frozenset({"optimizer.grad_reduce_in_fp32"})
        arch = architecture.find(config)
        assert arch is not None
        found[wide] = savings.lightest(arch, devices.find("H100"), config, keep).peak.total
    assert (found[True] < found[False]) == less and found[None] == min(found[True], found[False])


def test_two_pairs_of_kinds_are_offered_of_those_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(("first", None, "second", "third", "fourth"))
    monkeypatch.setattr(remedies, "_with_larger", lambda config, tried: [one] if (one := next(told)) else [])
    assert remedies._pairs(made("Qwen/Qwen3-8B", 1, 1), remedies.Asked()) == ["first", "second"]


def test_layouts_of_remedies_are_ranked_for_the_responses_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def ranked(self: layouts.Search, limit: int) -> list[layouts.Candidate]:
        asked.add(self.response_tokens)
        return []

    monkeypatch.setattr(layouts.Search, "ranked", ranked)
    assert remedies.find(made("Qwen/Qwen3-32B", 1, 2, batch=BATCH), response_tokens=321.0) == [] and asked == {321.0}


def test_more_machines_are_whole_nodes() -> None:
    """A node is filled before there are two, and nodes that are not full become more only where there are several."""
    assert remedies._machines(1, 4)[:3] == [(1, 8), (2, 8), (3, 8)]
    assert all(gpus == 8 for _, gpus in remedies._machines(1, 4))
    assert remedies._machines(1, 1)[:3] == [(1, 2), (1, 4), (1, 8)]
    several = remedies._machines(2, 4)
    assert several[:3] == [(3, 4), (2, 8), (4, 4)] and (3, 8) in several
    assert [nodes * gpus for nodes, gpus in several] == sorted(nodes * gpus for nodes, gpus in several)
    assert max(nodes for nodes, _ in several) == 64
