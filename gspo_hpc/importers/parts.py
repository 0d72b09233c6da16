"""Convert what several projects have in common: machines, sizes, data, names.

Each function reads arguments from a draft and puts settings of ours; sizes count completions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from gspo_hpc.config import schema
from gspo_hpc.config.constants import USUAL_GPUS_PER_NODE
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_data_file, is_null, yaml_value
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.tables import default_of
from gspo_hpc.rewards.builtin import REGISTRY

_WHERE_IT_RUNS = re.compile(r"gpu|cpu|xpu|auto|\d+:\d+")  # words of torchrun: all devices, or from 1 to 4 nodes
_ROUTED_IN_16_BIT = re.compile(r"(?i)qwen.*(-a\d+(\.\d+)?b|moe|3-30b|3-235b)|mixtral|gpt-oss")
# Names of models that read images.
SEES = re.compile(
    r"(?i)(?:^|[-_/.\d])(?:vl|vlm|vision|llava|internvl|pixtral|omni|smolvlm|qwen3[._][56])(?=[-_./\d]|$)"
)
SEEN = "rows are text alone here, so what comes with images is not trained"


def split_nodes(gpus: int) -> tuple[int, int]:
    """Return (nodes, GPUs of each): as few nodes as hold them, at most 8 GPUs to a node."""
    each = next(size for size in range(min(USUAL_GPUS_PER_NODE, gpus), 0, -1) if gpus % size == 0)
    return gpus // each, each


def machines(draft: Draft, nodes: int | None, each: int | None, gpus: int | None, unknown: str) -> tuple[int, int]:
    """Put the cluster; return (nodes, training GPUs of each). `gpus` (--gpus) goes before what the file says."""
    if gpus is not None:
        if each is not None and (nodes or 1) * each != gpus:
            draft.assumed.append(f"--gpus {gpus} takes precedence over what the file gives: {nodes or 1} x {each} GPUs")
        nodes, each = split_nodes(gpus)
        if nodes > 1:
            draft.assumed.append(f"--gpus {gpus}: taken for {nodes} nodes of {each}")
    elif each is None:
        draft.assumed.append(f"{unknown}: 1 GPU is assumed; give --gpus N")
    nodes, each = nodes or 1, each or 1
    draft.put("cluster.nodes", nodes)
    draft.put("cluster.gpus_per_node", each)
    return nodes, each


def visible(draft: Draft, variables: Mapping[str, str]) -> int | None:
    """Return how many devices CUDA_VISIBLE_DEVICES names, None if it is not set or not known."""
    value = variables.get("CUDA_VISIBLE_DEVICES", "")
    if is_unset(value):
        unknown(draft, "CUDA_VISIBLE_DEVICES", value)
        return None
    return len([item for item in value.split(",") if item.strip()]) or None


def unknown(draft: Draft, name: str, value: str) -> None:
    """Tell that a variable or an option of a launcher has a value that is not known."""
    draft.assumed.append(f"{name}={value}: {draft.why_unset(value)}; it is left out")
    draft.around.append(f"{name}={value}")


def rounded(value: float) -> float:
    """Return a product without what binary numbers add to it: 5e-07 for 5e-06 x 0.1."""
    return float(f"{value:.12g}")


def is_of_machine(value: str) -> bool:
    """Tell whether a count is a word of torchrun for what the machine has, or for any number in a range."""
    return _WHERE_IT_RUNS.fullmatch(value.strip()) is not None


def positive(draft: Draft, name: str, value: str | None) -> int | None:
    """Return a count from an environment variable or an option of the launcher, None if it is not known."""
    if value is None or value is True:
        return None
    if is_unset(value):
        unknown(draft, name, value)
        return None
    if is_of_machine(value):
        draft.assumed.append(f"{name}={value}: how many these are is known only where it runs; give --gpus N")
        return None
    if not value.strip().isdecimal() or int(value) < 1:
        draft.refuse(f"{name}={value}: must be a whole number, 1 or more")
        return None
    return int(value)


def router(draft: Draft, name: str, bridged: bool = False) -> None:
    """Tell that routers compute in float32 here, where `name` is a model whose router has another type there.

    Transformers, and the bridge that verl uses, compute those of Qwen's mixtures and of Mixtral in the model's type.
    `bridged`: such a bridge to Megatron makes the layers, which has float32 for Qwen3-Next.
    """
    model = PurePath(draft.text(name) or "").name
    if bridged and "qwen3-next" in model.lower():
        return
    if _ROUTED_IN_16_BIT.search(model) and "moe.router_dtype" not in draft.settings:
        draft.assumed.append(
            "the router of experts computes in float32 here, and in the model's dtype in the original; "
            "moe.router_dtype: null does so, too"
        )


def kept(draft: Draft, name: str, saved: bool = False) -> None:
    """Put how many checkpoints are kept; null, zero and less are all of them in the other projects.

    `saved`: the original saves some, so that it is told where it keeps more than are kept here.
    """
    unknown = is_unset(draft.values.get(name))
    if unknown:
        draft.whole(name)  # reports it
    elif (count := draft.whole(name, None, least=-(10**9)) or 0) > 0:
        draft.put("checkpoint.keep", count, name)
        return
    else:
        draft.drop(name, "all are kept there; here checkpoint.keep is how many")
    if saved:
        number, unless = default_of("checkpoint.keep"), f" unless {name} is a number" * unknown
        text = f"checkpoints: all are kept in the original{unless}, and the last {number} here (checkpoint.keep)"
        draft.differs.append(text)


def rollout_size(draft: Draft, update: int, rollout: int, comment: str, of: Sequence[str] = ()) -> None:
    """Put completions per rollout: as updates of it where it is whole updates."""
    if rollout % update == 0:
        draft.put("batch.steps_per_generation", rollout // update, comment=comment, of=of)
    else:
        draft.put("batch.generation_batch_size", rollout, comment=comment, of=of)


def offload(draft: Draft, names: Mapping[str, str]) -> None:
    """Put what of the trainer moves to host memory, if that is given. `names`: our part -> the argument for it."""
    if not any(draft.given(name) for name in names.values()):
        return
    given = tuple(dict.fromkeys(names.values()))
    moved = [part for part, name in names.items() if draft.switch(name)]
    draft.put("memory.offload_trainer", bool(moved), of=given)
    if 0 < len(moved) < len(_PARTS):
        draft.put("memory.offload_parts", moved, of=given)


def earlier(draft: Draft, project: str, defaults: Mapping[str, str]) -> None:
    """Tell defaults that earlier versions of a project had: of arguments that are not given."""
    if changed := [f"{name} {text}" for name, text in defaults.items() if name not in draft.values]:
        draft.assumed.append(f"defaults are those of {project}; earlier versions had {'; '.join(changed)}")


def epochs(draft: Draft, name: str, count: float) -> None:
    """Put the passes over the data, from which the steps follow when the run starts."""
    draft.put("run.max_epochs", int(count) if count == int(count) else count, name)


def turns(draft: Draft, name: str, where: str = "with tools or an environment") -> None:
    """Say loudly that the original is a rollout of several turns, and this is not."""
    text = f"the original goes on for several turns, {where}; here a rollout is one completion"
    draft.assumed.append(f"{draft.label(name)}: {text}")


def rewards(draft: Draft, name: str, weights: str) -> None:
    """Report the reward functions: their signature differs between projects, so none is carried over."""
    if names := draft.texts(name):
        weighed = f", weighed {' '.join(draft.texts(weights))}" if draft.given(weights) else ""
        own = f"{', '.join(REGISTRY)}, or path/to/file.py:function"
        hint = "; number_match compares numbers" if names[0].startswith("accuracy") else ""
        draft.drop(name, f"reward functions differ: set reward.functions{weighed} to {own}{hint}")


_PARTS = ("weights", "gradients", "optimizer")
# Rates up to here are usual where all weights are trained; adapters take ten to a hundred times as much.
_USUAL_RATE = 5e-6


def adapters(draft: Draft, name: str, rate: str, default: float) -> None:
    """Report that all weights are trained, and a learning rate `rate` that fits adapters only."""
    draft.drop(name, "all weights are trained here, no adapters")
    value = draft.number(rate, default) or 0.0
    if value > _USUAL_RATE:
        given = draft.label(rate) if draft.given(rate) else f"{rate} {default:g}, the default there,"
        draft.assumed.append(f"{given} was chosen for adapters: all weights are trained here, usually at 1e-6")


def model(draft: Draft, name: str) -> None:
    """Put the model's folder, or its name on the hub."""
    if path := draft.text(name):
        draft.keep("model.path", name, path)
        if SEES.search(path):
            draft.assumed.append(f"{path} reads images: {SEEN}")


