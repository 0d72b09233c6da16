"""A run whose judge has a budget: it ends when that is used up, and goes on with a larger one as if it had never ended.

It takes about two minutes, for four starts of a run of four steps. It would catch a run that goes on without scores,
one that ends without saving what it trained, requests that a kill or an end makes twice or not at all in the account,
and a run with a raised budget that differs from one which was never stopped.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_hpc.runs import spending
from tests.run import harness

TRIAL = 2  # requests before each start, which are not in the account


def score(message: str) -> int:
    return zlib.crc32(message.encode()) % 10


class Judge(BaseHTTPRequestHandler):
    """An endpoint with a score that follows from the message."""

    asked: ClassVar[list[str]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(message)
        text = f"Score: {score(message)}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        data = json.dumps(answer | {"usage": usage}).encode()
        with contextlib.suppress(OSError):  # who asked was killed
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Judge]]]:
    kind = type("Fresh", (Judge,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        running.daemon_threads, running.block_on_close = True, False
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", kind
        running.shutdown()


def overrides(url: str, *more: str) -> tuple[str, ...]:
    asks = {"base_url": url, "model": "m", "template": "{prompt} {completion}", "completion_price": 1000.0}
    return (
        harness.ONE_RANK,
        f"reward.functions={json.dumps([{'function': 'judge', 'args': asks}])}",
        "reward.timeout=60",
        "run.max_steps=4",
        "batch.steps_per_generation=2",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
        *more,
    )


def without_counts(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in one.items() if not key.startswith("judge/")}
        for one in harness.comparable(run_dir)
    ]


def test_a_run_ends_with_its_budget_and_goes_on_with_a_larger_one(
    server: tuple[str, type[Judge]], tiny_config: Path, tmp_path: Path
) -> None:
    """Two rollouts of 64 completions; the budget ends in the second, and a kill comes into it with the larger one."""
    url, seen = server
    run_dir, log = tmp_path / "run", tmp_path / "log"

    def command(run: Path, *more: str) -> list[str]:
        return harness.command(tiny_config, run, *overrides(url, *more))

    def counted() -> spending.Account:
        account = spending.read(run_dir / spending.FOLDER)
        assert account is not None
        return account

    def unsent(starts: int) -> int:
        """Return how many requests are in the account that never came here: the end was just before they were sent."""
        return counted().total().requests - (len(seen.asked) - starts * TRIAL)

    process = harness.start(command(run_dir, "judges.max_requests=100"), log)
    assert harness.finish(process, log) == 2, log.read_text()[-3000:]
    text = log.read_text()
    assert "budget of requests (judges.max_requests) is used up: 100 of 100 requests" in text
    assert "judges.used_up is stop: raise the limit, or give judges.used_up=exclude" in text
    assert harness.last_step(run_dir) == 2
    assert unsent(1) in range(len(counted().open) + 1) and counted().total().requests == 100
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["000002"]
    status = subprocess.run([sys.executable, "-m", "gspo_hpc", "status", str(run_dir)], capture_output=True, text=True)
    assert "refused" in status.stdout and "asked of judges: 100 of 100 requests, " in status.stdout
    kept = harness.journal_lines(run_dir, 1)
    assert kept < 8  # groups that could not all be scored are sampled again

    process = harness.start(command(run_dir, "judges.max_requests=200"), log)
    harness.wait_for(lambda: len(seen.asked) >= 105 + 2 * TRIAL, process, log)
    harness.kill(process)
    process = harness.start(command(run_dir, "judges.max_requests=200"), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    account = counted()
    assert unsent(3) in range(len(account.open) + 1)
    last = harness.metrics(run_dir)[-1]
    assert last["judge/requests"] == account.total().requests and last["failures"] == 0
    assert last["judge/cost"] == pytest.approx(account.total().cost) and last["judge/cost"] >= 128 * 0.003
    assert "asked of judges:" in log.read_text()

    plain = tmp_path / "plain"
    process = harness.start(command(plain), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    assert without_counts(run_dir) == without_counts(plain)


def test_a_run_may_go_on_without_scores(server: tuple[str, type[Judge]], tiny_config: Path, tmp_path: Path) -> None:
    """The first rollout has 64 completions, and the second asks about the six that the budget has left."""
    url, seen = server
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("judges.max_requests=70", "judges.used_up=exclude", "reward.on_failure=zero")
    process = harness.start(harness.command(tiny_config, run_dir, *overrides(url, *more)), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(run_dir)
    assert records[-1]["judge/requests"] == 70 == len(seen.asked) - TRIAL
    assert sum(record["failures"] for record in records) == 58 == sum(record["excluded"] for record in records)
    assert records[-1]["reward_outcome/judge/over_budget"] > 0
    # No completion without a score is a zero in the mean of its update, of 32 completions.
    rewards = sum(one["reward"] * (32 - one["excluded"]) for one in records[2:] if one["reward"] is not None)
    assert rewards == pytest.approx(sum(map(score, seen.asked[-6:])))
