"""The reward function that asks a language model behind an OpenAI-compatible endpoint for a score.

The client is the openai package, which vLLM brings along: it repeats requests that the endpoint refuses for the moment
(no connection, 408, 409, 429, 5xx) with growing delays, and waits as long as a Retry-After header says. All completions
of a group are asked about in one call, side by side. A request that fails costs its completion alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gspo_hpc.rewards.catalogue import field_of, reward_function

if TYPE_CHECKING:
    import asyncio

    from openai import AsyncOpenAI

TEMPLATE = """Judge how well an answer solves a task.

Task:
{prompt}

Answer:
{completion}

Give your reasons in at most three sentences. Then end with a line "Score: N", where N is a whole number from 0 for
a useless answer to 10 for a perfect one."""
PATTERN = r"(?i)score\W{0,6}(-?\d+(?:\.\d+)?)"
REQUEST: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "max_tokens": 512})
_PLACE = re.compile(r"\{(\w+)\}")  # braces around anything else, as JSON and LaTeX have them, stay
_OWN_TIME = 0.9  # share of the time limit after which a request is given up; the rest is for the answers of others
_EXCERPT = 120  # characters of an answer that an error quotes

_next_turn = 0.0  # when this process may send its next request, on the monotonic clock


def _prepare() -> None:
    """Import the client, which takes seconds."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the package openai is not installed ({error}): pip install openai") from None


def _check(
    base_url: str,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    request: Mapping[str, Any] = REQUEST,
    concurrency: int = 8,
    requests_per_minute: float = 0.0,
    max_retries: int = 4,
    **_: Any,
) -> None:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(f"base_url {base_url!r} is no address such as http://host:8000/v1")
    if "completion" not in _PLACE.findall(template):
        raise ValueError("template has no {completion}, so the judge would not see what it judges")
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"pattern {pattern!r} has {groups} groups: it must have one, which is the score")
    if not isinstance(request, Mapping) or {"model", "messages", "stream"} & set(request):
        raise ValueError(f"request is {request!r}: it must be a mapping without model, messages and stream")
    for name, value, least in (
        ("concurrency", concurrency, 1),
        ("requests_per_minute", requests_per_minute, 0),
        ("max_retries", max_retries, 0),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")


def _check_row(fields: Mapping[str, Any], *, template: str = TEMPLATE, **_: Any) -> None:
    for name in _PLACE.findall(template):
        if name not in ("prompt", "completion"):
            field_of(fields, name)


@reward_function(check=_check, check_row=_check_row, prepare=_prepare, asks_elsewhere=True)
async def judge(
    completions: Sequence[str],
    *,
    prompt: str,
    fields: Mapping[str, Any],
    time_limit: float,
    reward_processes: int,
    base_url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    api_key_env: str = "",
    request: Mapping[str, Any] = REQUEST,
    concurrency: int = 8,
    requests_per_minute: float = 0.0,
    max_retries: int = 4,
) -> list[float | Exception]:
    """Return the score that the model `model` at `base_url` gives to each completion, or why there is none.

    `template` is the message to the judge: {prompt}, {completion} and {FIELD} for fields of the row are replaced. The
    score is the group of the last match of `pattern` in its reply. `api_key_env` names the environment variable with
    the key of the endpoint, and `request` holds further parameters of the request. At most `concurrency` requests of a
    process are under way at once, and all processes of the run together send at most `requests_per_minute` (0: without
    limit), repetitions aside; a request that is refused for the moment is repeated up to `max_retries` times.
    """
    import asyncio  # here: commands that only check a config need neither

    import openai

    key = os.environ.get(api_key_env, "") if api_key_env else "none"
    if not key:
        raise RuntimeError(f"the environment variable {api_key_env} (api_key_env) is not set")
    gate, turns = asyncio.Semaphore(concurrency), asyncio.Lock()
    seconds_between = 60.0 * reward_processes / requests_per_minute if requests_per_minute else 0.0

    async def score(client: AsyncOpenAI, completion: str) -> float:
        values = {**fields, "prompt": prompt, "completion": completion}
        message = _PLACE.sub(lambda place: str(values.get(place[1], place[0])), template)
        async with gate:
            await _turn(turns, seconds_between)
            try:
                reply = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": message}], extra_body=dict(request)
                )
            except openai.APIStatusError as error:
                raise RuntimeError(f"{base_url} refused with {error.status_code}: {_excerpt(error, key)}") from None
            except openai.APITimeoutError:
                raise TimeoutError(f"{base_url} did not answer") from None
            except openai.APIConnectionError as error:
                raise ConnectionError(
                    f"{base_url} cannot be reached: {_excerpt(error.__cause__ or error, key)}"
                ) from None
            except (openai.OpenAIError, ValueError) as error:
                raise ValueError(f"{base_url} gave no chat completion: {_excerpt(error, key)}") from None
        return _score_of(reply, pattern, base_url)

    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=key, max_retries=max_retries, timeout=time_limit
    ) as client:
        tasks = [asyncio.create_task(score(client, completion)) for completion in completions]
        _, late = await asyncio.wait(tasks, timeout=_OWN_TIME * time_limit)
        for task in late:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    why = f"{base_url} gave no score within {_OWN_TIME * time_limit:g} s, most of its time limit"
    return [TimeoutError(why) if isinstance(one, asyncio.CancelledError) else one for one in found]  # type: ignore[misc]


async def _turn(turns: asyncio.Lock, seconds_between: float) -> None:
    """Wait until this process may send its next request."""
    import asyncio

    global _next_turn
    if not seconds_between:
        return
    async with turns:  # who gives up while it waits takes nobody's turn
        await asyncio.sleep(max(0.0, _next_turn - time.monotonic()))
        _next_turn = time.monotonic() + seconds_between


def _score_of(reply: Any, pattern: str, base_url: str) -> float:
    """Return the score in a reply of the endpoint. Raises ValueError if there is none."""
    try:
        text = reply.choices[0].message.content or ""
    except (AttributeError, LookupError, TypeError):  # whatever else a server sends with a status of 200
        raise ValueError(f"{base_url} gave no chat completion: {_excerpt(reply)}") from None
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(f"the judge's reply has no score: {_excerpt(text)}")
    try:
        return float(found[-1])
    except ValueError:
        raise ValueError(f"the judge's score is {found[-1][:_EXCERPT]!r}, not a number") from None


def _excerpt(value: object, key: str = "") -> str:
    """Return the end of a text on one line, without the key: the end is where a judge's score would be."""
    text = " ".join(str(value).split())
    text = text.replace(key, "[hidden]") if len(key) > 4 else text
    return repr(text if len(text) <= _EXCERPT else f"...{text[-_EXCERPT:]}")
