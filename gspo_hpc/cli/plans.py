"""The command `gspo-hpc plan`.

What only some plans need is imported where it is used, so that a plan answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.reading.places import COMMAND_LINE, Places
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.launch import preflight
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.planning.quantities import with_steps
from gspo_hpc.system.exit_codes import DONE, INCOMPLETE, REFUSED
from gspo_hpc.system.terminal import paint

if TYPE_CHECKING:
    from gspo_hpc.launch.preflight import Problem
    from gspo_hpc.planning.estimates.time import Times
    from gspo_hpc.planning.fixes.change import Fix

# What is known of conversations, in the order of estimates.work.Talk, and the options that say it.
Talking = tuple[float | None, float | None, float | None]
TALK = ("--turns", "--reply-tokens", "--answer-seconds")


def plan(
    name: str,
    config: Config,
    places: Places,
    *,
    as_json: bool,
    ranks: bool,
    sbatch: bool,
    price: float | None,
    response_tokens: float | None,
    talk: Talking,
) -> int:
    """Print the plan, and what `train` would refuse in the files that the config names.

    Return DONE if a run could be started from the config and the files that it names, and there is a batch script if
    one was asked for; REFUSED if not; INCOMPLETE if nothing is wrong, but what no run gets by itself is lacking.

    `ranks` prints every rank, however many there are.
    """
    check_positive("--price", price)
    check_positive("--response-tokens", response_tokens)
    for option, value in zip(TALK, talk, strict=True):
        check_positive(option, value)
    if talk[0] is not None and talk[0] < 1.0:
        raise ValueError(f"{TALK[0]} {talk[0]:g} must be at least 1: a conversation has a message of the model")
    config = _with_cached_files(config)
    rows = preflight.rows(config, WHOLE_FILE_BYTES)
    found = make_plan(config, rows)
    problems = preflight.problems(config)
    absent, downloads = (
        tuple(dict.fromkeys(problem.key for problem in problems if problem.absent and problem.downloaded == by_itself))
        for by_itself in (False, True)
    )
    found = replace(found, errors=tuple(_lines(problems, places)), absent=absent, downloads=downloads)
    offered = _fixes(name, config, places, rows) if found.broken else []
    times, tokens = _times(with_steps(config, rows), found, response_tokens, talk)
    others = {} if times is None else _asynchrony(config, times, response_tokens, talk)
    notes, unchecked = (
        [*cut(config, response_tokens)],
        [] if found.broken else [*_not_looked_at(config, found, problems)],
    )
    if times is None and (price or response_tokens):
        notes.append("--price and --response-tokens change nothing: time is not estimated.")
    if any(talk) and (times is None or not config.environment.talks):
        why = "time is not estimated" if config.environment.talks else "completions are no conversations"
        notes.append(f"{', '.join(TALK)} change nothing: {why}.")
    found = replace(found, notes=(*found.notes, *notes))
    script = _batch_script(config) if sbatch else None
    refused = found.broken or found.not_run or found.errors or bool(script) != sbatch
    lacks = found.missing or found.unknown_model is not None or found.absent
    code = REFUSED if refused else INCOMPLETE if lacks else DONE
    if as_json:
        more: dict[str, object] = {"time": None if times is None else times.to_json(price) | others}
        more["algorithm"] = as_dict(config.algorithm) | {"paper": config.algorithm.paper}
        more["not_checked"] = unchecked
        more |= {"sbatch": script} if sbatch else {}
        print(json.dumps(_content(found, places, offered, ranks) | more, indent=2))
        return code
    from gspo_hpc.cli.pages import plan as plan_page  # only here: JSON is printed without rich
    from gspo_hpc.cli.pages import render

    lines: list[tuple[str, str]] = []
    if found.memory is not None and not found.broken and not found.errors:
        from gspo_hpc.cli.pages import estimates

        lines = [*estimates.answer(found.memory, config, times, price)]
    elif config.model.path is not None and not found.broken and not found.errors:
        lines = [*plan_page.no_answer(with_steps(config, rows))]
    render.show(plan_page.page(name, config, found, places, offered, answer=lines, unchecked=unchecked, ranks=ranks))
    if found.memory is not None:
        from gspo_hpc.cli.pages import estimates

        render.show([*plan_page.title("Memory"), *estimates.memory(found.memory, config)])
        if times is not None:
            render.show([*plan_page.title("Time"), *estimates.time(times, tokens, price, others)])
    print(f"\n{script}" if script else "", end="")
    return code


def _content(plan: Plan, places: Places, fixes: Sequence[Fix], ranks: bool) -> dict[str, Any]:
    """Return the plan as plain values; with `ranks`, the place of each rank, or None if they cannot be placed."""
    found = plan.to_json() | {"fixes": [fix.to_json() for fix in fixes if not fix.left]}
    found["partial_fix"] = next(({"changes": fix.to_json(), "left": list(fix.left)} for fix in fixes if fix.left), None)
    if plan.broken:
        from gspo_hpc.planning import mentions
    for item, told in zip(plan.broken, found["broken"], strict=True):
        told["settings"] = [{"key": key, "place": place} for key, place in mentions.given(item, places).items()]
    if ranks:
        from gspo_hpc.planning import ranks as rank_grid

        try:
            found["ranks"] = [seat._asdict() for seat in rank_grid.seats(plan.layout)]
        except ValueError:
            found["ranks"] = None
    return found


def _fixes(name: str, config: Config, places: Places, rows: int | None) -> list[Fix]:
    """Return the fixes of a config, those among them that take settings of the command line back."""
    from gspo_hpc.config import loader
    from gspo_hpc.planning.fixes import repair  # only here: a valid plan needs none

    file = None
    if COMMAND_LINE in places.values():
        with suppress(loader.ConfigError):  # a file that is none without these settings
            file = _with_cached_files(loader.load(name, run_code=True))
    return repair.offered(config, rows, file)


def _batch_script(config: Config) -> str | None:
    """Return the batch script that submit would hand in; None, with the reason on stderr, if it would refuse."""
    from gspo_hpc.launch.slurm import submit  # submitit comes with it, which a plan can do without

    try:
        return submit.script(config)
    except ValueError as error:
        print(f"{paint('no batch script:', '33', sys.stderr)} {error}", file=sys.stderr)
        return None


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError unless an option's value is above 0 and finite, or not given."""
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{option} {value:g} must be {'finite' if value == float('inf') else 'more than 0'}")


