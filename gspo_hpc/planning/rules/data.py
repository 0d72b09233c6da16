"""Rules of the data, of the prompts that rollouts draw, of the length of a run and of what evaluates it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import auto

from gspo_hpc.planning.builder import PlanBuilder, show
from gspo_hpc.planning.rules.ids import RuleId
from gspo_hpc.planning.rules.registry import rule


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
    SANDBOX_HAS_ITS_PLACE = auto()
    SANDBOX_READS_NO_RUN = auto()


@rule(DataRule.DATA_FILLS_ROLLOUT, "the training data has prompts for at least one rollout")
def _rows(plan: PlanBuilder) -> Iterator[str]:
    prompts = plan.quantities.get("num_rollout_prompts")
    if plan.rows is not None and not _all_held_out(plan) and prompts is not None and plan.rows < prompts:
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
    if data.eval is not None and data.train_ratio < 1:
        yield (
            f"data.eval ({data.eval}) and data.train_ratio ({data.train_ratio:g}) both say which prompts are for "
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
        if found is not None and data.prompt_key not in found:
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
    kept = {"run.dir": config.run_dir, "data.train": config.data.train, "data.eval": config.data.eval}
    for folder in config.sandbox.readable:
        for key, path in kept.items():
            if (
                path is not None
                and os.path.commonpath([folder := os.path.abspath(folder), os.path.abspath(path)]) == folder
            ):
                yield (
                    f"sandbox.readable names {folder}, and {key} ({path}) lies in it: programs that the model writes "
                    "would read it; name narrower folders, or leave it out with sandbox.readable=[]"
                )
