"""Read with what a Python file loads its model, and which adapters it makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gspo_hpc.importers import tables
from gspo_hpc.importers.texts import trl_kinds
from gspo_hpc.importers.texts.constants import is_code
from gspo_hpc.importers.texts.syntax import Tree, called, shown
from gspo_hpc.importers.texts.trainers import TRAINER

# Arguments of peft's LoraConfig, and of Unsloth's get_peft_model, by TRL's names for them.
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
         "target_modules": "lora_target_modules", "target_parameters": "lora_target_parameters",
         "modules_to_save": "lora_modules_to_save", "task_type": "lora_task_type", "use_dora": "use_dora",
         "init_lora_weights": "init_lora_weights"}  # fmt: skip
_LOADED = {"model_name": "model_name_or_path", "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
           "gpu_memory_utilization": "vllm_gpu_memory_utilization", "revision": "model_revision"}  # fmt: skip
_PRECISIONS = {"load_in_4bit", "load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning"}
_NOTHING = "it has no counterpart here"
QUANTIZED = "weights are never quantized here"


def of_adapters(tree: Tree, value: Callable[[ast.expr], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the adapters that a file makes by peft or Unsloth, by TRL's names, and what is not carried over, with why.

    `value` evaluates an expression. Arguments without a name of TRL's are among what is not carried over.
    """
    found: dict[str, Any] = {}
    left: dict[str, str] = {}
    makers: list[tuple[str, ast.Call]] = []
    for call in tree.calls:
        fast = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value).startswith("Fast")
        if called(call) == "LoraConfig":
            makers.append(("LoraConfig", call))
        elif called(call) == "get_peft_model" and fast:
            makers.append(("unsloth", call))
        elif called(call) == "from_pretrained" and fast:
            given = [("model_name", node) for node in call.args[:1]]
            given += [(keyword.arg or "**", keyword.value) for keyword in call.keywords]
            for name, node in given:
                _sort(_LOADED, found, left, ast.unparse(call.func), name, value(node))
            if _PRECISIONS.isdisjoint(name for name, _ in given):
                left[f"{ast.unparse(call.func)} load_in_4bit=True (its default)"] = QUANTIZED
    more, told = _loaded(tree, value, bool(makers))
    found, left = more | found, left | told
    if len(makers) > 1:
        lines = ", ".join(str(call.lineno) for _, call in makers)
        left[f"LoraConfig (lines {lines})"] = "it is not told which one the trainer gets: set adapter.*"
        return found | {"peft_config": f"$(one of lines {lines})"}, left
    for kind, call in makers:
        found["peft_config"] = kind if tree.certain(call) else f"$({kind} in line {call.lineno})"
        for keyword in call.keywords:
            if keyword.arg is None:
                left[f"{called(call)} **{shown(keyword.value)}"] = "it may give any argument of the adapters"
            elif not (keyword.arg == "bias" and value(keyword.value) == "none"):
                _sort(_LORA, found, left, called(call), keyword.arg, value(keyword.value))
            else:
                left[f"{called(call)} bias=none"] = "biases are frozen here, too"
    return found, left


_TRAINED = re.compile(r"Model|For[A-Z]")  # of a class whose from_pretrained loads a model, as AutoModelForCausalLM
_GRADES = re.compile(r"Reward|Classification|Peft|Sentence|Fast")  # and of one that grades, or is read elsewhere
_DTYPE = re.compile(r"(?:\$\(torch\.)?(bfloat16|float16|float32|auto)\)?")
_QUANTIZED = ("quantization_config", "load_in_4bit", "load_in_8bit")


