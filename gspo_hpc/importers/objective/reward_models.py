"""Convert reward models: which model scores, on what of a GPU, and whether anything else has a part in the reward.

Functions of another project are not carried over, since their signatures differ. So where a reward model stands beside
some, it is told what to write for it, and the reward is left to whoever writes the functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_hpc.importers import parts, report
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.scripts.scope import is_unset

_NAME = "reward_model"
_CUSTOM = ("custom_reward_function.path", "reward.custom_reward_function.path")
_WEIGHTS = "the weights are part of reward.functions here"
_SHARED = (
    "reward models share the GPUs that train; with rollout.mode server, placement apart gives them GPUs of their own"
)


def of_verl(draft: Draft) -> None:
    """Put the reward model of a run of verl, which alone gives rewards where no function of one's own asks it."""
    for section in ("reward.reward_model", "reward_model"):
        enable = f"{section}.enable"
        if not draft.given(enable):
            continue
        if not draft.switch(enable):
            draft.drop(enable, report.OFF)
            continue
        path = next((name for name in (f"{section}.model_path", f"{section}.model.path") if draft.given(name)), None)
        if path is None:
            draft.drop(enable, "it names no model; give one in reward.models, and a term {function: reward_model}")
            continue
        own = next((name for name in _CUSTOM if draft.given(name)), None)
        model = {"name": _NAME, "path": draft.text(path)} | _engine_of_verl(draft, section)
        for name in (f"{section}.enable_resource_pool", f"{section}.n_gpus_per_node", f"{section}.nnodes"):
            draft.drop(name, _SHARED)
        if own is not None:
            _told(draft, (enable, path), [model], f"the function of {own} asks it")
            continue
        _put(draft, [model], path)
        draft.put("reward.functions", [{"function": _NAME}], enable)


def _engine_of_verl(draft: Draft, section: str) -> dict[str, Any]:
    """Return the settings of the engine that are given."""
    rollout, found = f"{section}.rollout", dict[str, Any]()
    if draft.given(name := f"{rollout}.tensor_model_parallel_size"):
        found["tensor_parallel_size"] = draft.whole(name, 1)
        draft.credit("reward.models", name)
    if draft.given(name := f"{rollout}.gpu_memory_utilization"):
        found["gpu_memory_utilization"] = draft.number(name, 0.5)
        draft.credit("reward.models", name)
    if draft.text(name := f"{rollout}.dtype") in ("float32", "bfloat16", "float16"):
        found["dtype"] = draft.text(name)
        draft.credit("reward.models", name)
    lengths = [f"{rollout}.prompt_length", f"{rollout}.response_length"]
    if all(map(draft.given, lengths)):
        found["max_length"] = sum(draft.whole(name, 1) or 1 for name in lengths)
        draft.credit("reward.models", *lengths)
    elif draft.given(name := f"{section}.max_length"):
        found["max_length"] = draft.whole(name)
        draft.credit("reward.models", name)
    return found


def of_swift(draft: Draft) -> None:
    """Put the reward models of a run of ms-swift, or report them beside its reward functions."""
    plugins = draft.texts("reward_model_plugin")
    paths = draft.texts("reward_model", known=True)
    others = [name for name in plugins if name != "default"]
    if not paths:
        _by_functions(draft)
        return
    models = _models(paths)
    if others:
        _told(draft, ("reward_model",), models, f"the plugin {others[0]} asks it")
        _by_functions(draft)
    elif draft.given("reward_funcs"):
        _told(draft, ("reward_model",), models, "reward_funcs has functions, too")
        _by_functions(draft)
    else:
        _put(draft, models, "reward_model")
        _functions(draft, models, "reward_model")
        draft.credit("reward.models", "reward_model_plugin")


def of_trl(draft: Draft) -> None:
    """Put the reward models of a run of TRL, which stand among its reward functions by their names on the hub."""
    named = draft.texts("reward_funcs")
    found = [name for name in named if _is_model(name)]
    alone = "reward_model_name_or_path"  # of TRL's own scripts, which put it before the functions
    if draft.given(alone):
        found = [str(draft.text(alone)), *found]
    if not found or any(map(is_unset, found)):
        _by_functions(draft)
        return
    models, origin = _models(found), alone if draft.given(alone) else "reward_funcs"
    if len(found) < len(named) + draft.given(alone):
        _told(draft, (origin,), models, "there are functions, too")
        if origin == alone:
            _by_functions(draft)
        return
    _put(draft, models, origin)
    _functions(draft, models, origin)
    if origin == alone:
        draft.credit("reward.models", "reward_funcs")


def _by_functions(draft: Draft) -> None:
    """Report the reward functions and their weights."""
    parts.rewards(draft, "reward_funcs", "reward_weights")
    draft.drop("reward_weights", _WEIGHTS)


def _is_model(name: str) -> bool:
    """Tell whether a reward function is the name of a model on the hub, or its folder: functions have no slash."""
    return "/" in name and ".py" not in name and "(" not in name


def _models(paths: Sequence[str]) -> list[dict[str, Any]]:
    names = [_NAME] if len(paths) == 1 else [f"{_NAME}_{number}" for number in range(1, len(paths) + 1)]
    return [{"name": name, "path": path} for name, path in zip(names, paths, strict=True)]


def _put(draft: Draft, models: Sequence[Mapping[str, Any]], name: str) -> None:
    apart = {"placement": "apart"} if draft.settings.get("rollout.mode", ("",))[0] == "server" else {}
    draft.put("reward.models", [dict(one) | apart for one in models], name)


def _functions(draft: Draft, models: Sequence[Mapping[str, Any]], name: str) -> None:
    """Put a term for each model, with the weights that are given."""
    weights = draft.texts("reward_weights", known=True)
    terms = [_term(one, many=len(models) > 1) for one in models]
    if len(weights) == len(models):
        terms = [term | {"weight": float(weight)} for term, weight in zip(terms, weights, strict=True)]
        draft.credit("reward.functions", "reward_weights")
    else:
        draft.drop("reward_weights", _WEIGHTS)
    draft.put("reward.functions", terms, comment=f"of {name}", of=(name,))


def _term(model: Mapping[str, Any], *, many: bool) -> dict[str, Any]:
    return {"function": _NAME} | ({"args": {"model": model["name"]}} if many else {})


def _told(draft: Draft, names: Sequence[str], models: Sequence[Mapping[str, Any]], why: str) -> None:
    """Report models whose scores are not the whole reward, with what to write for them."""
    entries = "; ".join(", ".join(f"{key}: {value}" for key, value in one.items()) for one in models)
    terms = ", ".join("{function: reward_model}" if len(models) == 1 else f"{one['name']}" for one in models)
    for name in names:
        draft.drop(name, f"{why}: give reward.models ({entries}), and terms of reward.functions that ask it ({terms})")