def revision(draft: Draft, of: str) -> None:
    """Put the commit or branch of the model `of` on the hub beside its name."""
    name, path = "model_revision", str(draft.settings.get("model.path", ("",))[0])
    if (given := draft.text(name)) is None:
        return
    if given not in ("main", "master") and re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not is_unset(given):
        draft.put("model.path", f"{path}@{given}", comment=f"with {name}", of=(of, name))
    else:
        draft.drop(name, "it is the default" if given in ("main", "master") else "it is that of a model on the hub")


def data(draft: Draft, name: str, key: str) -> None:
    """Put data.train or data.eval where it is one file that can be read here."""
    files = draft.texts(name)
    if len(files) == 1 and is_data_file(files[0]):
        path = files[0].split("#")[0]
        draft.keep(key, name, path)
        if "#" in files[0]:
            draft.drop(name, "all rows of the file are used here")
    elif files:
        rows = "the rows of all of these" if len(files) > 1 else "its rows"
        text = f"{key} takes JSONL, CSV or parquet, and datasets as folders or on the hub (OWNER/NAME:CONFIG/SPLIT)"
        draft.drop(name, f"{text}: name them, or write {rows}, each with its prompt, to such a file")


def sources(draft: Draft, name: str, shares: str) -> bool:
    """Put data.sources for several files, or some rows of one (FILE#N); return whether there are such.

    `shares`: the argument with the chance of each file; without it, every file has the share of its size.
    """
    files = draft.texts(name)
    several = len(files) > 1 or any("#" in file for file in files)
    if not several or not all(map(is_data_file, files)):
        draft.drop(shares, "it is of several files that can be read here")
        return False
    pairs = zip(_labels(files), files, strict=True)
    made: list[dict[str, Any]] = [{"name": label, "files": file} for label, file in pairs]
    if weights := draft.texts(shares, known=True):
        if len(weights) != len(files):
            draft.wrong(shares, f"has {len(weights)} values for {len(files)} data sets")
        for source, weight in zip(made, weights, strict=False):
            source["weight"] = yaml_value(weight)
        draft.credit("data.sources", shares)
        draft.differs.append(f"{shares}: an epoch there is not each row once (stopping_strategy): see run.max_steps")
    unset = next(filter(is_unset, files), None)
    draft.put("data.sources", made, name) if unset is None else draft.keep("data.sources", name, unset)
    draft.settings["data.sources"] = (made, draft.settings["data.sources"][1])  # of all files, also where one is unset
    if any("#" in file for file in files):
        draft.differs.append("FILE#N with N above the rows of the file repeats rows there, and is an error here")
    return True


