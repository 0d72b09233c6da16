"""Rules of the objective: algorithms/objective.py knows what contradicts what; and of the models beside the policy.

These are the teacher of the objective, and models that give rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import auto
from typing import Any

from gspo_hpc.algorithms import objective
from gspo_hpc.config.derived import (
    has_own_layout,
    has_unseen,
    rewards_count,
    samples_part_of_distribution,
    teacher_config,
)
from gspo_hpc.config.schema import Config
from gspo_hpc.config.sections import reward_models
from gspo_hpc.config.sections.reward_models import FUNCTION
from gspo_hpc.models.positions import Positions
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.rules import registry
from gspo_hpc.planning.rules.grid import gpus_of_engine_node
from gspo_hpc.planning.rules.ids import RuleId, Topic
from gspo_hpc.planning.rules.model import ModelRule, longest_of_versions, too_long
from gspo_hpc.planning.rules.registry import rule


class ObjectiveRule(RuleId):
    """Names of the rules in this file."""

    OBJECTIVE_CONSISTENT = auto()
    LOGPROBS_COMPARABLE = auto()
    TEACHER_CAN_BE_RUN = auto()
    TEACHER_FITS_LAYOUT = auto()
    TEACHER_VOCABULARY = auto()
    TEACHER_ALONE_GRADES_NOTHING = auto()
    REWARD_WEIGHTS = auto()
    REWARD_MODELS_ARE_ASKED = auto()
    REWARD_MODEL_PLACE = auto()
    REWARD_MODEL_KIND = auto()
    REWARD_MODEL_DIVISION = auto()
    REWARD_MODEL_LENGTH = auto()
    REWARD_MODEL_ARGUMENTS = auto()


_CANCELLED = 1e-9  # of the largest weight: a sum below it is rounding

# Rules of a model that is trained which hold for one that only runs forward, with the same layout.
_OF_TEACHER = (
    ModelRule.MODEL_CONFIG_READABLE,
    ModelRule.TENSOR_PARALLEL_HEADS,
    ModelRule.TENSOR_PARALLEL_KV_HEADS,
    ModelRule.TENSOR_PARALLEL_QKV_ROWS,
    ModelRule.TENSOR_PARALLEL_INTERMEDIATE_SIZE,
    ModelRule.EXPERT_TENSOR_PARALLEL_INTERMEDIATE_SIZE,
    ModelRule.EXPERT_PARALLEL_EXPERTS,
    ModelRule.EXPERTS_NEED_SEQUENCE_PARALLEL,
)


@rule(
    ObjectiveRule.OBJECTIVE_CONSISTENT,
    "the settings of the objective do not contradict each other",
    Topic.OBJECTIVE,
    estimable=True,
)
def _consistent(plan: PlanBuilder) -> Iterator[str]:
    if not objective.is_known(plan.config.algorithm):
        return  # the config of a run, whose settings were checked before it was started
    try:
        objective.resolve(plan.config.algorithm)
    except ValueError as error:
        yield from str(error).splitlines()


@rule(
    ObjectiveRule.LOGPROBS_COMPARABLE,
    "`temperature` is 1 where `top_p` or `top_k` leave tokens out",
    Topic.OBJECTIVE,
    estimable=True,
)
def _comparable(plan: PlanBuilder) -> Iterator[str]:
    rollout = plan.config.rollout
    if samples_part_of_distribution(rollout) and rollout.temperature != 1.0:
        yield (
            f"rollout.temperature ({rollout.temperature:g}) must be 1 with rollout.top_p ({rollout.top_p:g}) and "
            f"rollout.top_k ({rollout.top_k}): vLLM reports log-probs of the whole distribution, which the trainer "
            "computes, only at temperature 1"
        )


def _of_teacher(plan: PlanBuilder) -> PlanBuilder | None:
    """Return a plan of the teacher in the place of the model; None without a teacher."""
    if not plan.config.algorithm.has_teacher:
        return None
    return PlanBuilder(teacher_config(plan.config), None, plan.models)


def longest_of_teacher(plan: PlanBuilder) -> Positions | None:
    """Return the longest sequence of the teacher. No engine runs it, so it is the longest that any version takes."""
    taught = _of_teacher(plan)
    found = longest_of_versions(taught) if taught is not None else None
    return max(found, key=lambda one: one.length) if found is not None else None


@rule(
    ObjectiveRule.TEACHER_CAN_BE_RUN, "`algorithm.teacher` is a model that this version trains, with its own provider"
)
def _teacher_family(plan: PlanBuilder) -> Iterator[str]:
    model, teacher = plan.config.model, plan.config.algorithm.teacher
    if teacher is None or not plan.config.algorithm.has_teacher:
        return
    if model.provider != "own":
        yield f"algorithm.teacher needs model.provider own: {model.provider} builds no second model here"
    elif (reason := plan.models.untrained(teacher, model.provider)) is not None:
        yield f"algorithm.teacher {teacher} cannot be run by this version: {reason.partition('. On GPUs')[0]}"


@rule(
    ObjectiveRule.TEACHER_FITS_LAYOUT,
    "the trainer's layout, or that of `parallel.teacher_...`, divides `algorithm.teacher` as it divides the model",
)
def _teacher_layout(plan: PlanBuilder) -> Iterator[str]:
    if (taught := _of_teacher(plan)) is None:
        return
    from gspo_hpc.planning.rules.stages import StageRule  # only here: rules are listed in the order of their files

    layers = (StageRule.PIPELINE_PARALLEL_LAYERS, StageRule.UNEVEN_PIPELINE_LAYERS, StageRule.UNEVEN_PIPELINE_CHUNKS)
    messages = [message for name in (*_OF_TEACHER, *layers) for message in registry.rules()[name].check(taught)]
    longest = longest_of_teacher(plan)
    if longest is not None and plan.longest_sequence > longest.length:
        messages.append(too_long(plan.longest_sequence, longest))
    whose = "the trainer's layout"
    if has_own_layout(plan.config):
        whose = "a layout of its own (parallel.teacher_...)"
        messages += _cuts(taught.config, plan.world)
    for message in messages:
        yield f"algorithm.teacher has {whose}: {message.replace('of the model', 'of the teacher')}"


def _cuts(own: Config, world: int | None) -> Iterator[str]:
    """Yield what is wrong with the number of ranks for the teacher's sizes."""
    at = own.parallel
    tp, pp, cp = at.tensor_model_parallel_size, at.pipeline_model_parallel_size, at.context_parallel_size
    etp, ep = at.expert_tensor_parallel_size or tp, at.expert_model_parallel_size
    for product, names in (
        (tp * pp * cp, f"its tensor ({tp}) x pipeline ({pp}) x context ({cp})"),
        (etp * ep * pp, f"its expert tensor ({etp}) x expert ({ep}) x pipeline ({pp})"),
    ):
        if world is not None and world % product:
            yield f"world_size ({world}) must be divisible by {names} parallel size = {product}"


