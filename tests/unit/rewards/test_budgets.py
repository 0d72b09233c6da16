"""The budget of judges, against a real HTTP server that counts what it is asked.

It takes about two minutes, mostly for processes that import the client. It would catch a request beyond the budget, of
processes or pools that spend at once too; a repetition, or a request whose process was killed, that is not counted or
is counted twice; an answer without a count of tokens that costs nothing; and a budget that becomes a score.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_hpc.config.schema import Judges, Reward, RewardFunction
from gspo_hpc.rewards.calls import Sampled
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.runs import spending
from gspo_hpc.runs.spending import Account, Amount, OverBudget, Patience, Spending

PROMPT, COMPLETION = 30, 7  # tokens that the server says an answer took
SOON = Patience(60.0, 0.0, {})  # what is noted is waited for as long as it says
NONSENSE: dict[str, Any] = {  # or what else it says of them
    "negative": {"prompt_tokens": -1000, "completion_tokens": 7},
    "endless": {"prompt_tokens": 30, "completion_tokens": math.inf},
    "text": {"prompt_tokens": "30", "completion_tokens": "7"},
    "half": {"prompt_tokens": 30},
    "list": [30, 7],
}


class Counting(BaseHTTPRequestHandler):
    """An endpoint that counts requests, and does what the last word of a message says."""

    asked: ClassVar[list[str]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()
    held: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = body["messages"][-1]["content"].split()[-1]
        with self.lock:
            self.asked.append(how)
            times = self.asked.count(how)
        if how == "held":
            self.held.wait(60)
        status = 429 if how == "busy" else int(how) if how.isdecimal() else 200
        if status != 200 and times <= 2:
            self.send(status, {"error": {"message": "rate limit"}})
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": "Score: 5"}, "finish_reason": "stop"}
        answer: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        answer["choices"] = [choice]
        if how != "untold":
            answer["usage"] = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION, "total_tokens": 37}
        answer["usage"] = NONSENSE.get(how, answer.get("usage"))
        time.sleep(0.05)
        self.send(200, answer)

    def send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("retry-after-ms", "20")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # who asked was killed
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Counting]]]:
    kind = type("Fresh", (Counting,), {"asked": [], "held": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        running.daemon_threads, running.block_on_close = True, False
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", kind
        running.shutdown()


def reward(url: str, **args: Any) -> Reward:
    asks = {"base_url": url, "model": "m", "template": "{prompt} {completion}", "request": {"max_tokens": 10}}
    return Reward(functions=(RewardFunction(function="judge", args=asks | args),), workers=2, timeout=20.0)


def pool(config: Reward, judges: Judges, run: Path, rank: int = 0) -> RewardPool:
    return RewardPool(config, judges=judges, spending=spending.file_of(run, rank))


def graded(pools: list[RewardPool], texts: list[str], groups: int = 1) -> list[RewardResult]:
    found: list[RewardResult] = []
    for one in pools:
        for number in range(groups):
            one.submit_group([(number, i) for i in range(len(texts))], [Sampled(t, 1) for t in texts], "Q", {})
    while any(one.pending for one in pools):
        for one in pools:
            found += [result for _, result in one.poll(timeout=0.05)]
    return found


def account(run: Path) -> Account:
    found = spending.read(run / spending.FOLDER)
    assert found is not None
    return found


def test_two_ranks_together_ask_as_often_as_they_may(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    url, seen = server
    judges = Judges(max_requests=19)
    with pool(reward(url), judges, tmp_path, 0) as one, pool(reward(url), judges, tmp_path, 1) as other:
        results = graded([one, other], ["good"] * 4, groups=4)
    assert len(results) == 32 and len(seen.asked) == 19 == sum(result.failure is None for result in results)
    assert account(tmp_path).total() == Amount(19, 19 * PROMPT, 19 * COMPLETION, 0.0)
    for result in results:
        if result.failure is not None:  # no score, and no zero in its place
            assert result.parts == {} and result.outcomes == {"judge": "over_budget"}
            assert "budget of requests (judges.max_requests) is used up: 19 of 19 requests" in result.failure


def test_repetitions_count_and_a_refusal_takes_no_tokens(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    url, seen = server
    prices = {"prompt_price": 2.0, "completion_price": 10.0}
    with pool(reward(url, **prices), Judges(), tmp_path) as one:
        (busy,) = graded([one], ["busy"])
        (good,) = graded([one], ["good"])
    assert busy.failure is good.failure is None and seen.asked == ["busy"] * 3 + ["good"]
    used = account(tmp_path).total()
    assert used == Amount(4, 2 * PROMPT, 2 * COMPLETION, pytest.approx(2 * (PROMPT * 2 + COMPLETION * 10) / 1e6))
    with pool(reward(url), Judges(max_requests=6), tmp_path) as one:
        seen.asked.clear()
        (busy,) = graded([one], ["busy"])  # the second repetition is one too many
    assert seen.asked == ["busy"] * 2 and busy.outcomes == {"judge": "over_budget"}


@pytest.mark.parametrize(("status", "lost"), [(503, False), (500, False), (502, True), (504, True)])
def test_an_answer_that_a_gateway_lost_takes_the_most(
    server: tuple[str, type[Counting]], tmp_path: Path, status: int, lost: bool
) -> None:
    """The model behind it may have written all of it, and that is billed; an endpoint that refuses bills nothing."""
    url, _ = server
    with pool(reward(url), Judges(), tmp_path) as one:
        (result,) = graded([one], [str(status)])
    most = Amount(1, len(f"Q {status}") + 128, 10)
    tried = Amount(2, 2 * most.prompt_tokens, 20) if lost else Amount(2)
    assert result.failure is None and account(tmp_path).total() == tried + Amount(1, PROMPT, COMPLETION)
    assert account(tmp_path).estimated == 2 * lost


def test_the_costs_of_a_run_stay_below_the_largest(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    """A request may cost 10 x 100 = 0.001 at most, and 7 x 100 is its cost: there is room for 13 of them in 0.01."""
    url, seen = server
    with pool(reward(url, completion_price=100.0), Judges(max_cost=0.01), tmp_path) as one:
        results = graded([one], ["good"] * 4, groups=5)
    assert len(seen.asked) == sum(result.failure is None for result in results) == 13
    assert account(tmp_path).total().cost == pytest.approx(13 * 0.0007)
    (over,) = {result.failure for result in results} - {None}
    assert "budget of cost (judges.max_cost) is used up: 13 requests" in over and "cost 0.0091 of 0.01" in over


def test_an_answer_without_a_count_takes_the_most(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    url, _ = server
    with pool(reward(url), Judges(max_completion_tokens=100), tmp_path) as one:
        results = graded([one], ["untold"] * 12)
    used = account(tmp_path)
    assert sum(result.failure is None for result in results) == 10 == used.estimated
    assert used.total() == Amount(10, 10 * (len("Q untold") + 128), 100, 0.0)
    assert "10 of the requests without a count of tokens" in spending.words(used, None)


def test_an_answer_with_a_nonsensical_count_takes_the_most(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    url, _ = server
    with pool(reward(url), Judges(max_prompt_tokens=100_000), tmp_path) as one:
        results = graded([one], [*NONSENSE])
    assert [result.parts for result in results] == [{"judge": 5.0}] * len(NONSENSE)
    most = sum(len(f"Q {how}") + 128 for how in NONSENSE)
    assert account(tmp_path).total() == Amount(len(NONSENSE), most, 10 * len(NONSENSE), 0.0)


KILLED = """
import sys, json
from pathlib import Path
from gspo_hpc.config.schema import Judges, Reward, RewardFunction
from gspo_hpc.rewards.calls import Sampled
from gspo_hpc.rewards.pool import RewardPool

