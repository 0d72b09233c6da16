"""Find out which arguments of a command a Python file never hands on to the model that it trains."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gspo_hpc.importers.texts import trl_kinds
from gspo_hpc.importers.texts.syntax import Function, Tree, called
from gspo_hpc.importers.texts.trainers import TRAINER

_ADAPTERS = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
             "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora")  # fmt: skip
# Functions that take the whole object with a model's arguments, and hand neither precision nor adapters on.
_PLAIN = set("print pprint info warning debug error log str repr isinstance type get_quantization_config".split())
_PLAIN |= {"get_kbit_device_map", "get_peft_config", "get_tokenizer"}
_PARTS = ("dtype", "peft", "lora")  # of names that show that a file does something about these
_MODEL = ("model_name_or_path", "model_revision", "trust_remote_code", "attn_implementation")  # arguments of a model
_PEFT_CONFIG = 9  # its place among a trainer's parameters
_DTYPE = "the script hands it to no model, and weights are loaded there as if it was not given"
_PEFT = "the script makes no adapters of it and gives its trainer none: all weights are trained"


def unused(tree: Tree) -> dict[str, str]:
    """Return the arguments that a file takes from its command line and hands to no model, with why."""
    made = [call for call in tree.calls if called(call).endswith(TRAINER) and (call.keywords or call.args)]
    if not made or any(map(_open, made)) or _escapes(tree):
        return {}
    named = {*_named(tree)}
    shown = {part for part in _PARTS for name in named if part in name.lower()}
    found: dict[str, str] = {}
    if "dtype" not in shown and "model_init_kwargs" not in named:
        found |= dict.fromkeys(("dtype", "torch_dtype"), _DTYPE)
    if shown.isdisjoint(("peft", "lora")):
        found |= dict.fromkeys(_ADAPTERS, _PEFT)
    return found


def _open(call: ast.Call) -> bool:
    """Tell whether a trainer may be given more than what stands there: by stars, or as its tenth argument."""
    stars = any(isinstance(node, ast.Starred) for node in call.args)
    return stars or any(keyword.arg is None for keyword in call.keywords) or len(call.args) > _PEFT_CONFIG


def _named(tree: Tree) -> Iterator[str]:
    """Yield the names and short texts that a file uses, without what trainers of other algorithms are given."""
    left: list[ast.AST] = [tree.module]
    while left:
        node = left.pop()
        match node:
            case ast.Call() if trl_kinds.other_trainer(called(node), ""):
                continue
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name
        left += ast.iter_child_nodes(node)


def _escapes(tree: Tree) -> bool:
    """Tell whether the object with a model's arguments goes as a whole to code that is not in the file."""
    places = [node.value for node in tree.nodes if isinstance(node, ast.Attribute) and node.attr in _MODEL]
    holders = {node.id for node in places if isinstance(node, ast.Name)}
    if not holders:
        return True  # it is not seen where the model comes from
    left, seen = [*holders], {*holders}
    while left:
        name = left.pop()
        for node in tree.nodes:
            if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)):
                continue
            above = tree.parent(node)
            call = tree.parent(above) if isinstance(above, ast.keyword) else above
            if isinstance(above, ast.Attribute | ast.FormattedValue):
                continue
            if not isinstance(call, ast.Call) or call.func is node:
                return True
            if called(call) in _PLAIN:
                continue
            function, _ = tree.defined(call)
            if not isinstance(function, Function):
                return True
            given = [parameter for parameter, one in tree.parameters(call) if one is node]
            if not given:
                return True
            left += [one for one in given if one not in seen]
            seen |= {*given}
    return False
