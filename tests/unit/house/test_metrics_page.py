"""docs/metrics.md explains every key of metrics.jsonl, and none that there is not.

It takes four seconds, most of them for importing torch. It catches a new metric without a line on the page, and a line
about one that is gone. Keys are read from the source of what makes them; tests/run compares those of real runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import SimpleNamespace
from typing import get_args

import pytest

from gspo_hpc.algorithms.loss import MAX_NAMES, SUM_NAMES
from gspo_hpc.config.constants import PHASES
from gspo_hpc.config.derived import PassName
from gspo_hpc.data.outcomes import CALL_OUTCOMES, OUTCOMES
from gspo_hpc.trackers.protocol import Sent
from gspo_hpc.trackers.services import wandb
from gspo_hpc.training.step_record import INTERMEDIATE, MEAN_OF
from tests import metrics_page, pages

# What makes the records: functions whose dictionaries and assignments to keys are metrics.
PRODUCERS = {
    "training/step_record.py": (
        "step_record",
        "outcome_shares",
        "tool_calls",
        "_speed",
        "_judges",
        "_state",
        "_pass_record",
    ),
    "training/telemetry/meter.py": ("metrics",),
    "training/sampling/base.py": ("_record_retired", "_data_metrics"),
    "training/sampling/carrying.py": ("metrics",),
    "evaluation/by_source.py": ("source_metrics", "source_epochs"),
    "training/observers/files.py": ("_learnt",),
    "rollout/drawing.py": ("metrics",),
    "training/phases.py": ("run",),
    "training/loop.py": ("_log_before_first_step", "finish_step"),
    "rollout/timing.py": ("engine_metrics",),
    "data/packing.py": ("evenness",),
    "policy/router_replay.py": ("balance",),
    "evaluation/scores.py": ("greedy_scores", "sample_scores"),
    "evaluation/marks.py": ("scores",),
}
_PASSES = [*get_args(PassName), "probe"]
# What stands in the place of a part that is computed.
PARTS = {
    "reward/*": ["number_match", "reward.py:reward"],
    "reward_outcome/*": [f"math_verify/{one}" for one in OUTCOMES],
    **{
        f"source/*/{name}": ["gsm8k"]
        for name in (
            "groups",
            "reward",
            "accuracy",
            "no_signal_fraction",
            "response_length",
            "truncated_fraction",
            "epoch",
        )
    },
    "tool_calls/*": [one for one in CALL_OUTCOMES if one != "done"],
    "seconds/*": PHASES,
    "passes/*": _PASSES,
    "passes/*/micro_batches": _PASSES,
    "passes/*/most_completions": _PASSES,
    "passes/*/most_tokens": _PASSES,
    "eval/avg@*": ["4"],
    "eval/pass@*": ["16"],
    "eval/maj@*": ["8"],
    "eval/*/*": [
        f"gsm8k/{name}{end}"
        for names, ends in (
            (("response_length", "ungraded"), ("",)),
            (("accuracy", "avg@4", "pass@4", "maj@4"), ("", "_low", "_high")),
        )
        for name in names
        for end in ends
    ],
    **dict.fromkeys(("*_low", "*_high"), ["eval/avg@4", "eval/pass@4", "eval/maj@4"]),
}


def test_the_console_of_the_page_names_the_tracker_as_the_program_does() -> None:
    """The sample is of a real run; this line of it had been changed in the program alone."""
    (line,) = [one for one in metrics_page.PAGE.splitlines() if one.startswith("tracker: ")]
    run = SimpleNamespace(dir=f"{line.rpartition(' ')[2]}/files", offline=True)
    assert line == f"tracker: {wandb.Wandb(run, Sent(), lambda _: None, print, 0.0).place}"


def text_of(node: ast.expr | None) -> str | None:
    """The text of a key, with * for each part that is computed; None for what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def keys_in(function: ast.FunctionDef) -> Iterator[str]:
    """The keys of dictionaries that a function makes, and those that it assigns to."""
    for node in ast.walk(function):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            given = list(node.keys)
        elif isinstance(node, ast.DictComp):
            given = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            given = [node.slice]
        yield from (key for one in given if (key := text_of(one)) is not None)


def made(source: str, names: tuple[str, ...]) -> set[str]:
    """The keys that functions of a module make."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    chosen = [one for one in functions if one.name in names]
    assert {one.name for one in chosen} == set(names), "a function that makes metrics was renamed"
    return {key for one in chosen for key in keys_in(one)}


def all_keys() -> set[str]:
    """Every key that a record can have."""
    found = {*(MEAN_OF.get(name, name) for name in SUM_NAMES), *MAX_NAMES, "entropy", "loss"}
    for path, names in PRODUCERS.items():
        for key in made((pages.PROJECT / "gspo_hpc" / path).read_text("utf-8"), names):
            found |= {key.replace("*/*", "*").replace("*", part) for part in PARTS[key]} if "*" in key else {key}
    return found - {*INTERMEDIATE}


def test_every_metric_is_explained() -> None:
    assert metrics_page.unexplained(all_keys()) == []


def test_every_line_is_about_a_metric() -> None:
    known = all_keys()
    assert [one for one in metrics_page.keys() if not any(metrics_page.fits(key, one) for key in known)] == []
    assert len(metrics_page.keys()) == len(set(metrics_page.keys())) > 70


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("def f():\n    return {'new': 1} | {f'seconds/{x}': 2}", {"new", "seconds/*"}),
        ("def f():\n    found['a/b'] = 1\n    found[f'{k}@{x}'] = 2", {"a/b", "*@*"}),
        ("def f():\n    return {f'passes/{x}/more': 1 for x in y}", {"passes/*/more"}),
    ],
)
def test_planted_metrics_are_seen(source: str, keys: set[str]) -> None:
    assert made(source, ("f",)) == keys


def test_planted_gaps_of_the_page_are_found() -> None:
    page = "| `reward`, `eval/avg@K` | both |\n| `reward/NAME` | x |\n| `passes/PASS` | y |\n"
    found = ["reward", "rewards", "reward/a.py:f/g", "eval/avg@8", "eval/avg", "passes/update", "passes/update/more"]
    assert metrics_page.unexplained(found, page) == ["eval/avg", "passes/update/more", "rewards"]
