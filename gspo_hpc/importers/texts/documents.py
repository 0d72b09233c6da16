"""Read the run that a YAML text or a Python file holds."""

from __future__ import annotations

import os.path
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gspo_hpc.config.schema import Config, keys
from gspo_hpc.importers import report, tables
from gspo_hpc.importers.inputs import flatten, read_text, read_yaml, yaml_value
from gspo_hpc.importers.scripts.places import found_for, plain_path, written_text
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.texts import foreign, python_source, trl_kinds
from gspo_hpc.importers.texts.constants import is_code
from gspo_hpc.importers.texts.sources import ACCELERATE, READ, Found
from gspo_hpc.importers.texts.trainers import NOT_TRLS, UNSLOTH
from gspo_hpc.importers.texts.uses.ends import EVALUATES
from gspo_hpc.importers.texts.uses.models import QUANTIZED
from gspo_hpc.importers.typos import misspelt

_GROUPS = ("train", "rollout", "teacher")  # of a YAML of ms-swift on Ray: settings of one group of its workers
# What --from names -> the table of its arguments; "swift" is either of them.
SWIFTS = {"megatron-swift": "swift", "ms-swift": "swift_hf"}
_UNTOLD = "is known only when the script runs: write its name out in the command"
# verl's own configs, whose defaults are known.
VERLS_OWN = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
# Files of verl's own groups, whose defaults are known too; those with ${model_engine} follow that.
_OWN_GROUPS = set(
    "legacy_data rollout hf_model rollout_correction reward_manager reward reward_model reward_loop dp_reward_loop "
    "dp_reward_model megatron_reward_model legacy_reward_impl".split()
)
_INTERPOLATION = re.compile(
    r"\$\{(?:(?P<env>oc\.env:)(?P<name>\w+)(?:,(?P<default>[^${}]*))?|(?P<key>\.*\w+(?:\.\w+)*))\}"
)
# Arguments of a run, which no config of a launcher has.
_TRAINING = ("model_name_or_path", "learning_rate", "per_device_train_batch_size", "output_dir", "num_generations")
_MAPPINGS = re.compile(r"(_kwargs|_config|_groups|^deepspeed|^env|^ENV)$")  # arguments that may be mappings
_VERLS_SFT = {"data", "model", "optim", "trainer"}  # groups of its config
_NOT_ARGUMENTS = ("defaults", "hydra.", "hydra")


def from_yaml(
    raw: Mapping[Any, Any], source: str | None, folder: Path = Path(), name: str = "", text: str = ""
) -> Found:
    """Return the run in a mapping. Raises ValueError if it does not show whose it is, or it is another project's.

    `folder` and `name`: of its file; `text`: its text, for the comments in it.
    """
    if _is_ours(raw):
        raise ValueError("it is a config of gspo_hpc already, so there is nothing to convert: gspo-hpc plan FILE")
    if _is_accelerates(raw):
        raise ValueError("this is accelerate's config; convert takes the GRPOConfig, and --gpus N for num_processes")
    asked = source
    if source is None:
        if project := foreign.of_keys(raw):
            raise foreign.refusal(project)
        source = "verl" if "actor_rollout_ref" in raw else nearest_project(_workers({**raw})[0])
    if source == "verl":
        bases, values = hydra_defaults(raw, "this YAML")
        values |= verl_values(raw)
        return Found(source, resolved(values, {}), {"config_name": bases[0]} if bases else {}, [])
    values = {str(key): value for key, value in raw.items()}
    if source == "trl":
        around = environment(values, "env") | {key: str(values[key]) for key in ACCELERATE if key in values}
        run = Found(source, values, {**around, "yaml": name}, [])
        comments = " ".join(re.findall(r"(?m)^[ \t]*#(.*)$", text))
        return of_grpo(run, name, folder, asked, comments)
    values, variables, left = swift_values(values)
    return Found(of_swift(values, source), values, variables, [], left=left)


