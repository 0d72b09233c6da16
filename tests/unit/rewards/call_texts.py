"""Messages that call tools in the forms of GLM 4.5 and gpt-oss, well formed and not, for tools/bench/tool_calls.py.

That program has vLLM's own parsers read them, and writes what they found into parsed_by_vllm.json.
"""

from __future__ import annotations

import json
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "score": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                },
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}}},
]


def _glm(name: str, *pairs: tuple[str, str], between: str = "\n", end: str = "</tool_call>") -> str:
    inside = "".join(
        f"{between}<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in pairs
    )
    return f"<tool_call>{name}{inside}{between}{end}"


_Q = ("query", "cats")
GLM45 = [
    "It is 7.",
    "",
    "<think>Let me see.</think>\nIt is 7.",
    _glm("search", _Q),
    _glm("search", _Q, between=""),
    _glm("search", _Q, ("limit", "3")),
    _glm("search", _Q, ("limit", "3"), between=""),
    _glm("search", _Q, ("score", "2.5"), ("exact", "true")),
    _glm("search", _Q, ("exact", "false")),
    _glm("search", _Q, ("tags", '["a", "b"]')),
    _glm("search", _Q, ("tags", "[]")),
    _glm("search", _Q, ("options", '{"a": {"b": [1, 2, {"c": null}]}}')),
    _glm("search", _Q, ("options", '{"text": "</arg>, <b> & \\"quoted\\""}')),
    _glm("search", ("query", "")),
    _glm("search", ("query", "12")),
    _glm("search", ("query", "true")),
    _glm("search", ("query", '{"a": 1}')),
    _glm("search", ("query", "two\nlines")),
    _glm("search", ("query", "  spaces  ")),
    _glm("search", ("query", "Käse 猫 🐈 שלום")),
    _glm("search", ("query", "a < b && c > d")),
    _glm("search", ("query", "<b>bold</b>")),
    _glm("search", ("query", 'say "hi" \\ back')),
    _glm("now"),
    _glm("now", between=""),
    "<tool_call> now </tool_call>",
    "<think>I call.</think>\n" + _glm("search", _Q),
    "<think>I call.</think>" + _glm("search", _Q) + "<|observation|>",
    "\n<think>a < b</think>\nI look it up." + _glm("search", _Q),
    "I look it up.\n" + _glm("search", _Q),
    "I look it up.\n" + _glm("search", _Q) + "\nand then",
    _glm("search", _Q) + _glm("now"),
    _glm("search", _Q) + "\n" + _glm("search", ("query", "dogs")) + "\n" + _glm("now", between=""),
    "one " + _glm("search", _Q) + " two " + _glm("now") + " three",
    _glm("search", _Q) * 2,
    _glm("search", ("query", "猫")) + _glm("search", ("query", "犬")),
    _glm("search", (" query ", "cats")),
    "<tool_call>search\n\n<arg_key>query</arg_key>\n\n<arg_value>cats</arg_value>\n\n</tool_call>",
    "<tool_call>\nsearch\n<arg_key>query</arg_key>\n<arg_value>cats</arg_value>\n</tool_call>",
    _glm("search", _Q, ("limit", " 3 ")),
    _glm("search", _Q, ("limit", "many")),
    _glm("search", _Q, ("unknown", "x")),
    _glm("search", ("limit", "3")),
    _glm("search", _Q, ("options", "{'a': 1}")),
    _glm("search", _Q, ("options", "{broken")),
    _glm("search", _Q, end=""),
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>ca",
    "<tool_call>search\n<arg_key>query</arg_key>",
    "<tool_call>sea",
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>cats\n</tool_call>",
    "<tool_call>search\n<arg_key>query\n<arg_value>cats</arg_value>\n</tool_call>",
    "<tool_call>search\n<arg_value>cats</arg_value>\n</tool_call>",
    "<tool_call>search cats</tool_call>",
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>cats</arg_value>\nnoise\n</tool_call>",
    _glm("search", _Q, ("query", "dogs")),
    _glm("search", _Q, end="") + _glm("now"),
    "</tool_call>" + _glm("now"),
    "<arg_key>query</arg_key><arg_value>cats</arg_value>",
    "<think>or " + _glm("now") + "?</think>no",
    "<think>or " + _glm("now"),
    "<think>a</think>b<think>" + _glm("now") + "</think>" + _glm("search", _Q),
]


