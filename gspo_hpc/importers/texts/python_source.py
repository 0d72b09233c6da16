"""Read the GRPOConfig that a Python file makes. The file is parsed, never imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.importers import tables
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.texts import config_flow, foreign, trainers, trl_kinds
from gspo_hpc.importers.texts.constants import Constants, as_code, is_code
from gspo_hpc.importers.texts.escapes import Escapes
from gspo_hpc.importers.texts.objects import ObjectMap
from gspo_hpc.importers.texts.own_configs import OwnConfigs
from gspo_hpc.importers.texts.scopes import Variable
from gspo_hpc.importers.texts.syntax import Tree, When, called, shown
from gspo_hpc.importers.texts.uses import beside, ends, handed, mappings, models, own_fields, trainers_beside
from gspo_hpc.importers.texts.uses import repeats as repeats_of
from gspo_hpc.importers.texts.uses.own_fields import OwnFields

_CONFIG = "GRPOConfig"
_LISTS = ("parse_args_and_config", "parse_args_into_dataclasses")  # parse a list of words
APART = frozenset({"model_name_or_path", "dataset_name", "reward_funcs"})  # given to the trainer, not in its config


_OMITTED = "the example leaves its value out: give it, or what is the default counts"


class ParseError(ValueError):
    """A text that Python cannot parse."""


class PythonRun(NamedTuple):
    """Run that a Python file describes."""

    values: dict[str, Any]  # arguments of the GRPOConfig it makes; those that only running it would tell are $(code)
    parses: bool  # it takes a GRPOConfig from the command line
    imports: tuple[str, ...]
    trainer: str  # the class of TRL's trainer or config, "" if there is none
    line: int = 0  # of the GRPOConfig
    changed: Mapping[str, Any] = {}  # where it takes one from the command line: what it sets afterwards
    defaults: Mapping[str, Any] = {}  # there: what counts where the command does not say
    doubts: tuple[str, ...] = ()  # places of the file that may change any argument
    left: Mapping[str, str] = {}  # what the file changes in the trainer -> why it is not carried over
    unread: str = ""  # where it makes or parses one in a way that is not read, "" if it does not
    evaluates: str | None = None  # when it evaluates behind its training, None if that is not known
    unused: Mapping[str, str] = {}  # arguments of its command line that reach no model -> why
    own: OwnFields = OwnFields()  # of what it takes from the command line beside that
    reasons: Mapping[str, str] = {}  # a value that is $(code) -> why it is not known, where that can be said
    files: Mapping[str, list[str]] = {}  # files beside it that are read, too -> their classes
    repeats: str = ""  # where it may train several times
    absent: str = ""  # which class of arguments it makes or parses that is not at hand, as a clause

    @property
    def from_trl(self) -> bool:
        """Tell whether the file imports TRL."""
        return any(module == "trl" or module.startswith("trl.") for module in self.imports)


def read(text: str, place: Path | None = None) -> PythonRun:
    """Return what a Python file says. `place`: the file, beside which what it imports may lie.

    Raises ValueError if Python cannot parse it, it imports another project, or it makes several configs.
    """
    try:
        files = beside.merged(ast.parse(text), place)
        module, tree = files.module, Tree(files.module)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise ParseError(f"{where}Python cannot parse this: {getattr(error, 'msg', error)}") from None
    known = Constants(tree)
    imports = tuple(dict.fromkeys(_imports(module)))
    if project := foreign.of_imports(imports):
        raise foreign.refusal(project)
    calls = tree.calls
    if other := trl_kinds.class_of_another(tree):
        return PythonRun({}, False, (*imports, "trl"), other)
    configs = OwnConfigs(tree, known)
    own = configs.names
    made = [call for call in calls if called(call) in own and (call.keywords or call.args)]
    if (module_of := configs.module(made)) != "trl" and not any(name.partition(".")[0] == "trl" for name in imports):
        raise ValueError(
            f"its {_CONFIG} is that of {module_of}, and it imports nothing of TRL: convert reads TRL's; write "
            f"from trl import {_CONFIG} if it is the same"
        )
    if len(made) > 1:
        lines = ", ".join(str(call.lineno) for call in made)
        raise ValueError(f"it makes {len(made)} GRPOConfigs (lines {lines}): leave one in the file")
    names = {node.id for node in tree.nodes if isinstance(node, ast.Name)}
    parses = bool(not made and own & names and any("Parser" in called(call) for call in calls))
    absent = beside.not_at_hand(module, files.absent)
    trainer = _trainer([*map(called, calls)], [node.id for node in tree.nodes if isinstance(node, ast.Name)])
    if not made and not parses:
        left = dict(_foreign_trainers(tree))
        run = PythonRun({}, False, imports, trainer, left=left, unread=_unread(tree, own), absent=absent)
        return run._replace(doubts=(f"a class that is not at hand ({absent.partition(' ')[0]})",)) if absent else run
    theirs = trainers_beside.of_file(tree, place)
    tree.trainers = frozenset(theirs)
    for name, one in theirs.items():
        files.read.setdefault(one.file, []).append(name)
    seeds = made or [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _parsers(calls)
    ]
    fields, doubts = configs.defaults(made)
    objects = ObjectMap(tree, seeds, not made)
    repeats = repeats_of.several(tree, objects, known.value)
    changes = config_flow.follow(tree, objects, known.value, as_code)
    escapes = Escapes(tree, objects, known.value)
    doubts += tuple(dict.fromkeys((*changes.doubts, *escapes.doubts)))
    patched = dict(_patched(escapes.patches))
    given, left = models.of_adapters(tree, known.value)
    given |= escapes.given
    of_model, unread_of_model = trainers.of_model_config(tree, known.value)
    patched_by, more = trainers.of_unsloth(imports)
    fields = patched_by | fields
    left |= more | unread_of_model | trainers.of_patches(escapes.patches) | escapes.left | changes.left
    for name in (*trainers.own(tree), *theirs):
        left |= trainers.of_class(tree, name, theirs)
    for call in objects.trainers():
        left |= trainers.of_class(tree, called(call), theirs)
        given = trainers.of_trainer(tree, call, known.value, made[0] if made else None) | given
    given |= {name: value for name, value in of_model.items() if is_code(given.get(name, "$("))}
    defaults = _preset(tree, seeds, known)
    literal = _parsed_in_file(seeds, known) if parses and not defaults else None
    if parses and literal is None:
        unread = next((text for text in _other_parses(seeds) if "argv" not in text), "")
        doubts += tuple(_other_parses(seeds))
        sure = {name: value for name, value in given.items() if not is_code(value) and name != "reward_funcs"}
        below = fields | defaults | {name: value for name, value in given.items() if name not in sure}
        own_values = sure | changes.values | patched
        run = PythonRun({}, True, imports, trainer, 0, own_values, below, doubts, left, unread, ends.evaluates(tree))
        run = run._replace(reasons=changes.reasons, files=files.read, absent=absent, repeats=repeats)
        return run._replace(unused=handed.unused(tree), own=own_fields.read(tree, known, configs))
    (config,) = made or seeds
    whole = fields | (literal or _keywords(config, known)) | changes.values | patched
    values = _told(whole)
    told = {*values, *_told(given)}
    left |= dict.fromkeys((f"{name}=..." for name in whole | given if name not in told), _OMITTED)
    if called(config) in tree.classes:
        left[f"class {called(config)}({_CONFIG})"] = "the defaults of its fields are read; what else it does is not"
    for name, value in _told(given).items():
        values.setdefault(name, value)
    name = called(config) if made else _CONFIG
    # Nothing of it is known, and the defaults would stand for all of it.
    if whole and all(name.startswith("*") and is_code(value) for name, value in whole.items()):
        return PythonRun({}, False, imports, name, unread=f"line {config.lineno}: {shown(config)}")
    run = PythonRun(values, False, imports, name, config.lineno, {}, {}, doubts, left, "", ends.evaluates(tree))
    return run._replace(reasons=changes.reasons, files=files.read, repeats=repeats)


def _trainer(made: Sequence[str], names: Sequence[str]) -> str:
    """Return the class of the trainer of a file, or that of its config, "" if neither is there.

    `made`: classes and functions that it calls; `names`: all that stand in it, as a parser is given a class.
    """
    ours = [name for name in made if name.endswith(trainers.TRAINER)]
    others = [name for end in ("Trainer", "Config") for name in (*made, *names)
              if name.endswith(end) and trl_kinds.other_trainer(name, "")]  # fmt: skip
    return next(iter((*ours, *others, *(name for name in made if name.endswith(("Trainer", "Config"))))), "")


def _foreign_trainers(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the trainers that a file imports from elsewhere than TRL and makes, with why they are not carried over."""
    for call in tree.calls:
        module = tree.imported.get(name := called(call), "trl")
        if name.endswith("Trainer") and module.partition(".")[0] not in ("trl", "transformers"):
            yield f"{module}.{tree.originals.get(name, name)}", trainers.NOT_TRLS


