"""Tool calls in a message of the model, in the forms for which chat templates ask.

vLLM has parsers by the same names. They run in processes that import vLLM, and they take a message with one call that
is no JSON for a message without calls; here the model is told which call was wrong, so each is read by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

_THINKING, _THOUGHT = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>)?", re.DOTALL)
# Arguments are read one behind the other, and never searched for: where the model repeats itself, a search would look
# at the rest of the message again for each beginning. The group ?> ends a key at its first end.
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"(?><arg_key>(.*?)</arg_key>)\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_KEY = "<arg_key>"
_START, _MESSAGE = "<|start|>", "<|message|>"  # of the harmony format
_MESSAGE_END = re.compile(r"<\|(?:end|call|return|endoftext)\|>")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_FUNCTIONS = "functions."
_NO_FUNCTIONS = ("assistant", "browser", "python", "container")  # other recipients: the format's own, built-in tools
_PYTHON_TAG = "<|python_tag|>"
_ENDS = ("|>", "</s>")  # of what the model ended its message with
_END = re.compile(r"<\|[a-z_]+\|>")


@dataclass(frozen=True)
class Call:
    """A call of a tool as the model wrote it; with `error` it cannot be read."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    texts: bool = False  # the arguments are texts, of which the schema says what they stand for


def hermes(text: str) -> list[Call]:
    """Return the calls between <tool_call> tags, each a JSON object with `name` and `arguments` (Hermes, Qwen)."""
    return [_call(found[1]) for found in _HERMES.finditer(_said(text, _call))]


def llama3_json(text: str) -> list[Call]:
    """Return the calls of a message that is nothing but JSON objects with `name` and `parameters` (Llama 3)."""
    said = text.strip()
    if not said.startswith(("{", _PYTHON_TAG)):  # else the message is a call, and has no thoughts
        said = _said(text).strip()
    said = _without_ends(said).strip()
    marked = said.startswith(_PYTHON_TAG)
    said = said.removeprefix(_PYTHON_TAG).strip()
    if not said.startswith("{"):
        return []
    calls: list[Call] = []
    at, decoder = 0, json.JSONDecoder(parse_constant=_no_number)
    while at < len(said):
        try:
            value, end = decoder.raw_decode(said, at)
        except (ValueError, RecursionError):
            # A message that only begins like a call, such as a set in mathematics, is none.
            return [*calls, _call(said[at:])] if marked or '"name"' in said[at:] else calls
        if not (isinstance(value, dict) and "name" in value):
            return calls
        calls.append(_read(value))
        at = end
        while at < len(said) and (said[at].isspace() or said[at] in ";,"):
            at += 1
    return calls


def qwen3_coder(text: str) -> list[Call]:
    """Return the calls between <tool_call> tags as <function=NAME> with <parameter=NAME> (Qwen 3.5, Nemotron 3).

    Values are texts, whatever the tool takes.
    """
    return [_function_call(found[1]) for found in _HERMES.finditer(_said(text, _function_call))]


def glm45(text: str) -> list[Call]:
    """Return the calls between <tool_call> tags as NAME with <arg_key> and <arg_value> pairs (GLM 4.5 and later).

    Values are texts, whatever the tool takes.
    """
    return [_key_value_call(found[1]) for found in _HERMES.finditer(_said(text, _key_value_call))]


def openai(text: str) -> list[Call]:
    """Return the calls of a message in the harmony format: its parts with a function as recipient (gpt-oss).

    A part is `<|channel|>NAME to=functions.TOOL <|constrain|>json<|message|>ARGUMENTS<|call|>`; the recipient may stand
    before the channel. The first part has no <|start|>, which the prompt ends with.
    """
    calls = []
    for part in text.split(_START):
        header, begun, content = part.partition(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1].partition(".")[0] in _NO_FUNCTIONS:
            continue
        name = recipient[1].removeprefix(_FUNCTIONS)
        if not begun:
            calls.append(Call(name, {}, "the call has no arguments: <|message|> must follow its recipient"))
            continue
        ended = _MESSAGE_END.search(content)
        given = content[: ended.start()] if ended else content
        try:
            arguments = json.loads(given, parse_constant=_no_number)
        except (ValueError, RecursionError):
            calls.append(Call(name, {}, "the arguments are no JSON object"))
            continue
        calls.append(_read({"name": name, "arguments": arguments}))
    return calls


