"""The JSON schema of a config: it takes what the loader takes, and refuses what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.config.plugins import algorithms
from gspo_hpc.config.schema import Config, as_dict, keys

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    from gspo_hpc.config.json_schema import json_schema

    found = json.loads(json.dumps(json_schema()))
    Draft202012Validator.check_schema(found)
    return found


def mistakes(schema: dict[str, Any], raw: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(raw)]


def test_the_command_prints_it(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert main(["schema", "--help"]) == 0
    assert "# yaml-language-server: $schema=FILE" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(schema: dict[str, Any], path: Path) -> None:
    assert mistakes(schema, yaml.safe_load(path.read_text())) == []


def test_the_defaults_are_valid(schema: dict[str, Any]) -> None:
    assert mistakes(schema, {}) == []
    assert mistakes(schema, json.loads(json.dumps(as_dict(Config())))) == []


@pytest.mark.parametrize("name", [None, "gspo", "gspo_token", "grpo"])
def test_every_algorithm_is_valid_with_its_keys(schema: dict[str, Any], name: str | None) -> None:
    raw = {"name": name} if name else {}
    assert mistakes(schema, {"algorithm": raw}) == []
    assert mistakes(schema, {"algorithm": {**raw, "clip_low": 0.1, "clip_high": 0.2, "kl_beta": 0.1}}) == []


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({"run": {"max_stepz": 3}}, "max_stepz"),
        ({"batsh": {}}, "batsh"),
        ({"cluster": {"nodes": 0}}, "minimum"),
        ({"cluster": {"nodes": 100_001}}, "maximum"),
        ({"optimizer": {"adam_beta1": 1}}, "maximum"),
        ({"rollout": {"temperature": 2.5}}, "maximum"),
        ({"rollout": {"top_p": 0}}, "minimum"),
        ({"rollout": {"mode": "colocated"}}, "colocated"),
        ({"batch": {"share_prompts": 1}}, "boolean"),
        ({"run": {"name": "../x"}}, "match"),
        ({"reward": {"functions": [{"weight": 2}]}}, "function"),
        ({"slurm": {"partition": "a;b"}}, "not valid under any"),
        ({"algorithm": {"clip_hi": 0.1}}, "not valid under any"),
        ({"algorithm": {"clip_low": 1}}, "not valid under any"),
        ({"algorithm": {"name": "gpso"}}, "not valid under any"),
        ({"algorithm": {"name": "grpo", "kl_beta": -1}}, "not valid under any"),
        ({"slurm": {"container": {"kind": "docker", "image": "x"}}}, "not valid under any"),
    ],
)
def test_it_refuses_what_the_loader_refuses(schema: dict[str, Any], raw: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError):
        from_dict(raw)
    (message,) = mistakes(schema, raw)
    assert word in message


def test_every_key_has_its_meaning_and_default(schema: dict[str, Any]) -> None:
    for name, field in keys().items():
        section, key = name.split(".")
        if section != "algorithm":
            found = schema["$defs"][schema["properties"][section]["$ref"].rsplit("/", 1)[1]]["properties"][key]
            assert found["description"] == field.description
            assert found["default"] == json.loads(json.dumps(field.default)), name
    for kind in algorithms().values():
        for key, field in kind.model_fields.items():
            found = schema["$defs"][kind.__name__]["properties"][key]
            assert found["description"] == (field.description if key != "name" else f"{kind.__doc__} {kind.paper}.")
            assert found["default"] == field.default
