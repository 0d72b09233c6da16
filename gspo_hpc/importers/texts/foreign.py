"""Recognise the scripts and configs of projects that are not converted, so that their users are told so at once."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

READ = "convert reads Megatron-SWIFT, ms-swift, verl and TRL"


@dataclass(frozen=True)
class _Signs:
    """Signs that a text is another project's."""

    word: str = ""  # pattern of a word in a command that starts it, and of a module that its Python files import
    options: tuple[frozenset[str], ...] = ()  # names of options, of which one set is given in full
    keys: tuple[frozenset[str], ...] = ()  # keys of its YAML or TOML, at the top or dotted, of which one set is there
    never: frozenset[str] = frozenset()  # keys that its YAML does not have


def _sets(*texts: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(text.split()) for text in texts)


_PROJECTS: dict[str, _Signs] = {
    "NeMo-RL": _Signs(
        r"(^|[/.])nemo_rl([/.]|$)|(^|/)examples/(\w+/)*run_(grpo|dpo|sft|rm|distillation|vlm_grpo|eval)\w*\.py$",
        options=_sets("grpo.num_generations_per_prompt", "grpo.max_num_steps", "cluster.num_nodes"),
        keys=_sets("policy grpo", "policy loss_fn", "policy cluster", "policy checkpointing", "policy defaults",
                   "grpo defaults", "grpo loss_fn", "cluster defaults", "logger defaults", "policy logger"),
    ),
    "slime": _Signs(
        r"(^|/)slime([/.]|$)|^slime_plugins",
        options=_sets("num_rollout rollout_batch_size", "n_samples_per_prompt rollout_batch_size",
                      "actor_num_nodes rollout_num_gpus", "actor_num_nodes colocate", "hf_checkpoint ref_load"),
    ),
    "OpenRLHF": _Signs(
        r"^openrlhf(\.|$)|/openrlhf/",
        options=_sets("pretrain micro_train_batch_size", "pretrain rollout_batch_size", "actor.model_name_or_path"),
        keys=_sets("pretrain micro_train_batch_size"),
    ),
    "prime-rl": _Signs(
        r"^prime_rl(\.|$)|^rl$",
        keys=_sets("orchestrator trainer", "orchestrator inference", "orchestrator"),
    ),
    "AReaL": _Signs(
        r"^areal(\.|/|$)|^realhf(\.|$)",
        options=_sets("experiment_name trial_name", "scheduler.type", "rollout.backend", "allocation_mode"),
        keys=_sets("experiment_name trial_name", "allocation_mode gconfig", "gconfig rollout"),
    ),
    "SkyRL": _Signs(
        r"^skyrl([._/]|_train|_gym|_agent|$)|(^|[./])skyrl[_-]?(train|agent|tx)",
        options=_sets("generator.n_samples_per_prompt", "trainer.policy.model.path", "trainer.placement.colocate_all"),
        keys=_sets("generator trainer", "generator.n_samples_per_prompt", "trainer.algorithm.advantage_estimator"),
    ),
    "ROLL": _Signs(
        r"(^|/)start_\w+_pipeline\.py$|^roll(\.|$)",
        keys=_sets("actor_train actor_infer", "pretrain rollout_batch_size", "actor_train pretrain"),
    ),
    "open-instruct": _Signs(
        r"(^|/)open_instruct(/|\.|$)",
        options=_sets("num_samples_per_prompt_rollout", "num_unique_prompts_rollout", "dataset_mixer_list"),
        keys=_sets("num_samples_per_prompt_rollout", "num_unique_prompts_rollout", "dataset_mixer",
                   "dataset_mixer_list", "with_tracking checkpointing_steps"),
        never=frozenset({"num_generations", "max_completion_length"}),
    ),
    "EasyR1": _Signs(
        r"^verl\.trainer\.main$",
        keys=_sets("worker algorithm trainer", "worker.actor.global_batch_size"),
    ),
    "rLLM": _Signs(
        r"^rllm(\.|$)",
        options=_sets("rllm/backend", "rllm.algorithm.adv_estimator", "rllm.workflow.n_parallel_tasks"),
    ),
    "verifiers": _Signs(r"^verifiers(\.|$)|^vf-(rl|train|eval)$"),
    "Tinker": _Signs(r"^tinker(_cookbook)?(\.|$)"),
    "LLaMA-Factory": _Signs(r"^llamafactory(-cli|\.|$)", keys=_sets("stage finetuning_type")),
    "Axolotl": _Signs(r"^axolotl(\.|$)", keys=_sets("base_model micro_batch_size", "base_model rl")),
    "torchtune": _Signs(r"^torchtune(\.|$)", keys=_sets("tokenizer._component_", "model._component_")),
    "tunix": _Signs(r"^tunix(\.|$)", options=_sets("rl_training_config.max_steps", "grpo_config.num_generations"),
                    keys=_sets("rl_training_config", "actor_model_config", "reference_model_config")),
    "EasyDeL": _Signs(r"^easydel(\.|$)"),
    "siiRL": _Signs(r"^siirl(\.|$)"),
    "Trinity-RFT": _Signs(
        r"^trinity(\.|$)",
        keys=_sets("algorithm.algorithm_type", "explorer synchronizer", "buffer synchronizer", "buffer explorer"),
    ),
    "Agent-Lightning": _Signs(r"^agentlightning(\.|$)|^agl$", keys=_sets("agentlightning")),
    "Oumi": _Signs(r"^oumi(\.|$)", options=_sets("training.trainer_type"),
                   keys=_sets("training.trainer_type", "model.model_name data.train")),
    "trlX": _Signs(r"^trlx(\.|$)", keys=_sets("train method tokenizer", "train.total_steps method")),
    "torchtitan": _Signs(r"(^|/)torchtitan([/.]|$)"),
    "RLinf": _Signs(r"^rlinf(\.|$)"),
    "MindSpeed-RL": _Signs(r"^mindspeed_rl(\.|$)"),
    "ChatLearn": _Signs(r"^chatlearn(\.|$)"),
    "XTuner": _Signs(r"^xtuner(\.|$)"),
    "PipelineRL": _Signs(r"^pipelinerl(\.|$)"),
    "NeMo-Aligner": _Signs(r"^nemo_aligner(\.|$)"),
}  # fmt: skip