if __name__ == "__main__":
    args, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    reward = Reward(functions=(RewardFunction(function="judge", args=args),), workers=2, timeout=20.0)
    pool = RewardPool(reward, judges=Judges(max_requests=20), spending=path)
    for number, word in enumerate(["good", "held"]):
        keys = [(number, place) for place in range(4)]
        pool.submit_group(keys, [Sampled(word, 1)] * 4, "Q", {})
        while word == "good" and pool.pending:
            pool.poll(timeout=0.1)
    while True:
        pool.poll(timeout=1.0)
"""


@pytest.mark.parametrize(("kills", "torn"), [(1, False), (2, True)])
def test_what_a_kill_left_without_an_answer_counts_once(
    server: tuple[str, type[Counting]], tmp_path: Path, kills: int, torn: bool
) -> None:
    """Each time, four requests are answered, and four are under way when the rank and its processes are killed."""
    url, seen = server
    config = reward(url)
    (tmp_path / "rank.py").write_text(KILLED)
    path = spending.file_of(tmp_path, 0)
    for number in range(1, kills + 1):
        words = [sys.executable, str(tmp_path / "rank.py"), json.dumps(dict(config.functions[0].args)), str(path)]
        rank = subprocess.Popen(words, start_new_session=True)
        until = time.monotonic() + 60
        while len(seen.asked) < 8 * number and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        assert account(tmp_path).total().requests == 8 * number == len(seen.asked)
    if torn:  # the line that was being written
        with path.open("ab") as file:
            file.write(b'\n0badc0de ["asked","torn-1",5,')
    left = 20 - len(seen.asked)
    with pool(config, Judges(max_requests=20), tmp_path) as one:
        results = graded([one], ["good"] * 14)
    assert sum(result.failure is None for result in results) == left and len(seen.asked) == 20
    used = account(tmp_path)
    assert used.total().requests == 20 and len(used.open) == 4 * kills
    answered = 20 - len(used.open)
    assert used.answered == Amount(answered, answered * PROMPT, answered * COMPLETION, 0.0)


def test_a_request_waits_for_others_that_may_leave_room(tmp_path: Path) -> None:
    limits = Judges(max_completion_tokens=100)
    one, other = (Spending(spending.file_of(tmp_path, rank), limits, SOON) for rank in range(2))
    first = one.ask(Amount(1, 0, 60), seconds=60.0)
    assert first is not None and other.ask(Amount(1, 0, 60), seconds=60.0) is None
    one.answered(first, Amount(1, 0, 10))
    second = other.ask(Amount(1, 0, 60), seconds=0.0)  # its answer never comes
    assert second is not None
    time.sleep(0.2)
    with pytest.raises(OverBudget, match=r"judges.max_completion_tokens\) is used up: 2 requests, 70 of 100 complet"):
        one.ask(Amount(1, 0, 60), seconds=60.0)
    assert one.ask(Amount(1, 0, 30), seconds=60.0) is not None


def test_of_two_that_ask_at_once_one_sees_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one asks after the first has looked, and before it has noted its own request."""
    one, other = (Spending(spending.file_of(tmp_path, rank), Judges(max_requests=1), SOON) for rank in range(2))
    numbers, append = list[str | None](), one._append

    def late(event: list[Any], **options: Any) -> None:
        if not numbers:
            numbers.append(other.ask(Amount(1), seconds=60.0))
        append(event, **options)

    monkeypatch.setattr(one, "_append", late)
    assert one.ask(Amount(1), seconds=60.0) is None and numbers[0] is not None
    assert account(tmp_path).total().requests == 1
    other.answered(numbers[0], Amount(1, 5, 6))
    with pytest.raises(OverBudget, match="1 of 1 requests"):
        one.ask(Amount(1), seconds=60.0)


