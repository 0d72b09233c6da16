"""One browser for all tests of this tier, and the pages that they open: those of a run with everything on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.schema import Reward, RewardFunction, Tracking
from gspo_hpc.evaluation import stored
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.sample_record import End, RecordedGroup, RecordedSample
from tests.browser import chromium
from tests.browser.chromium import Browser, Tab
from tests.unit.report.test_page import answered, make_run, record, sample

STEPS = (1, 5, 10)
LONG = "an_answer_without_any_break_" * 12


@dataclass(frozen=True)
class Pages:
    """The pages by name, and the run that they are about."""

    run: RunDir
    all: dict[str, Path]


def _records() -> list[dict[str, Any]]:
    first = {"step": 0, "eval/accuracy": 0.25, "attempt": 1}
    steps = [
        record(
            step,
            **{"lr": 1e-6 * min(step, 5), "approx_kl": 1e-4 * step, "reference_kl": 0.01, "truncated_fraction": 0.1},
            **{"reward/number_match": 0.5, "reward/length_penalty": -0.01 * step},
        )
        for step in range(1, 21)
    ]
    return [first, *steps[:-1], steps[-1] | {"eval/accuracy": 0.75}]


def _recorded(step: int, slot: int) -> RecordedGroup:
    """A group whose samples differ in all that a page shows, with one that is longer than the table begins with."""
    rng = random.Random(step * 10 + slot)
    samples = []
    for index, length in enumerate((12, 450, 3, 1)):
        engine = [-3 * rng.random() for _ in range(length)]
        old = [one + rng.gauss(0, 1e-5) for one in engine]
        new = [one + rng.gauss(0, 1e-2) for one in old]
        computed = index != 2
        texts = [rng.choice([" seven", "\n", "<b>", " \u4f60", "\u05e9", " a b", ""]) for _ in range(length)]
        samples.append(
            RecordedSample(
                index=index,
                text="".join(texts) if index else LONG,
                reward=float(index % 2),
                reward_parts={"number_match": float(index % 2), "length_penalty": -0.02},
                failure="ValueError: " + LONG if index == 3 else None,
                excluded=index == 3,
                advantage=1.0 if computed else 0.0,
                truncated=index == 1,
                weights_version=step - 1,
                seed=7,
                tokens=[rng.randrange(50_000) for _ in range(length)],
                token_texts=texts,
                rollout_logprobs=[*engine],
                old_logprobs=[*old] if slot else None,
                logprobs=[*new] if computed else None,
                reference_logprobs=None,
                ratios=[math.exp(a - b) for a, b in zip(new, old, strict=True)] if computed else None,
            )
        )
    return RecordedGroup(step, step // 2, 0, slot, 30 + slot, f"What is {LONG}?", 9, {"answer": 12}, samples)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """A run that failed with everything that a page may have, its steps, and its comparison with a plain run."""
    root = tmp_path_factory.mktemp("pages")
    functions = tuple(RewardFunction(function=name, weight=0.5) for name in ("number_match", "length_penalty"))
    other = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    samples = [sample("before", "it is 8", reward=0.0), sample("after", "7", step=20)]
    samples += [sample("before", "2", prompt=other), sample("after", LONG, prompt=other, reward=0.0, step=20)]
    samples += [sample("train", LONG, prompt=other, reward=0.3, step=20)]
    more = {"reward": Reward(functions=functions), "tracking": Tracking(record_interval=5)}
    run = make_run(root / "run", _records(), samples, **more)
    for step in STEPS:
        for rank in (0, 1):
            rows = [_recorded(step, rank)]
            sample_record.append(sample_record.path_of(run.record, rank), sample_record.packed(rows))
    sample_record.append(sample_record.path_of(run.record, 0), sample_record.packed([End(15, 64.0)]))
    text = f'Traceback (most recent call last):\n  File "x.py", line 3, in f\nValueError: no answer from {LONG}\n'
    run.attempt(2).log_path(0).write_text("starting\n" * 30 + text)
    run.attempt(2).finish("failed", 1, f"rank 0 ended with exit code 1: ValueError: no answer from {LONG}")
    plain = make_run(root / "plain", [record(step, reward=-3.0 - step) for step in range(1, 9)])
    answers = [answered(1, right=True), answered(2, text=LONG), answered(3, failure=f"ValueError: {LONG}")]
    stored.write_into(run, 20, [*answers, *(answered(row, right=True) for row in range(10, 40))])
    assert main(["report", str(run.path)]) == main(["report", str(plain.path)]) == 0
    assert main(["report", "--compare", str(run.path), str(plain.path), "--out", str(root / "compare.html")]) == 0
    found = {
        "failed": run.path / "report.html",
        "plain": plain.path / "report.html",
        "step": run.path / "report_steps" / "step-000005.html",
        "compare": root / "compare.html",
    }
    return Pages(run, found)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser without a window, started once."""
    with chromium.browser() as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new page; at the end nothing may have gone wrong in it, and nothing but files may have been asked for."""
    with chromium.tab(browser) as opened:
        yield opened
        opened.settle()
        assert opened.problems == []
        assert opened.requests and all(url.startswith("file://") for url in opened.requests), opened.requests