def _call(name: str, arguments: str, *, channel: str = "commentary", kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>{channel} to=functions.{name}{kind}<|message|>{arguments}<|call|>"


def _first(name: str, arguments: str) -> str:
    """Return a call whose recipient stands before the channel, as templates write them."""
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


_A = '{"query": "cats"}'
_THOUGHT = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>It is 7.<|return|>"
OPENAI = [
    "",
    _FINAL,
    _THOUGHT + _FINAL,
    _call("search", _A),
    _call("search", _A, kind=" json"),
    _call("search", _A, kind=""),
    _call("search", _A, kind="<|constrain|>json"),
    _first("search", _A),
    _THOUGHT + _call("search", _A),
    _THOUGHT + _first("search", _A),
    _call("search", _A, channel="analysis"),
    _call("search", _A, channel="final"),
    _call("now", "{}"),
    _call("now", "{ }"),
    _THOUGHT + _call("now", "{}"),
    _call("search", '{"query": "cats", "limit": 3}'),
    _call("search", '{\n  "query": "cats",\n  "limit": 3\n}'),
    _call("search", '{"query": "cats", "score": 2.5, "exact": true}'),
    _call("search", '{"query": "cats", "exact": false}'),
    _call("search", '{"query": "cats", "tags": ["a", "b"]}'),
    _call("search", '{"query": "cats", "options": {"a": {"b": [1, 2, {"c": null}]}}}'),
    _call("search", '{"query": "cats", "options": {"text": "say \\"hi\\" \\\\ back"}}'),
    _call("search", '{"query": ""}'),
    _call("search", '{"query": "two\\nlines"}'),
    _call("search", '{"query": "Käse 猫 🐈 שלום"}'),
    _call("search", '{"query": "\\u732b"}'),
    _call("search", '{"query": "a < b && c > d"}'),
    _call("search", '{"query": "to=functions.now"}'),
    _call("search", '{"query": "<b>bold</b>"}'),
    _call("search", '  {"query": "cats"}  '),
    _call("search", '{"query": "cats", "unknown": 1}'),
    _call("search", '{"limit": 3}'),
    _call("search", '{"query": "cats", "limit": "3"}'),
    "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + _call("search", _A),
    _THOUGHT + "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + _call("now", "{}"),
    _call("search", _A) + "<|start|>assistant" + _call("now", "{}"),
    _call("search", _A) + "<|start|>assistant" + _call("search", '{"query": "dogs"}') + "<|start|>assistant" + _FINAL,
    _first("search", _A) + "<|start|>assistant" + _first("now", "{}"),
    "<|channel|>analysis<|message|>call to=functions.now<|end|><|start|>assistant" + _FINAL,
    "<|channel|>final<|message|>to=functions.now {}<|return|>",
    _call("search", _A).removesuffix("<|call|>"),
    _call("search", _A).removesuffix("<|call|>") + "<|end|>",
    '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "ca',
    "<|channel|>commentary to=functions.search <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.search <|constrain|>json",
    "<|channel|>commentary to=functions.sea",
    "<|channel|>commentary",
    "<|channel|>analysis<|message|>I think",
    _call("search", "{query: cats}"),
    _call("search", "{'query': 'cats'}"),
    _call("search", "cats"),
    _call("search", '["cats"]'),
    _call("search", '"cats"'),
    _call("search", '{"query": "cats"} {"limit": 3}'),
    _call("search", ""),
    _call("search", "cats", kind=" <|constrain|>code"),
    _call("search", '{"query": NaN}'),
    "<|channel|>commentary to=search <|constrain|>json<|message|>" + _A + "<|call|>",
    "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "<|channel|>commentary to=browser.search <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=assistant<|message|>{}<|end|>",
    _call("nothing_such", "{}"),
    "It is 7.",
    "<|message|>It is 7.<|return|>",
]


def texts() -> dict[str, list[str]]:
    """Return the messages by the form that they are in, each once."""
    found = {"glm45": GLM45, "openai": OPENAI}
    assert all(len(one) == len(set(one)) for one in found.values())
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]