# Commands that prepare an environment or files, in which the name of a project is that of a package or a folder.
_PREPARES = frozenset(
    ". apt apt-get cd chmod conda cp curl echo export git hf huggingface-cli ln ls mamba micromamba mkdir "
    "ml module mv pip pip3 popd printf pushd rm rsync source tar touch unset wget".split()
)


def _prepares(words: Sequence[str]) -> bool:
    """Tell whether a command starts nothing; conda run does, and uv pip does not."""
    first, second = (*(os.path.basename(word) for word in words[:2]), "", "")[:2]
    return (first in _PREPARES and second != "run") or (first == "uv" and second in ("pip", "add", "venv", "sync"))


def of_words(words: Sequence[str], options: Iterable[str] = ()) -> str | None:
    """Return the project that a command starts, None if it is none of these. `options`: names that are given."""
    if _prepares(words):
        return None
    entries = [word for number, word in enumerate(words)
               if number < 3 or word.endswith(".py") or words[number - 1] in ("-m", "--module")]  # fmt: skip
    overrides = {word.lstrip("+~").partition("=")[0] for word in words if "=" in word and not word.startswith("-")}
    named = frozenset({*options} | overrides)
    for project, signs in _PROJECTS.items():  # names first: forks keep the options of the project that they come from
        if signs.word and any(re.search(signs.word, word) for word in entries if "=" not in word):
            return project
    return next((project for project, signs in _PROJECTS.items() if any(s <= named for s in signs.options)), None)


def of_imports(modules: Iterable[str]) -> str | None:
    """Return the project whose modules a Python file imports, None if it is none of these."""
    given = [*modules]
    for project, signs in _PROJECTS.items():
        if signs.word and any(re.search(signs.word, module) for module in given):
            return project
    return None


def of_keys(raw: Mapping[Any, Any]) -> str | None:
    """Return the project whose config these keys are, None if it is none of these."""
    names = {str(name) for name in raw}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            names |= {f"{key}.{inner}" for inner in value}
    for project, signs in _PROJECTS.items():
        if any(needed <= names for needed in signs.keys) and not signs.never & names:
            return project
    return None


# How a text imports a module or starts one, or a Python file, wherever that stands: in quotes, in another command.
_MODULE = re.compile(r"(?:^|[\s;\"'(])(?:from|import|-m|--module)[\s=]+([A-Za-z_][\w.]*)", re.MULTILINE)
_FILE = re.compile(r"(?:^|[\s\"'(=])((?:[\w.${}-]*/)*[\w.-]+\.py)(?=$|[\s\"')\\;])", re.MULTILINE)

_WITHIN = re.compile(
    r"\bcd[ \t]+([\w./-]+)[ \t]*&&[ \t]*(?:bash|sh|python3?|uv run)[ \t]+([\w./-]+)"
)  # cd slime && bash run.sh
_VALUE = re.compile(r"(?:^|\s)--[\w-]+[\s=]+([A-Z][\w-]*)(?=$|\s)", re.MULTILINE)


def of_text(text: str) -> str | None:
    """Return the project that a text imports or starts somewhere, None if it is none of these, or several.

    An option's value is a project's name only as that spells it, and if it is no word in small or large letters alone.
    """
    given = [*_MODULE.findall(text), *_FILE.findall(text), *map("/".join, _WITHIN.findall(text))]
    named = {name for name in _VALUE.findall(text) if not name.islower() and not name.isupper()}
    found = [project for project, signs in _PROJECTS.items()
             if project in named or (signs.word and any(re.search(signs.word, word) for word in given))]  # fmt: skip
    return found[0] if len(found) == 1 else None


class ForeignRunError(ValueError):
    """A run of a project that is not converted."""


def refusal(project: str) -> ForeignRunError:
    """Return the error that says whose run it is."""
    return ForeignRunError(f"this is a run of {project}, which is not converted: {READ}")
