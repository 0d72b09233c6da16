"""Calls of tools in the forms of GLM 4.5 and gpt-oss, held against vLLM's own parsers, and replies by such templates.

It takes ten seconds: what vLLM finds in the messages of call_texts.py is in parsed_by_vllm.json, which
tools/bench/tool_calls.py writes. It would catch a call that is not read, is read with other values than vLLM's server
gives, or is made of text that is none; a message that takes longer to read the longer it is, beyond its length; and
results of tools in a place where the template does not have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.schema import Data
from gspo_hpc.data.replies import Replies
from gspo_hpc.rewards.environments import schemas
from gspo_hpc.rewards.environments.tool_calls import PARSERS, Call, asked_for
from tests.unit.rewards import call_texts
from tests.unit.rewards.processor_time import at_most

THEIRS = json.loads(Path(__file__).with_name("parsed_by_vllm.json").read_text("utf-8"))
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in call_texts.TOOLS}
WRONG = "wrong"  # in the place of arguments: the model is told what is wrong with the call
# By a part of the message: what we read otherwise. vLLM's server leaves out a call that it cannot read, or a part of
# it, gives arguments of gpt-oss to the client as they are, and makes calls that a model only thinks of.
OTHERWISE: dict[str, dict[str, list[list[Any]]]] = {
    "glm45": {
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>ca": [["search", WRONG]],
        "<tool_call>search\n<arg_key>query</arg_key>": [["search", WRONG]],
        "<tool_call>sea": [["sea", {}]],
        "<tool_call>": [["", WRONG]],
        "<tool_call></tool_call>": [["", WRONG]],
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>': [['{"name": "now", "arguments": {}}', {}]],
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>cats\n</tool_call>": [["search", WRONG]],
        "<tool_call>search\n<arg_key>query\n<arg_value>cats</arg_value>\n</tool_call>": [["search", WRONG]],
        "<tool_call>search\n<arg_value>cats</arg_value>\n</tool_call>": [["", WRONG]],
        "<tool_call>search cats</tool_call>": [["search cats", {}]],
        call_texts.GLM45[-8]: [["search", WRONG]],  # text between the arguments
        call_texts.GLM45[-7]: [["search", WRONG]],  # an argument twice
        call_texts.GLM45[-6]: [["search", {"query": "cats"}], ["now", {}]],  # the first has no end
        call_texts.GLM45[-3]: [],
        call_texts.GLM45[-2]: [],
        call_texts.GLM45[-1]: [["search", {"query": "cats"}]],
    },
    "openai": {
        **{
            f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{given}": [["search", WRONG]]
            for given in (
                '{"query": "ca',
                "",
                "{query: cats}<|call|>",
                "{'query': 'cats'}<|call|>",
                "cats<|call|>",
                '["cats"]<|call|>',
                '"cats"<|call|>',
                '{"query": "cats"} {"limit": 3}<|call|>',
                "<|call|>",
                '{"query": NaN}<|call|>',
            )
        },
        "<|channel|>commentary to=functions.search <|constrain|>code<|message|>cats<|call|>": [["search", WRONG]],
        "<|channel|>commentary to=functions.search <|constrain|>json": [["search", WRONG]],
        "<|channel|>commentary to=functions.sea": [["sea", WRONG]],
        "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}<|call|>": [["", {}]],
    },
}


def read(call: Call) -> list[Any]:
    if call.error is not None:
        return [call.name, WRONG]
    if call.texts and call.name in SCHEMAS:
        typed = {name: schemas.value(text, SCHEMAS[call.name], name) for name, text in call.arguments.items()}
        return [call.name, typed]
    return [call.name, call.arguments]


def theirs(name: str, arguments: str) -> list[Any]:
    try:
        return [name, json.loads(arguments)]
    except ValueError:
        return [name, arguments]


@pytest.mark.parametrize("form", ["glm45", "openai"])
def test_calls_are_those_that_vllm_reads(form: str) -> None:
    rows = THEIRS[form]
    assert [row["text"] for row in rows] == call_texts.texts()[form], "run tools/bench/tool_calls.py"
    differing = {}
    for row in rows:
        ours = [read(call) for call in PARSERS[form](row["text"])]
        if json.dumps(ours) != json.dumps([theirs(*call) for call in row["calls"]]):
            differing[row["text"]] = ours
    assert differing == OTHERWISE[form]
    assert len(rows) - len(differing) >= 45


REPEATED = {
    "hermes": [
        "<tool_call>",
        '<tool_call>{"name": "search"',
        '<tool_call>{"name": "a", "arguments": {"b": "<think></think>"}}</tool_call>',
        "<tool_call><think></think>",
    ],
    "llama3_json": ["</s>", '{"name": "a"}; <|eot_id|>', '{"name": "a", "b": '],
    "qwen3_coder": [
        "<tool_call><function=search><parameter=query>",
        "<parameter=query>",
        "<parameter=a></parameter>\n",
    ],
    "glm45": [
        "<tool_call>search<arg_key>query</arg_key><arg_value>",
        "<arg_key>query",
        "<arg_key>a</arg_key><arg_value>",
    ],
    "openai": ["<|start|>assistant to=functions.search", " to=functions.search<|message|>", "<|channel|><|message|>"],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, every in REPEATED.items() for text in every])
def test_a_model_that_repeats_itself_takes_no_time_beyond_the_length(form: str, text: str) -> None:
    """Calls are read by the thread that steps the engine. A search from each beginning took hours of processor time."""
    begins = {"llama3_json": '{"name": "a"}', "qwen3_coder": "<tool_call><function=a>", "glm45": "<tool_call>a"}
    with at_most(20.0):
        for repeated in (text * 30_000, text * 30_000 + "<"):
            PARSERS[form](repeated)
            PARSERS[form](begins.get(form, "") + repeated)


GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{name}\n"
    "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content.strip() }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% set last.name = none %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before a result') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ENDS = ["<|observation|>", "<|user|>", "<|call|>", "<|return|>", "<|end|>"]


class Words:
    """A tokenizer whose tokens are the ends of messages, and whole texts."""

    def __init__(self, template: str) -> None:
        self.template, self.texts = template, list(ENDS)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **more: Any) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(text: str) -> None:
            raise ValueError(text)

        made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        given = {"raise_exception": refuse, "add_generation_prompt": add_generation_prompt, **more}
        return made.from_string(self.template).render(messages=messages, **given)

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(self.texts[one] for one in tokens)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.texts.append(text)
        return {"input_ids": [len(self.texts) - 1]}


def after(template: str, said: Any, ended: str) -> str:
    words = Words(template)
    replies = Replies(words, Data(), call_texts.TOOLS)
    return words.decode(replies.tokens(said, ENDS.index(ended)))


def test_results_stand_where_the_template_has_them() -> None:
    """A token that ends a message is not there twice, whatever the template puts behind earlier messages."""
    assert asked_for(GLM) == "glm45" and asked_for(HARMONY) == "openai"
    two = [("search", "3 cats"), ("now", "noon")]
    told = "\n<tool_response>\n3 cats\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|assistant|>"
    assert after(GLM, two, "<|observation|>") == told
    assert after(GLM, two, "<|call|>") == f"<|observation|>{told}"
    assert after(GLM, "go on", "<|user|>") == "\ngo on<|assistant|>"
    result = '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"3 \\"cats\\""<|end|>'
    assert after(HARMONY, [("search", '3 "cats"')], "<|call|>") == f"{result}<|start|>assistant"
    user = "<|start|>user<|message|>go on<|end|><|start|>assistant"
    assert after(HARMONY, "go on", "<|return|>") == user == after(HARMONY, "go on", "<|end|>")