def _labels(files: Sequence[str]) -> list[str]:
    """Return a name for each file, all different: that of the file, without what a name of a source may not have."""
    found: list[str] = []
    for file in files:
        stem = PurePath(file.split("#")[0]).name.partition(".")[0]
        label = schema.run_name(stem, 36) or "data"
        same = sum(one == label or re.fullmatch(rf"{re.escape(label)}-\d+", one) is not None for one in found)
        found.append(f"{label}-{same + 1}" if same else label)
    return found


def prompt_length(draft: Draft, name: str, window: str, response: int, comment: str, apart: bool = False) -> int:
    """Put rollout.max_prompt_length: from its own argument, or what the engine's window leaves beside the response.

    `apart`: engines with GPUs of their own are the trainer's all the same, and no server with a window of its own.
    """
    given, whole = draft.whole(name), draft.whole(window)
    if given is not None:
        draft.put("rollout.max_prompt_length", given, name, comment)
        served = draft.settings.get("rollout.mode", ("", ""))[0] == "server" and not apart
        if whole is not None and whole < given + response and not served:
            draft.assumed.append(
                f"{draft.label(window)}: an engine of {draft.source.project} stops there, and here at "
                f"{given + response} tokens, prompt and response together"
            )
        return given
    if whole is not None and whole <= response:
        draft.wrong(window, f"must be above the longest completion ({response}): a prompt has to fit, too")
    elif whole is not None:
        text = f"{window} {whole} less the response"
        draft.put("rollout.max_prompt_length", whole - response, comment=text, of=(window,))
        return whole - response
    draft.put("rollout.max_prompt_length", 512, comment="assumed")
    value = draft.values.get(name)
    why = "is not known" if is_unset(value) else f"is {value}" if name in draft.values else "is not given"
    draft.assumed.append(f"{name} {why}: rollout.max_prompt_length 512 is assumed")
    return 512


def engine(draft: Draft, names: Mapping[str, tuple[str, type]], defaults: Mapping[str, float]) -> None:
    """Put rollout.engine: vLLM's own arguments.

    `names`: argument of the other project -> (vLLM's, its type). `defaults`: those of the project that vLLM does not
    share, by vLLM's names. A server has arguments of its own.
    """
    if "rollout.engine" in draft.settings:
        for name in filter(draft.given, names):
            draft.drop(name, "the command that starts the server decides it")
        return
    found: dict[str, int | float | bool] = {}
    for name, (own, kind) in names.items():
        if is_unset(draft.values.get(name)):
            draft.number(name)  # reports it
        if not draft.given(name):
            continue
        read = draft.switch if kind is bool else draft.whole if kind is int else draft.number
        value = read(name)
        if kind is float and value is not None and not 0 < value <= 1:
            draft.wrong(name, "must be above 0 and at most 1")
        elif value is not None:
            found[own] = value
            draft.credit("rollout.engine", name)
    assumed = [own for own in defaults if own not in found]
    if found := {**found, **{own: defaults[own] for own in assumed}}:
        text = f"{' and '.join(assumed)}: default of {draft.source.project}" if assumed else ""
        draft.put("rollout.engine", found, comment=text)


