"""Read what a Python file gives TRL's trainer beside its config, and what it changes in the trainer itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from gspo_hpc.importers.texts.constants import as_code
from gspo_hpc.importers.texts.objects import names_trainer
from gspo_hpc.importers.texts.syntax import PLAIN_BASES, Function, Tree, base_name, called, shown

TRAINER = "GRPOTrainer"
# What a trainer is given, in the order of its parameters.
_ORDER = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes",
    "callbacks", "optimizers", "peft_config",
)  # fmt: skip
# The names that TRL's scripts have for what a trainer is given.
_NAMES = {"model": "model_name_or_path", "train_dataset": "dataset_name"}
# Arguments that the trainer reads when it is made and never again, and those that it reads only while it trains: in all
# versions of TRL from 0.14 to 1.9 and of transformers from 4.50 to 5. All others it may read at both times.
READ_WHEN_MADE = frozenset(
    "beta epsilon epsilon_high importance_sampling_level loss_type mask_truncated_completions max_completion_length "
    "max_prompt_length num_generations num_iterations shuffle_dataset temperature top_k top_p".split()
)
READ_IN_TRAINING = frozenset(
    "adam_beta1 adam_beta2 adam_epsilon eval_steps learning_rate logging_steps lr_scheduler_kwargs lr_scheduler_type "
    "max_steps num_train_epochs run_name save_steps save_strategy save_total_limit warmup_steps weight_decay".split()
)
# Of these, what DeepSpeed's JSON is filled with when the config is made, if it has an optimizer.
READ_BY_DEEPSPEED = frozenset("adam_beta1 adam_beta2 adam_epsilon learning_rate weight_decay".split())
NOT_TRLS = "it is not TRL's trainer: what it changes is not known"
# Methods of TRL's trainer, in any version, and of transformers' that decide what is trained, the most telling first.
_OBJECTIVE = (
    "_compute_loss", "compute_loss", "compute_liger_loss", "_generate_and_score_completions", "_calculate_rewards",
    "_get_per_token_logps_and_entropies", "_get_per_token_logps", "_get_last_hidden_state", "get_off_policy_mask",
    "get_high_entropy_mask", "get_sapo_token_loss", "get_gamma_weights", "_generate", "_generate_single_turn",
    "_prepare_inputs", "training_step", "create_optimizer", "create_optimizer_and_scheduler", "prediction_step",
)  # fmt: skip
# Names by which methods of another base class are taken for such ones.
_LIKELY = re.compile(r"loss|advantage|logps|log_prob|_generate|_calculate_rewards|_prepare_inputs|create_optimizer")


def of_trainer(tree: Tree, call: ast.Call, value: Callable[[ast.expr], Any], config: ast.AST | None) -> dict[str, Any]:
    """Return the arguments that a trainer is given beside its config. Raises ValueError for another optimizer.

    `value` evaluates an expression; `config`: where the config is made, if it is made in the call.
    """
    found: dict[str, Any] = {}
    for name, node in _given(call):
        if name == "args" or node is config or (name in ("eval_dataset", "peft_config", "callbacks") and _none(node)):
            continue
        if name == "reward_funcs":
            found[name] = _functions(node, value)
        elif name == "peft_config":
            found |= of_peft_config(tree, node, value)
        elif name == "optimizers":
            if not (isinstance(node, ast.Tuple) and all(map(_none, node.elts))):
                _refuse_optimizer(node)
                found[name] = f"$({shown(node)})"
        else:
            found[_NAMES.get(name, name)] = value(node)
    return found


# Of a ModelConfig, what TRL's get_peft_config reads.
_OF_PEFT = re.compile(r"use_peft|lora_\w+|use_rslora|use_dora")
_MODEL_CONFIG, _PEFT_CONFIG = "ModelConfig", "get_peft_config"
UNSLOTH = "import unsloth"
WARM_UP = 0.1  # default of warmup_steps with transformers 5, and of warmup_ratio with transformers 4
# Defaults that Unsloth's patch gives TRL's GRPOConfig (unsloth/models/rl.py of August 2026).
_UNSLOTH = {
    **{
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-5,
        "warmup_steps": WARM_UP,
    },
    **{"weight_decay": 0.001, "seed": 3407, "loss_type": "bnpo", "beta": 0.001, "report_to": "none"},
    "vllm_importance_sampling_correction": False,
}


def of_model_config(tree: Tree, value: Callable[[ast.expr], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of the ModelConfig that a file makes, and what is not carried over, with why.

    They have the names of TRL's own options. Adapters are made of them by get_peft_config alone.
    """
    made = _model_configs(tree)
    if len(made) != 1:
        lines = ", ".join(str(call.lineno) for call in made)
        why = "it is not told which one counts: set model.* and adapter.*"
        return {}, {f"{_MODEL_CONFIG} (lines {lines})": why} if made else {}
    (call,) = made
    found: dict[str, Any] = {}
    for place, node in enumerate(call.args):
        found["model_name_or_path" if not place and not isinstance(node, ast.Starred) else f"*{shown(node)}"] = value(
            node
        )
    for keyword in call.keywords:
        found[keyword.arg or f"**{shown(keyword.value)}"] = value(keyword.value)
    for target in tree.nodes:
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
            if tree.behind(target.value) == [call]:
                found[target.attr] = f"$({shown(tree.parent(target) or target)} in line {target.lineno})"
    if any(called(other) == _PEFT_CONFIG for other in tree.calls):
        return found, {}
    unread = [name for name in found if _OF_PEFT.fullmatch(name)]
    why = f"no {_PEFT_CONFIG} makes adapters of it"
    left = {f"{_MODEL_CONFIG} {name}={found[name]}": why for name in unread}
    return {name: given for name, given in found.items() if name not in unread}, left


