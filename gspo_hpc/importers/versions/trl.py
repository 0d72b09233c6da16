"""Tell which versions of TRL a run may be of, and what these have in place of the defaults of TRL 1.9.

A pin in the text and arguments that only some versions have show the version. Where they leave one default, it is
taken; where several are left, each is told with its versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null, read_text
from gspo_hpc.importers.scripts.places import around
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.texts.trainers import UNSLOTH
from gspo_hpc.importers.typos import misspelt

_FIRST, _ZERO, _LATEST = 14, 30, 99  # 0.14 is 14, 1.0 is 30, and 99 any later version
_READ = _ZERO + 9  # 1.9, whose defaults are those of the converter
_SIZE, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_RANGE = "versions of TRL"  # among the variables of a draft
_TOLERANT = 18  # the last version whose parser ignores what it does not know in a YAML


class _Default(NamedTuple):
    """A default that some versions had."""

    name: str
    text: str  # as it is told
    value: Any  # as it is taken, None if it can only be told
    last: int
    first: int = _FIRST
    beside: str = ""  # the switch without which nothing reads it


_DEFAULTS = (
    _Default(_STEPS, "8", 8, 14),
    _Default("beta", "0.04", 0.04, 18),
    _Default("loss_type", "a mean over sequences", "grpo", 15),
    _Default("loss_type", "bnpo", "bnpo", 21, 16),
    _Default("temperature", "0.9", 0.9, 17),
    _Default("top_k", "50", 50, 17),
    _Default("max_prompt_length", "512, with longer prompts cut from the left", 512, 25),
    _Default("max_completion_length", "512", 512, _LATEST, _READ + 1),
    _Default("bf16", "false, unless mixed_precision of accelerate is bf16", False, 18),
    _Default("vllm_mode", "an engine on a GPU of its own", None, 15, _FIRST, "use_vllm"),
    _Default("vllm_mode", "server", "server", 29, 16, "use_vllm"),
    _Default("vllm_gpu_memory_utilization", "0.9", None, 17, _FIRST, "use_vllm"),
    _Default("vllm_importance_sampling_correction", "none", False, 22, _FIRST, "use_vllm"),
    _Default("vllm_importance_sampling_correction", "weights of tokens of at most 2", True, 25, 23, "use_vllm"),
    _Default("ref_model_sync_steps", "64", 64, 15, _FIRST, "sync_ref_model"),
    _Default("ref_model_mixup_alpha", "0.9", 0.9, 15, _FIRST, "sync_ref_model"),
)
# Arguments that began with a version, or ended with one. Names that scripts have of their own show nothing.
_SINCE = {
    15: "reward_weights log_completions",
    16: "epsilon epsilon_high num_iterations scale_rewards vllm_server_host vllm_server_port vllm_server_timeout",
    17: "loss_type mask_truncated_completions num_completions_to_print wandb_log_unique_prompts",
    18: "delta generation_batch_size steps_per_generation vllm_mode vllm_server_base_url vllm_tensor_parallel_size",
    19: "generation_kwargs",
    20: "importance_sampling_level top_entropy_quantile use_transformers_paged",
    21: "vllm_model_impl",
    23: "vllm_enable_sleep_mode vllm_importance_sampling_cap vllm_importance_sampling_correction",
    25: "cast_lm_head_to_fp32 chat_template_kwargs",
    26: "log_unique_prompts num_generations_eval sapo_temperature_neg sapo_temperature_pos tools "
    "use_bias_correction_kl vllm_importance_sampling_mode vllm_max_model_length",
    27: "max_tool_calling_iterations multi_objective_aggregation off_policy_mask_threshold vllm_group_port "
    "vllm_structured_outputs_regex",
    28: "log_completions_hub_repo",
    29: "environment_factory",
    30: "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    36: "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
    37: "router_aux_loss_coef transformers_continuous_batching_config use_transformers_continuous_batching",
    38: "entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy",
    39: "log_multimodal",
}
_UP_TO = {17: "vllm_device vllm_dtype", 27: "max_prompt_length"}
_BEGAN = {name: first for first, names in _SINCE.items() for name in names.split()}
_ENDED = {name: last for last, names in _UP_TO.items() for name in names.split()}

# trl==0.14.0, trl[vllm]>=0.15,<0.16, trl (==0.14.0) and trl = "^0.14" of poetry, and trl.git@v0.14.0 of an installation
# from the repository.
_VERSION = r"v?(\d+)\.(\d+)(?:\.(\d+|\*))?"
_BOUND = rf"(==|~=|<=|>=|<|>|\^)\s*{_VERSION}"
_PIN = re.compile(rf"(?<![\w./-])(?i:trl)(?:\[[\w,-]*\])?\s*(?:\(\s*|=\s*[\"'])?{_BOUND}(?:\s*,\s*{_BOUND})*")
_SOURCE = re.compile(rf"(?<![\w-])trl(?:\.git)?@{_VERSION}(?![\w.])")

_REQUIREMENTS = ("requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg", "environment*.y*ml")


def settle(draft: Draft, text: str, folder: Path | None) -> frozenset[str]:
    """Take the defaults of the versions that a run may be of, where those have only one; return their arguments.

    `text`: of the script, which lies in `folder`: where it has no pin, one in a file of requirements around it counts.
    """
    pins, place = _pins(text), ""
    if not pins and folder is not None:
        pins, place = _required(folder)
    low, high, why = _range(draft, pins)
    why += f" in {place}" if place and why in pins else ""
    draft.variables[_RANGE] = f"{low} {high} {_patch(pins, low)}"
    if high <= _TOLERANT:
        _tolerate(draft)
    if UNSLOTH in draft.variables or not why:
        return frozenset()
    given, taken = {*draft.values}, list[str]()
    size = draft.values.get(_SIZE)
    if high == _FIRST:
        group = draft.whole("num_generations", 8) or 8
        if is_null(size) or not is_unset(size):
            prompts = 1 if is_null(size) else draft.whole(_SIZE, 1) or 1
            draft.values[_SIZE] = prompts * group
            taken.append(f"{_SIZE} of {prompts} prompts, each with {group} completions")
    for name, one, several in _possible(draft, low, high):
        if one is None or one.value is None:
            continue
        draft.values[name] = one.value
        before = ", ".join(f"{other.text} ({_span(other)})" for other in several)
        taken.append(f"{name} {one.text}" + (f", and before it {before}" if before else ""))
    if taken:
        draft.assumed.append(f"{why}: defaults of that version are taken: {'; '.join(taken)}")
    return frozenset(draft.values.keys() - given)


def span(draft: Draft) -> tuple[int, int, int]:
    """Return the first and the last version that a run may be of, as 14 for 0.14 and 30 for 1.0, and the first's patch.

    The patch is 0 where a pin does not give it.
    """
    low, high, patch = map(int, draft.variables.get(_RANGE, f"{_FIRST} {_LATEST} 0").split())
    return low, high, patch


def _patch(pins: list[str], low: int) -> int:
    """Return the patch that the first version of a run has at least, 0 if no pin gives one."""
    bounds = [(pin, match) for pin in pins for match in _bounds(pin)]
    return max([0, *(int(match[4]) for _, match in bounds
                     if match[1] in ("@", "==", ">=", ">", "~=", "^") and _version(match) == low
                     and (match[4] or "").isdecimal())])  # fmt: skip


def _tolerate(draft: Draft) -> None:
    """Let a misspelt argument of a YAML be, which the parser of these versions throws away without a word."""
    table = draft.source.table
    names = [*draft.places] or ([*draft.values] if "yaml" in draft.variables else [])
    for name in names:
        if name in draft.values and not table.has(name) and (nearest := misspelt(name, table.like(name))):
            draft.variables["added"] = f"{draft.variables.get('added', '')} {name}"
            draft.assumed.append(
                f"{draft.label(name)}: it may be a misspelt {nearest}; TRL up to {_shown(_TOLERANT)} ignores what it "
                "does not know in a YAML, and so it has no effect there"
            )


def _pins(text: str) -> list[str]:
    found = dict.fromkeys(match[0] for pattern in (_PIN, _SOURCE) for match in pattern.finditer(text))
    return [re.sub(r"\(\s*|=\s*[\"']", "", pin) for pin in found]


def _required(folder: Path) -> tuple[list[str], str]:
    """Return the pins of the nearest file of requirements that has some, and its name."""
    for place in around(folder):
        for pattern in _REQUIREMENTS:
            for path in sorted(place.glob(pattern)):
                try:
                    lines = read_text(path, wide=True).splitlines() if path.is_file() else []
                except ValueError:  # no text
                    continue
                if pins := _pins("\n".join(line.partition("#")[0] for line in lines)):
                    return pins, path.name
    return [], ""


def tell(draft: Draft) -> None:
    """Tell what other versions of TRL have, as far as the run may be of one of these."""
    low, high, _ = span(draft)
    told: dict[str, list[str]] = {}
    for name, one, several in _possible(draft, low, high):
        for default in (*several, *filter(None, (one,))):
            told.setdefault(name, []).append(f"{default.text} ({_span(default)})")
    if low <= _FIRST < high:
        if draft.given(_SIZE):
            draft.assumed.append(
                f"{draft.label(_SIZE)}: TRL 0.14 counts prompts in it, and an update then has num_generations times as "
                "many completions; it is completions since 0.15"
            )
        else:
            told = {_SIZE: ["1 prompt with all its completions (0.14)"]} | told
    later = told.pop("max_completion_length", [])
    earlier = "; ".join(f"{name} {', '.join(texts)}" for name, texts in told.items())
    lines = [f"earlier versions had {earlier}"] if earlier else []
    lines += [f"later ones have max_completion_length {text}" for text in later]
    if lines:
        draft.assumed.append(f"defaults are those of TRL 1.9; {'; '.join(lines)}")


def _possible(draft: Draft, low: int, high: int) -> Iterable[tuple[str, _Default | None, list[_Default]]]:
    """Yield arguments that are not given, with the defaults that other versions have, as far as they are left.

    First the one that counts, if that of 1.9 cannot: of several, the latest.
    """
    for name in dict.fromkeys(default.name for default in _DEFAULTS):
        if name in draft.values or (name == "bf16" and _has_precision(draft)):
            continue
        others = [default for default in _DEFAULTS if default.name == name and _is_read(draft, default)]
        others = [_with_vllm(draft, default) for default in others]
        left = [default for default in others if default.first <= high and default.last >= low]
        covered = {at for default in left for at in range(default.first, default.last + 1)}
        if not left:
            continue
        latest = max(left, key=lambda default: default.last) if covered >= {*range(low, high + 1)} else None
        yield name, latest, [default for default in left if default is not latest]


def _is_read(draft: Draft, default: _Default) -> bool:
    return not default.beside or draft.switch(default.beside)


def _with_vllm(draft: Draft, default: _Default) -> _Default:
    """Return top_k as vLLM had it, which was told none before 0.16."""
    return default._replace(first=16) if default.name == "top_k" and draft.switch("use_vllm") else default


def _has_precision(draft: Draft) -> bool:
    """Tell whether something else than the default of bf16 decides in which precision the run computes."""
    launched = draft.variables.get("mixed_precision", "no").lower() in ("bf16", "fp16")
    dtype = draft.values.get("dtype", draft.values.get("torch_dtype"))
    return launched or draft.switch("fp16") or str(dtype).removeprefix("torch.") in ("bfloat16", "float16")


def _span(default: _Default) -> str:
    if default.last == _LATEST:
        return f"since {_shown(default.first)}"
    if default.first == default.last:
        return _shown(default.last)
    if default.first == _FIRST:
        return f"up to {_shown(default.last)}"
    return f"{_shown(default.first)} to {_shown(default.last)}"


def _shown(version: int) -> str:
    return f"0.{version}" if version < _ZERO else f"1.{version - _ZERO}"


def _range(draft: Draft, pins: list[str]) -> tuple[int, int, str]:
    """Return the first and the last version that a run may be of, and what shows them."""
    low, high, why = _FIRST, _LATEST, ""
    bounds = [(pin, "==" if "@" in pin else match[1], match) for pin in pins for match in _bounds(pin)]
    for pin, sign, match in bounds:
        major, patch, version = match[2], match[4], _version(match)
        if sign in ("==", ">=", ">", "~=", "^"):
            low, why = max(low, version), why or pin
        if sign in ("==", "<=") or (sign == "~=" and patch) or (sign == "^" and major == "0"):
            high, why = min(high, version), pin
        elif sign == "<":
            high, why = min(high, version if patch not in (None, "0") else version - 1), pin
        elif sign == "~=" and major == "0":
            high, why = min(high, _ZERO - 1), pin
    if low == high:  # a pin of one version is right, whatever arguments a script still has
        return low, high, why
    names = [name for name in draft.values if not is_null(draft.values[name])] if UNSLOTH not in draft.variables else []
    low = max([low, *(_BEGAN[name] for name in names if name in _BEGAN)])
    for name in names:
        if _ENDED.get(name, _LATEST) < high:
            high, why = _ENDED[name], f"{name} is an argument of TRL up to {_shown(_ENDED[name])}"
    return (low, high, why) if low <= high else (_FIRST, _LATEST, "")  # signs that exclude each other show nothing


def _version(match: re.Match[str]) -> int:
    major, minor = match[2], match[3]
    return int(minor) if major == "0" else _ZERO + int(minor) if major == "1" else _LATEST


def _bounds(pin: str) -> list[re.Match[str]]:
    if "@" in pin:
        return [*re.finditer(rf"(@){_VERSION}", pin)]
    return [*re.finditer(_BOUND, pin)]
