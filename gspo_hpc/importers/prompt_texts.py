"""Convert what decides the text of a prompt beside its data: variables of the chat template, and thinking."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null, options, yaml_value
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command

# Model types of ms-swift that read images, beside those whose names say so as models' names do.
_SEEING_TYPES = re.compile(
    r"(?i)^(chat)?glm\d*(_\d)?v|^minicpm[vo]|^ovis|^paligemma|^molmo|^idefics|^deepseek_janus|_ocr"
)
_OF_IMAGES = tuple(
    "max_pixels freeze_vit freeze_aligner vit_lr aligner_lr vit_gradient_checkpointing vit_attn_impl "
    "vllm_limit_mm_per_prompt vllm_mm_processor_cache_gb".split()
)
BOUNDS_OF_IMAGES = tuple(
    "MAX_PIXELS MIN_PIXELS IMAGE_MAX_TOKEN_NUM IMAGE_MIN_TOKEN_NUM ROOT_IMAGE_DIR VIDEO_MAX_PIXELS VIDEO_MIN_PIXELS "
    "VIDEO_MAX_TOKEN_NUM FPS_MAX_FRAMES".split()
)
# What ms-swift takes for the prompt of a row, the chat messages before a plain text.
_PROMPTS = (
    "messages",
    "conversations",
    "conversation",
    "query",
    "prompt",
    "input",
    "instruction",
    "question",
    "problem",
)

_KEY = "data.chat_template_kwargs"
# Models that think or not, as their chat template is told, by their types and templates in ms-swift and by their
# names, in which more may follow. Since 4.3.1 ms-swift does not let them, unless it is told to.
_HYBRID_TYPES = re.compile(r"(?i)(qwen3|qwen3_[5-9])(_moe)?|glm4_(5v?|7|moe(_lite)?)|glm4v_moe|deepseek_v3_[12]")
_HYBRID = re.compile(r"(?i)qwen-?3([._]\d)?[-_]\d+([._]\d+)?b|glm-4\.[5-7]|deepseek-v3\.[12]")
_SETTLED = re.compile(r"(?i)instruct|thinking|2507|coder|embedding|reranker|guard|omni|qwen-?3-(vl|next)")

# Models whose prompts ms-swift writes as their tokenizers do; of Qwen3 it is said by itself whether they think.
_AS_IN_TOKENIZER = re.compile(r"(?i)qwen-?[23]|qwq")
_OF_QWEN3 = re.compile(r"(?i)qwen-?3")
# Base models to whose prompts ms-swift puts the template of the models that were made of them.
_BASE = re.compile(r"(?i)qwen2(\.5)?(-math|-coder)?-\d+(\.\d+)?b/?$")


def template_variables(draft: Draft, name: str) -> None:
    """Put the variables of the chat template: of the mapping `name`, or of its JSON, and of all name.of.one."""
    found: dict[str, Any] = {}
    if name in draft.values and not is_null(raw := draft.values[name]):
        given = yaml_value(raw) if isinstance(raw, str) and not is_unset(raw) else raw
        if isinstance(given, str) and is_unset(given):
            draft.sure(name, "")  # reports it
            return
        if not isinstance(given, Mapping):
            draft.wrong(name, "must be a mapping of names to values, or its JSON")
            return
        found |= given
        draft.credit(_KEY, name)
    for key, value in _below(draft, name):
        place = found
        *groups, last = key.removeprefix(f"{name}.").split(".")
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    if found:
        draft.put(_KEY, found)


def messages_alone(draft: Draft, unless: Sequence[str]) -> None:
    """Put that prompts which are a plain text get no chat template, as in TRL.

    `unless`: arguments of scripts that make messages of every prompt, where they are given.
    """
    if not any(map(draft.given, unless)):
        text = "as in TRL, only prompts that are lists of messages get it; true for all"
        draft.put("data.chat_template", False, comment=text)


def _below(draft: Draft, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments name.of.one whose values are known."""
    for key in [key for key in draft.values if key.startswith(f"{name}.")]:
        if is_unset(value := draft.values[key]):
            draft.sure(key, "")  # reports it
        else:
            draft.credit(_KEY, key)
            yield key, value


def own_rows(draft: Draft, rows: str, loop: str) -> None:
    """Tell that classes of the script's own make prompts (`rows`) or carry on a rollout (`loop`)."""
    if draft.text(rows):
        draft.assumed.append(
            f"{draft.label(rows)}: that class decides which prompts there are, how long they are and their template; "
            "what stands here is what verl's own class does"
        )
    if draft.text(loop):
        draft.assumed.append(
            f"{draft.label(loop)}: that class decides how a rollout is sampled, with tools or further turns, and its "
            "template's variables; here it is one completion for each prompt"
        )


def system(draft: Draft) -> None:
    """Put the system prompt of ms-swift, in which a backslash with an n is the end of a line."""
    text = draft.text("system")
    if text and text.endswith((".txt", ".md")):
        draft.drop("system", "it names a file: write its text to data.system_prompt")
    elif text and is_unset(text):
        draft.sure("system", "")  # reports it
    elif text:
        draft.put("data.system_prompt", text.replace("\\n", "\n"), "system")
    elif draft.values.get("system") == "":
        why = "there prompts have no system message then; here the tokenizer's chat template may have one of its own"
        draft.drop("system", why)
        draft.assumed.append(f"system is empty: {why}")