def _is_ours(raw: Mapping[Any, Any]) -> bool:
    """Tell whether a mapping is a config of this package: its sections, and half or more of their keys."""
    if not raw or not all(key in Config.model_fields for key in raw):
        return False
    inner = [f"{section}.{name}" for section, own in raw.items() if isinstance(own, Mapping) for name in own]
    return bool(inner) and 2 * sum(key in keys() for key in inner) >= len(inner)


def of_grpo(found: Found, name: str, folder: Path, asked: str | None, comments: str = "") -> Found:
    """Return a run, with notes if it is one of TRL. Raises ValueError if TRL's arguments are those of another trainer.

    `name` and `folder`: of its file; `asked`: what --from names.
    """
    if found.source != "trl":
        return found
    notes = trl_kinds.check(found.values, name, folder.name if name else "", comments, asked == "trl")
    return found._replace(notes=(*found.notes, *notes))


def _is_accelerates(raw: Mapping[Any, Any]) -> bool:
    """Tell whether a mapping is accelerate's config, and nothing else."""
    if "compute_environment" in raw or ("num_processes" in raw and "mixed_precision" in raw):
        return True
    return "distributed_type" in raw and not any(name in raw for name in _TRAINING)


def environment(values: dict[str, Any], name: str) -> dict[str, str]:
    """Take the variables that a YAML sets for the run out of its values: of ms-swift under ENV, of TRL under env."""
    if not isinstance(values.get(name), Mapping):
        return {}
    return {str(key): str(value) for key, value in values.pop(name).items()}