def run_name(draft: Draft, names: Sequence[str]) -> None:
    """Put run.name from the first argument that gives one."""
    for name in names:
        text = draft.text(name)
        short = schema.run_name(PurePath(text).name) if text else ""
        if text and short and not is_unset(text):
            draft.put("run.name", short, of=(name,))
            if len(whole := schema.run_name(PurePath(text).name, len(text))) > len(short):
                draft.assumed.append(f"{name}: of its {len(whole)} characters, run.name has the first {len(short)}")
            break


def trackers(draft: Draft, name: str, default: Sequence[str]) -> None:
    """Put tracking from the list of backends."""
    found = [item.lower() for item in draft.texts(name)] if draft.given(name) else list(default)
    draft.credit("tracking.wandb", name)
    if not {"wandb", "all"} & {*found}:
        draft.put("tracking.wandb", "disabled")
    if {"tensorboard", "all"} & {*found}:
        draft.put("tracking.tensorboard", True, of=(name,))
    for tracker in ("mlflow", "trackio", "swanlab"):
        if tracker in found:
            draft.put(f"tracking.{tracker}", "online" if tracker == "swanlab" else True, of=(name,))
    known = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab", "none", "all", "console")
    if others := [item for item in found if item not in known]:
        draft.drop(name, f"{' '.join(others)}: there are W&B, TensorBoard, MLflow, Trackio and SwanLab here")


_WANDB = {"WANDB_PROJECT": "wandb_project", "WANDB_ENTITY": "wandb_entity", "WANDB_MODE": "wandb"}
_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # what Transformer Engine reads of FP8's scales
_SIZES = "NNODES NPROC_PER_NODE CUDA_VISIBLE_DEVICES num_machines num_processes nproc_per_node num_gpus".split()
# Keys that variables, and options of a launcher, decide.
DECIDED = {
    **{name: (f"tracking.{last}",) for name, last in _WANDB.items()},
    **dict.fromkeys(_SIZES, ("cluster.nodes", "cluster.gpus_per_node")),
    _SCALES: ("slurm.environment",),
}


def environment(draft: Draft) -> None:
    """Put what the script tells W&B through variables, where no argument says it."""
    for name, last in _WANDB.items():
        value, key = draft.variables.get(name, ""), f"tracking.{last}"
        arguments = [one for one, (own, _) in draft.source.table.copied.items() if own == key]
        if key in draft.settings or any(not is_null(draft.values.get(one)) for one in arguments):
            continue
        if is_unset(value):
            unknown(draft, name, value)
        elif value in ("online", "offline", "disabled") if last == "wandb" else value:
            draft.put(key, value, comment=f"{name} in the script")
    if (value := draft.variables.get(_SCALES, "")) and "model.fp8" in draft.settings:
        if is_unset(value):
            unknown(draft, _SCALES, value)
        else:
            draft.put("slurm.environment", {_SCALES: value}, comment="as in the script; export it for gspo-hpc train")


def warmup(draft: Draft, ratio: float | None, name: str, steps: int | None, up: bool = False, least: int = 0) -> None:
    """Put the warm-up that is a share of all steps, rounded down or `up`, if those are known.

    `least`: 1 where the original does not round. Any part of a step makes the rate of its first update 0, as one does.
    """
    if not ratio:
        draft.credit("optimizer.lr_warmup_steps", name)
        return
    if steps is None:
        draft.drop(name, f"set optimizer.lr_warmup_steps to {ratio:g} of run.max_steps once that is known")
    else:
        draft.put(
            "optimizer.lr_warmup_steps",
            math.ceil(ratio * steps) if up else max(least, int(ratio * steps)),
            comment=f"{name} {ratio:g} of {steps} steps",
            of=(name,),
        )


def output(draft: Draft, name: str) -> None:
    """Report that the folder of the results is another one; its last part may name the run."""
    draft.drop(name, "the run directory is runs/NAME here, or run.dir")


def steps_unknown(draft: Draft, what: str) -> None:
    """Report that the length of the run follows from the size of the data."""
    draft.assumed.append(f"{what}: run.max_steps follows from the number of prompts; give --rows N")