def cut(config: Config, response_tokens: float | None) -> Iterator[str]:
    """Yield a note if the expected response is longer than responses can be."""
    longest = config.rollout.max_response_length
    if response_tokens is not None and response_tokens > longest:
        yield f"--response-tokens {response_tokens:,.0f} is cut to rollout.max_response_length ({longest:,})."


def _lines(problems: Sequence[Problem], places: Places) -> Iterator[str]:
    """Yield the lines of what is wrong here, each problem with the place of its setting."""
    for problem in problems:
        if not problem.absent:
            yield from f"{places.around(problem.key, 'config')}: {problem}".splitlines()


def _not_looked_at(config: Config, found: Plan, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield what this plan could not look at, and for a whole config what no plan looks at, and which command does."""
    noted = config.model.path is not None and any(note.startswith(config.model.path) for note in found.notes)
    for problem in problems:
        if problem.absent and not (problem.key == "model.path" and noted):
            trains = problem.key == "data.train" or (problem.key.startswith("data.sources") and "files" in problem.key)
            counted = ": its prompts are not counted" if trains else ""
            yield f"{problem.key} {problem.text}{counted}. {problem.absent}."
    if found.runnable is False or found.unknown_model is not None:
        return
    yield "What vLLM refuses, and the memory that is really taken: ranks find these before the first step."
    machine = "the cluster" if config.cluster.nodes > 1 else "this machine"
    yield (
        f"Rows of the data after the first ones, prompts as tokens, what your own reward functions return, and "
        f"{machine}: gspo-hpc doctor CONFIG looks at them, and so do train and submit before they start anything."
    )


def _with_cached_files(config: Config) -> Config:
    """Return the config with the paths of data that is named by its place on the hub, where the cache has it."""
    data = config.data
    if data.train is None and data.eval is None and not data.named:
        return config
    from gspo_hpc.data import hub_data

    return hub_data.with_cached_files(config)


def _times(config: Config, found: Plan, response_tokens: float | None, talk: Talking) -> tuple[Times | None, float]:
    """Return the time estimate of a plan that can have one, and the average response length that it is for."""
    if found.memory is None:
        return None, 0.0
    from gspo_hpc.planning.estimates import time

    return time.of_plan(config, found, response_tokens, time.Talk(*talk))


def _asynchrony(config: Config, times: Times, response_tokens: float | None, talk: Talking) -> dict[str, str | None]:
    """Return whether other ways to generate pay, by name: side by side with training, and with partial rollouts.

    None stands for one that is not to be had.
    """
    if config.cluster.platform != "cuda":
        return {"asynchrony": None, "partial_rollouts": None}
    from gspo_hpc.planning import asynchrony
    from gspo_hpc.planning.estimates.work import Talk

    known = Talk(*talk)
    return {
        "asynchrony": asynchrony.line(config, times, response_tokens, talk=known),
        "partial_rollouts": asynchrony.partial(config, times, response_tokens, talk=known),
    }