@rule(ObjectiveRule.TEACHER_VOCABULARY, "the vocabulary of `algorithm.teacher` has at least the rows of the model's")
def _teacher_vocabulary(plan: PlanBuilder) -> Iterator[str]:
    """The rows beyond the tokenizer's are padding, but an engine may sample them."""
    if (taught := _of_teacher(plan)) is None:
        return
    own, its = (one.model_file.size("vocab_size") for one in (plan, taught))
    if own is not None and its is not None and its < own:
        yield (
            f"vocab_size ({its}) of algorithm.teacher must be at least that of the model ({own}): the teacher has no "
            "row for tokens that the policy may sample"
        )


@rule(
    ObjectiveRule.TEACHER_ALONE_GRADES_NOTHING,
    "where no reward function has a weight, groups are not replaced, prompts neither retired nor weighed, and without "
    "any function there is no evaluation",
    Topic.OBJECTIVE,
    estimable=True,
)
def _teacher_alone(plan: PlanBuilder) -> Iterator[str]:
    config = plan.config
    if rewards_count(config):
        return
    if config.rollout.dynamic_sampling and config.rollout.dynamic_sampling_metric is None:
        yield (
            "rollout.dynamic_sampling replaces groups whose rewards are equal, and with algorithm.teacher as the only "
            "signal all are: set rollout.dynamic_sampling=false, or give a reward function a weight"
        )
    if config.data.no_resampling_pass_rate is not None:
        yield (
            "data.no_resampling_pass_rate leaves out prompts that are solved, but with algorithm.teacher as the only "
            "signal these teach as well: set data.no_resampling_pass_rate=null, or give a reward function a weight"
        )
    if config.data.curriculum_floor is not None:
        yield (
            "data.curriculum_floor weighs prompts by their right answers, but with algorithm.teacher as the only "
            "signal all teach alike: set data.curriculum_floor=null, or give a reward function a weight"
        )
    held_out = ""
    if has_unseen(config.data):
        held_out = "data.train_ratio" if config.data.train_ratio < 1 else "data.eval"
    if held_out and not config.reward.functions:
        yield (
            f"{held_out} gives prompts for evaluation, and no reward function grades their answers: give one, with "
            "weight 0 where it is to have no part in training, or no such prompts"
        )


