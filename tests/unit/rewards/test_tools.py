"""Tools: what the model is told of them, how its calls are read, and what becomes of calls that go wrong (10 s).

It would catch a schema that lies about a function, a call that is lost because its neighbour is no JSON, and a call
that costs a conversation instead of an error for the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data.outcomes import CallRecord
from gspo_hpc.launch import checks, preflight
from gspo_hpc.rewards.environments import schemas, tools
from gspo_hpc.rewards.environments.calculator import calculator
from gspo_hpc.rewards.environments.tool_calls import Call, asked_for, glm45, hermes, llama3_json, qwen3_coder
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.environments.turns import asked, turn_pool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.runs import snapshot
from tests.folders import model_folder

FILE = '''
import os
import time
from typing import Literal, Optional


def search(query: str, limit: int = 3, where: Literal["web", "books"] = "web", tags: list[str] | None = None,
           *, fields, shelf: str) -> list:
    """Look something up.

    More about it, which the model is not told.

    Args:
        query (str): What to look for,
            in a few words.
        limit: How many results.

    Returns:
        The results.
    """
    return [query, limit, where, fields["answer"], shelf]


async def slow(seconds: float):
    time.sleep(seconds)
    return "awake"


def breaks(how: str) -> str:
    """Fail."""
    if how == "exit":
        os._exit(3)
    if how == "odd":
        return object()
    raise RuntimeError("no idea")


def long(n: int):
    return "x" * n


def many(*words):
    return words
'''
WORDS = "environment.tools=[{function: 'own.py:search', args: {shelf: a}}, calculator, {function: 'own.py:slow'}]"
TEMPLATE = "{{ tools }}<tool_call>"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def config(*functions: str, more: tuple[str, ...] = ()) -> Config:
    listed = ", ".join(one if one.startswith("{") else f"{{function: '{one}'}}" for one in functions)
    return loader.load(None, [f"environment.tools=[{listed}]", *more], run_code=True)


SEARCH = "{function: 'own.py:search', args: {shelf: a}}"


def test_a_schema_is_read_from_the_signature_and_no_file_is_run(file: Path) -> None:
    file.write_text(FILE + "\nraise SystemExit('run')\n")
    search, slow = (one["function"] for one in tools.shown(config(SEARCH, "own.py:slow").environment))
    assert search == {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for, in a few words."},
                "limit": {"type": "integer", "description": "How many results."},
                "where": {"type": "string", "enum": ["web", "books"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["query"],
        },
    }
    assert slow["parameters"]["properties"] == {"seconds": {"type": "number"}} and slow["description"] == ""
    (shown,) = tools.shown(config("calculator").environment)
    assert shown["function"]["parameters"]["required"] == ["expression"]
    assert "(3 + 4) * 5" in shown["function"]["parameters"]["properties"]["expression"]["description"]


def test_a_schema_of_ones_own_takes_its_place(file: Path) -> None:
    own = "{function: 'own.py:long', description: Say x., parameters: {type: object, properties: {n: {type: integer}}}}"
    (shown,) = tools.shown(config(own).environment)
    assert shown["function"]["description"] == "Say x."
    assert shown["function"]["parameters"] == {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (("calculater",), "there is no such tool: calculater; nearest: calculator"),
        (("own.py:serch",), "has no function 'serch' at its top level; nearest: search"),
        (("{function: 'own.py:search', args: {shelv: a}}",), "has no parameter 'shelv'; nearest: shelf"),
        (("calculator", "calculator"), "two tools are called calculator"),
        (("own.py:many",), "many has parameters that cannot be given by name"),
        (("other.py:search",), "other.py is not there"),
    ],
)
def test_mistakes_are_told_before_anything_starts(file: Path, functions: tuple[str, ...], said: str) -> None:
    (problem,) = preflight.environments(config(*functions))
    assert problem.key == "environment.tools" and said in str(problem)


def test_tools_by_the_template_alone(file: Path) -> None:
    (problem,) = preflight.environments(config("calculator", more=("data.chat_template_kwargs={tools: []}",)))
    assert problem.key == "data.chat_template_kwargs"
    (problem,) = preflight.environments(config("calculator", more=("data.chat_template=false",)))
    assert problem.key == "data.chat_template"


def test_files_go_with_a_job_and_belong_to_the_run(file: Path) -> None:
    given = config(SEARCH)
    assert snapshot.files(given)["own.py:search"] == "tool" and "own.py" in snapshot.fingerprints(given)


def test_a_file_that_cannot_be_loaded_is_told_before_ranks_start(file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "7"}))
    more = ("data.train=rows.jsonl", "reward.functions=[{function: number_match}]")
    checks.check_inputs(config(SEARCH, more=more))
    file.write_text("import nothing_such\n" + FILE)
    with pytest.raises(ValueError, match="environment.tools: own.py:search cannot be loaded: ModuleNotFoundError"):
        checks.check_inputs(config(SEARCH, more=more))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 7.", []),
        ("I look." + call("a", x=1) + call("b") + "<|im_end|>", [Call("a", {"x": 1}), Call("b", {})]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [Call("a", {"x": 1})]),
        ('<tool_call>{"name": "a"}', [Call("a", {})]),
        (f"<think>or {call('a')}?</think>no", []),
        (f"or {call('a')}?</think>{call('b')}", [Call("b", {})]),
        (f"<think>{call('a')}", []),
        # Tags of thoughts in an argument, as in a program about them, are a part of it.
        (call("a", x="</think>"), [Call("a", {"x": "</think>"})]),
        (call("b") + call("a", x="<think> and </think>"), [Call("b", {}), Call("a", {"x": "<think> and </think>"})]),
        (f"<think>{call('b')}</think>{call('a', x='</think>')}", [Call("a", {"x": "</think>"})]),
        (call("a", x="<think>") + call("b"), [Call("a", {"x": "<think>"}), Call("b", {})]),
        (f"{call('a', x='<think>')}<think>{call('b')}", [Call("a", {"x": "<think>"})]),
        (f"<think>{call('a', x='</think>')}", []),
        # A thought about how to call is no call.
        (f"<think>in <tool_call> I write JSON</think>{call('b')}", [Call("b", {})]),
    ],
)
def test_calls_in_tags(text: str, calls: list[Call]) -> None:
    assert hermes(text) == calls


def test_a_call_that_is_no_json_leaves_its_neighbours() -> None:
    texts = ["{name: a}", '{"name": 3}', '{"name": "a", "arguments": [1]}', "[" * 9999, '{"name": "a", "x": NaN}']
    found = hermes("".join(f"<tool_call>{text}</tool_call>{call('b')}" for text in texts))
    assert [one.error is None for one in found] == [False, True] * len(texts)
    said = ["no valid JSON", "a JSON object with", "the arguments are no", "nested too deeply", "NaN is no number"]
    assert all(text in str(one.error) for text, one in zip(said, found[::2], strict=True))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 7.<|eot_id|>", []),
        ("{1, 2} is the set.", []),
        ('{"sum": 7}', []),
        ('<|python_tag|>{"name": "a", "parameters": {"x": 1}}<|eom_id|>', [Call("a", {"x": 1})]),
        ('{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', [Call("a", {}), Call("b", {})]),
    ],
)
def test_calls_as_bare_json(text: str, calls: list[Call]) -> None:
    assert llama3_json(text) == calls
    assert llama3_json('{"name": "a", "parameters": {')[0].error


def test_thoughts_in_arguments_of_other_forms() -> None:
    code = '<tool_call><function=run><parameter=code>print("</think>")</parameter></function></tool_call>'
    assert qwen3_coder(f"<think>Yes.</think>{code}") == [Call("run", {"code": 'print("</think>")'}, texts=True)]
    code = '<tool_call>run<arg_key>code</arg_key><arg_value>print("</think>")</arg_value></tool_call>'
    assert glm45(f"<think>Yes.</think>{code}") == [Call("run", {"code": 'print("</think>")'}, texts=True)]
    text = '{"name": "run", "parameters": {"code": "print(\'</think>\')"}}'
    assert llama3_json(text) == [Call("run", {"code": "print('</think>')"})]


def test_calls_as_xml(file: Path) -> None:
    """The schema of the tool says what type an argument has."""
    box = Toolbox.of(config(SEARCH, "own.py:slow").environment, "{{ tools }}<tool_call><function=")
    inside = "<function=search>\n<parameter=query>\n12\n34\n</parameter>\n<parameter=limit>\n2\n</parameter>\n"
    tags = '<parameter=tags>["a"]</parameter></function>'
    two = box.calls(f"So:<tool_call>\n{inside}{tags}\n</tool_call><tool_call><function=slow></tool_call>")
    assert two[0] == Call("search", {"query": "12\n34", "limit": 2, "tags": ["a"]})
    assert isinstance(two[1], CallRecord) and "missing arguments: seconds" in two[1].result
    twice = "<parameter=seconds>1</parameter>" * 2
    for wrong in ("{}", "<function=slow>1</function>", f"<function=slow>{twice}</function>"):
        (found,) = box.calls(f"<tool_call>{wrong}</tool_call>")
        assert isinstance(found, CallRecord) and found.outcome == "malformed"
    (found,) = box.calls("<tool_call><function=slow><parameter=seconds>soon</parameter></function></tool_call>")
    assert isinstance(found, CallRecord) and "seconds must be of type number" in found.result


def test_the_template_says_how_it_wants_calls() -> None:
    assert asked_for("... <tool_call>\n{...}") == "hermes"
    assert asked_for("<tool_call>\n<function=NAME>") == "qwen3_coder"
    assert asked_for("<tool_call>NAME<arg_key>") == "glm45" and asked_for("nothing of it") is None
    assert asked_for("Calls must go to the commentary channel. <|channel|>commentary json") == "openai"
    assert asked_for('{"name": function name, "parameters": dictionary}. Environment: ipython') == "llama3_json"
    settings = config("calculator").environment
    with pytest.raises(
        ValueError,
        match="a form that is not known here; give one of hermes, llama3_json, qwen3_coder, glm45, openai as",
    ):
        Toolbox.of(settings, "{{ tools }}")
    with pytest.raises(ValueError, match="the chat template does not show tools"):
        Toolbox.of(settings, "<tool_call>")
    own = config("calculator", more=("environment.tool_parser=hermes",)).environment
    assert Toolbox.of(own, "{{ tools }}").parser == "hermes"


def test_a_template_without_tools_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    given = config("calculator", more=(f"model.path={model}",))
    (problem,) = preflight.environments(given)
    assert "the chat template does not show tools" in str(problem)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert not list(preflight.environments(given))


def test_calls_that_cannot_be_made_have_their_errors(file: Path) -> None:
    box = Toolbox.of(config(SEARCH, "calculator", more=("environment.max_calls=7",)).environment, TEMPLATE)
    texts = [
        call("serch", query="a"),
        "<tool_call>{</tool_call>",
        call("search"),
        call("search", query=1),
        call("search", query="a", fields={}),
        call("search", query="a", where="here"),
        call("search", query="a", limit=2.0),
        call("search", query="a"),
    ]
    found = box.calls("".join(texts))
    assert [one.outcome if isinstance(one, CallRecord) else one for one in found] == [
        "unknown",
        *["malformed"] * 5,
        Call("search", {"query": "a", "limit": 2.0}),
        "failed",
    ]
    said = ["no tool 'serch'; nearest: search", "no valid JSON", "missing arguments: query", "must be of type string"]
    said += ["unknown arguments: fields", "must be one of web, books", "", "only the first 7 calls"]
    assert all(
        text in (one.result if isinstance(one, CallRecord) else "") for text, one in zip(said, found, strict=True)
    )
    (long,), (many,) = box.calls(call("s" * 9000)), box.calls(call("search", query="a", **{"b" * 9000: 1}))
    assert isinstance(long, CallRecord) and len(long.name) == 64 and len(long.result) < 200
    assert isinstance(many, CallRecord) and len(many.result) == 1000 and many.result.endswith("b…")
    (odd,) = box.calls('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')
    assert isinstance(odd, CallRecord) and odd.name.encode() and odd.result.encode()


def test_processes_run_tools_side_by_side_and_what_goes_wrong_costs_a_call(file: Path) -> None:
    given = config(
        SEARCH,
        *("calculator", "own.py:slow", "own.py:breaks", "own.py:long"),
        more=("environment.timeout=3", "environment.workers=3", "environment.max_result=30"),
    )
    box = Toolbox.of(given.environment, TEMPLATE)
    calls = {
        "found": Call("search", {"query": "é"}),
        "sum": Call("calculator", {"expression": "1 / 0"}),
        "slow": Call("slow", {"seconds": 0.1}),
        "hangs": Call("slow", {"seconds": 60}),
        "exits": Call("breaks", {"how": "exit"}),
        "raises": Call("breaks", {"how": "raise"}),
        "odd": Call("breaks", {"how": "odd"}),
        "long": Call("long", {"n": 5000}),
    }
    found: dict[str, RewardResult] = {}
    with turn_pool(given, 1) as pool:
        for key, one in calls.items():
            pool.submit(key, "", 0, "", asked({"answer": 7}, 1, {"kept": 1}, one))
        while pool.pending:
            found |= dict(pool.poll(timeout=None))
    records = {key: box.result(calls[key], result) for key, result in found.items()}
    assert records["found"] == CallRecord("search", '["é", 3, "web", 7, "a"]', "done")
    assert records["slow"].result == "awake"
    assert records["sum"] == CallRecord("calculator", "Error: ZeroDivisionError: division by zero", "failed")
    assert records["raises"].result == "Error: RuntimeError: no idea" and records["odd"].outcome == "failed"
    assert records["exits"].outcome == "failed" and "exit code 3" in records["exits"].result
    assert records["hangs"].outcome == "timed_out" and "no answer within 3 s" in records["hangs"].result
    assert records["long"].result == "x" * 30 + "\n[cut off: 30 of 5,000 characters]"
    turn = found["found"].turn
    assert turn is not None and turn.state == {"kept": 1} and not turn.over


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 5", "35"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2^10 - 1", "1023"),
        ("-7 // 2 % 3", "2"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("round(2 * pi, 2)", "6.28"),
    ],
)
def test_sums(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a + 1",
        "(1",
        "9 ** 9 ** 9",
        "(-8) ** 0.5",
        "exp(999)",
        "'a' * 3",
        "().__class__",
        "1e999",
        "True",
        "1" * 1001,
    ]
    + ["min()", "round(1.5, 0.5)", f"1{'-' * 998}1"]
    + ["max(1, key=2)", "(" * 300, "[1][0]", "2 ** 4000 * 2 ** 4000", "1 if 1 else 2"],
)
def test_what_is_no_sum_is_refused(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)


def test_what_a_schema_leaves_open_is_left_to_the_tool() -> None:
    assert schemas.misfit({"a": {"b": 1}}, {"properties": {"a": True}}) is None
    assert schemas.misfit({"b": 1}, {"properties": {}, "additionalProperties": True}) is None
    assert schemas.misfit({"a": True}, {"properties": {"a": {"type": ["integer", "null"]}}}) is not None