def _model_configs(tree: Tree) -> list[ast.Call]:
    """Return the calls that make a ModelConfig with arguments."""
    return [call for call in tree.calls if called(call) == _MODEL_CONFIG and (call.args or call.keywords)]


def of_peft_config(tree: Tree, node: ast.expr, value: Callable[[ast.expr], Any]) -> dict[str, Any]:
    """Return what a trainer's peft_config says, unless :func:`of_adapters` or :func:`of_model_config` finds it.

    One that neither finds, as one of another module, is $(code).
    """
    found = [one for one in tree.behind(node) if not (isinstance(one, ast.Constant) and one.value is None)]
    if not found or value(node) is None:
        return {}
    (first, *others) = found
    if not others and isinstance(first, ast.Call) and called(first) == _PEFT_CONFIG:
        given = [*first.args, *(keyword.value for keyword in first.keywords)]
        made = tree.behind(given[0]) if given else []
        if made == _model_configs(tree) or any("Parser" in called(call) for call in tree.calls):
            return {}  # the ModelConfig says it, or the command
    return {"peft_config": as_code(node)}


def of_unsloth(imports: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the defaults that GRPOConfig has where Unsloth is imported, and what else that changes, with why."""
    if not any(module.partition(".")[0] == "unsloth" for module in imports):
        return {}, {}
    names = ", ".join(f"{name} {value}" for name, value in _UNSLOTH.items())
    return dict(_UNSLOTH), {
        UNSLOTH: "it replaces TRL's GRPOTrainer and GRPOConfig by its own: where nothing is given, its "
        f"defaults of August 2026 are taken ({names}); how its trainer computes the loss is not read"
    }


def _given(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    for place, node in enumerate(call.args):
        name = _ORDER[place] if place < len(_ORDER) and not isinstance(node, ast.Starred) else f"*{shown(node)}"
        yield name, node
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            yield from ((str(getattr(key, "value", "")), node)
                        for key, node in zip(keyword.value.keys, keyword.value.values, strict=True))  # fmt: skip
        else:
            yield keyword.arg or f"**{shown(keyword.value)}", keyword.value


def _none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _functions(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """Return reward functions, which are given as such or by their names."""
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    told = [item for item in items if not (isinstance(item, ast.Constant) and item.value is ...)]
    return [item.id if isinstance(item, ast.Name) else value(item) for item in told]


def _refuse_optimizer(node: ast.expr) -> None:
    first = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else node
    if (
        isinstance(first, ast.Call)
        and "adam" not in called(first).lower()
        and ast.unparse(first.func).startswith(("torch.optim.", "optim."))
    ):
        raise ValueError(f"line {node.lineno}: optimizers {shown(first)}: there is only AdamW here")


def own(tree: Tree) -> Iterator[str]:
    """Yield the classes of the file that are derived from TRL's trainer and used by their name, whatever it is for."""
    used = {node.id for node in tree.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            and not isinstance(tree.parent(node), ast.ClassDef)}  # fmt: skip
    derived = {TRAINER, *tree.trainers, *(name for name, original in tree.originals.items() if original == TRAINER)}
    for name, node in tree.classes.items():
        if any(base_name(base) in derived for base in node.bases):
            derived.add(name)
            if name in used:
                yield name


class Beside(Protocol):
    """A trainer's class in another file, which is read as one of the file's own."""

    def is_trls(self) -> bool:
        """Tell whether it is derived from TRL's trainer alone."""

    def changes(self) -> dict[str, str]:
        """Return what it changes, or raise ValueError, as :func:`of_class` does."""


def of_class(tree: Tree, name: str, others: Mapping[str, Beside]) -> dict[str, str]:
    """Return what a class of the file, derived from TRL's trainer, changes: what it is -> why it is not carried over.

    `others`: trainers of other files, by their names in this one. Raises ValueError where it changes what is trained.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    left = [name]
    while left:
        name = left.pop(0)
        if (own := tree.classes.get(name)) is not None:
            if name not in seen:
                seen.add(name)
                found |= _of_body(tree, own, is_trls(tree, own, others))
                left += [base_name(base) for base in own.bases]
        elif name in others:
            found |= others[name].changes()
        elif (original := tree.originals.get(name, name)) == TRAINER:
            if (module := tree.imported.get(name, "trl")).partition(".")[0] != "trl":
                found[f"{module}.{TRAINER}"] = NOT_TRLS
        elif names_trainer(original):
            found[name] = NOT_TRLS
        elif seen and original and original not in PLAIN_BASES:
            found[name] = "a class that a trainer of the file's own is derived from: what it changes is not known"
    return found


def is_trls(tree: Tree, own: ast.ClassDef, others: Mapping[str, Beside]) -> bool:
    """Tell whether a class of the file is derived from TRL's trainer and from no other class that is not plain."""
    seen: set[str] = set()
    left = [base_name(base) for base in own.bases]
    while left:
        name = left.pop()
        if name in tree.classes:
            left += [base_name(base) for base in tree.classes[name].bases if name not in seen]
            seen.add(name)
        elif tree.originals.get(name, name) in PLAIN_BASES or (name in others and others[name].is_trls()):
            continue
        elif tree.originals.get(name, name) != TRAINER or tree.imported.get(name, "trl").partition(".")[0] != "trl":
            return False
    return True


def _of_body(tree: Tree, own: ast.ClassDef, trls: bool) -> dict[str, str]:
    """Return what the body of a class sets, and what else may change the class.

    `trls`: it is derived from TRL's trainer alone, whose methods are known: a further one is called by its own alone.
    """
    names: dict[str, int] = {}
    strange = [*own.decorator_list, *(keyword.value for keyword in own.keywords)]
    for node in _in_body(own):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.setdefault(name, node.lineno)
            case ast.Name(id=name, ctx=ast.Store()):
                above = tree.parent(node)
                if not (isinstance(above, ast.AnnAssign) and above.value is None):
                    names.setdefault(name, node.lineno)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name: node.lineno for alias in aliases}
            case ast.Subscript(ctx=ast.Store()) | ast.Expr(value=ast.Call()):
                strange.append(node if isinstance(node, ast.expr) else node.value)
    decisive = [name for name in _OBJECTIVE if name in names]
    decisive += [name for name in names if not trls and name != "__init__" and _LIKELY.search(name)]
    for name in decisive[:1]:
        raise ValueError(
            f"line {names[name]}: {own.name} overrides {name} of TRL's trainer: what it trains has no counterpart here"
        )
    text = "a trainer of the file's own: what these {} is not carried over"
    found = {f"class {own.name}: {', '.join(names)}": text.format("methods do")} if names else {}
    found |= {f"class {own.name}: {shown(node)} (line {node.lineno})": text.format("lines change") for node in strange}
    return found


def _in_body(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs in the body of a class, without what stands in its functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and isinstance(node, ast.ClassDef):
            continue  # a base or a decorator
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from _in_body(child)


def of_patches(patches: Mapping[str, int]) -> dict[str, str]:
    """Return what is set on trainers or on TRL's class. Raises ValueError where it changes what is trained."""
    for name, line in patches.items():
        if name in _OBJECTIVE:
            raise ValueError(
                f"line {line}: {name} of TRL's trainer is replaced: what it trains has no counterpart here"
            )
    why = "it is set on the trainer: what that changes is known only when the script runs"
    return {f"{TRAINER}.{name} (line {line})": why for name, line in patches.items()}
