"""Rules of the data, of the prompts that rollouts draw, of the length of a run and of what evaluates it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from enum import auto
from fractions import Fraction

from gspo_hpc.config.derived import term_names
from gspo_hpc.config.schema import EvalSet
from gspo_hpc.data.counting import prompt_field
from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.quantities import fill_in_sources
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule
from gspo_hpc.system.text import near_miss


class DataRule(RuleId):
    """Names of the rules in this file."""

    DATA_FILLS_ROLLOUT = auto()
    RUN_LENGTH_GIVEN_ONCE = auto()
    EVALUATION_PROMPTS_GIVEN_ONCE = auto()
    TRAIN_RATIO_LEAVES_PROMPTS = auto()
    EVALUATION_REWARD_IS_GIVEN = auto()
    DATA_HAS_PROMPTS = auto()
    DYNAMIC_SAMPLING_MAY_DRAW_MORE = auto()
    DYNAMIC_SAMPLING_METRIC_IS_GIVEN = auto()
    OVERSAMPLING_WITHIN_BOUND = auto()
    ENVIRONMENT_REPORTS_NO_EXPERTS = auto()
    TRAINING_DATA_GIVEN_ONCE = auto()
    SOURCES_DIFFER_IN_NAME = auto()
    ANSWERS_FIT_ENGINES = auto()
    SOURCES_ALL_HAVE_WEIGHTS = auto()
    SOURCE_FILLS_ITS_SHARE = auto()
    SOURCE_REWARDS_ARE_GIVEN = auto()
    CURRICULUM_WEIGHS_PROMPTS = auto()
    SANDBOX_HAS_ITS_PLACE = auto()
    SANDBOX_READS_NO_RUN = auto()
    JUDGES_BUDGET_BOUNDS_SOMETHING = auto()


@rule(DataRule.DATA_FILLS_ROLLOUT, "the training data has prompts for at least one rollout")
def _rows(plan: PlanBuilder) -> Iterator[str]:
    prompts, rollout = plan.quantities.get("num_rollout_prompts"), plan.config.rollout
    if plan.rows is None or _all_held_out(plan) or prompts is None:
        return
    drawn = math.ceil(prompts * Fraction(str(rollout.oversampling_factor)))
    if rollout.unfinished != "wait" and prompts <= plan.rows < drawn:
        yield (
            f"the training data has {plan.rows} prompts, but with rollout.oversampling_factor "
            f"{rollout.oversampling_factor:g} a rollout draws {drawn}: give more of them, or a smaller factor"
        )
    if plan.rows < prompts:
        yield (
            f"the training data has {plan.rows} prompts, but one rollout needs num_rollout_prompts ({show(prompts)}): "
            "give more of them, or make the rollout smaller"
        )


@rule(DataRule.RUN_LENGTH_GIVEN_ONCE, "`run.max_steps` and `run.max_epochs` are not both given", estimable=True)
def _length(plan: PlanBuilder) -> Iterator[str]:
    run = plan.config.run
    if run.max_steps is not None and run.max_epochs is not None:
        yield f"run.max_steps ({run.max_steps}) and run.max_epochs ({run.max_epochs:g}) exclude each other; give one"


@rule(
    DataRule.EVALUATION_PROMPTS_GIVEN_ONCE,
    "`data.eval` is not given beside a `data.train_ratio` below 1",
    estimable=True,
)
def _evaluation(plan: PlanBuilder) -> Iterator[str]:
    data = plan.config.data
    named = next((one.eval for one in data.sources if one.eval is not None), data.eval)
    if named is not None and data.train_ratio < 1:
        yield (
            f"data.eval ({named}) and data.train_ratio ({data.train_ratio:g}) both say which prompts are for "
            "evaluation: give data.eval=null, or data.train_ratio=1"
        )


@rule(DataRule.TRAIN_RATIO_LEAVES_PROMPTS, "`data.train_ratio` leaves a prompt to train on", estimable=True)
def _ratio(plan: PlanBuilder) -> Iterator[str]:
    if _all_held_out(plan):
        yield f"data.train_ratio ({plan.config.data.train_ratio:g}) leaves no prompt of data.train to train on"


@rule(DataRule.EVALUATION_REWARD_IS_GIVEN, "`eval.reward` names one of `reward.functions`", estimable=True)
def _reward(plan: PlanBuilder) -> Iterator[str]:
    """Another name has no mark, so every answer would count as wrong."""
    name, given = plan.config.eval.reward, [term.function for term in plan.config.reward.functions]
    if name is not None and given and name not in given:
        yield f"eval.reward ({name}) must be one of reward.functions: {', '.join(given)}"


@rule(DataRule.DATA_HAS_PROMPTS, "rows of `data.train` and `data.eval` have `data.prompt_key`", estimable=True)
def _prompt_key(plan: PlanBuilder) -> Iterator[str]:
    """The first rows are looked at, so this is broken only where none of them has a prompt."""
    data = plan.config.data
    for key, path in (("data.train", data.train), ("data.eval", data.eval)):
        found = None if path is None else plan.models.fields(path)
        if found is not None and prompt_field(found, data.prompt_key) is None:
            yield f"{key} {path} has no {data.prompt_key!r} (data.prompt_key); its rows have: {', '.join(found[:20])}"


@rule(
    DataRule.DYNAMIC_SAMPLING_MAY_DRAW_MORE,
    "`rollout.dynamic_sampling` needs `rollout.max_num_gen_batches` of 2 or more",
    estimable=True,
)
def _draws_more(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    if rollout.dynamic_sampling and rollout.max_num_gen_batches < 2:
        yield (
            f"rollout.max_num_gen_batches ({rollout.max_num_gen_batches}) must be 2 or more with "
            "rollout.dynamic_sampling: a rollout may draw no prompt beside its own, so no group can be replaced"
        )


@rule(
    DataRule.DYNAMIC_SAMPLING_METRIC_IS_GIVEN,
    "`rollout.dynamic_sampling_metric` names one of `reward.functions`",
    estimable=True,
)
def _metric(plan: PlanBuilder) -> Iterator[str]:
    """Groups have no values of another name, so none of them would ever have signal."""
    name, given = plan.config.rollout.dynamic_sampling_metric, [one.function for one in plan.config.reward.functions]
    if name is not None and given and name not in given:
        yield f"rollout.dynamic_sampling_metric ({name}) must be one of reward.functions: {', '.join(given)}"
    without = [one.name for one in plan.config.data.sources if one.rewards is not None and name not in one.rewards]
    if name is not None and without:
        yield (
            f"rollout.dynamic_sampling_metric ({name}) grades no completion of {', '.join(without)}, whose groups "
            "would never have signal: add it to their rewards, or leave the metric out"
        )


@rule(
    DataRule.OVERSAMPLING_WITHIN_BOUND,
    "`rollout.oversampling_factor` is not above `rollout.max_num_gen_batches`",
    estimable=True,
)
def _oversampling(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    # Of a bound below 2 another rule tells, and 2 is what it has at least once that is mended.
    if rollout.dynamic_sampling and rollout.oversampling_factor > max(2, rollout.max_num_gen_batches):
        yield (
            f"rollout.oversampling_factor ({rollout.oversampling_factor:g}) must not be above "
            f"rollout.max_num_gen_batches ({rollout.max_num_gen_batches}), the rollouts of prompts that one may draw"
        )


def _all_held_out(plan: PlanBuilder) -> bool:
    return plan.rows == 0 and plan.config.data.train_ratio < 1


@rule(
    DataRule.ENVIRONMENT_REPORTS_NO_EXPERTS,
    "an environment has no `moe.router_replay: rollout`",
    estimable=True,
)
def _experts(plan: PlanBuilder) -> Iterator[str]:
    """Engines report the experts of a request, and each message of a conversation is one."""
    config = plan.config
    if plan.model_file.experts and config.environment.talks and config.moe.router_replay == "rollout":
        what = f"name ({config.environment.name})" if config.environment.name else "tools"
        yield (
            f"moe.router_replay: rollout and environment.{what} exclude each other: engines "
            "report experts for whole completions alone; set moe.router_replay=old_logprobs, or off"
        )


@rule(DataRule.TRAINING_DATA_GIVEN_ONCE, "`data.train` and `data.sources` are not both given", estimable=True)
def _given_once(plan: PlanBuilder) -> Iterator[str]:
    data = plan.config.data
    if data.train is not None and data.sources:
        yield f"data.train ({data.train}) and data.sources exclude each other: make it one of the sources"


@rule(
    DataRule.SOURCES_DIFFER_IN_NAME,
    "sources in `data.sources` and sets in `data.eval_sets` have names of their own",
    estimable=True,
)
def _names(plan: PlanBuilder) -> Iterator[str]:
    data = plan.config.data
    names, of_sets = [one.name for one in data.sources], [one.name for one in data.eval_sets]
    for key, what, own in (("data.sources", "sources", names), ("data.eval_sets", "sets", of_sets)):
        for name in dict.fromkeys(one for place, one in enumerate(own) if one in own[:place]):
            yield f"{key} has {own.count(name)} {what} with the name {name}: give each one of its own"
    for name in dict.fromkeys(one for one in of_sets if one in names):
        yield f"a set in data.eval_sets and a source in data.sources are both called {name}: give the set another name"


@rule(
    DataRule.ANSWERS_FIT_ENGINES,
    "`max_tokens` of `eval` and of a set in `data.eval_sets` is at most `rollout.max_response_length`",
    estimable=True,
)
def _answers(plan: PlanBuilder) -> Iterator[str]:
    """Engines have room for the longest prompt and the longest response of training, and for no more."""
    config, most = plan.config, plan.config.rollout.max_response_length
    given = {"eval.max_tokens": config.eval.max_tokens}
    given |= {f"max_tokens of set {one.name} (data.eval_sets)": one.max_tokens for one in config.data.eval_sets}
    for key, tokens in given.items():
        if tokens is not None and tokens > most:
            yield (
                f"{key} ({tokens}) is above rollout.max_response_length ({most}), for which engines have room: give at "
                f"most {most}, or ask afterwards: gspo-hpc eval RUN rollout.max_response_length={tokens}"
            )


@rule(DataRule.SOURCES_ALL_HAVE_WEIGHTS, "all sources in `data.sources` have a weight, or none", estimable=True)
def _weights(plan: PlanBuilder) -> Iterator[str]:
    sources = plan.config.data.sources
    without = [one.name for one in sources if one.weight is None]
    if without and len(without) < len(sources):
        yield (
            f"data.sources has no weight for {', '.join(without)}, but for others: give all of them one, or none, "
            "which gives each source the share of its size"
        )


@rule(DataRule.SOURCE_FILLS_ITS_SHARE, "a source has as many prompts as a rollout takes of it", estimable=True)
def _share(plan: PlanBuilder) -> Iterator[str]:
    """A prompt that came twice in one rollout would count twice."""
    fill_in_sources(plan)
    for one in plan.sources:
        if one.most is not None and one.prompts < one.most:
            from gspo_hpc.data.sources.mixing import too_few  # only here: most plans have no sources

            yield f"data.sources: {too_few(one.name, one.prompts, one.most)}"


@rule(
    DataRule.SOURCE_REWARDS_ARE_GIVEN,
    "`rewards` of a source or an evaluation set name functions of `reward.functions`; those that are `only_named` are "
    "named, and are not all of them where other prompts are graded",
    estimable=True,
)
def _source_rewards(plan: PlanBuilder) -> Iterator[str]:
    names = term_names([one.function for one in plan.config.reward.functions])
    data = plan.config.data
    for one in data.named:
        is_set = isinstance(one, EvalSet)
        what = f"set {one.name} (data.eval_sets)" if is_set else f"source {one.name} (data.sources)"
        for name in one.rewards or {}:
            if name not in names:
                near = near_miss(name, names, known=True)
                add = f"; or add {{function: {name}, only_named: true}} there, to grade nothing else"
                more = add if is_set and "nearest" not in near else ""
                yield f"rewards of {what} have {name}, which is none of reward.functions{near}{more}"
    yield from _only_named(plan, names)


def _only_named(plan: PlanBuilder, names: Sequence[str]) -> Iterator[str]:
    functions, data = plan.config.reward.functions, plan.config.data
    named = {name for one in data.named for name in one.rewards or {}}
    for place, (name, term) in enumerate(zip(names, functions, strict=True)):
        if term.only_named and name not in named:
            yield (
                f"reward.functions[{place}] ({name}) is only_named, and no source or evaluation set names it in "
                "rewards: it grades nothing"
            )
    if functions and all(one.only_named for one in functions):
        every = data.train is not None or data.eval is not None
        without = [f"{one.name} (its files)" for one in data.named if one.rewards is None]
        if every or without:
            prompts = " and ".join(filter(None, ["data.train or data.eval" * every, ", ".join(without)]))
            yield f"all of reward.functions are only_named, and prompts of {prompts} name none: nothing grades them"


@rule(DataRule.CURRICULUM_WEIGHS_PROMPTS, "`data.curriculum_key` has a `data.curriculum_floor`", estimable=True)
def _curriculum(plan: PlanBuilder) -> Iterator[str]:
    data = plan.config.data
    if data.curriculum_key is not None and data.curriculum_floor is None:
        yield (
            f"data.curriculum_key ({data.curriculum_key}) weighs nothing without data.curriculum_floor: give the "
            "smallest chance of a prompt, such as data.curriculum_floor=0.1"
        )


@rule(
    DataRule.SANDBOX_HAS_ITS_PLACE,
    "`sandbox.kind: http` has a `sandbox.url`, and `apptainer` a `sandbox.image`",
    estimable=True,
)
def _sandbox(plan: PlanBuilder) -> Iterator[str]:
    sandbox = plan.config.sandbox
    if sandbox.kind == "http" and sandbox.url is None:
        yield "sandbox.kind: http needs sandbox.url, the service's address; sandbox.kind=auto takes what a node has"
    if sandbox.kind == "apptainer" and sandbox.image is None:
        yield "sandbox.kind: apptainer needs sandbox.image with a Python in it; sandbox.kind=auto takes what a node has"


@rule(
    DataRule.SANDBOX_READS_NO_RUN, "programs in the sandbox cannot read the run, its data or its model", estimable=True
)
def _readable(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if not config.sandbox.readable:
        return
    from gspo_hpc.data.sources import parts  # only here: most runs name no folders

    kept = {"run.dir": config.run_dir} | {part.key: part.path for part in parts.every(config.data)}
    if config.model.path is not None and os.path.exists(config.model.path):  # else it is a name on the hub
        kept["model.path"] = config.model.path
    for folder in config.sandbox.readable:
        for key, path in kept.items():
            if os.path.commonpath([folder := os.path.abspath(folder), os.path.abspath(path)]) == folder:
                yield (
                    f"sandbox.readable names {folder}, and {key} ({path}) lies in it: programs that the model writes "
                    "would read it; name narrower folders, or leave it out with sandbox.readable=[]"
                )


@rule(
    DataRule.JUDGES_BUDGET_BOUNDS_SOMETHING,
    "a budget in `judges` is for a judge whose replies and prices say what it uses",
    estimable=True,
)
def _judges_budget(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    budget = {f"judges.{key}": value for key, value in config.judges if key != "used_up" and value is not None}
    if not budget:
        return
    from gspo_hpc.planning import judges  # only here: most runs have none

    found = judges.judges(config)
    own = any(".py:" in term.function for term in config.reward.functions)  # it may note requests of its own
    if not found and not own:
        name, value = next(iter(budget.items()))
        yield f"{name} ({value:g}) is a budget, but no reward function asks a judge: give {name}=null"
    for term in found:
        prices = [term.args.get(f"{kind}_price", 0.0) for kind in ("prompt", "completion")]
        unbounded = judges.reply_tokens(term.args) is None
        if unbounded and ("judges.max_completion_tokens" in budget or ("judges.max_cost" in budget and prices[1])):
            yield (
                f"judges.{'max_completion_tokens' if 'judges.max_completion_tokens' in budget else 'max_cost'} is a "
                "budget, but nothing bounds a reply of the judge: give max_tokens in `request` of its args"
            )
        if "judges.max_cost" in budget and not any(prices):
            yield (
                f"judges.max_cost ({config.judges.max_cost:g}) is a budget, but the judge has no price: give "
                "prompt_price and completion_price in its args, or judges.max_cost=null"
            )