@rule(
    ObjectiveRule.REWARD_WEIGHTS,
    "weights of the same reward function do not cancel, and with `rollout.dynamic_sampling` some weight is not 0",
    Topic.OBJECTIVE,
    estimable=True,
)
def _weights(plan: PlanBuilder) -> Iterator[str]:
    """Equal rewards of a whole rollout are what dynamic sampling would draw again until it gives up."""
    config, terms = plan.config, plan.config.reward.functions
    alike: dict[str, list[int]] = {}
    for number, term in enumerate(terms):
        if term.weight and not term.only_named:
            alike.setdefault(repr((term.function, term.clip_range, sorted(term.args.items()))), []).append(number)
    for numbers in alike.values():
        weights = [terms[number].weight for number in numbers]
        if len(weights) > 1 and abs(sum(weights)) < _CANCELLED * max(map(abs, weights)):
            yield (
                f"weights of reward.functions {' and '.join(map(str, numbers))} ({terms[numbers[0]].function} with the "
                f"same arguments) cancel: {' '.join(f'{weight:+g}' for weight in weights)} = 0; leave these terms out, "
                "or give other weights"
            )
    weighed = any(term.weight for term in terms) or any(one.rewards for one in config.data.sources)
    rollout = config.rollout
    if rollout.dynamic_sampling and rollout.dynamic_sampling_metric is None and rewards_count(config):
        if terms and not weighed:
            yield (
                "rollout.dynamic_sampling replaces groups whose rewards are equal, and with every weight of "
                "reward.functions at 0 all are, so it would find none: give a reward function a weight"
            )


