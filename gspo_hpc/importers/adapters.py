"""Carry over LoRA adapters: their rank, scale and layers, and what of them has no counterpart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.models.adapter_table import ALL, TARGETS

# Layers by Megatron's names -> those that they are made of. One with several has one first matrix for all of them.
_FUSED = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_fc1": ("gate_proj", "up_proj")}
_SPLIT = {
    **{"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "linear_proj": "o_proj"},
    **{"linear_fc1_gate": "gate_proj", "linear_fc1_up": "up_proj", "linear_fc2": "down_proj"},
}
ONE_FIRST = "one first matrix for all of its layers there, and one for each here"
PEFT = ("q_proj", "v_proj")  # of Llama, Qwen2, Qwen3, Mistral and Gemma, where LoraConfig names none


@dataclass(frozen=True)
class Lora:
    """Names of a project's arguments, and the values where they are not given."""

    rank: str
    alpha: str
    targets: str
    dropout: str = ""
    rank_scaled: str = ""  # switches the scale from alpha / rank to alpha / sqrt(rank)
    rank_default: int = 8
    alpha_default: float = 32.0
    targets_default: Sequence[str] = (ALL,)
    dropout_default: float = 0.0
    defaults_of: str = ""  # whose defaults they are, where they are not the project's
    targets_told: str = ""  # of the default
    others: Sequence[str] = ()  # change what is trained, and have no counterpart


def put(draft: Draft, chosen: str, lora: Lora) -> None:
    """Put the adapters of a run; `chosen`: the argument that says that there are any."""
    draft.put("adapter.type", "lora", chosen)
    rank = draft.whole(lora.rank, lora.rank_default) or lora.rank_default
    _number(draft, "adapter.rank", rank, lora.rank, lora)
    alpha = draft.number(lora.alpha, lora.alpha_default)
    alpha = lora.alpha_default if alpha is None else alpha
    if lora.rank_scaled and draft.switch(lora.rank_scaled):
        text = f"{alpha:g} x sqrt({rank}): the scale is alpha / sqrt(rank) there, and alpha / rank here"
        draft.put("adapter.alpha", alpha * math.sqrt(rank), comment=text, of=(lora.rank_scaled, lora.alpha, lora.rank))
    else:
        _number(draft, "adapter.alpha", alpha, lora.alpha, lora)
        draft.drop(lora.rank_scaled, report.OFF)
    _targets(draft, lora)
    if lora.dropout and (share := draft.number(lora.dropout, lora.dropout_default)):
        text = "adapters have no dropout here, so that two passes over the same weights agree"
        draft.drop(lora.dropout, text)
        if not draft.given(lora.dropout):
            draft.differs.append(f"{lora.dropout} {share:g}, the default there: {text}")
    else:
        draft.credit("adapter.dropout", lora.dropout)
    for name in lora.others:
        if is_unset(draft.values.get(name)):
            draft.sure(name, "")  # reports it
        if draft.given(name) and str(draft.values[name]).lower() not in ("false", "none", "[]", "{}"):
            text = "it changes what is trained, and adapters have nothing of the kind here"
            draft.drop(name, text)
            draft.assumed.append(f"{draft.label(name)}: {text}")


def _number(draft: Draft, key: str, value: float, name: str, lora: Lora) -> None:
    if lora.defaults_of and not draft.given(name):
        draft.put(key, value, comment=f"default of {lora.defaults_of}")
    else:
        draft.put(key, value, name)


def _targets(draft: Draft, lora: Lora) -> None:
    given = [item for text in _without_commas(draft, lora) for item in text.replace(",", " ").split()]
    if any(is_unset(item) for item in given):
        draft.sure(lora.targets, "")
        given = []
    if not given and draft.given(lora.targets) and not is_unset(str(draft.values[lora.targets])):
        draft.wrong(lora.targets, "must name linear layers")
    if not given:
        mine = lora.targets_default == PEFT
        text = "of peft, for Llama, Qwen, Mistral and Gemma" if mine else lora.targets_told
        _put(draft, lora, [*lora.targets_default], text)
        return
    if ALL in given or "all" in given or {*TARGETS} <= {*given}:
        given = [ALL, *(name for name in given if name not in (ALL, "all", *TARGETS))]
    found, strange, shared = list[str](), list[str](), list[str]()
    for name in given:
        last = name.removeprefix("self_attn.").removeprefix("mlp.")  # of every layer; layers.0.q_proj is of one
        parts = _FUSED.get(last) or ((_SPLIT[last],) if last in _SPLIT else ())
        shared += [last] if last in _FUSED else []
        if parts or last in (ALL, *TARGETS):
            found += parts or (last,)
        else:
            strange.append(name)
    text = f"{' and '.join(shared)}: {ONE_FIRST}" if shared else ""
    _put(draft, lora, found or [ALL], text)
    if strange:
        named = " and ".join(strange)
        instead = "" if found else f"; all linear layers get one ({ALL}) unless adapter.targets says otherwise"
        draft.drop(lora.targets, f"{named[:60]} cannot have an adapter here, or is a pattern{instead}")


