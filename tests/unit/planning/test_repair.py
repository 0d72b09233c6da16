"""Repairs of plans with several independent faults (2 s): each makes the plan valid, or says what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.fixes import repair, search
from gspo_hpc.planning.plan import make_plan
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
