"""Tell which versions of ms-swift a run may be of, and what these have in place of the defaults of ms-swift 4.5.

Arguments show it: some that version 3 has are called otherwise in 4, or gone; a few were gone before 3.5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from gspo_hpc.importers import inputs
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.scripts.scope import is_unset

# Argument of version 3 alone -> the last version that has it: grpo_trainer.py and arguments.py of each tag.
_THIRD = {"train_type": "3.12", "num_infer_workers": "3.5", "tensor_parallel_size": "3.9", "tools_prompt": "3.3"}
_THIRD |= {"vllm_device": "3.5", "multi_turn_func": "3.9", "gc_collect_after_offload": "3.9"}
_TUNED = "train_type"  # which 4.0 takes for tuner_type, too
# Types and names of models that version 3 does not have.
_MODELS_OF_FOURTH = re.compile(
    r"(?i)(^|[/_-])(qwen-?3[._]5|glm[_-]?ocr|deepseek[_-]ocr[_-]?2|glm4_moe_lite|glm_moe_dsa|step3_vl|paddle_ocr_1_5)"
)
_SINCE_3_7 = ("importance_sampling_level", "top_entropy_quantile", "log_entropy")
_FOURTH = {"top_p": "0.9 (up to 4.0.2)", "top_k": "50 (up to 4.0.2)"}
_HELD = {"split_dataset_ratio": "0.01 (up to 3.5)"}
_EARLIEST = {  # before 3.5, whose server vllm_mode chooses
    "loss_type": "bnpo, a mean over the tokens of a micro-batch (up to 3.3)",
    "adam_beta2": "0.999 (up to 3.2.1)",
}
_LEAST = 16  # completions of an update, for which gradient_accumulation_steps is chosen up to 3.6
_WORKERS = "num_infer_workers"
EARLY = (_WORKERS, "tools_prompt", "vllm_device")  # signs of a version before 3.6
_OF_MODEL = (
    "without use_vllm transformers generates there, and samples from the top_k of the model's generation_config, 50 "
    "where it gives none; here from all tokens (rollout.top_k)"
)
_LONGEST, _LONGEST_BEFORE = "max_completion_length", ("response_length", "max_new_tokens")
_FILE = re.compile(r"(?i)\.(json|csv|txt|arrow)(#\d+)?$")  # also read as a file there, whatever it is called
_SERVERS = ("vllm_server_host", "vllm_server_base_url")


def third(draft: Draft) -> str:
    """Return an argument that only version 3 has, the one that was gone first; empty if there is none."""
    given = {draft.name(name) for name in ("tuner_type", "vllm_tensor_parallel_size")} | {*draft.values}
    found = [name for name in _THIRD if name in given and not (name == _TUNED and _of_fourth(draft))]
    return min(found, key=lambda name: float(_THIRD[name].partition(".")[2])) if found else ""


def _of_fourth(draft: Draft) -> bool:
    """Tell whether a run trains a model that ms-swift has since version 4 alone."""
    kinds = (draft.values.get(name) for name in ("model_type", "template", "model"))
    return any(isinstance(kind, str) and _MODELS_OF_FOURTH.search(kind) for kind in kinds)


def loss(draft: Draft) -> str:
    """Return the loss_type of a run that gives none: a mean over tokens where the version is below 3.4 for sure."""
    return "bnpo" if third(draft) == "tools_prompt" else "grpo"


def share_held_out(draft: Draft) -> float:
    """Return the split_dataset_ratio of a run that gives none: 0.01 where the version is below 3.6 for sure."""
    return 0.01 if third(draft) in EARLY else 0.0


def processes(draft: Draft, variables: Mapping[str, str]) -> int | None:
    """Return the processes of a node where NPROC_PER_NODE does not give them: ms-swift starts one.

    None if nothing tells how many GPUs there are, and those that are visible if NPROC_PER_NODE is not known.
    """
    seen = parts.visible(draft, variables)
    if seen in (None, 1) or "NPROC_PER_NODE" in variables or "nproc_per_node" in variables:
        return seen
    draft.assumed.append(
        f"NPROC_PER_NODE is not given: ms-swift starts one process, which has all of the {seen} visible GPUs; here "
        "1 GPU trains, unless --gpus N says otherwise"
    )
    return 1


def accumulated(draft: Draft, size: int, processes: int) -> int:
    """Return gradient_accumulation_steps; `size`: completions of a micro-batch of each of the `processes`."""
    name, sign = "gradient_accumulation_steps", third(draft)
    found = draft.whole(name)
    if found is not None:
        slept = draft.text("sleep_level") not in (None, "0")
        if slept and found > 1 and sign == "tools_prompt":
            draft.assumed.append(f"{draft.label(name)}: ms-swift up to 3.3 makes it 1 beside sleep_level")
            draft.drop(name, "ms-swift up to 3.3 makes it 1 beside sleep_level")
            return 1
        if slept and found > 1 and sign in EARLY:
            draft.assumed.append(f"{draft.label(name)}: up to 3.3 ms-swift makes it 1 beside sleep_level")
        return found
    early = max(1, math.ceil(_LEAST / size / processes))
    if sign in EARLY:
        draft.assumed.append(f"{name} is not given: {early}, as ms-swift up to 3.6 chooses for {processes} processes")
        return early
    late = draft.given("tuner_type") and draft.name("tuner_type") != _TUNED  # of version 4
    if early > 1 and not (late or _of_fourth(draft) or any(map(draft.given, _SINCE_3_7))):
        draft.assumed.append(
            f"{name} is not given: 1; ms-swift up to 3.6 chooses {early}, for {_LEAST} completions an update"
        )
    return 1


def addressed(draft: Draft) -> bool:
    """Tell whether a run names a server, which has a window of its own."""
    return any(draft.given(name) for name in _SERVERS) or draft.text("vllm_mode") == "server"


def response(draft: Draft) -> int:
    """Put the longest completion, and return it. Since 3.6 swift rlhf has two more names for it, which come first."""
    name, most = _LONGEST, draft.whole(_LONGEST, 512) or 512
    told = ""
    for older in _LONGEST_BEFORE if draft.source.project == "ms-swift" else ():
        if third(draft) in EARLY:
            draft.drop(older, f"{_LONGEST} alone bounds completions up to 3.5")
        elif name != _LONGEST:
            draft.drop(older, f"{name} takes precedence over it")
        elif length := draft.whole(older, 0, least=0):
            name, most = older, length
            told = f"{name}, which goes before {_LONGEST} since 3.6; up to 3.5 it has no effect"
        elif draft.given(older):
            draft.drop(older, "0 is as if it were not given")
    draft.put("rollout.max_response_length", most, name, told)
    if name != _LONGEST:
        draft.drop(_LONGEST, f"{name} takes precedence over it")
    return most


def prompts(draft: Draft, response: int) -> None:
    """Put the longest prompt, and what becomes of longer ones."""
    served = addressed(draft) and draft.settings.get("rollout.mode", ("",))[0] == "server"
    bounds = f"from max_length, which bounds the prompt in {draft.source.project}"
    if served:
        bounds = "from max_length; the server bounds prompts by the --max_length of its own command"
    parts.prompt_length(draft, "max_length", "vllm_max_model_len", response, bounds, apart=not addressed(draft))
    cut = draft.choice("truncation_strategy", ("left", "delete"), "left")
    if served and cut == "left":
        draft.put("data.overlong", "error", comment="the server of ms-swift refuses prompts that are too long", of=(
            "truncation_strategy",))  # fmt: skip
        return
    replaced = "" if cut == "left" else "there another prompt takes its place, so that an epoch is no shorter"
    draft.put("data.overlong", "truncate_left" if cut == "left" else "drop", "truncation_strategy", replaced)
    with_ray = any(map(draft.given, ("train.gpus", "rollout.gpus", "colocate_groups")))
    if cut == "left" and draft.given("max_length") and not with_ray:
        draft.differs.append(
            f"{draft.label('max_length')}: a longer prompt is cut for the engine alone there, and updates have it "
            "whole; here both have it cut"
        )


def registered(draft: Draft) -> None:
    """Tell what ms-swift does to a data set that it knows by name."""
    names = [name for name in draft.texts("dataset") if not inputs.is_data_file(name) and not _FILE.search(name)]
    if not names:
        return
    text = "ms-swift may change the prompts of a data set that it registers by name, and choose its subset and split"
    if any("clevr_cogen_a_train" in name for name in names):
        text += (
            "; to those of clevr_cogen_a_train it adds ' Output the thinking process in <think> </think> and final "
            "answer (number) in <answer> </answer> tags.'"
        )
    draft.differs.append(f"{names[0]}: {text} (swift/dataset); here prompts are what the rows hold")


def mode(draft: Draft) -> str:
    """Return where vLLM runs, colocate or server.

    Up to 3.11.0, ms-swift on Hugging Face's trainer follows the address of a server alone, whatever vllm_mode says.
    """
    addressed = any(draft.given(name) for name in _SERVERS)
    found, given = "server" if addressed else "colocate", draft.choice("vllm_mode", ("colocate", "server"), "colocate")
    silent = not addressed and not draft.given("vllm_mode") and third(draft) not in EARLY
    if draft.source.project == "ms-swift" and draft.switch("use_vllm") and silent:
        draft.assumed.append(
            "vllm_mode is not given: colocate, as in ms-swift up to 3.11.0; later versions demand it beside use_vllm"
        )
    if draft.source.project != "ms-swift" or found == given:
        return given
    early = f"ms-swift up to 3.11.0 takes {found} {'beside' if addressed else 'without'} a server's address"
    if not draft.given("vllm_mode"):
        draft.assumed.append(f"vllm_mode is not given: {found} is taken, as {early}")
        return found
    taken = found if third(draft) else given
    draft.assumed.append(
        f"{draft.label('vllm_mode')}: {early} in any case, later ones as it is given; {taken} is taken"
    )
    return taken


def engines_apart(draft: Draft, each: int) -> int:
    """Return how many engines a node has on GPUs of their own beside `each` that train, 0 if they share those.

    So it is up to 3.4 where vLLM generates, unless there are as many engines as GPUs; none has tensor parallelism.
    """
    if third(draft) not in EARLY or draft.given("vllm_mode"):
        return 0
    if not (draft.switch("use_vllm") or draft.switch("use_lmdeploy")):
        return 0
    count = draft.whole(_WORKERS, 1) or 1
    return 0 if count == each else count


def sampling(draft: Draft) -> None:
    """Put top_p and top_k, whose defaults were others in ms-swift 3."""
    sign = third(draft)
    text = f"default of ms-swift 3, which has {sign}; 4.0.3 and later have {{}}"
    cut, most = (0.9, 50) if sign else (1.0, -1)
    whole = not sign and draft.source.project == "ms-swift" and not draft.switch("use_vllm")
    if whole and (draft.whole("top_k", -1, least=-1) or -1) < 1:
        draft.differs.append(
            _OF_MODEL if not is_unset(draft.values.get("use_vllm")) else f"if use_vllm is false: {_OF_MODEL}"
        )
    for name, value, present in (
        ("top_p", draft.number("top_p", cut), "1"),
        ("top_k", draft.whole("top_k", most, least=-1) or -1, "-1"),
    ):
        assumed = bool(sign) and not draft.given(name) and draft.values.get(name) is None
        draft.put(f"rollout.{name}", value, None if assumed else name, text.format(present) if assumed else "")
    tell(draft, sign)


def tell(draft: Draft, sign: str) -> None:
    """Tell which defaults were taken, and which ones another version had; `sign`: see :func:`third`."""
    earlier = dict(_HELD)
    if draft.source.project == "ms-swift" and not draft.given("vllm_mode"):  # Megatron-SWIFT has GRPO since 3.8
        earlier |= _EARLIEST
        if draft.switch("use_vllm") and sign not in EARLY and not any(draft.given(name) for name in _SERVERS):
            earlier[_WORKERS] = "1, an engine on a GPU beside those that train (up to 3.4)"
        if not draft.given("top_p") or not draft.given("top_k"):
            earlier["repetition_penalty"] = "that of the model's generation_config, as top_p and top_k (up to 3.1)"
    elif draft.source.project != "ms-swift":
        earlier["beta"] = "0.1 (up to 3.11)"
        if draft.given("wandb_project"):
            earlier["report_to"] = "wandb, since wandb_project is given (up to 3.11)"
    if not sign:
        held = {} if draft.given("tuner_type") else earlier  # 3 has no tuner_type
        parts.earlier(draft, "ms-swift 4.5", {**_FOURTH, **held})
        return
    taken = ["top_p", "top_k"]
    if share_held_out(draft):
        taken.append("split_dataset_ratio (0.01)")
        earlier.pop("split_dataset_ratio")
    if loss(draft) != "grpo":
        taken.append("loss_type (bnpo: a mean over a micro-batch there)")
        earlier.pop("loss_type", None)
    told = "; ".join(f"{name} {value}" for name, value in earlier.items() if name not in draft.values)
    last = "3 and 4.0 (in 4.0.3 and 4.0.4 top_p is 1 and top_k -1)" if sign == _TUNED else f"3 (up to {_THIRD[sign]})"
    draft.assumed.append(
        f"{sign} is an argument of ms-swift {last}: {', '.join(taken)} have its defaults where not "
        f"given, all others those of 4{'; earlier ones of 3 also had ' if told else ''}{told}"
    )