PARSERS: dict[str, Callable[[str], list[Call]]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "openai": openai,
}


def asked_for(template: str) -> str | None:
    """Return the name of the parser for the form in which a chat template asks for calls; None for another form."""
    if _CALL in template:
        # Others write XML within the same tags.
        return "qwen3_coder" if "<function=" in template else "glm45" if _KEY in template else "hermes"
    if "<|channel|>commentary" in template:
        return "openai"
    if '"parameters": ' in template and ("ipython" in template or _PYTHON_TAG in template):
        return "llama3_json"
    return None


def _said(text: str, reader: Callable[[str], Call] | None = None) -> str:
    """Return a message without its thoughts: calls in these are not meant.

    A tag of thoughts within a call that `reader` can read is a part of its arguments, as where these are a program.
    """
    end = len(text)
    while (at := text.rfind(_THOUGHT, 0, end)) >= 0:
        call = _call_around(text, at, reader)
        if call is None:
            return text[at + len(_THOUGHT) :]
        end = call.start
    at = 0
    while (at := text.find(_THINKING, at)) >= 0:
        call = _call_around(text, at, reader)
        if call is None:
            return text[:at]
        at = call.stop
    return text


def _call_around(text: str, at: int, reader: Callable[[str], Call] | None) -> range | None:
    """Return the place of the call that has `at` in it and can be read; None if there is none."""
    begin, end = text.rfind(_CALL, 0, at), text.find(_CALL_END, at)
    if reader is None or begin < 0 or end < 0 or text.find(_CALL_END, begin, at) >= 0:
        return None
    return None if reader(text[begin + len(_CALL) : end]).error else range(begin, end)


def _function_call(text: str) -> Call:
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        return Call("", {}, "the call must be <function=NAME> with a <parameter=NAME> for each argument")
    pairs = _pairs(_PARAMETER, function[2])
    if pairs is None:
        return Call(function[1], {}, "each argument must be one <parameter=NAME>...</parameter>")
    return Call(function[1], {name: _without_breaks(value) for name, value in pairs.items()}, texts=True)


def _key_value_call(text: str) -> Call:
    name, key, rest = text.partition(_KEY)
    name, pairs = name.strip(), _pairs(_ARGUMENT, key + rest)
    if not name or "<" in name:
        return Call("", {}, "the call must be NAME with an <arg_key> and an <arg_value> for each argument")
    if pairs is None:
        return Call(name, {}, "each argument must be one <arg_key>...</arg_key><arg_value>...</arg_value>")
    return Call(name, pairs, texts=True)


def _pairs(argument: re.Pattern[str], text: str) -> dict[str, str] | None:
    """Return the arguments of a call by name; None where there is anything else, or a name twice."""
    pairs: dict[str, str] = {}
    at, end = len(text) - len(text.lstrip()), len(text)
    while at < end:
        found = argument.match(text, at)
        if found is None or (name := found[1].strip()) in pairs:
            return None
        pairs[name], at = found[2], found.end()
    return pairs


def _without_ends(text: str) -> str:
    """Return a message without what the model ended it with, which may stand there many times."""
    end = len(text.rstrip())
    while text.endswith(_ENDS, 0, end):
        begin = text.rfind("<", 0, end)
        if text[begin:end] != _ENDS[1] and not _END.fullmatch(text, max(0, begin), end):
            break
        end = begin
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _without_breaks(value: str) -> str:
    """Return a value without the line breaks that the form puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _call(text: str) -> Call:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        return Call("", {}, "the call is nested too deeply")
    except ValueError as error:
        return Call("", {}, f"the call is no valid JSON: {error}")
    return _read(value)


def _read(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, 'the call must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as in the API of OpenAI
        try:
            arguments = json.loads(arguments, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return Call(value["name"], {}, "the arguments are no JSON object")
    if not isinstance(arguments, dict):
        return Call(value["name"], {}, "the arguments are no JSON object")
    return Call(value["name"], arguments)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
