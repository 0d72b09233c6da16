"""The most that a run may ask of judges, as far as the counts and lengths of its completions are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from gspo_hpc.config.constants import JUDGE_REPLY_TOKENS
from gspo_hpc.config.derived import eval_of
from gspo_hpc.config.schema import Config, RewardFunction
from gspo_hpc.planning.builder import PlanBuilder

NAME = "judge"  # the reward function of the package that asks a model behind an endpoint
_RETRIES = 4  # its max_retries by default


def judges(config: Config) -> list[RewardFunction]:
    """Return the reward functions that are judges of the package."""
    return [term for term in config.reward.functions if term.function == NAME]


def reply_tokens(args: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a judge's reply; None where its request does not bound them."""
    request = args.get("request")
    if not isinstance(request, Mapping):
        return JUDGE_REPLY_TOKENS
    given = [request.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return next((most for most in given if isinstance(most, int)), None)


def notes(plan: PlanBuilder) -> Iterator[str]:
    """Yield for each judge what it may be asked at most, without repetitions, and the budget for that."""
    config, q = plan.config, plan.quantities
    found = judges(config)
    completions = q.get("num_completions")
    if not found or completions is None:
        return
    rollout = config.rollout
    most = int(completions)
    if rollout.dynamic_sampling:  # groups without signal are graded, too
        most *= rollout.max_num_gen_batches
    elif rollout.unfinished != "wait":
        most = math.ceil(most * Fraction(str(rollout.oversampling_factor)))
    scored, whole = _scored_in_evaluations(config, q.get("max_steps"))
    lengths = (rollout.max_prompt_length, rollout.max_response_length)
    totals = {"max_requests": 0.0, "max_completion_tokens": 0.0, "max_cost": 0.0}
    for term in found:
        trains = not term.only_named or any(one.rewards for one in config.data.sources)
        rolled = most if trains else 0
        parts = [f"{rolled + scored:,} requests ({rolled:,} completions of rollouts, {scored:,} of evaluations)"]
        if not whole:
            parts = [f"{rolled:,} requests for rollouts, and one for each completion of an evaluation"]
        count, prices = (
            rolled + scored,
            [float(term.args.get(f"{kind}_price", 0.0)) for kind in ("prompt", "completion")],
        )
        reply = reply_tokens(term.args)
        asked = count * sum(lengths)
        parts.append(f"about {asked:,} prompt tokens beside its template")
        cost = asked * prices[0]
        if reply is not None:
            parts.append(f"{count * reply:,} completion tokens")
            cost += count * reply * prices[1]
        if any(prices) and reply is not None:
            parts.append(f"a cost of {cost / 1e6:,.4g}")
        totals["max_requests"] += count
        totals["max_completion_tokens"] += count * (reply or 0)
        totals["max_cost"] += cost / 1e6
        retries = term.args.get("max_retries", _RETRIES)
        yield (
            f"{term.args.get('model', NAME)} judges, and may get {', '.join(parts)}: these are the most, with every "
            f"completion at its longest; a request that is refused for the moment is sent up to {retries} times more."
        )

    ends = {"stop": "the run may end for it", "exclude": "completions may be excluded for it"}[config.judges.used_up]
    for name, total in totals.items():
        budget = getattr(config.judges, name)
        if budget is not None and budget < total:
            yield f"judges.{name} ({budget:,g}) is below what judges may get, {total:,.4g}: {ends}."


def _scored_in_evaluations(config: Config, steps: int | Fraction | None) -> tuple[int, bool]:
    """Return how many completions evaluations grade, and whether that is known."""
    options, data = config.eval, config.data
    names = [one.name for one in data.eval_sets]
    if data.eval is not None or data.train_ratio < 1 or any(one.eval for one in data.sources):
        names.append("")
    times = int(options.before) + int(options.after)
    if options.interval and steps is not None:
        times += (int(steps) - int(options.after)) // options.interval
    if not times or not names:
        return 0, True
    asked = [eval_of(config, name) for name in names]
    if any(one.max_prompts is None for one in asked):
        return 0, False
    answers = (1 + (one.samples if one.samples > 1 else 0) for one in asked)
    return times * sum((one.max_prompts or 0) * each for one, each in zip(asked, answers, strict=True)), True