def swift_values(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the arguments of a YAML of ms-swift, the variables that it sets, and what it gives in vain, with why."""
    values = {str(name): value for name, value in raw.items()}
    variables = environment(values, "ENV")
    values, left = _workers(values)
    return values, variables, left


def of_swift(given: Mapping[str, Any], source: str) -> str:
    """Return the table that arguments of ms-swift are in: on Megatron ("swift"), or on Hugging Face ("swift_hf").

    It is the one that has more of the arguments which the other has not. `source`: what --from says, or "swift". Raises
    ValueError if that does not decide, for the two have other defaults.
    """
    if source in SWIFTS:
        return SWIFTS[source]
    megatron, hf = tables.load("swift"), tables.load("swift_hf")
    ours = [name for name in given if megatron.has(name) and not hf.has(name)]
    theirs = [name for name in given if hf.has(name) and not megatron.has(name)]
    if "device_groups" in given:  # Megatron-SWIFT knows it, and does not read it
        theirs.append("device_groups")
    if len(ours) != len(theirs):
        return "swift" if len(ours) > len(theirs) else "swift_hf"
    if str(kind := given.get("rlhf_type", "grpo")) != "grpo" and not is_unset(kind):  # which is refused of both
        return "swift"
    told = f"{ours[0]} is of the first, and {theirs[0]} of the second" if ours else "all are arguments of both"
    raise ValueError(
        "it is not told whether these arguments are those of megatron rlhf or of swift rlhf, which have other defaults "
        f"({told}): name it with --from megatron-swift or --from ms-swift"
    )


def verl_values(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the dotted names and values of a YAML of verl."""
    return {name: value for name, value in flatten(raw) if not name.startswith(_NOT_ARGUMENTS)}


def resolved(values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return values in which ``${other.name}`` and ``${oc.env:NAME,default}`` are replaced by what these are.

    That is OmegaConf's way to name another key, whose value is that after all overrides.
    """
    every = dict(_groups(values))
    return {name: _resolved(name, value, every, variables, 0) for name, value in every.items()}


def _groups(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values in which a whole group that another key names, as in ``ref: ${actor}``, has that key's name too."""
    for name, value in values.items():
        match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        group = f"{_absolute(name, match['key'])}." if match is not None and match["key"] else ""
        inner = {key.removeprefix(group): one for key, one in values.items() if group and key.startswith(group)}
        if not inner or f"{name}.".startswith(group):
            yield name, value
        else:
            for key, one in inner.items():
                if f"{name}.{key}" not in values:
                    text = f"${{{group}{key}}}"  # whose own ${.key} counts from where it stands
                    yield f"{name}.{key}", text if _INTERPOLATION.fullmatch(text) else one


def _absolute(name: str, key: str) -> str:
    """Return the key that an interpolation names: each dot but the first stands for one group further out."""
    out = len(key) - len(key.lstrip("."))
    return ".".join([*name.split(".")[:-out], key.lstrip(".")]) if out else key


def _resolved(at: str, value: Any, values: Mapping[str, Any], variables: Mapping[str, str], depth: int) -> Any:
    if not isinstance(value, str) or depth > 8:
        return value

    def one(match: re.Match[str]) -> Any:
        if match["env"]:
            given = variables.get(match["name"], match["default"])
            return match[0] if given is None or is_unset(given) else given.strip()
        name = _absolute(at, match["key"])
        return _resolved(name, values[name], values, variables, depth + 1) if name in values else match[0]

    if whole := _INTERPOLATION.fullmatch(value):
        found = one(whole)
        return yaml_value(found) if whole["env"] and found != value else found
    return _INTERPOLATION.sub(lambda match: str(one(match)), value)


def hydra_defaults(raw: Mapping[str, Any], path: str) -> tuple[list[str], dict[str, Any]]:
    """Return verl's configs that a YAML of Hydra is made from, and what it chooses of their groups.

    Raises ValueError for any other config, which is not known.
    """
    defaults = raw.get("defaults")
    given = defaults if isinstance(defaults, list) else []
    bases = [base for base in given if isinstance(base, str) and base != "_self_"]
    if others := [base for base in bases if base not in VERLS_OWN]:
        raise ValueError(
            f"{path}: it is made from {', '.join(others)}, and only verl's {', '.join(VERLS_OWN)} are known"
        )
    if bases and "_self_" in given and given.index("_self_") < given.index(bases[0]):
        raise ValueError(f"{path}: _self_ stands before {bases[0]}, whose values then replace those of the file")
    chosen = {re.sub(r"^(?:override|optional) ", "", str(name)): value
              for group in given if isinstance(group, Mapping) for name, value in group.items()}  # fmt: skip
    own = {name for name, value in chosen.items()
           if value is None or value in _OWN_GROUPS or str(value).startswith("${model_engine}")}  # fmt: skip
    return bases, {name: value for name, value in chosen.items() if not name.startswith("hydra") and name not in own}


def _is_own(folder: str) -> bool:
    folder = os.path.normpath(folder)
    return folder == "config" or folder.endswith(("trainer/config", "dapo/config"))


def hydra_file(
    given: dict[str, str],
    variables: dict[str, str],
    left: dict[str, str],
    place: Path,
    written: Mapping[str, str | None],
) -> tuple[str, dict[str, Any]]:
    """Return the file that Hydra's flags name, and what it sets: nothing for verl's own, whose defaults are known."""
    name = given.get("--config-name", VERLS_OWN[0]).removesuffix(".yaml")
    folder = given.get("--config-path", given.get("--config-dir", "config"))
    flags = " ".join(f"{flag} {value}" for flag, value in given.items())
    if name in VERLS_OWN and _is_own(folder):
        left |= {flags: "verl's own: its defaults are known"} if flags else {}
        return name, {}
    path = f"{folder}/{name}.yaml"
    entry = variables.get("entry", "")
    module = os.path.dirname(entry if entry.endswith(".py") else entry.replace(".", "/"))
    if "--config-dir" not in given and text_of(place, beside := os.path.join(module, path), written) is not None:
        path = beside  # Hydra looks for a path beside the module
    if is_unset(name) or text_of(place, path, written) is None:
        raise ValueError(
            f"{flags}: that file sets arguments of the run, and is not at hand: put {plain_path(path)} beside the "
            "script, or convert from the folder in which the script is started"
        )
    raw = named(place, path, written)
    bases, chosen = hydra_defaults(raw, path)
    variables["config_name"] = bases[0] if bases else name
    left[flags] = f"{path} is read, and its arguments are taken as part of the command"
    values = verl_values(raw)
    refuse_misspelt(path, values, "verl")
    return path, chosen | values


def refuse_misspelt(path: str, values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError, with the file that a command names, for a misspelt argument in it."""
    table = tables.load(source)
    for name in values:
        if not table.has(name) and (nearest := misspelt(name, table.like(name))):
            raise ValueError(f"{path}: unknown argument {report.plain(name)}; nearest: {nearest}")


def _workers(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of a YAML whose `train`, `rollout` and `teacher` have settings of their own.

    Also those that count for other workers than their own group's. What a group gives goes before what all share. In
    ms-swift the trainer has the arguments of `train`, also for sampling, and the engines their own vllm_* of `rollout`.
    """
    groups = {name: values.pop(name) for name in _GROUPS if isinstance(values.get(name), Mapping)}
    left: dict[str, str] = {}
    for name, group in groups.items():
        other = "rollout" if name == "train" else "train"
        for key, value in ((str(key), value) for key, value in group.items()):
            if name == "teacher" or key == "gpus":
                values[f"{name}.{key}"] = value
            elif key.startswith("vllm_") is (name == "rollout"):
                values[key] = value
            elif {**values, **groups.get(other, {})}.get(key) != value:
                left[f"{name}.{key}={value}"] = f"ms-swift takes {key} from {other} and from what all groups share"
    return values, left


def nearest_project(given: Mapping[str, Any]) -> str:
    """Return the project that knows most of these arguments. Raises ValueError if they do not show it."""
    names = {str(name) for name in given}
    whole = [name for name in names if isinstance(given.get(name), Mapping) and not _MAPPINGS.search(name)]
    if target := next((text for text in _targets(given) if text.startswith("verl.")), ""):
        raise ValueError(
            f"this is a part of verl's own config ({target}), without actor_rollout_ref: convert reads the whole, or "
            "the command"
        )
    if _VERLS_SFT <= names or "partial_pretrain" in (given["model"] if isinstance(given.get("model"), Mapping) else ()):
        raise ValueError("this is a config of verl's supervised trainer: convert reads verl.trainer.main_ppo with grpo")
    names -= {*whole}  # sections of somebody's own: no argument of these projects is a mapping with such a name
    for name in whole:
        if inner := sorted(trl_kinds.signs(map(str, given[name])), key=[*map(str, given[name])].index):
            raise ValueError(
                f"{name}.{inner[0]}: arguments of TRL or ms-swift in a section of somebody's own, which only its "
                "script reads: give them at the top of the YAML, by the project's names"
            )
    counts = {project: len(tables.load(project).known & names) for project in ("swift", "trl")}
    if "rlhf_type" in names:
        counts["swift"] += len(names)
    elif {"model", "dataset"} <= names and len(tables.load("swift_hf").known & names) > 3:
        raise ValueError(
            "these are arguments of ms-swift without rlhf_type, as swift sft and pt have: convert reads rlhf_type grpo"
        )
    best = max(counts, key=lambda project: counts[project])
    few = best == "trl" and 2 * counts[best] < len(names) and not trl_kinds.signs(names)
    if counts[best] < 2 or counts["swift"] == counts["trl"] or few:
        raise ValueError("these arguments do not show whose they are; name the project with --from swift, verl or trl")
    return best


def _targets(raw: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the classes that a config of Hydra says its groups are made into."""
    yield from (str(value) for name, value in flatten(raw) if name.rpartition(".")[2] == "_target_")


def from_python(text: str, place: Path | None = None) -> Found:
    """Return the run whose GRPOConfig a Python file makes. Raises ValueError if it makes none."""
    run = python_source.read(text, place)
    if not run.values:
        raise ValueError(python_source.why_not_read(run))
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in run.values.items()}
    note = f"the GRPOConfig in line {run.line} is read, and what the file does with it; the rest of the file is not"
    return with_python(Found("trl", values, {}, [], (note,)), run, "the file")


def with_python(found: Found, run: python_source.PythonRun | None, word: str) -> Found:
    """Return a run with what its Python file `word`, if it is at hand, changes after the config is made or parsed."""
    if run is None:
        return found
    idle = {name: found.values[name] for name in run.unused if name in found.values and name not in run.changed}
    filled = [run.own.filled(part, found.values) for part in (run.defaults, run.changed)]
    values = {**filled[0], **found.values, **filled[1]}
    table, handed = tables.load("trl"), {**run.defaults, **run.changed}
    theirs = {name: value for name, value in found.values.items() if name in run.own.names and not table.has(name)}
    values = {name: value for name, value in values.items() if name not in idle and name not in theirs}
    notes = [*found.notes, *(f"of {file}, {', '.join(names)} is read, too" for file, names in run.files.items())]
    notes += [f"{word}: {text}" for text in (run.absent, run.repeats) if text]
    if names := [n for n, value in run.changed.items() if found.values.get(n) != value and not is_code(value)]:
        notes.append(f"{word} sets {', '.join(names)} itself, whatever its command says: its values are used")
    if run.doubts:
        text = "which may set any argument: those that are not given have their defaults here"
        notes.append(f"{word} has {'; '.join(run.doubts)}, {text}")
    if own := [name for name, why in run.left.items() if why == NOT_TRLS]:
        notes.append(f"{word} trains with {' and '.join(own)}, which is not TRL's: what that changes is not known")
    doubted = frozenset(values) - (frozenset() if run.parses else python_source.APART) if run.doubts else frozenset()
    left = {**found.left, **{f"{name}={value}": run.unused[name] for name, value in idle.items()}, **run.left}
    left |= {f"{name}={value}": run.own.reason(name, word, handed) for name, value in theirs.items()}
    around = {**found.variables, READ: "", **({UNSLOTH: "1"} if UNSLOTH in left else {})}
    around |= {QUANTIZED: "1"} if QUANTIZED in left.values() else {}
    around |= {EVALUATES: run.evaluates} if run.evaluates is not None else {}
    return found._replace(
        values=values, variables=around, notes=tuple(notes), left=left, doubted=doubted,
        doubts=(*run.doubts, *([run.repeats] if run.repeats else [])),
        unknown={**found.unknown, **run.reasons},
    )  # fmt: skip


def refuse_toml(text: str) -> NoReturn:
    """Raise ValueError for a TOML text, with the project that it is of."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it looks like TOML, and is not valid: {error}") from None
    raise foreign.refusal(foreign.of_keys(raw) or "a project with configs in TOML (prime-rl, say)")


def named(place: Path, name: str, written: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file that a command names; `written`: texts of files that the script writes."""
    text = text_of(place, name, written)
    if text is None:
        path = plain_path(name)
        if is_unset(path):
            raise ValueError(f"{path}, which the command reads, {_UNTOLD}")
        raise ValueError(f"{path}, which the command reads, is not there: put it beside the script")
    try:
        raw = read_yaml(text)
    except ValueError as error:  # its line is one of that file
        raise ValueError(f"{name}: {error}") from None
    if raw is None:
        raise ValueError(f"{name}: not a mapping of names to values")
    return {str(key): value for key, value in raw.items()}


def text_of(place: Path, name: str, written: Mapping[str, str | None] | None = None) -> str | None:
    """Return the text of a file that a command names, None if it is not at hand. Raises ValueError if it is no text."""
    given = {} if written is None else written
    if (text := written_text(name, given)) is not None:
        return text
    path = found_for(name, place, given)
    return None if path is None else read_text(path)