def of_base(draft: Draft) -> None:
    """Tell what ms-swift puts around the prompts of a base model, and where it ends completions of it."""
    model = draft.text("model") or ""
    if draft.given("use_chat_template") and not draft.switch("use_chat_template"):
        return
    if not _BASE.search(model):
        open_ = _OF_QWEN3.search(model) and not (
            _SETTLED.search(model) or _thinks_or_not(draft) or draft.given("enable_thinking")
        )
        if model and (open_ or not _AS_IN_TOKENIZER.search(model)):
            draft.differs.append(
                f"{model}: prompts have the template that ms-swift has for models of its kind there (swift/template), "
                "which may differ from that of its tokenizer, which counts here: in system prompts, dates, thinking"
            )
        return
    system = ""
    if not draft.given("system"):
        system = ' and "You are Qwen, created by Alibaba Cloud. You are a helpful assistant." as system prompt (2.5)'
    draft.assumed.append(
        f"{model} is a base model: ms-swift gives its prompts the template of the instruct models{system}, and ends a "
        "completion at <|im_end|>; here its tokenizer's own template counts (data.system_prompt) and its own last token"
    )


def of_ray(draft: Draft, response: int) -> None:
    """Tell what Megatron-SWIFT's trainer with Ray does to long sequences; `response`: the longest completion."""
    with_ray = any(map(draft.given, ("train.gpus", "rollout.gpus", "colocate_groups")))
    if with_ray and draft.source.project != "ms-swift" and draft.given("max_length"):
        draft.differs.append(
            f"{draft.label('max_length')}: with Ray it also cuts prompt and completion (of up to {response}) together, "
            "from the left before they are trained on; here it bounds the prompt"
        )


def turns_of(draft: Draft, server: Command | None) -> None:
    """Tell that the command of a server, which decides it there, makes a rollout one of several turns."""
    given = {} if server is None else options(server.words)[0]
    if server is None:
        draft.assumed.append(
            "the command of the server is not in the script: with multi_turn_scheduler or use_gym_env the original goes"
            " on for several turns, and here a rollout is one completion"
        )
    for name in ("multi_turn_scheduler", "use_gym_env"):
        if str(given.get(name, "false")).lower() not in ("false", "none", ""):
            draft.assumed.append(
                f"--{name} {given[name]} of the server: the original goes on for several turns, and here a rollout is "
                "one completion"
            )


def images(draft: Draft) -> None:
    """Tell that a model reads images where arguments or variables of ms-swift show it, and not its name."""
    if any(line.endswith(parts.SEEN) for line in draft.assumed):
        return
    for name in ("model_type", "template"):
        if (kind := draft.text(name)) and (parts.SEES.search(kind) or _SEEING_TYPES.search(kind)):
            draft.assumed.append(f"{draft.label(name)} reads images: {parts.SEEN}")
            return
    arguments = [draft.label(name) for name in _OF_IMAGES if draft.given(name)]
    variables = [f"{name}={draft.variables[name]}" for name in BOUNDS_OF_IMAGES if draft.variables.get(name)]
    if signs := [*arguments, *variables]:
        draft.assumed.append(f"{signs[0]} is for a model that reads images: {parts.SEEN}")


def columns(draft: Draft) -> None:
    """Put which field of a row holds the prompt, where ms-swift is told to rename it; other fields keep their names."""
    name = "columns"
    if name not in draft.values or is_null(given := draft.values[name]):
        return
    if is_unset(given):
        draft.sure(name, "")  # reports it
        return
    renamed = yaml_value(given) if isinstance(given, str) else given
    if not isinstance(renamed, Mapping):
        draft.wrong(name, "must be a mapping of names to names, or its JSON")
        return
    held = [str(old) for kind in _PROMPTS for old, new in renamed.items() if new == kind]
    others = ", ".join(f"{old} to {new}" for old, new in renamed.items() if str(old) not in held[:1] and old != new)
    if held:
        draft.put("data.prompt_key", held[0], name, f"{name} makes it {renamed[held[0]]}")
    if others:
        text = f"fields keep their names here, as reward functions get them; there {others}"
        draft.drop(name, text)
        draft.assumed.append(f"{name}: {text}")


def _thinks_or_not(draft: Draft) -> bool:
    """Tell whether the model is one that thinks or not as it is told: by its template, its name or its type."""
    template = draft.text("template")
    if template and not is_unset(template):
        return _HYBRID_TYPES.fullmatch(template) is not None
    model = draft.text("model") or ""
    kind = draft.text("model_type") or ""
    return not _SETTLED.search(model) and bool(_HYBRID_TYPES.fullmatch(kind) or _HYBRID.search(model))


def thinking(draft: Draft) -> None:
    """Put what ms-swift has for the prompts of models that think."""
    name = "enable_thinking"
    if draft.given(name):
        draft.put(_KEY, {name: draft.switch(name)}, name)
    elif _thinks_or_not(draft):
        model = draft.text("model") or "the model"
        draft.assumed.append(
            f"{name} is not given: since 4.3.1 ms-swift does not let {model} think, and here it thinks unless "
            f"{_KEY} is {{{name}: false}}"
        )
    if "response_prefix" in draft.values:
        text = "prompts end as the chat template has it here, and not with a text of their own"
        draft.drop("response_prefix", text)
        draft.assumed.append(f"{draft.label('response_prefix')}: {text}")