def _told(values: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without those that a page leaves out with dots."""
    return {name: value for name, value in values.items()
            if value is not ... and value != [...] and (value != [] or name != "reward_funcs")}  # fmt: skip


def _patched(patches: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that are set on the trainer, which has read them, with a value that is not known."""
    for name, line in patches.items():
        argument = {"epsilon_low": "epsilon"}.get(name, name)
        if argument in tables.load("trl").known:
            yield argument, as_code(f"{trainers.TRAINER}.{name} in line {line}")


def _parsers(calls: Iterable[ast.Call]) -> set[str]:
    """Return the methods by which the file parses its command line."""
    names = {
        call.func.attr for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("parse")
    }
    return names - {"parse_args", "parse_known_args"} or names


def _preset(tree: Tree, seeds: Sequence[ast.Call], known: Constants) -> dict[str, Any]:
    """Return the defaults that a parser of the file is given, $(code) where it may not have them when it parses."""
    begins = [tree.when(seed) for seed in seeds]
    starts = (None, *map(tree.start, seeds))
    own = {_receiver(tree, seed) for seed in seeds}
    sure: list[tuple[When, dict[str, Any]]] = []
    found: dict[str, Any] = {}
    for call in tree.calls:
        if called(call) not in ("set_defaults", "set_defaults_with_config"):
            continue
        time, holder = tree.when(call), _receiver(tree, call)
        values = _keywords(call, known)
        if None not in (holder, *own) and holder not in own:
            continue  # of another parser
        plain = time is not None and tree.certain(call) and tree.start(call) in starts and own == {holder} != {None}
        if time is not None and plain and all(begin is not None and time < begin for begin in begins):
            sure.append((time, values))
        else:
            found |= {name: as_code(f"{name}={value}") for name, value in values.items()}
    for _, values in sorted(sure, key=lambda pair: pair[0]):
        found = values | {name: value for name, value in found.items() if name not in values or is_code(value)}
    return found


def _receiver(tree: Tree, call: ast.Call) -> Variable | None:
    """Return the parser whose method a call calls, None if it may be another name for the same one."""
    holder = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(holder, ast.Call) and "Parser" in called(holder):
        return (id(holder), "")
    variable = tree.variable(holder) if isinstance(holder, ast.Name) else None
    bindings = [] if variable is None else tree.scopes.bindings.get(variable, [])
    given = tree.parent(bindings[0]) if len(bindings) == 1 else None
    made = isinstance(given, ast.Assign) and isinstance(given.value, ast.Call) and "Parser" in called(given.value)
    return variable if made else None


def _other_parses(seeds: Sequence[ast.Call]) -> Iterator[str]:
    """Yield the calls that take the arguments from elsewhere, where none takes them from the command line."""
    elsewhere = [call for call in seeds
                 if called(call) in ("parse_dict", "parse_json_file", "parse_yaml_file") or call.args
                 or any(keyword.arg == "args" for keyword in call.keywords)]  # fmt: skip
    if len(elsewhere) == len(seeds):
        yield from (f"line {call.lineno}: {shown(call)}" for call in elsewhere)


def _parsed_in_file(seeds: Sequence[ast.Call], known: Constants) -> dict[str, Any] | None:
    """Return the arguments that the file's one parser is given as they stand in the file, None for any other."""
    if len(seeds) != 1:
        return None
    (call,) = seeds
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "args")]
    value = known.value(given[0]) if len(given) == 1 else None
    if called(call) == "parse_dict" and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return value or None
    if called(call) in _LISTS and isinstance(value, list) and all(isinstance(word, str) for word in value):
        values, before = options(value)
        return values if values and not before and "config" not in values else None
    return None