def test_a_reply_may_have_several_choices_which_all_count(server: tuple[str, type[Counting]], tmp_path: Path) -> None:
    url, seen = server
    request = {"max_tokens": 10, "n": 3}
    with pool(reward(url, request=request), Judges(max_completion_tokens=29), tmp_path) as one:
        (result,) = graded([one], ["good"])
    assert not seen.asked and "judges.max_completion_tokens" in (result.failure or "")


def test_a_pool_without_a_run_has_a_budget_of_its_own(server: tuple[str, type[Counting]]) -> None:
    url, seen = server
    with RewardPool(reward(url), judges=Judges(max_requests=3)) as one:
        results = graded([one], ["good"] * 5)
    assert len(seen.asked) == 3 == sum(result.failure is None for result in results)


def line(text: str) -> bytes:
    return b"\n%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


@pytest.mark.parametrize("until", ["1e300", '"inf"', '"nan"', "4102444800"])
def test_no_line_makes_others_wait_longer_than_a_request_may_take(tmp_path: Path, until: str) -> None:
    """The run directory may be of another's making, and another node's clock may be wrong."""
    spending.file_of(tmp_path, 1).parent.mkdir()
    spending.file_of(tmp_path, 1).write_bytes(line(f'["asked", "a", 5, 90, 0, {until}]'))
    found = Account(tmp_path / spending.FOLDER, SOON)
    found.read()
    assert found.open["a"][0] == Amount(1, 5, 90) and found.open["a"][1] <= time.monotonic() + SOON.longest


