"""The JSON schema of a config: it takes what the loader takes, and refuses what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.config.plugins import algorithms
from gspo_hpc.config.schema import Config, Container, EvalSet, RewardFunction, RewardModel, Source, Tool, as_dict, keys

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    from gspo_hpc.config.reference.json_schema import json_schema

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


# ---- the same values as the loader ---------------------------------------------------------------

TEXTS = (
    [
        "",
        " ",
        "a",
        "a b",
        "a\n",
        "\n",
        "a\tb",
        "run",
        "run\n",
        "-run",
        "x" * 100,
        "x" * 101,
        "a;b",
        "gpu",
        " gpu",
        "é",
        "\u202e",
    ]
    + [
        "a\u2028b",
        "a\x85b",
        "a\0b",
        "90",
        "90:00",
        "0:00",
        "24:00:00",
        "1-00:00:00",
        "1-24",
        "1:60",
        "1-",
        "UNLIMITED",
        "90\n",
    ]
    + ["1e3", "10", "0.5", "off", "auto", "bfloat16", "colocate", "gspo", "grpo", "sequence", "pyxis", "core_attn"]
)
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2,
    256,
    257,
    10**9,
    10**9 + 1,
    2**63,
    2**63 - 1,
    100_000,
    100_001,
    0.0,
    1.0,
    -1.0,
    0.5,
    1e3,
]
NUMBERS += [1.5, 2.0, 0.01, 0.009, 2.1, 1e30, -1e-9, 1e9 + 1]
VALUES = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]),
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
)
NESTED = VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
CONTAINER = {"kind": "pyxis", "image": "x"}


def settings_of_a_config() -> dict[str, Any]:
    """A function for each setting, sections and keys inside lists included: it makes a config of one value."""

    def at(section: str, key: str) -> Any:
        return lambda value: {section: {key: value}}

    made: dict[str, Any] = {name: at(*name.split(".")) for name in keys()}
    made |= {section: lambda value, section=section: {section: value} for section in Config.model_fields}
    for name, kind in algorithms().items():
        first = next(iter(algorithms().values())).model_fields  # of others, keys of another type are enough
        for key, field in kind.model_fields.items():
            if field is not first[key] and field.metadata == first[key].metadata and key != "name":
                continue
            made[f"algorithm.{name}.{key}"] = lambda v, n=name, k=key: {"algorithm": {"name": n, k: v}}
    for key in RewardFunction.model_fields:
        made[f"reward.functions[].{key}"] = lambda v, k=key: {"reward": {"functions": [{"function": "f", k: v}]}}
    for key in RewardModel.model_fields:
        made[f"reward.models[].{key}"] = lambda v, k=key: {"reward": {"models": [{"name": "a", "path": "p", k: v}]}}
    for key in Tool.model_fields:
        made[f"environment.tools[].{key}"] = lambda v, k=key: {"environment": {"tools": [{"function": "f", k: v}]}}
    for key in Source.model_fields:
        made[f"data.sources[].{key}"] = lambda v, k=key: {"data": {"sources": [{"name": "a", "files": "f", k: v}]}}
    for key in EvalSet.model_fields:
        made[f"data.eval_sets[].{key}"] = lambda v, k=key: {"data": {"eval_sets": [{"name": "a", "files": "f", k: v}]}}
    for key in Container.model_fields:
        made[f"container.{key}"] = lambda v, k=key: {"slurm": {"container": CONTAINER | {k: v}}}
    made["optimizer.min_lr"] = lambda value: {"optimizer": {"lr": 1e308, "min_lr": value}}  # a rule between two keys
    return made


MAKERS = settings_of_a_config()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_value_is_taken_by_both_or_by_none(schema: dict[str, Any], name: str) -> None:
    """Every value that is listed here, in every key."""
    validator = Draft202012Validator(schema)
    for value in [None, True, False, [], {}, [1], ["a"], ["a\n"], {"a": 1}, {"a": "b"}, *NUMBERS, *TEXTS]:
        agree(validator, MAKERS[name](value))


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from(sorted(MAKERS)), NESTED)
def test_random_values_are_taken_by_both_or_by_none(schema: dict[str, Any], name: str, value: Any) -> None:
    agree(Draft202012Validator(schema), MAKERS[name](value))


def agree(validator: Draft202012Validator, raw: dict[str, Any]) -> None:
    try:
        from_dict(raw)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    found = [error.message for error in validator.iter_errors(raw)]
    assert bool(refused) == bool(found), (
        f"{raw}: the loader: {refused or 'takes it'}; the schema: {found or 'takes it'}"
    )
