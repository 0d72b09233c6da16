"""A trial of reward functions before a run is started: each is called on a few short texts, for the first prompt.

Users' files are run in a process of their own, which is ended after a while. It may print what it likes: the answers
come over another file.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import RewardFunction, Sandbox, as_dict
from gspo_hpc.config.sections.reward_models import FUNCTION as REWARD_MODEL
from gspo_hpc.rewards.calls import Loaded, Sampled, error_text, loaded, raised
from gspo_hpc.rewards.catalogue import ASK_ELSEWHERE, PREPARATIONS, TURN
from gspo_hpc.rewards.registry import is_batched
from gspo_hpc.rewards.worker_process import limit_memory
from gspo_hpc.system import environment
from gspo_hpc.system.processes import end_children_with_this_process

SECONDS = 30.0  # for all functions; a file may import large libraries from a slow file system
TEXTS = ("", "The answer is 42.", '{"answer": 42}')  # completions, of which a function may refuse some
# Errors that are mistakes of the function or its settings. Others may depend on the completion, or on a service that
# only the nodes reach.
_MISTAKES = (TypeError, NameError, AttributeError, LookupError)


class Outcome(NamedTuple):
    """The outcome for one function: why it cannot grade anything, or None if it can."""

    failure: str | None
    certain: bool = True  # False if it might be otherwise for real completions, or on another machine
    not_here: bool = False  # its file could not be run here, or its service did not answer here


def run(
    functions: Sequence[RewardFunction],
    prompt: str,
    fields: Mapping[str, Any],
    *,
    texts: Sequence[str] = TEXTS,
    seconds: float = SECONDS,
    memory_gb: float | None = None,
    sandbox: Sandbox | None = None,
) -> list[Outcome]:
    """Return the outcome of each function for a prompt and the other fields of its row. Takes at most `seconds`.

    `texts` are the completions; without any, functions are only loaded. `memory_gb` bounds the memory of their process.
    `sandbox`: the settings of the one that they may ask for.
    """
    rows = [(prompt, fields)]
    return run_rows(functions, rows, texts=texts, seconds=seconds, memory_gb=memory_gb, sandbox=sandbox)[0]


def run_rows(
    functions: Sequence[RewardFunction],
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    texts: Sequence[str] = TEXTS,
    seconds: float = SECONDS,
    memory_gb: float | None = None,
    sandbox: Sandbox | None = None,
) -> list[list[Outcome]]:
    """Return the outcomes of the functions for each of several rows, as :func:`run`; each function is loaded once."""
    found, count = _outcomes(functions, rows, texts, seconds, memory_gb, sandbox), len(functions)
    return [found[at * count : (at + 1) * count] for at in range(len(rows))]


def _outcomes(
    functions: Sequence[RewardFunction],
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    texts: Sequence[str],
    seconds: float,
    memory_gb: float | None,
    sandbox: Sandbox | None,
) -> list[Outcome]:
    if all(_is_quick(term) for term in functions):
        return [*_try_all(functions, rows, texts, sandbox)]
    settings = as_dict(sandbox or Sandbox())
    terms = [{"function": term.function, "args": dict(term.args)} for term in functions]
    with tempfile.TemporaryDirectory(prefix="gspo-rewards-") as folder:
        answers = Path(folder) / "answers"
        try:
            done = subprocess.run(
                environment.python("gspo_hpc.rewards.trial", str(answers)),
                input=json.dumps(
                    {"functions": terms, "rows": [*rows], "texts": texts}
                    | {"memory_gb": memory_gb, "sandbox": settings}
                ),
                capture_output=True,
                text=True,
                errors="replace",
                env=os.environ | environment.importing(),
                timeout=seconds,
                check=False,
            )
            failure = f"ended its process with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"gave no answer within {seconds:g} s"
        lines = answers.read_text("utf-8").splitlines() if answers.exists() else []
    found = [Outcome(*json.loads(line)) for line in lines]
    wanted = len(functions) * len(rows)
    if len(found) < wanted:  # the one that was tried, and the others after it, which were not
        found.append(Outcome(failure, certain=False))
    return found + [Outcome(None)] * (wanted - len(found))


def main(argv: Sequence[str]) -> int:
    """Try the functions that standard input names; write their outcomes, one a line, into the file of the argument."""
    asked = json.load(sys.stdin)
    end_children_with_this_process()
    if asked["memory_gb"] is not None:
        limit_memory(asked["memory_gb"])
    sandbox = Sandbox(**asked["sandbox"])
    with open(argv[0], "w", encoding="utf-8", buffering=1) as answers:
        for outcome in _try_all(
            [RewardFunction(**term) for term in asked["functions"]], asked["rows"], asked["texts"], sandbox
        ):
            answers.write(f"{json.dumps(outcome)}\n")
    return 0


def _is_quick(term: RewardFunction) -> bool:
    """Return whether a function may be called in this process: one of the package, without a library that is slow."""
    built_in = own_code.file_of(term.function) is None and term.function != TURN
    return built_in and term.function not in (*PREPARATIONS, "regex")


def _try_all(
    terms: Sequence[RewardFunction],
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    texts: Sequence[str],
    sandbox: Sandbox | None,
) -> Iterator[Outcome]:
    """Yield the outcome of each function for the first row, then for the next one."""
    functions = dict[int, Loaded | Outcome]()
    for prompt, fields in rows:
        for number, term in enumerate(terms):
            if number not in functions:
                functions[number] = _loaded(term, sandbox)
            function = functions[number]
            yield function if isinstance(function, Outcome) else _try(term, function, prompt, fields, texts)


def _loaded(term: RewardFunction, sandbox: Sandbox | None) -> Loaded | Outcome:
    if term.function == REWARD_MODEL:  # which only an engine of a run can ask
        return Outcome(None)
    try:
        return loaded(term, sandbox=sandbox)
    except BaseException as error:  # a user's file may raise anything, SystemExit too
        return Outcome(f"cannot be loaded: {error_text(error)}", certain=False, not_here=True)


def _try(
    term: RewardFunction, function: Loaded, prompt: str, fields: Mapping[str, Any], texts: Sequence[str]
) -> Outcome:
    built_in = own_code.file_of(term.function) is None and term.function != TURN
    elsewhere = term.function in ASK_ELSEWHERE
    found: list[Outcome] = []
    for text in texts:
        group = [Sampled(text, len(text.split()), tuple(range(len(text.split()))), 0.0)] * 2
        try:
            if is_batched(inspect.signature(function.grader)):
                value, failure, *_ = function.call_batched(group, prompt, dict(fields))[0]
            else:
                value, failure, *_ = function.call(group, 0, prompt, dict(fields))
        except BaseException as error:
            certain = not elsewhere and (built_in or isinstance(error, _MISTAKES))
            found.append(Outcome(raised(error).failure, certain, elsewhere))
            continue
        if value is not None:
            return Outcome(None)
        found.append(Outcome(failure, not elsewhere, elsewhere))
    certain = all(outcome.certain for outcome in found)
    return Outcome(found[0].failure, certain, elsewhere) if found else Outcome(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