def _without_commas(draft: Draft, lora: Lora) -> list[str]:
    """Return the names of the layers without those that no layer has, for peft takes a comma for a part of a name."""
    words = draft.texts(lora.targets)
    odd = [word for word in words if "," in word.strip("[]") and not is_unset(word)]
    if not odd:
        return words
    label = draft.label(lora.targets)
    kept = [word for word in words if word not in odd]
    if kept:
        names = " and ".join(f'"{word}"' for word in odd)
        draft.assumed.append(
            f"{label}: no layer is called {names[:60]}, with its comma, and none gets an adapter by it"
        )
        draft.drop(lora.targets, f"a comma is part of a name there, and {names[:60]} names no layer")
    else:
        draft.assumed.append(f"{label}: peft takes it for one name, which no layer has; it is taken for several here")
    return kept or words


def _put(draft: Draft, lora: Lora, targets: list[str], text: str) -> None:
    unique = [*dict.fromkeys(targets)]
    draft.put("adapter.targets", [ALL] if {*TARGETS} <= {*unique} else unique, lora.targets, text)


# Of TRL's own arguments.
_LORA = Lora(
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_dropout",
    "use_rslora",
    rank_default=16,
    targets_default=PEFT,
    dropout_default=0.05,
    others=("lora_modules_to_save", "lora_target_parameters", "use_dora"),
)
# What makes the adapters in a Python file -> its own defaults.
_LORAS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"rank_default": 8, "alpha_default": 8.0, "dropout_default": 0.0, "defaults_of": "LoraConfig"},
    "unsloth": {
        "rank_default": 16,
        "alpha_default": 16.0,
        "dropout_default": 0.0,
        "targets_default": (ALL,),
        "defaults_of": "Unsloth",
    },
}
FOLDER = "PeftModel.from_pretrained"  # loads adapters to begin with


def of_trl(draft: Draft) -> None:
    """Put the adapters of a run of TRL: of its own arguments, or of what makes them in a Python file.

    Where it is not known whether a run has some, or which, it has: its rate was made for them.
    """
    kind = draft.text("peft_config") or ""
    maker = kind.removeprefix("$(").partition(" in line ")[0]
    ours = replace(_LORA, **_LORAS.get(maker, {}))
    name = "peft_config" if kind else "use_peft"
    if not is_unset(draft.values.get(name)):
        if kind or draft.switch("use_peft"):
            put(draft, name, ours)
    elif maker == FOLDER:
        draft.sure(name, "", "all weights are trained here")
    elif maker in _LORAS or any(map(draft.given, (ours.rank, ours.alpha, ours.targets))):
        draft.sure(name, "", "the run is taken for one with these adapters")
        put(draft, name, ours)
        draft.put("adapter.type", "lora", comment="whether there are any is known only when the script runs")
    elif kind:
        text = "the run is taken for one with adapters, with the defaults here: set adapter.rank, alpha and targets"
        draft.sure(name, "", text)
        draft.put("adapter.type", "lora", comment="which ones is known only when the script runs: set the others")
    else:
        draft.switch(name)  # reports it
    draft.credit("adapter.type", "use_peft", "peft_config")


def sampled(draft: Draft, always: bool) -> None:
    """Tell how completions are sampled with adapters in TRL and ms-swift; `always`: vLLM generates in any case."""
    if draft.switch("vllm_enable_lora") or not (always or draft.switch("use_vllm")):
        draft.differs.append(
            "completions are sampled with adapters beside the weights there; here engines get merged weights, rounded "
            "to the model's type (docs/lora.md)"
        )
        return
    draft.differs.append(
        "adapters are added to the base weights there for every rollout and taken out again, rounded to their type, so "
        "that base and reference drift a little; here the base is never written"
    )
