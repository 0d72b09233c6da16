"""The reward function that asks a language model behind an OpenAI-compatible endpoint for a score.

The client is the openai package, which vLLM brings along. Requests that the endpoint refuses for the moment (no
connection, 408, 409, 429, 5xx) are repeated here and not there, because each counts: for the rate and the budget. All
completions of a group are asked about in one call, side by side. A request that fails costs its completion alone.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gspo_hpc.config.constants import JUDGE_REPLY_TOKENS
from gspo_hpc.data.outcomes import OverBudget
from gspo_hpc.rewards.catalogue import field_of, reward_function

if TYPE_CHECKING:
    import asyncio

    from openai import AsyncOpenAI

    from gspo_hpc.runs.spending import Amount, Spending

TEMPLATE = """Judge how well an answer solves a task.

Task:
{prompt}

Answer:
{completion}

Give your reasons in at most three sentences. Then end with a line "Score: N", where N is a whole number from 0 for
a useless answer to 10 for a perfect one."""
PATTERN = r"(?i)score\W{0,6}(-?\d+(?:\.\d+)?)"
REQUEST: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "max_tokens": JUDGE_REPLY_TOKENS})
_PLACE = re.compile(r"\{(\w+)\}")  # braces around anything else, as JSON and LaTeX have them, stay
_OWN_TIME = 0.9  # share of the time limit after which a request is given up; the rest is for the answers of others
_EXCERPT = 120  # characters of an answer that an error quotes
_TEMPLATE_TOKENS = 128  # that a chat template adds to a message, at most; of the message, a token has a byte or more
_PASSING = (408, 409, 429)  # and all from 500
_LOST = (502, 504)  # of gateways, behind which the model may have worked: its answer did not come
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_TOLD = 0.5, 8.0, 60.0  # seconds before a repetition
_ROOM_SECONDS = 0.2  # between looks whether others have left room in the budget

# When this process may send its next request to a judge, by address, model and pace; on the monotonic clock.
_next_turns: dict[tuple[str, str, float], float] = {}


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
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
    **_: Any,
) -> None:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(f"base_url {base_url!r} is no address such as http://host:8000/v1")
    check_form(template, pattern)
    if not isinstance(request, Mapping) or {"model", "messages", "stream"} & set(request):
        raise ValueError(f"request is {request!r}: it must be a mapping without model, messages and stream")
    for name, value, least in (
        ("concurrency", concurrency, 1),
        ("requests_per_minute", requests_per_minute, 0),
        ("max_retries", max_retries, 0),
        ("prompt_price", prompt_price, 0),
        ("completion_price", completion_price, 0),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")


def check_form(template: str, pattern: str) -> None:
    """Raise ValueError for a template that does not show the completion, or a pattern that finds no score."""
    if "completion" not in _PLACE.findall(template):
        raise ValueError("template has no {completion}, so the judge would not see what it judges")
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"pattern {pattern!r} has {groups} groups: it must have one, which is the score")


def message_for(template: str, prompt: str, completion: str, fields: Mapping[str, Any]) -> str:
    """Return the message that asks for a score: the template with its places filled."""
    values = {**fields, "prompt": prompt, "completion": completion}
    return _PLACE.sub(lambda place: str(values.get(place[1], place[0])), template)


def check_fields(fields: Mapping[str, Any], template: str) -> None:
    """Raise ValueError where a template shows a field that a row does not have."""
    for name in _PLACE.findall(template):
        if name not in ("prompt", "completion"):
            field_of(fields, name)


def _check_row(fields: Mapping[str, Any], *, template: str = TEMPLATE, **_: Any) -> None:
    check_fields(fields, template)


@reward_function(check=_check, check_row=_check_row, prepare=_prepare, asks_elsewhere=True)
async def judge(
    completions: Sequence[str],
    *,
    prompt: str,
    fields: Mapping[str, Any],
    time_limit: float,
    reward_processes: int,
    spending: Any,  # Spending, or None; the signature is read where that is not imported
    base_url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    api_key_env: str = "",
    request: Mapping[str, Any] = REQUEST,
    concurrency: int = 8,
    requests_per_minute: float = 0.0,
    max_retries: int = 4,
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
) -> list[float | Exception]:
    """Return the score that the model `model` at `base_url` gives to each completion, or why there is none.

    `template` is the message to the judge: {prompt}, {completion} and {FIELD} for fields of the row are replaced. The
    score is the group of the last match of `pattern` in its reply. `api_key_env` names the environment variable with
    the key of the endpoint, and `request` holds further parameters of the request. At most `concurrency` requests of a
    process are under way at once, and all processes of the run together send at most `requests_per_minute` (0: without
    limit); a request that is refused for the moment is repeated up to `max_retries` times. The prices are of a million
    tokens. Each request, repetitions too, is noted in `spending`, and none is sent that its budget has no room for.
    """
    import asyncio  # here: commands that only check a config need neither

    import openai

    key = os.environ.get(api_key_env, "") if api_key_env else "none"
    if not key:
        raise RuntimeError(f"the environment variable {api_key_env} (api_key_env) is not set")
    seconds_between = 60.0 * reward_processes / requests_per_minute if requests_per_minute else 0.0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=time_limit) as client:
        endpoint = _Endpoint(
            client,
            asyncio.Semaphore(concurrency),
            asyncio.Lock(),
            base_url,
            key,
            model,
            request,
            max_retries,
            seconds_between,
            time_limit,
            (prompt_price, completion_price),
            spending,
        )

        async def score(completion: str) -> float:
            message = message_for(template, prompt, completion, fields)
            return _score_of(await endpoint.reply(message), pattern, base_url)

        tasks = [asyncio.create_task(score(completion)) for completion in completions]
        _, late = await asyncio.wait(tasks, timeout=_OWN_TIME * time_limit)
        for task in late:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    why = f"{base_url} gave no score within {_OWN_TIME * time_limit:g} s, most of its time limit"
    return [TimeoutError(why) if isinstance(one, asyncio.CancelledError) else one for one in found]  # type: ignore[misc]


@dataclass(frozen=True)
class _Endpoint:
    """A model behind an address, for the requests of one call."""

    client: AsyncOpenAI
    gate: asyncio.Semaphore
    turns: asyncio.Lock
    url: str
    key: str
    model: str
    request: Mapping[str, Any]
    max_retries: int
    seconds_between: float
    time_limit: float
    prices: tuple[float, float]  # of a million tokens of prompts, and of completions
    spending: Spending | None

    async def reply(self, message: str) -> Any:
        """Return the reply to a message. Raises an error that says why there is none."""
        import asyncio

        import openai

        async with self.gate:
            for repetition in range(self.max_retries + 1):
                await _turn(self.turns, (self.url, self.model, self.seconds_between))
                try:
                    return await self._sent(message)
                except openai.APITimeoutError:
                    raise TimeoutError(f"{self.url} did not answer") from None
                except (openai.APIStatusError, openai.APIConnectionError) as error:
                    if repetition == self.max_retries or not _may_pass(error):
                        raise self._named(error) from None
                    delay = _delay(error, repetition)
                except (openai.OpenAIError, ValueError) as error:
                    if isinstance(error, OverBudget):
                        raise
                    raise ValueError(f"{self.url} gave no chat completion: {_excerpt(error, self.key)}") from None
                await asyncio.sleep(delay)
        raise AssertionError("the last repetition returns or raises")

    async def _sent(self, message: str) -> Any:
        """Send one request that counts, and return the reply."""
        import openai

        most = self._amount(len(message.encode("utf-8", "replace")) + _TEMPLATE_TOKENS, _most_tokens(self.request))
        number = await self._number(most)
        try:
            reply = await self.client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": message}], extra_body=dict(self.request)
            )
        except (openai.APIStatusError, openai.APIConnectionError) as error:
            if _used_nothing(error):
                self._answered(number, self._amount(0, 0))
            elif hasattr(error, "status_code"):  # no answer is under way any more
                self._answered(number, most, told=False)
            raise
        usage = getattr(reply, "usage", None)
        counts: list[Any] = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        if all(type(one) is int and one >= 0 for one in counts):
            self._answered(number, self._amount(*counts))
        else:  # not all endpoints say it, and some say nonsense: a number below 0 would make room in the budget
            self._answered(number, most, told=False)
        return reply

    async def _number(self, most: Amount) -> str | None:
        """Return the number of a request that may be sent, once the budget has room. Raises OverBudget."""
        import asyncio

        if self.spending is None:
            return None
        while (number := self.spending.ask(most, self.time_limit)) is None:
            await asyncio.sleep(_ROOM_SECONDS * random.uniform(0.5, 1.5))
        return number

    def _answered(self, number: str | None, used: Amount, *, told: bool = True) -> None:
        if self.spending is not None and number is not None:
            self.spending.answered(number, used, told=told)

    def _amount(self, prompt_tokens: int, completion_tokens: int) -> Amount:
        from gspo_hpc.runs.spending import Amount  # here: a config that is checked needs it no more than asyncio

        prompt_price, completion_price = self.prices
        cost = (prompt_tokens * prompt_price + completion_tokens * completion_price) / 1e6
        return Amount(1, prompt_tokens, completion_tokens, cost)

    def _named(self, error: Any) -> Exception:
        """Return an error of the client as one that names the endpoint, and not its key."""
        import openai

        if isinstance(error, openai.APIStatusError):
            return RuntimeError(f"{self.url} refused with {error.status_code}: {_excerpt(error, self.key)}")
        return ConnectionError(f"{self.url} cannot be reached: {_excerpt(error.__cause__ or error, self.key)}")


def _most_tokens(request: Mapping[str, Any]) -> int:
    """Return how many tokens a reply may have; 0 where the request does not bound it."""
    given = [request.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return int(next((most for most in given if most is not None), 0)) * int(request.get("n") or 1)


def _may_pass(error: Any) -> bool:
    """Return whether the same request may be answered later."""
    status = getattr(error, "status_code", None)
    return status is None or status in _PASSING or status >= 500


def _used_nothing(error: Any) -> bool:
    """Return whether an endpoint did no work for a request: it refused it, or nobody listened."""
    if (status := getattr(error, "status_code", None)) is not None:
        return status not in _LOST
    return "ConnectError" in {kind.__name__ for kind in type(error.__cause__).__mro__}  # of httpx, of the client


def _delay(error: Any, repetition: int) -> float:
    """Return the seconds to wait before a repetition: what the endpoint says, or from half a second to 8."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    told = _number_of(headers.get("retry-after-ms"), 1e-3) or _number_of(headers.get("retry-after"), 1.0)
    if told is None and (date := email.utils.parsedate_tz(headers.get("retry-after") or "")) is not None:
        with contextlib.suppress(ValueError, OverflowError):  # a year that no calendar has
            told = email.utils.mktime_tz(date) - time.time()
    if told is not None and 0 < told <= _LONGEST_TOLD:
        return told
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**repetition) * random.uniform(0.75, 1.0)


def _number_of(text: str | None, unit: float) -> float | None:
    try:
        return None if text is None else unit * float(text)
    except ValueError:
        return None


async def _turn(turns: asyncio.Lock, judge: tuple[str, str, float]) -> None:
    """Wait until this process may send its next request to a judge; the last of its names are the seconds between."""
    import asyncio

    if not (seconds_between := judge[2]):
        return
    async with turns:  # who gives up while it waits takes nobody's turn
        await asyncio.sleep(max(0.0, _next_turns.get(judge, 0.0) - time.monotonic()))
        _next_turns[judge] = time.monotonic() + seconds_between


def _score_of(reply: Any, pattern: str, base_url: str) -> float:
    """Return the score in a reply of the endpoint. Raises ValueError if there is none."""
    try:
        text = reply.choices[0].message.content or ""
    except (AttributeError, LookupError, TypeError):  # whatever else a server sends with a status of 200
        raise ValueError(f"{base_url} gave no chat completion: {_excerpt(reply)}") from None
    return score_in(text, pattern)


def score_in(text: str, pattern: str) -> float:
    """Return the score in the text of a reply: what the last match of the pattern says. Raises ValueError."""
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