def _unread(tree: Tree, own: set[str]) -> str:
    """Return where a file names its config without a call that gives it arguments, as in partial(GRPOConfig)."""
    for node in tree.nodes:
        if isinstance(node, ast.Name) and node.id in own and isinstance(node.ctx, ast.Load):
            above: ast.AST = node
            while not isinstance(above, ast.stmt) and (parent := tree.parent(above)) is not None:
                above = parent
            if not isinstance(above, ast.ClassDef):
                return f"line {node.lineno}: {shown(above)}"
    return ""


# How a command begins that starts a Python file: variables, then a launcher.
_STARTS = re.compile(r"\s*(?:[$>]\s+)?((?:[A-Z_]+=\S+\s+)*(?:accelerate\s+launch|torchrun|uv\s+run|python3?)\b.*)")


def command_shown(text: str, name: str, place: Path | None = None) -> str:
    """Return the commands in the docstring of a file that takes its GRPOConfig from the command line, "" if none.

    `name`: of the file; commands that start another one are left out.
    """
    try:
        told = ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # which is told where the file is read
        return ""
    commands: list[str] = []
    going = False
    for line in told.splitlines():
        start = _STARTS.match(line)
        if going:
            commands[-1] += f"\n{line}"
        elif start:
            commands.append(start[1])
        going = (going or start is not None) and line.rstrip().endswith("\\")
    shown_here = [one for one in commands if not name or re.search(rf"(^|[\s/]){re.escape(name)}\b", one)]
    if not shown_here or (run := read(text, place)).values or not run.parses:
        return ""
    return "\n".join(shown_here)


