"""The reward function for programs: those that the model wrote are tested in the sandbox, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gspo_hpc.rewards.catalogue import Graded, field_of, reward_function
from gspo_hpc.rewards.programs import harness
from gspo_hpc.rewards.programs.cases import Cases, cases_of, same
from gspo_hpc.rewards.programs.fences import blocks

if TYPE_CHECKING:
    from gspo_hpc.rewards.programs.harness import Verdict
    from gspo_hpc.sandbox.runner import Sandbox

_LANGUAGES = ("", "python", "python3", "py", "py3")
# Of the time limit of a call: share and seconds that are left to start and to end programs, but no more than half.
_KEPT, _KEPT_SECONDS = 0.2, 2.0
_LEAST = 0.2  # seconds in which a program can start


def program_in(completion: str) -> str | None:
    """Return the last fenced block of Python, or of no language, in a completion; None if it has none."""
    found = [text for language, text in blocks(completion) if language.lower() in _LANGUAGES]
    return found[-1] if found and found[-1].strip() else None


def _check_row(fields: Mapping[str, Any], *, tests: str = "tests", setup: str = "", **_: Any) -> None:
    cases_of(fields, tests)
    if setup:
        field_of(fields, setup)


@reward_function(check_row=_check_row)
def code(
    completion: str,
    *,
    prompt: str,
    fields: Mapping[str, Any],
    sandbox: Any,  # a Sandbox of gspo_hpc.sandbox.runner; whoever checks a config reads this without that room
    time_limit: float,
    tests: str = "tests",
    setup: str = "",
    partial: bool = False,
) -> float:
    """Return 1.0 if the program in the completion passes all tests of the field named `tests`, else 0.0.

    The program is the last fenced block. It runs in the sandbox, once for each pair of standard input and output and
    once for all assertions, which see its names; the field named `setup` holds code that runs before these. With
    `partial` the reward is the share of tests that are passed. The result is a :class:`Graded` with the outcome "right"
    or that of the first test that is not passed: "wrong", "too_slow", "crashed", "not_compiled"; "unparsable" if there
    is no program. Raises UnparsableGold if the field holds no tests.
    """
    cases = cases_of(fields, tests)
    program = program_in(completion)
    if program is None:
        return Graded(0.0, "unparsable")
    before = str(field_of(fields, setup)) if setup else ""
    found: list[Verdict] = []
    for verdict in _tested(program, before, cases, sandbox, time.monotonic() + _own_time(time_limit)):
        found.append(verdict)
        if verdict == "not_compiled" or (verdict != "right" and not partial):
            break
    passed = found.count("right")
    if passed == len(cases):
        return Graded(1.0, "right")
    return Graded(passed / len(cases) if partial else 0.0, next(one for one in found if one != "right"))


def _own_time(time_limit: float) -> float:
    """Return the seconds of a call in which programs run."""
    return time_limit - min(max(_KEPT * time_limit, _KEPT_SECONDS), time_limit / 2)


def _tested(program: str, setup: str, cases: Cases, sandbox: Sandbox, deadline: float) -> Iterator[Verdict]:
    """Yield what became of each test. Those for which no time is left are too slow."""
    for pair in cases.pairs:
        left = deadline - time.monotonic()
        if left < _LEAST:
            yield "too_slow"
            continue
        outcome = sandbox.run(program, pair.given, seconds=left)
        if not outcome.ended_well:
            yield harness.how_it_ended(outcome)
        else:
            yield "right" if same(outcome.stdout, pair.expected) else "wrong"
    left = deadline - time.monotonic()
    if cases.assertions and left < _LEAST:
        for _ in cases.assertions:
            yield "too_slow"
    elif cases.assertions:
        text = f"{program}\n{setup}" if setup else program
        asked, word = harness.question(text, cases.assertions)
        outcome = sandbox.run(harness.TEXT, asked, seconds=left)
        yield from harness.verdicts(outcome, word, len(cases.assertions))
