"""Features that this version can plan, but not run: `plan` says so and exits with 2, and nothing starts it.

Catches a config that is called valid although `train` and `submit` refuse it. A second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.checks import require
from gspo_hpc.models import catalog
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import PlanError, make_plan
from gspo_hpc.planning.rules import planned_only
from tests.examples import example

WHOLE: dict[str, Any] = {
    "run": {"max_steps": 2},
    "model": {"path": "Qwen3-8B"},
    "cluster": {"gpus_per_node": 8},
    "batch": {"num_generations": 8, "global_batch_size": 64, "micro_batch_tokens": 4096},
    "data": {"train": "rows.jsonl"},
    "reward": {"functions": [{"function": "number_match"}]},
}
OTHER = {"model": {"path": "google/gemma-3-27b-it"}}


def test_a_config_that_can_be_run() -> None:
    plan = make_plan(from_dict(WHOLE))
    assert plan.valid and plan.runnable and plan.not_run == () == plan.missing
    assert require(from_dict(WHOLE)) == plan
    part = make_plan(from_dict({"batch": WHOLE["batch"]}))
    assert part.valid and not part.runnable and "model.path" in part.missing


def test_train_and_submit_refuse_with_the_line_of_the_plan() -> None:
    config = from_dict(WHOLE | OTHER)
    plan = make_plan(config)
    (item,) = plan.not_run
    assert plan.valid and not plan.runnable and item.feature == "model_family" and "gemma" in item.reason
    with pytest.raises(ValueError) as refused:
        require(config)
    assert str(refused.value) == item.reason and not isinstance(refused.value, PlanError)


def test_plan_says_so_on_the_page_in_json_and_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(WHOLE))
    assert main(["plan", str(path)]) == 3
    assert ": valid, but not all that it names is on this machine " in " ".join(capsys.readouterr().out.split())
    words = ["plan", str(path), "model.path=google/gemma-3-27b-it"]
    assert main(words) == 2
    page = " ".join(capsys.readouterr().out.split())
    assert ": valid, but not run by this version" in page and "google/gemma-3-27b-it can be planned" in page
    assert main([*words, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] and not told["runnable"] and told["not_run"][0]["feature"] == "model_family"
    assert told["missing"] == [] and told["broken"] == []
    for command in ("train", "submit"):
        assert main([command, *words[1:]]) == 2
        assert f"error: {told['not_run'][0]['reason']}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "code", "runnable", "head"),
    [
        ("Qwen/Qwen3-8B", 3, None, "valid, but not all that it names is on this machine"),
        ("deepseek-ai/DeepSeek-V3-0324", 2, False, "valid, but not run by this version"),
        ("google/gemma-3-27b-it", 2, False, "valid, but not run by this version"),
        ("moonshotai/Moonlight-16B-A3B", 2, False, "valid, but not run by this version"),
        ("Qwen/Qwen2-VL-7B", 2, False, "valid, but not run by this version"),
        ("Qwen/Qwen2-57B-A14B", 3, None, "what could be checked is valid; nothing is known of the model"),
        ("my/own", 3, None, "what could be checked is valid; nothing is known of the model"),
        (None, 3, False, "what is given is valid; a run needs more"),
    ],
)
def test_what_train_would_refuse_is_not_called_runnable(
    path: str | None, code: int, runnable: bool | None, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan ends with 0 only where nothing but the files is left to be looked at."""
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(WHOLE | {"model": {"path": path}}))
    assert main(["plan", str(run)]) == code
    assert " ".join(capsys.readouterr().out.split()).startswith(f"plan of {run}: {head} ")
    assert main(["plan", str(run), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["runnable"] is runnable and told["valid"] is True
    unknown = head.endswith("nothing is known of the model")
    assert told["unknown_model"] == (path if unknown else None)
    assert any("A local folder with the model's config.json" in note for note in told["notes"]) is unknown


def test_a_bridge_may_know_a_text_family_that_only_its_name_tells() -> None:
    model = {"path": "google/gemma-2-9b", "provider": "mcore_bridge"}
    plan = make_plan(from_dict(WHOLE | {"model": model, "batch": WHOLE["batch"] | {"share_prompts": False}}))
    assert plan.not_run == () and plan.runnable is None and plan.unknown_model == "google/gemma-2-9b"


@pytest.mark.parametrize(
    ("change", "provider", "reason"),
    [
        ({}, "own", None),
        ({"architectures": ["GPT2LMHeadModel"]}, "own", "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": ["GPT2LMHeadModel"]}, "mcore_bridge", None),
        ({"use_sliding_window": True}, "own", "use_sliding_window = True"),
        ({"vision_config": {}}, "mcore_bridge", "it has a vision_config"),
        ({"architectures": 3}, "own", "cannot be understood"),
        ({"architectures": {"a": 1}}, "own", "cannot be understood"),
    ],
)
def test_models_that_are_not_trained(change: dict[str, Any], provider: str, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen3-8B") | change))
    model = {"path": str(tmp_path), "provider": provider}
    plan = make_plan(from_dict(WHOLE | {"model": model, "batch": WHOLE["batch"] | {"share_prompts": False}}))
    assert plan.valid, plan.broken
    assert [reason in item.reason for item in plan.not_run] == ([True] if reason else [])


def test_the_feature_in_contributing_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_only, "_features", dict(planned_only._features))
    (code,) = re.findall(r"^```python\n(.*?)^```$", example("A feature that can be planned, but not run"), re.S | re.M)
    exec(compile(f"from __future__ import annotations\n{code}", "example", "exec"), dict(vars(planned_only)))

    def of(recipe: str) -> Config:
        return from_dict(WHOLE | {"model": WHOLE["model"] | {"fp8": "hybrid", "fp8_recipe": recipe}})

    (item,) = make_plan(of("mxfp8")).not_run
    assert item.feature == "mxfp8" and "fp8_recipe=blockwise" in item.reason
    assert make_plan(of("blockwise")).runnable
    with pytest.raises(ValueError, match="fp8_recipe=blockwise"):
        require(of("mxfp8"))


def test_no_fix_leads_to_what_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = from_dict(WHOLE | {"parallel": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}})

    def keys() -> set[str]:
        return {change.key for fix in search.find(refused) for change in fix.changes}

    assert "cluster.nodes" in keys()
    monkeypatch.setattr(planned_only, "_features", dict(planned_only._features))

    @planned_only.planned_only("several_nodes")
    def _nodes(plan: PlanBuilder) -> Iterator[str]:
        if plan.config.cluster.nodes > 1:
            yield "cluster.nodes above 1"

    assert keys() and "cluster.nodes" not in keys()


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("provider", "quantization", "engine", "reason"),
    [
        ("mcore_bridge", None, {"load_format": "auto"}, None),
        ("mcore_bridge", FP8, {}, None),
        ("mcore_bridge", FP8, {"load_format": "dummy"}, None),
        ("mcore_bridge", FP8, {"load_format": "auto"}, "load_format auto would read FP8 weights"),
        ("mcore_bridge", {"quant_method": "mxfp4"}, {}, r"\(quantization_config: mxfp4\).* Give .* in 16 bits"),
        ("mcore_bridge", {"quant_method": "fp8"}, {}, r"\(quantization_config: fp8\).* Give .* in 16 bits"),
        ("own", FP8, {}, r"\(quantization_config: fp8\).* with model.provider=mcore_bridge also FP8 in blocks"),
    ],
)
def test_quantized_folders(provider: str, quantization: Any, engine: Any, reason: str | None, tmp_path: Path) -> None:
    """DeepSeek's FP8 in blocks is trained in 16 bits; what else is quantized is refused before anything starts."""
    settings = catalog.content("Qwen3-8B") | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = {"path": str(tmp_path), "provider": provider}
    found = make_plan(from_dict(WHOLE | {"model": model, "rollout": {"engine": engine}})).not_run
    assert len(found) == (reason is not None), found
    if reason is not None:
        assert re.search(reason, found[0].reason), found