def _keywords(call: ast.Call, known: Constants) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, node in enumerate(call.args):
        name = "output_dir" if not place and not isinstance(node, ast.Starred) else f"*{shown(node)}"
        values[name] = known.value(node)
    for keyword in call.keywords:
        if keyword.arg is None:  # **more
            more = known.mapping(keyword.value)
            more = mappings.built(known, keyword.value) if more is None else more
            values |= {f"**{shown(keyword.value)}": as_code(keyword.value)} if more is None else more
        else:
            values[keyword.arg] = known.value(keyword.value)
    return values


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def why_not_read(run: PythonRun | None) -> str:
    """Return why a file that makes no GRPOConfig is not read, with what it is instead. None: a file without text."""
    write = "write GRPOConfig(name=value, ...) in its place"
    none = "a Python file is read for the GRPOConfig that it makes, and there is none in it"
    if run is None:
        return none
    if run.unread:
        return f"{run.unread}: the arguments of its {_CONFIG} are not read there: {write}"
    if run.parses:
        return "it takes its GRPOConfig from the command line: give that command, or the YAML that it reads"
    if run.absent and run.from_trl:
        return run.absent
    if run.trainer == trainers.TRAINER:
        return f"it makes a {run.trainer}, and no {_CONFIG} with arguments: {write}"
    if run.trainer and run.from_trl:
        why = trl_kinds.other_trainer(run.trainer, f"a {_CONFIG}")
        return why or f"{run.trainer} is another trainer of TRL: convert reads a {_CONFIG}"
    if any(module.partition(".")[0] == "swift" for module in run.imports):
        return "of ms-swift, commands and YAML are read: write the arguments of this file's run as one of these"
    return none
