"""Read the GRPOConfig that a Python file makes. The file is parsed, never imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gspo_hpc.importers.texts import foreign

_CONFIG, _TRAINER = "GRPOConfig", "GRPOTrainer"
# What a trainer is given beside its config, as TRL's scripts name it.
_TRAINERS_OWN = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "train_dataset": "dataset_name"}


class PythonRun(NamedTuple):
    """Run that a Python file describes."""

    values: dict[str, Any]  # arguments of the GRPOConfig it makes; those that only running it would tell are $(code)
    parses: bool  # it takes a GRPOConfig from the command line
    imports: tuple[str, ...]
    trainer: str  # the class of TRL's trainer or config, "" if there is none
    line: int = 0  # of the GRPOConfig


def read(text: str) -> PythonRun:
    """Return what a Python file says. Raises ValueError if Python cannot parse it, or it makes several configs."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise ValueError(f"{where}Python cannot parse this: {getattr(error, 'msg', error)}") from None
    known = dict(_constants(tree))
    imports = tuple(dict.fromkeys(_imports(tree)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if _called(call) == _CONFIG and (call.keywords or call.args)]
    if len(made) > 1:
        lines = ", ".join(str(call.lineno) for call in made)
        raise ValueError(f"it makes {len(made)} GRPOConfigs (lines {lines}): leave one in the file")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    parses = bool(not made and _CONFIG in names and any("Parser" in _called(call) for call in calls))
    found = next((_called(call) for call in calls if _called(call).endswith(("Trainer", "Config"))), "")
    trainer = next((_called(call) for call in calls if _called(call).endswith(_TRAINER)), found)
    if not made:
        return PythonRun({}, parses, imports, trainer)
    (config,) = made
    values = _keywords(config, known) | dict(_set_later(tree, config, known))
    for call in calls:
        if _called(call) == _TRAINER:
            for name, value in _keywords(call, known).items():
                if name in _TRAINERS_OWN:
                    values.setdefault(_TRAINERS_OWN[name], value)
                elif name == "peft_config" and value is not None:
                    values.setdefault("use_peft", True)
            if call.args and "model_name_or_path" not in values:
                values["model_name_or_path"] = _value(call.args[0], known)
    values = {
        name: value for name, value in values.items() if value is not ... and value != [...]
    }  # left out in a page
    return PythonRun(values, parses, imports, _called(config), config.lineno)


# How a command begins that starts a Python file: variables, then a launcher.
_STARTS = re.compile(r"\s*(?:[$>]\s+)?((?:[A-Z_]+=\S+\s+)*(?:accelerate\s+launch|torchrun|uv\s+run|python3?)\b.*)")


def command_shown(text: str, name: str) -> str:
    """Return the commands in the docstring of a file that takes its GRPOConfig from the command line, "" if none.

    `name`: of the file; commands that start another one are left out.
    """
    run = read(text)
    if run.values or not run.parses:
        return ""
    commands: list[str] = []
    going = False
    for line in (ast.get_docstring(ast.parse(text)) or "").splitlines():
        start = _STARTS.match(line)
        if going:
            commands[-1] += f"\n{line}"
        elif start:
            commands.append(start[1])
        going = (going or start is not None) and line.rstrip().endswith("\\")
    return "\n".join(
        command for command in commands if not name or re.search(rf"(^|[\s/]){re.escape(name)}\b", command)
    )


def _called(call: ast.Call) -> str:
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _keywords(call: ast.Call, known: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **more
            more = _value(keyword.value, known)
            values |= more if isinstance(more, dict) else {f"**{ast.unparse(keyword.value)}": _left(keyword.value)}
        else:
            by_name = keyword.arg == "reward_funcs"
            values[keyword.arg] = _functions(keyword.value, known) if by_name else _value(keyword.value, known)
    return values


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _functions(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return reward functions, which are given as such or by their names."""
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [item.id if isinstance(item, ast.Name) else _value(item, known) for item in items if _told(item)]


def _told(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is ...)


def _straight(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run in any case: of the file, of its functions, and of its main block."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _straight(statement.body)
        elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            yield from _straight(statement.body)


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names that the file sets once, to a value that stands in it."""
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts[node.id] = counts.get(node.id, 0) + 1
        elif isinstance(node, ast.arg):
            counts[node.arg] = counts.get(node.arg, 0) + 1
    known: dict[str, Any] = {}
    for statement in _straight(tree.body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        target = statement.target if isinstance(statement, ast.AnnAssign) else target
        given = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and given is not None and counts.get(target.id) == 1:
            value = _value(given, known)
            if not _is_left(value):
                known[target.id] = value
                yield target.id, value


def _set_later(tree: ast.Module, config: ast.Call, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that are set on the config after it is made: config.name = value."""
    straight = {id(statement) for statement in _straight(tree.body)}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    names = {target.id for node in assigned if node.value is config
             for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    for node in assigned:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names:
                yield target.attr, _value(node.value, known) if id(node) in straight else _left(node.value)


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the value of an expression: literals, names that the file sets, arithmetic; else $(code)."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.Attribute) and node.attr in ("bfloat16", "float16", "float32"):
        return node.attr  # torch.bfloat16
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv):
        left, right = _value(node.left, known), _value(node.right, known)
        if type(left) in (int, float) and type(right) in (int, float):
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
                case ast.FloorDiv() if right:
                    return left // right
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else _value(part.value, known)
                 for part in node.values if isinstance(part, ast.Constant | ast.FormattedValue)]  # fmt: skip
        plain = all(not isinstance(part, ast.FormattedValue) or part.format_spec is None and part.conversion < 0
                    for part in node.values)  # fmt: skip
        if plain and all(isinstance(part, str | int) and not _is_left(part) for part in parts):
            return "".join(map(str, parts))
    return _left(node)


def _left(node: ast.expr) -> str:
    """Return an expression as a shell's $(...), which stands for whatever only running the file would tell."""
    return f"$({' '.join(ast.unparse(node).split())[:60]})"


def _is_left(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("$(")


def refuse_others(run: PythonRun) -> None:
    """Raise ValueError for a file that makes no GRPOConfig, with what it is instead."""
    if project := foreign.of_imports(run.imports):
        raise foreign.refusal(project)
    if run.parses:
        raise ValueError("it takes its GRPOConfig from the command line: give that command, or the YAML that it reads")
    if run.trainer and any(module == "trl" or module.startswith("trl.") for module in run.imports):
        raise ValueError(f"{run.trainer} is another trainer of TRL: convert reads a GRPOConfig")
    raise ValueError("a Python file is read for the GRPOConfig that it makes, and there is none in it")
