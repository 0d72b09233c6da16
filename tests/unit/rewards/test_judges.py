"""The judge, against a real HTTP server on this machine that is slow, refuses, or answers nonsense.

It takes about half a minute: worker processes import the client, and one request waits for its limit of 20 seconds. It
would catch a failed request that becomes a score, one that costs the other completions of its group, a request that is
not repeated or is repeated for ever, a rate that processes exceed together, and a key that stands in an error.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards import builtin, judges, trial
from gspo_hpc.rewards.calls import Sampled
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.registry import check
from gspo_hpc.rewards.results import RewardResult

KEY = "sk-very-secret-key"


class Judge(BaseHTTPRequestHandler):
    """An endpoint that does what the completion says, which is the last word of the message."""

    asked: ClassVar[Counter[str]] = Counter()
    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[set[str | None]] = set()
    times: ClassVar[list[float]] = []
    busy: ClassVar[int] = 0
    most_busy: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = body["messages"][-1]["content"].split()[-1]
        with self.lock:
            kind.busy += 1
            kind.most_busy = max(kind.busy, kind.most_busy)
            self.asked[how] += 1
            times = self.asked[how]
            self.bodies.append(body)
            self.keys.add(self.headers["Authorization"])
            self.times.append(time.monotonic())
        try:
            self.behave(how, times)
        except OSError:  # who asked has hung up
            pass
        finally:
            with self.lock:
                kind.busy -= 1

    def behave(self, how: str, times: int) -> None:
        if how == "slow":
            time.sleep(60)
        elif how == "steady":
            time.sleep(0.15)
            self.reply("Score: 5")
        elif how == "busy":
            if times <= 2:
                self.send(429, b'{"error": {"message": "rate limit"}}', {"retry-after-ms": "50"})
            else:
                self.reply("Score: 4")
        elif how == "never":
            if times == 1:
                self.send(429, b"", {"retry-after": "Wed, 99 Jan 99999 99:99:99 GMT"})
            else:
                self.reply("Score: 3")
        elif how == "broken":
            self.send(500, b"out of order")
        elif how == "forbidden":
            why = f"wrong key: {self.headers['Authorization']}"  # the client quotes JSON alone
            self.send(401, json.dumps({"error": {"message": why}}).encode())
        elif how == "hangup":
            self.connection.close()
        elif how == "html":
            self.send(200, b"<html>hello</html>", {"content-type": "text/html"})
        elif how == "json":
            self.send(200, b'{"no": "choices"}')
        elif how == "cut":
            self.send(200, b'{"choices": [{"mess')
        elif how == "null":
            self.send(200, b'{"choices": [{"message": {"content": null}}]}')
        elif how == "silent":
            self.reply("I would rather not say.")
        elif how == "twice":
            self.reply("<think>Perhaps Score: 2?</think> It is fine.\n**Score:** 7.5")
        else:
            self.reply(f"Score: {len(how)}")

    def reply(self, text: str) -> None:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send(200, json.dumps(answer).encode())

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Judge]]]:
    kind = type(
        "Fresh",
        (Judge,),
        {"asked": Counter(), "bodies": [], "keys": set(), "times": [], "busy": 0, "most_busy": 0},
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        running.daemon_threads, running.block_on_close = True, False
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", kind
        running.shutdown()


def term(url: str, **args: Any) -> RewardFunction:
    return RewardFunction(
        function="judge", args={"base_url": url, "model": "m", "template": "{prompt} {completion}", **args}
    )


def graded(terms: list[RewardFunction], groups: list[list[str]], **keys: Any) -> list[list[RewardResult]]:
    pools = keys.pop("pools", 1)
    config = Reward(functions=tuple(terms), **{"workers": 1, "timeout": 20.0, **keys})
    check(config)
    got: dict[Any, RewardResult] = {}
    with RewardPool(config, pools=pools) as pool:
        for number, texts in enumerate(groups):
            sampled = [Sampled(text, 1) for text in texts]
            pool.submit_group([(number, i) for i in range(len(texts))], sampled, "Q", {"answer": "yes"})
        until = time.monotonic() + 90
        while pool.pending and time.monotonic() < until:
            got |= dict(pool.poll(timeout=1.0))
    return [[got[number, i] for i in range(len(texts))] for number, texts in enumerate(groups)]


FAILURES = {
    "slow": "gave no score within 18 s, most of its time limit",
    "broken": "refused with 500",
    "forbidden": "refused with 401: 'Error code: 401 - wrong key: Bearer [hidden]'",
    "hangup": "cannot be reached",
    "html": "gave no chat completion",
    "json": "gave no chat completion",
    "cut": "gave no chat completion",
    "null": "the judge's reply has no score: ''",
    "silent": "the judge's reply has no score: 'I would rather not say.'",
}


def test_each_failure_costs_its_completion_alone_and_is_no_zero(
    server: tuple[str, type[Judge]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    monkeypatch.setenv("JUDGE_KEY", KEY)
    texts = ["good", *FAILURES, "busy", "twice", "never"]
    asks = term(url, api_key_env="JUDGE_KEY", max_retries=2, concurrency=16)
    (results,) = graded([asks, RewardFunction(function="exact_match")], [texts])
    for text, result in zip(texts, results, strict=True):
        if text not in FAILURES:
            value = {"good": 4.0, "busy": 4.0, "twice": 7.5, "never": 3.0}[text]
            assert (result.failure, result.parts) == (None, {"judge": value, "exact_match": 0.0}), text
            continue
        assert FAILURES[text] in (result.failure or ""), (text, result)
        assert KEY not in (result.failure or "")
        assert result.parts == {"exact_match": 0.0}
        assert result.outcomes == {"judge": "timed_out" if text == "slow" else "failed"}
    assert seen.keys == {f"Bearer {KEY}"}
    # What may pass is repeated, what will not is not.
    assert seen.asked["busy"] == seen.asked["broken"] == 3 and seen.asked["forbidden"] == seen.asked["silent"] == 1
    assert all((body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 512) for body in seen.bodies)


def test_no_more_requests_at_once_than_allowed(server: tuple[str, type[Judge]]) -> None:
    url, seen = server
    (results,) = graded([term(url, concurrency=3)], [["steady"] * 9])
    assert [result.value for result in results] == [5.0] * 9 and seen.most_busy == 3


def test_all_processes_together_keep_the_rate(server: tuple[str, type[Judge]]) -> None:
    url, seen = server
    graded([term(url, requests_per_minute=60.0)], [["good"] * 2, ["fine"] * 2], workers=2)
    # One a second, so two processes send one each every two seconds. Without a rate, all would come at once.
    assert len(seen.times) == 4 and max(seen.times) - min(seen.times) > 1.0


def test_turns_are_never_closer_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [100.0], []

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def send(turns: asyncio.Lock, seconds: float = 2.0) -> None:
        await judges._turn(turns, ("http://h/v1", "m", seconds))
        sent.append(now[0])

    async def send_all() -> None:
        turns = asyncio.Lock()
        await asyncio.gather(*(send(turns) for _ in range(4)))
        now[0] += 30.0  # nothing is asked for a while, which gives no right to ask faster
        await asyncio.gather(*(send(turns) for _ in range(3)))
        await send(turns, 0.5)  # another judge, with a pace of its own, which waits for nobody's turn
        await send(turns, 0.5)

    monkeypatch.setattr(judges, "_next_turns", {})
    monkeypatch.setattr(judges.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        asyncio.run(send_all())
    assert sent == [100.0, 102.0, 104.0, 106.0, 136.0, 138.0, 140.0, 140.0, 140.5]


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ({"retry-after-ms": "50"}, 0.05, 0.05),
        ({"retry-after": "2.5"}, 2.5, 2.5),
        ({"retry-after": "60"}, 60.0, 60.0),
        ({"retry-after": "3600"}, 1.5, 2.0),  # longer than a call may take: as without it
        ({"retry-after": "-3"}, 1.5, 2.0),
        ({"retry-after": "soon"}, 1.5, 2.0),
        ({"retry-after": email.utils.formatdate(time.time() + 3600, usegmt=True)}, 1.5, 2.0),
        ({"retry-after": email.utils.formatdate(time.time() - 3600, usegmt=True)}, 1.5, 2.0),
        ({}, 1.5, 2.0),
    ],
)
def test_a_repetition_waits_as_long_as_it_is_told_within_a_bound(
    told: dict[str, str], least: float, most: float
) -> None:
    assert least <= judges._delay(SimpleNamespace(response=SimpleNamespace(headers=told)), 2) <= most
    assert judges._delay(SimpleNamespace(), 20) <= 8.0


def test_an_endpoint_that_is_not_there_is_no_zero() -> None:
    (results,) = graded([term("http://127.0.0.1:9/v1", max_retries=0)], [["a", "b"]])
    for result in results:
        assert "http://127.0.0.1:9/v1 cannot be reached" in (result.failure or "") and result.parts == {}


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (outcome,) = trial.run([term("http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY")], "Q", {})
    assert "the environment variable JUDGE_KEY (api_key_env) is not set" in (outcome.failure or "")


def test_the_trial_before_a_run_asks_the_endpoint(server: tuple[str, type[Judge]]) -> None:
    url, seen = server
    assert trial.run([term(url)], "Q", {}) == [trial.Outcome(None)]
    assert sum(seen.asked.values()) == 2
    (outcome,) = trial.run([term("http://127.0.0.1:9/v1", max_retries=0)], "Q", {})
    # A run that begins here is refused; one that is handed to Slurm may reach it from its nodes.
    assert "cannot be reached" in (outcome.failure or "") and (outcome.certain, outcome.not_here) == (False, True)


def test_fields_of_the_row_are_in_the_message(server: tuple[str, type[Judge]]) -> None:
    url, seen = server
    template = 'Rubric {answer}, form {"score": 1}, {prompt}: {completion} good'
    graded([term(url, template=template)], [["x {answer}"]])
    assert seen.bodies[0]["messages"] == [
        {"role": "user", "content": 'Rubric yes, form {"score": 1}, Q: x {answer} good'}
    ]
    arguments = {"template": "{rubric} {completion}"}
    assert "no field 'rubric'" in (builtin.refusal("judge", arguments, {"answer": 1}) or "")
    assert builtin.refusal("judge", {}, {}) is None


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"base_url": "host:8000"}, "base_url 'host:8000' is no address such as http://host:8000/v1"),
        ({"template": "Score it."}, "template has no {completion}"),
        ({"pattern": "("}, "is not a valid regular expression"),
        ({"pattern": "Score"}, "has 0 groups: it must have one"),
        ({"request": {"model": "x"}}, "without model, messages and stream"),
        ({"request": [1]}, "it must be a mapping"),
        ({"concurrency": 0}, "concurrency is 0: it must be at least 1"),
        ({"requests_per_minute": -1}, "requests_per_minute is -1"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"api_key": "sk-1"}, "unknown argument 'api_key'; nearest: api_key_env"),
        ({"time_limit": 3}, "unknown argument 'time_limit'"),
    ],
)
def test_arguments_that_make_no_sense_are_named(args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match="reward.functions") as caught:
        check(Reward(functions=(term("http://h/v1", **args),)))
    assert why in str(caught.value)
