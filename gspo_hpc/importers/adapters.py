"""Carry over LoRA adapters: their rank, scale and layers, and what of them has no counterpart."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.versions import swift
from gspo_hpc.models.adapter_table import ALL, CHOICES, EMBEDDING, TARGETS

# Layers by Megatron's names, or ms-swift's -> those that they are made of. One with several has one first matrix.
_FUSED = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_fc1": ("gate_proj", "up_proj")}
_SPLIT = {
    **{"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "linear_proj": "o_proj"},
    **{"linear_fc1_gate": "gate_proj", "linear_fc1_up": "up_proj", "linear_fc2": "down_proj"},
    **{"word_embeddings": EMBEDDING, "all-embedding": EMBEDDING},
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
    first: str = ""  # how matrices begin
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
    for name in (lora.first, *lora.others):
        first = name == lora.first
        if is_unset(draft.values.get(name)):
            draft.sure(name, "")  # reports it
        elif draft.given(name) and str(draft.values[name]).lower() not in (_LIKE_OURS if first else _NONE):
            text = _STARTS if first else "it changes what is trained, and adapters have nothing of the kind here"
            draft.drop(name, text)
            draft.assumed.append(f"{draft.label(name)}: {text}")
        elif first:
            draft.drop(name, "A is drawn and B is 0 here, too")


_NONE = ("false", "none", "[]", "{}")
_LIKE_OURS = ("true", "gaussian", "orthogonal")  # where B begins as 0, whatever A is
_STARTS = "A is drawn and B is 0 here; another start takes a part of the base into the adapters, or other values"


def _number(draft: Draft, key: str, value: float, name: str, lora: Lora) -> None:
    if lora.defaults_of and not draft.given(name):
        draft.put(key, value, comment=f"default of {lora.defaults_of}")
    else:
        draft.put(key, value, name)


def _targets(draft: Draft, lora: Lora) -> None:
    given = [item for text in _without_commas(draft, lora) for item in text.replace(",", " ").split()]
    if any(is_unset(item) for item in given):
        given = draft.texts(lora.targets, known=True)  # none, and reports it
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
        if parts or last in CHOICES:
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


def of_folder(draft: Draft, name: str, rank: str) -> None:
    """Put the folder of adapters that a run of verl begins with; `rank`: the argument that it may give as well.

    The folder alone switches adapters on, and decides what they are.
    """
    folder = draft.text(name)
    if not folder:
        return
    alone = "adapter.type" not in draft.settings
    if alone:
        draft.put("adapter.type", "lora", comment="lora_adapter_path alone switches them on", of=(name,))
    draft.assumed.append(
        f"{draft.label(name)}: verl takes rank, scale and layers from the folder's adapter_config.json"
        f"{'' if alone else f', and {draft.label(rank)} for its engines'}; here adapter.rank, alpha and targets say so"
    )
    draft.keep("adapter.path", name, folder)


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
    first="init_lora_weights",
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


_WITH = " (where use_vllm is true)"
_UNLESS = " (unless the file of --fsdp says fsdp_version 2, with which copies are merged)"


def sampled(draft: Draft, always: bool) -> None:
    """Tell how completions are sampled with adapters in TRL and ms-swift; `always`: vLLM generates in any case."""
    open_ = not always and is_unset(draft.values.get("use_vllm"))
    if draft.switch("vllm_enable_lora") or not (always or open_ or draft.switch("use_vllm")):
        draft.differs.append(
            "completions are sampled with adapters beside the weights there; here that is so in 16 bits, and in "
            "float32 engines get merged weights (adapter.engine)"
        )
        return
    if _merged_apart(draft):
        return
    unread = str(draft.values.get("fsdp", "")).endswith(".json") and draft.source.project == "ms-swift"
    draft.differs.append(
        f"adapters are added to the base weights there for every rollout{_WITH if open_ else ''} and taken out again, "
        "rounded to their type, so "
        f"that base and reference drift a little{_UNLESS if unread else ''}; here the base is never written"
    )


def _merged_apart(draft: Draft) -> bool:
    """Tell whether ms-swift merges adapters into copies, so that base weights stay: with FSDP2 and with ZeRO-3."""
    if draft.source.project != "ms-swift":
        return False
    given, version = draft.text("fsdp") or "", draft.variables.get("fsdp_version", "")
    second = "fsdp2" in given.lower() or re.search(r"fsdp_version\W+2\b", given) or version == "2"
    return bool(second) or "zero3" in (draft.text("deepspeed") or "")


# Of ms-swift.
_TUNER = Lora(
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "use_rslora",
    dropout_default=0.05,
    first="init_weights",
    others=(
        "target_regex",
        "target_parameters",
        "modules_to_save",
        "use_dora",
        "lora_bias",
        "lorap_lr_ratio",
    ),
)
# Arguments that name weights in Megatron's own format, which nothing reads here.
_MEGATRONS = ("mcore_adapter", "adapter_load")
# Arguments of reference models -> those of what the run begins with; first of adapters, then of whole models.
_REFERENCES = {"ref_adapters": "adapters", "mcore_ref_adapter": "mcore_adapter", "ref_adapter_load": "adapter_load"}
_WHOLE = {"ref_model": "model", "mcore_ref_model": "mcore_model", "ref_load": "load"}
_RESUMES, _WEIGHTS_ALONE = "resume_from_checkpoint", "resume_only_model"


def kind_of_tuner(draft: Draft, default: str) -> str:
    """Return the tuner of ms-swift; with adapters to begin with, Megatron-SWIFT makes LoRA of full."""
    kind = draft.sure("tuner_type", default)
    if kind != "full" or draft.source.project == "ms-swift":
        return kind
    names = [name for name in ("adapters", *_MEGATRONS, *_REFERENCES) if draft.values.get(name)]
    named = next((name for name in names if is_unset(draft.values[name]) or draft.given(name)), None)
    if named is None:
        return kind
    told = "tuner_type full is" if draft.given("tuner_type") else "tuner_type is not given:"
    draft.assumed.append(
        f"{told} lora, since {draft.label(named)} names adapters: so it is in Megatron-SWIFT since 3.12"
    )
    return "lora"


def of_swift(draft: Draft, kind: str, rate: str, default: float) -> None:
    """Put the adapters of ms-swift's tuner `kind`, of which LoRA alone has a counterpart, or tell that there are none.

    `rate`: the argument of the learning rate, with its default.
    """
    begins = _resumed(draft, kind)
    for name in _MEGATRONS:
        if name in draft.source.table.known and draft.values.get(name) and not is_null(draft.values[name]):
            text = "adapters in Megatron's format are not read here: write them as a folder of peft (adapter.path)"
            draft.drop(name, text)
            draft.assumed.append(f"{draft.label(name)}: {text}")
    if kind == "full":
        _without(draft)
    elif kind != "lora":
        parts.adapters(draft, "tuner_type", rate, default)
    else:
        put(draft, "tuner_type", _TUNER)
        if draft.source.project != "ms-swift":  # Megatron-SWIFT
            if draft.text("tuner_type") != "lora":
                draft.put("adapter.type", "lora", comment="since adapters are named", of=("tuner_type",))
            draft.differs.append(f"adapters of Megatron's linear_qkv and linear_fc1 have {ONE_FIRST}")
        if begins:
            draft.keep("adapter.path", _RESUMES, begins)
            draft.credit("adapter.path", _WEIGHTS_ALONE)
            draft.drop("adapters", f"{_RESUMES} with {_WEIGHTS_ALONE} takes precedence over it")
        elif is_unset(draft.values.get("adapters")):
            draft.sure("adapters", "")  # reports it
        elif draft.given("adapters") and len(found := draft.texts("adapters")) == 1:
            draft.keep("adapter.path", "adapters", found[0])
        elif draft.given("adapters"):
            draft.drop("adapters", "adapter.path is one folder")
        if "adapter.path" in draft.settings:
            draft.assumed.append(
                f"adapters of a folder: {draft.source.project} takes their rank, scale and layers from its "
                "adapter_config.json, whatever the arguments say; adapter.rank, alpha and targets have to be the same"
            )
    draft.credit("optimizer.lr", "tuner_type")


def _without(draft: Draft) -> None:
    """Tell of adapters to begin with where all weights are trained: the policy there does not have them either."""
    if is_unset(draft.values.get("adapters")):
        draft.sure("adapters", "")  # reports it
    elif draft.given("adapters"):
        text = "with tuner_type full the policy does not begin with them: merge them into the model if it is to"
        draft.drop("adapters", text)
        draft.assumed.append(f"{draft.label('adapters')}: {text}")


def _resumed(draft: Draft, kind: str) -> str:
    """Return the checkpoint whose weights a run begins with, empty if it names none; of all weights, put it."""
    folder = draft.text(_RESUMES) if _RESUMES in draft.source.table.known else None
    if folder is None or folder.lower() == "false":
        if draft.given(_WEIGHTS_ALONE):
            draft.drop(_WEIGHTS_ALONE, f"it is read with {_RESUMES} only")
        return ""
    if not draft.switch(_WEIGHTS_ALONE):
        text = (
            "its weights, optimizer and step are not read: the run begins anew here; gspo-hpc resumes runs of its own, "
            "from their run directories"
        )
        draft.drop(_RESUMES, text)
        draft.assumed.append(f"{draft.label(_RESUMES)}: {text}")
        return ""
    if swift.third(draft) in swift.EARLY:
        draft.drop("ignore_data_skip", "up to 3.6 the run begins at step 0 in any case, as here")
    elif not draft.switch("ignore_data_skip"):
        draft.differs.append(
            f"{draft.label(_RESUMES)}: since 3.7 ms-swift goes on at the step of that checkpoint and skips the data "
            "before it, unless ignore_data_skip is true; here the run begins at step 0"
        )
    elif draft.given("ignore_data_skip"):
        draft.drop("ignore_data_skip", "the run begins at step 0 here in any case")
    if kind != "full":
        return folder
    draft.keep("model.path", _RESUMES, folder, f"with {_WEIGHTS_ALONE}")
    draft.credit("model.path", _WEIGHTS_ALONE)
    draft.drop("model", f"{_RESUMES} with {_WEIGHTS_ALONE} takes precedence over it")
    return ""


def reference(draft: Draft) -> None:
    """Tell which model a divergence of ms-swift is against; here it is the one that the run begins with."""
    beta = draft.settings.get("algorithm.kl_beta", (0.0,))[0]
    named = [name for name in (*_REFERENCES, *_WHOLE) if not is_null(draft.values.get(name))]
    named = [name for name in named if draft.values[name]]
    for name in named:
        whole = name in _WHOLE
        ours = draft.values.get((_WHOLE if whole else _REFERENCES)[name])
        begins = str(draft.settings.get("model.path" if whole else "adapter.path", ("",))[0])
        theirs = [text.rstrip("/") for text in draft.texts(name)]
        if not beta:
            draft.drop(name, "with a beta of 0 there is no reference model")
        elif theirs == [begins.rstrip("/")] or draft.values[name] == ours:
            draft.drop(name, "it is what the run begins with, and so is the reference model here")
        elif not whole and "adapter.type" not in draft.settings:
            draft.drop(name, "it is read with adapters only")
        else:
            text = "the reference model is the one that the run begins with here"
            draft.drop(name, text)
            draft.assumed.append(f"{draft.label(name)}: {text}, and that one there")
    if beta and "adapter.path" in draft.settings and not {*named} & {*_REFERENCES}:
        draft.differs.append(
            f"the reference of the divergence is the model without adapters in {draft.source.project}, where "
            "ref_adapters does not name them, and here the model with those of adapter.path"
        )