def test_a_process_that_begins_later_waits_no_longer(tmp_path: Path) -> None:
    """A process that a time limit ends has another in its place, which would wait for the same line from anew."""
    path, limits = spending.file_of(tmp_path, 1), Judges(max_completion_tokens=100)
    path.parent.mkdir()
    old = line('["asked", "a", 5, 80, 0, 1e300]')
    second = line(f'["asked", "b", 5, 10, 0, {time.time() + 60}]')
    path.write_bytes(old + second[:11])  # it was being written
    patience = Patience.from_now(path.parent, SOON.longest)
    assert patience.noted == {path.name: len(old) + 11}
    path.write_bytes(old + second)
    one = Spending(spending.file_of(tmp_path, 0), limits, patience)
    assert one.ask(Amount(1, 5, 30), seconds=60.0) is None  # both may use less
    later = dataclasses.replace(patience, begun=patience.begun - SOON.longest - 1)
    one = Spending(spending.file_of(tmp_path, 0), limits, later)
    with pytest.raises(OverBudget, match="2 requests, 10 prompt tokens, 90 of 100 completion tokens"):
        one.ask(Amount(1, 5, 30), seconds=60.0)
    assert one.ask(Amount(1, 5, 15), seconds=60.0) is None  # the later line may leave room


def test_a_pool_waits_for_such_a_line_as_long_as_for_a_request(
    server: tuple[str, type[Counting]], tmp_path: Path
) -> None:
    """Else each completion waits until its time limit, and the run never says that its budget is used up."""
    url, seen = server
    (tmp_path / spending.FOLDER).mkdir()
    spending.file_of(tmp_path, 1).write_bytes(line('["asked", "a", 5, 90, 0, 1e300]'))
    config = Reward(functions=reward(url).functions, workers=1, timeout=3.0)
    with pool(config, Judges(max_completion_tokens=95), tmp_path) as one:
        found = [outcome for _ in range(4) for outcome in graded([one], ["good"])[0].outcomes.values()]
    assert not seen.asked and found[-1] == "over_budget"


def test_an_account_that_is_no_file_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0000.requests")
    (tmp_path / "rank-0001.requests").mkdir()
    assert spending.read(tmp_path) is None
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"rank-000{rank}.requests is no file: move it away"):
            Spending(tmp_path / f"rank-000{rank}.requests", Judges(), SOON)
    assert Spending(tmp_path / "rank-0002.requests", Judges(max_requests=1), SOON).ask(Amount(1), seconds=1.0)


def test_sums_of_nonsense_stay_numbers(tmp_path: Path) -> None:
    most = "9" * 4299
    (tmp_path / "rank-0000.requests").write_bytes(line(f'["answered", "a", {most}, {most}, 1e308, 1]') * 40)
    account = spending.read(tmp_path)
    assert account is not None and math.isfinite(account.total().cost)
    assert spending.words(account, Judges(max_cost=5.0)).startswith("40 requests, 40,000,000,000,000 prompt tokens")


def test_lines_of_another_making_do_not_count(tmp_path: Path) -> None:
    path = spending.file_of(tmp_path, 0)
    one = Spending(path, Judges(), SOON)
    number = one.ask(Amount(1, 5, 6), seconds=60.0)
    assert number
    with path.open("ab") as file:
        for text in (
            "[" * 3000,
            '["asked"]',
            '["asked", "a", "x", 1, 0, 0]',
            '["answered", "b", 1, 2]',
            '["asked", "e", -1, 1, 0, 0]',
            '["asked", "f", 1, -1, 0, 0]',
            '["answered", "g", 1, 1, -0.5, 1]',
            '["answered", "h", 1, 1, "nan", 1]',
            '["answered", "i", 1, 1, "inf", 1]',
            f'["answered", "{number}", -7, 0, 0, 1]',
            f'["ended", "{number}"]',
            '["answered", [1], 1, 1, 0, 1]',
            '{"a": 1}',
            "7",
        ):
            file.write(line(text))
        file.write(b'\n%08x ["asked", "d", 9, 9, 0, 0]\n' % zlib.crc32(b'["asked", "d", 1, 1, 0, 0]'))  # changed
        file.write(b'\n%08x ["asked", "c", 1, 1, Infinity, 0]\n' % zlib.crc32(b'["asked", "c", 1, 1, Infinity, 0]'))
    found = account(tmp_path)
    assert found.total() == Amount(1, 5, 6)
    assert spending.words(found, Judges()).endswith("13 lines of spending/ that no run writes, which are left out")