def _loaded(tree: Tree, value: Callable[[ast.expr], Any], new: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a file loads its model with, by TRL's names, and what of that is not carried over, with why.

    `new`: it also makes adapters of its own.
    """
    trained = [tree.when(call) for call in tree.calls if called(call).endswith(TRAINER)]

    def late(call: ast.Call) -> bool:
        """Tell whether a call comes after the trainer is made, as of a file that merges its adapters at the end."""
        time = tree.when(call)
        return time is not None and any(made is not None and made < time for made in trained)

    found: dict[str, Any] = {}
    left: dict[str, str] = {}
    early = [call for call in tree.calls if not late(call)]
    merged = any(called(call) == "merge_and_unload" for call in early)
    dtypes = dict[str, str]()  # as it is given -> its name, "" if that is not known
    for call in tree.calls:
        place, given = ast.unparse(call.func), list[tuple[str, ast.expr]]()
        other = bool(trl_kinds.other_trainer(called(call), ""))  # SFTConfig, say, whose model is not that of the run
        for keyword in call.keywords:
            if keyword.arg == "model_init_kwargs" and not other:
                place, given = keyword.arg, [*_pairs(tree, keyword.value)]
                whole = not is_code(value(keyword.value))
        if called(call) == "from_pretrained" and "PeftModel" in place:
            given_more = [(keyword.arg or "is_trainable", value(keyword.value)) for keyword in call.keywords]
            frozen = not any(name == "is_trainable" and one is not False for name, one in given_more)
            left[shown(call)] = _of_folder(call in early, merged, new, frozen)
            if call in early and not merged and not new:
                found["peft_config"] = f"$({place} in line {call.lineno})"
        elif called(call) == "from_pretrained" and _TRAINED.search(place) and not _GRADES.search(place):
            for keyword in call.keywords if call in early else ():
                given += [(keyword.arg, keyword.value)] if keyword.arg else _pairs(tree, keyword.value)
        for name, node in given:
            text = f"{place} {name}={shown(node)}"
            if name in _QUANTIZED and not _unquantized(node, value):
                left[text] = QUANTIZED
            elif name in ("torch_dtype", "dtype") and not re.search(r"\bargs?\b|_args?\b", ast.unparse(node)):
                match = _DTYPE.fullmatch(str(value(node)))
                dtypes[text] = match[1] if match and tree.certain(call) else ""
            elif place == "model_init_kwargs" and not whole and value(node) not in (None, False):
                left[text] = tables.load("trl").reasons.get(name) or _NOTHING
    if len(kinds := {*dtypes.values()}) == 1 and "" not in kinds:
        found["torch_dtype"] = kinds.pop()
    else:
        left |= dict.fromkeys(dtypes, "the precision is model.dtype here, and which model has this one is not told")
    return found, left


def _of_folder(early: bool, merged: bool, new: bool, frozen: bool) -> str:
    """Return why the adapters of a folder are not carried over. `frozen`: is_trainable is not given."""
    if not early:
        return "it is loaded after the trainer is made"
    if merged:
        return "its adapters are merged into the weights there: model.path has to be a folder of the merged model"
    if new:
        return "adapters begin anew here: adapter.path is a folder with those that they begin with"
    here = "as a whole here, unless adapter.type is lora and adapter.path that folder, with its rank, alpha and targets"
    if frozen:
        there = "peft freezes the adapters of a folder without is_trainable=True, so that there no weight is trained"
        return f"{there} unless the file changes that; the model is trained {here}"
    return f"it is trained with the adapters of a folder there, and {here}"


def _pairs(tree: Tree, given: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and values of a mapping that stands in the file, with those that it may have, or get later."""
    for node in tree.behind(given):
        if isinstance(node, ast.Dict):
            for key, one in zip(node.keys, node.values, strict=True):
                yield from _pairs(tree, one) if key is None else [(str(getattr(key, "value", shown(key))), one)]
        elif isinstance(node, ast.Call) and called(node) == "dict":
            for keyword in node.keywords:
                yield from _pairs(tree, keyword.value) if keyword.arg is None else [(keyword.arg, keyword.value)]
    for use in tree.scopes.loads.get(tree.variable(given), ()) if isinstance(given, ast.Name) else ():
        above = tree.parent(use)
        if isinstance(above, ast.Subscript) and isinstance(assign := tree.parent(above), ast.Assign):
            if above in assign.targets:  # given["name"] = value
                yield str(getattr(above.slice, "value", shown(above.slice))), assign.value
        elif isinstance(above, ast.Attribute) and above.attr == "update":
            if not isinstance(call := tree.parent(above), ast.Call):
                continue
            more = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is None)]
            yield from (pair for one in more for pair in _pairs(tree, one))
            yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def _unquantized(node: ast.expr, value: Callable[[ast.expr], Any]) -> bool:
    """Tell whether weights stay as they are, or an argument of TRL says whether they do."""
    return value(node) in (None, False) or "get_quantization_config" in ast.unparse(node)


def _sort(
    names: Mapping[str, str], found: dict[str, Any], left: dict[str, str], place: str, name: str, value: Any
) -> None:
    if name in names and not (name == "task_type" and str(value).startswith("$")):
        found[names[name]] = value
    else:
        left[f"{place} {name}={value}"] = _NOTHING