@rule(
    ObjectiveRule.REWARD_MODELS_ARE_ASKED,
    "`reward.models` differ in name, each is asked by a term of `reward.functions`, and each such term names one",
    Topic.OBJECTIVE,
    estimable=True,
)
def _models_asked(plan: PlanBuilder) -> Iterator[str]:
    reward = plan.config.reward
    names = [model.name for model in reward.models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two reward.models are called {name}: give each a name of its own"
    asked = {model.name for model in reward.scored.values()}
    for name in dict.fromkeys(names):
        if name not in asked:
            yield (
                f"no term of reward.functions asks the model {name} of reward.models: add "
                f"{{function: {FUNCTION}, args: {{model: {name}}}}}, or leave the model out"
            )
    for number, term in enumerate(reward.functions):
        if term.function == FUNCTION and number not in reward.scored:
            given = term.args.get("model")
            has = f"has {', '.join(names)}" if names else "is empty: give a model with name and path"
            yield (
                f"reward.functions[{number}] asks the model {given}, and reward.models {has}"
                if given
                else f"reward.functions[{number}] must name a model in its args, {{model: NAME}}: reward.models {has}"
            )


@rule(
    ObjectiveRule.REWARD_MODEL_PLACE,
    "`reward.models` share the GPUs that train, or in server mode have GPUs of their own, and score answers to single "
    "prompts that are whole",
    Topic.ENGINES,
)
def _models_place(plan: PlanBuilder) -> Iterator[str]:
    config, models = plan.config, plan.config.reward.scored.values()
    served = "serve the model on other machines with gspo-hpc serve or vllm serve, and ask it with the function judge"
    for model in {model.name: model for model in models}.values():
        if plan.server and model.placement == "colocate":
            yield (
                f"reward.models {model.name}: placement colocate needs rollout.mode colocate: in mode server engines "
                f"generate while the trainer works, and leave their GPUs to no other engine; give placement apart, or "
                f"{served}"
            )
        elif model.placement == "apart" and not plan.server:
            yield (
                f"reward.models {model.name}: placement apart needs rollout.mode server, which sets GPUs apart for "
                f"engines: give rollout.mode=server, or placement colocate, or {served}"
            )
        elif model.placement == "apart" and config.rollout.tensor_parallel_size >= config.gpus_per_engine_node:
            yield (
                f"reward.models {model.name}: placement apart puts its engine on the GPUs behind those of an engine of "
                f"the policy, and rollout.tensor_parallel_size ({config.rollout.tensor_parallel_size}) leaves none of "
                f"{gpus_of_engine_node(plan)}: give a smaller one, or {served}"
            )
        elif model.placement == "colocate" and model.tensor_parallel_size > config.rollout.tensor_parallel_size:
            yield (
                f"reward.models {model.name}: tensor_parallel_size ({model.tensor_parallel_size}) must be at most "
                f"rollout.tensor_parallel_size ({config.rollout.tensor_parallel_size}): its engine shares the GPUs of "
                "an engine of the policy"
            )
    if not models:
        return
    if config.environment.talks:
        yield "reward.models score single answers, and environment makes conversations: ask a model with judge instead"
    if config.rollout.unfinished != "wait":
        yield (
            f"rollout.unfinished ({config.rollout.unfinished}) ends a rollout by rewards that are there, and "
            "reward.models score after it: give rollout.unfinished=wait"
        )


@rule(ObjectiveRule.REWARD_MODEL_KIND, "the config.json of a reward model is of its `kind`, if there is one")
def _models_kind(plan: PlanBuilder) -> Iterator[str]:
    for model in plan.config.reward.models:
        file = plan.models.file(model.path)
        if file.error:
            yield f"reward.models {model.name}: {file.error}"
            continue
        names = [str(one) for one in (file.content or {}).get("architectures") or ()]
        if not names or file.note is not None:  # what comes with the package is of the model that it is named after
            continue
        classifies = any(one.endswith("ForSequenceClassification") for one in names)
        if not classifies and not any(one.endswith(("ForCausalLM", "ForConditionalGeneration")) for one in names):
            yield (
                f"reward.models {model.name} is a {names[0]}, which no kind takes: classification takes "
                "...ForSequenceClassification, and generative takes ...ForCausalLM"
            )
        elif classifies != (model.kind == "classification"):
            other = "generative" if model.kind == "classification" else "classification"
            yield (
                f"reward.models {model.name} is a {names[0]}, which kind {model.kind} does not take: give kind {other}"
                + (" with a template that asks for the score" if other == "generative" else "")
            )
        elif classifies and (labels := _labels(file.content or {})) != 1:
            yield f"reward.models {model.name} has {labels} labels: it must have one, whose logit is the score"


def _labels(content: Mapping[str, Any]) -> int:
    """Return the labels of a model by its config.json: two where nothing is said, as in transformers."""
    named = content.get("id2label")
    return len(named) if isinstance(named, dict) else int(content.get("num_labels") or 2)


@rule(ObjectiveRule.REWARD_MODEL_DIVISION, "`tensor_parallel_size` of a reward model divides its heads and MLPs")
def _models_division(plan: PlanBuilder) -> Iterator[str]:
    rules = (
        ModelRule.ROLLOUT_TENSOR_PARALLEL_HEADS,
        ModelRule.ROLLOUT_TENSOR_PARALLEL_KV_HEADS,
        ModelRule.ROLLOUT_TENSOR_PARALLEL_INNER_SIZE,
    )
    for model in plan.config.reward.models:
        own = PlanBuilder(reward_models.in_place_of_policy(plan.config, model), None, plan.models)
        for message in (message for name in rules for message in registry.rules()[name].check(own)):
            named = message.replace("rollout.", "").replace("of the model", "of this model")
            yield f"reward.models {model.name}: {named}"


@rule(ObjectiveRule.REWARD_MODEL_LENGTH, "a reward model takes sequences of its `max_length`, and these have room")
def _models_length(plan: PlanBuilder) -> Iterator[str]:
    for model in plan.config.reward.models:
        length = reward_models.length(plan.config, model)
        own = PlanBuilder(reward_models.in_place_of_policy(plan.config, model), None, plan.models)
        found = longest_of_versions(own)
        most = None if found is None else max(found, key=lambda one: one.length)
        given = "max_length" if model.max_length else "max_length, by default that of the policy and 1024 more,"
        if most is not None and length > most.length:
            yield f"reward.models {model.name}: {given} is {length} and must fit {most.made} of this model"
        if model.kind == "generative" and model.max_reply_length >= length:
            yield (
                f"reward.models {model.name}: max_reply_length ({model.max_reply_length}) must be below {given} "
                f"{length}"
            )


@rule(ObjectiveRule.REWARD_MODEL_ARGUMENTS, "`engine` of a reward model has no argument that another key decides")
def _models_arguments(plan: PlanBuilder) -> Iterator[str]:
    own = {
        **dict.fromkeys(("model", "tokenizer"), "path"),
        **dict.fromkeys(("runner", "convert", "task"), "kind"),
        **{name: name for name in ("dtype", "tensor_parallel_size", "gpu_memory_utilization")},
        "max_model_len": "max_length",
        "seed": "run.seed",
        "enable_sleep_mode": "placement",
        "weight_transfer_config": "the way weights are sent",
    }
    for model in plan.config.reward.models:
        for name in model.engine:
            if name in own:
                yield f"reward.models {model.name}: engine.{name} cannot be given: it follows from {own[name]}"
