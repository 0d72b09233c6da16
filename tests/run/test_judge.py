"""A judge that is a real vLLM server on this machine, with the tiny model: scores by itself, and as a run's reward.

It takes about a minute and a half, for the server and one run of two steps. It would catch a request that vLLM does not
take, scores that reach the wrong completions or no metric, and a server that dies in the middle and costs more than the
completions that it did not judge.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import load
from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards.calls import Sampled
from gspo_hpc.rewards.pool import RewardPool
from tests.run import harness

TEMPLATE = "{prompt} {completion}"
# The tiny model says nothing of itself that is a score: the server holds it to the form.
REQUEST = {"temperature": 0.0, "max_tokens": 12, "structured_outputs": {"regex": "Score: [0-9]"}}


@pytest.fixture(scope="module")
def server(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address of the server and its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("judge") / "log"
    words = ["--model", str(load(str(tiny_config)).model.path), "--served-model-name", "judge", "--enforce-eager"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--dtype", "float32"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    process = harness.start([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words], log, **own)
    harness.wait_for(lambda: answers(port), process, log)
    yield f"http://127.0.0.1:{port}/v1", process.pid
    if process.poll() is None:
        end(process.pid)
    process.wait(60)


def end(group: int) -> None:
    """SIGKILL to the server and its engine."""
    os.killpg(group, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def asked_directly(url: str, message: str) -> float:
    body = {"model": "judge", "messages": [{"role": "user", "content": message}], **REQUEST}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return float(json.load(reply)["choices"][0]["message"]["content"].removeprefix("Score: "))


def arguments(url: str) -> dict[str, Any]:
    return {"base_url": url, "model": "judge", "template": TEMPLATE, "request": REQUEST}


def test_scores_are_what_the_server_says(server: tuple[str, int]) -> None:
    url, _ = server
    texts = ["5", "17", "", "What is 3 + 4", "z" * 400]  # the last is longer than the model takes
    config = Reward(functions=(RewardFunction(function="judge", args=arguments(url)),), workers=1, timeout=60.0)
    with RewardPool(config) as pool:
        pool.submit_group(range(len(texts)), [Sampled(text, 1) for text in texts], "2 + 3 =", {})
        got: dict[Any, Any] = {}
        while pool.pending:
            got |= dict(pool.poll(timeout=None))
    expected = [asked_directly(url, f"2 + 3 = {text}") for text in texts[:-1]]
    assert [got[key].value for key in range(4)] == expected and len(set(expected)) > 1
    assert "refused with 400" in got[4].failure and got[4].parts == {}


def test_a_run_learns_from_a_judge_and_outlives_it(server: tuple[str, int], tiny_config: Path, tmp_path: Path) -> None:
    url, group = server
    given = json.dumps([{"function": "number_match"}, {"function": "judge", "weight": 0.1, "args": arguments(url)}])
    overrides = (
        harness.ONE_RANK,
        f"reward.functions={given}",
        "reward.timeout=60",
        "run.max_steps=3",
        "batch.steps_per_generation=1",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = harness.start(harness.command(tiny_config, run_dir, *overrides), log)
    harness.wait_for(lambda: harness.last_step(run_dir) >= 1, process, log)
    end(group)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = {record["step"]: record for record in harness.metrics(run_dir)}
    assert records[1]["failures"] == 0 and 0 <= records[1]["reward/judge"] <= 9
    assert records[1]["reward"] == pytest.approx(
        records[1]["reward/number_match"] + 0.1 * records[1]["reward/judge"], rel=1e-5
    )
    last = records[3]
    assert last["failures"] == last["excluded"] > 0  # of no completion that the server did not judge is 0 the score
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    failed = [sample for sample in samples if sample["failure"]]
    assert failed and all(f"{url} " in sample["failure"] for sample in failed)
