"""JSON of another's making: what is refused, and which files read with Python's own reader instead.

Takes 2 s. It would catch NaN, Infinity or deep nesting that is taken or ends as a traceback, and a new reader of a file
or an answer that may come from anybody.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

import gspo_hpc
from gspo_hpc.system.files import read_json
from gspo_hpc.system.text import parse_json

DEEP = "[" * 3000 + "]" * 3000
OBJECTS = '{"a": ' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    "text", [DEEP, OBJECTS, "[" * 100_000, "NaN", '{"a": [Infinity]}', "-Infinity", "1e999", "-1e400"]
)
def test_what_is_no_json_or_too_deep_is_a_value_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|is not JSON|beyond the range of numbers"):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a.json: not valid JSON: "):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", [None, True, 0, -1, 1.5, 1e308, 10**400, "NaN", [[], {}], {"a": {"b": [1e-400]}}])
def test_json_is_read_as_it_is(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


def test_numbers_that_are_not_finite_are_read_where_they_are_allowed() -> None:
    found = parse_json('{"a": [NaN, Infinity, 1e999]}', finite=False)["a"]
    assert math.isnan(found[0]) and found[1:] == [math.inf, math.inf]
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP, finite=False)


def test_a_key_that_is_given_twice_is_refused_where_that_is_asked_for() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="a key is given twice"):
        parse_json('[{"a": 1, "a": 2}]', unique=True)


# Files that read with Python's own reader: what our own processes send each other or have just written, files of the
# package, and what a model wrote, whose errors are the model's.
OWN = {
    "between ranks": [
        *("checkpoint/compat.py", "checkpoint/saver.py", "data/table.py", "exchange/exchange.py"),
        *("exchange/generator_starts.py", "exchange/weight_broadcast.py", "exchange/wire_format.py"),
        *("engine/transfer.py", "policy/process_groups.py"),
        *("rollout/handover.py", "rollout/node_store.py", "training/bringup.py", "training/compat.py"),
        *("training/jobs/dry_run.py", "training/jobs/train.py", "training/probe.py", "training/serving/commands.py"),
        *("training/serving/engines.py", "training/serving/generators.py"),
    ],
    "between a process and one that it started": [
        *("doctor/packages.py", "rewards/environments/verifiers_side.py"),
        *("rewards/trial.py", "sandbox/runner.py", "sandbox/supervisor.py", "training/observers/process.py"),
        "system/control.py",  # what the watcher sends to a rank
    ],
    "what was written here": [
        *("diagnose/evidence.py", "ops/hf_folder.py", "rewards/environments/protocol.py", "rewards/gym.py"),
    ],
    "config.json of a model that was checked before": ["engine/engine.py", "engine/transfer.py"],
    "files of the package": ["models/catalog.py"],
    "what a model or a user's command line says": [
        *("rewards/environments/schemas.py", "rewards/environments/tool_calls.py", "rewards/environments/verifiers.py"),
    ],
    "the one reader of others": ["system/text.py"],
}


def test_every_other_reader_of_json_is_the_one_for_files_of_anybody() -> None:
    package = Path(gspo_hpc.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load", "json.JSONDecoder")
    }
    assert found == {name for names in OWN.values() for name in names}
