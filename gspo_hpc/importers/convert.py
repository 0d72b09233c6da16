"""``gspo-hpc convert``: turn the run of another project into a config of ours.

It reads a Megatron-SWIFT command line, verl's overrides or a TRL GRPOConfig, without a shell and without the projects
themselves. The YAML that it writes says what is not carried over and where a size has another meaning.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config import yaml_text
from gspo_hpc.config.schema import Config
from gspo_hpc.importers import swift, tables, trl, verl
from gspo_hpc.importers.draft import Draft, Source, comments
from gspo_hpc.importers.inputs import flatten, options, read_yaml
from gspo_hpc.importers.shell import Command, follow
from gspo_hpc.importers.words import is_unset
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system.terminal import paint

SOURCES = ("swift", "verl", "trl")

_MOST = 8  # mistakes that are shown
_OVERRIDE = re.compile(r"[+~]{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_model)\.[\w.]+=")
_SCRIPT = re.compile(
    r"megatron\s+rlhf|\bverl[.]|main_ppo|accelerate\s+launch|trl\s+grpo|torchrun|(?:^|\s)--[a-z]\w+[\s=]|"
    r"(?:^|\s)(?:\+{0,2})(?:data|actor_rollout_ref|algorithm|trainer)\.[\w.]+="
)
_TRAINER = re.compile(r"(?:^|/)[\w-]*grpo[\w-]*\.py")
_HYDRA = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}  # of its flags those with a value
_VERLS_OWN = ("ppo_trainer", "ppo_megatron_trainer")  # its config names, the default first; their defaults are known
_UNSET_WORD = "not set in the script; what it adds is not known"
_POSSIBLE = "the run stands behind a condition that is not known before the script runs: it is assumed to hold"
_ACCELERATE = ("num_processes", "num_machines", "distributed_type")


class _Found(NamedTuple):
    """A run of another project: its arguments, the variables around it, and all commands of the script."""

    source: str
    values: dict[str, Any]
    variables: dict[str, str]
    commands: list[Command]
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unknown: Mapping[str, str] = {}  # shell variable (*: any other) -> why


@dataclass(frozen=True)
class Converted:
    """A run of another project as a config of ours."""

    source: str
    config: Config
    text: str  # the YAML, with everything that is to be said as comments
    differs: tuple[str, ...]  # where a size means something else
    dropped: tuple[str, ...]  # what has no counterpart
    assumed: tuple[str, ...]  # what was not given


_PROJECTS: dict[str, tuple[str, str, str, Callable[[Draft, list[Command], int | None, int | None], None]]] = {
    "swift": ("Megatron-SWIFT", "command line", "--", swift.convert),  # name, what is read, sign of an argument
    "verl": ("verl", "list of overrides", "", verl.convert),
    "trl": ("TRL", "GRPOConfig", "", trl.convert),
}


def convert(
    text: str, source: str | None = None, gpus: int | None = None, rows: int | None = None, folder: Path = Path()
) -> Converted:
    """Return the config that `text` amounts to: a script, a command line or YAML.

    `source` names the project if the text does not show it; `gpus` (GPUs that train) and `rows` (prompts of the data)
    are used if the text does not say. Files that the text names are looked for in `folder`. Raises ValueError with
    one line for each mistake.
    """
    found = _find(text, source, folder)
    project, kind, sign, converter = _PROJECTS[found.source]
    description = Source(project, kind, sign, tables.load(found.source))
    draft = Draft(description, found.values, found.variables, found.unknown)
    draft.assumed += found.notes
    draft.dropped += found.dropped
    draft.rename()
    draft.copy()
    converter(draft, found.commands, gpus, rows)
    config, body = draft.finish()
    head = [
        f"# Converted from a {description.kind} of {description.project} by gspo-hpc convert. Sizes count completions.",
        "# Before a run: gspo-hpc plan FILE",
    ]
    tail = comments("Where a size means something else:", draft.differs)
    tail += comments("Assumed, or still to be given:", draft.assumed)
    tail += comments("Not carried over:", draft.dropped)
    missing = [key for key in config.missing() if key != "reward.functions"] + ["reward.functions"]
    tail += comments("A run also needs:", [", ".join(missing)])
    written = "\n".join(head) + "\n" + body + "\n".join(tail) + "\n"
    return Converted(found.source, config, written, tuple(draft.differs), tuple(draft.dropped), tuple(draft.assumed))


def run(args: argparse.Namespace) -> int:
    """Run the command: write the config, and print on stderr what needs a look. Return 0."""
    path = Path(args.config)
    for name, count in (("--gpus", args.gpus), ("--rows", args.rows)):
        if count is not None and count < 1:
            raise ValueError(f"{name} {count}: must be 1 or more")
    if args.out is not None and args.out.exists():
        raise ValueError(f"{args.out} is there already; name another file")
    text = _read(None if args.config == "-" else path)
    try:
        found = convert(text, args.source, args.gpus, args.rows, Path() if args.config == "-" else path.parent)
    except ValueError as error:
        lines = str(error).splitlines()
        more = [f"... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
        raise ValueError("\n".join(f"{args.config}: {line}" for line in lines[:_MOST] + more)) from None
    if args.out is None:
        print(found.text, end="")
    else:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(found.text)
        print(f"{args.out}: written from {_PROJECTS[found.source][0]}")
        for title, items in (("where a size means something else", found.differs), ("not carried over", found.dropped)):
            print("\n".join([f"{title}:", *(f"  {item}" for item in items)]) if items else f"{title}: nothing")
    for line in _warnings(found, args.rows):
        print(f"{paint('warning:', '33', sys.stderr)} {line}", file=sys.stderr)
    return 0


def _warnings(found: Converted, rows: int | None) -> list[str]:
    """Return what was assumed, and which rules the plan breaks with a fix."""
    plan = make_plan(found.config, rows)
    lines = [*found.assumed, *(f"the plan breaks rule {item.rule}: {item.message}" for item in plan.broken)]
    if plan.broken and (offered := search.find(found.config, rows, limit=1)):
        lines.append(f"this fixes the plan: {offered[0]}")
    return lines + [f"{text}" for text in plan.warnings]


def _read(path: Path | None) -> str:
    """Return the text of a file or of standard input. Raises ValueError if it cannot be read as text."""
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
        text.encode("utf-8")  # in some locales standard input lets other bytes through, as surrogates
        return text
    except UnicodeError as error:
        raise ValueError(f"{path or '-'}: not UTF-8 text ({getattr(error, 'reason', error)})") from None
    except OSError as error:
        raise ValueError(f"{path or '-'}: cannot be read: {error.strerror}") from None


def _find(text: str, source: str | None, folder: Path) -> _Found:
    """Return the one run in a text."""
    if not text.strip():
        raise ValueError("it is empty")
    raw = None if _SCRIPT.search(_without_comments(text)) else read_yaml(text)
    if raw is not None:
        return _from_yaml(raw, source)
    script = follow(text)
    commands = script.commands
    runs = [run for command in commands if (run := _from_command(command, commands, folder)) is not None]
    if not runs:  # none that runs in any case: one that runs if a condition holds
        runs = [run for item in script.possible if (run := _from_command(item, commands, folder)) is not None]
        runs = [run._replace(notes=(*run.notes, _POSSIBLE)) for run in runs]
    lists = [run for command in commands if (run := _bare(command, commands, source, folder, not runs)) is not None]
    if not runs:
        runs, lists = lists[:1], lists[1:]
    if not runs:
        raise ValueError(
            "no run of Megatron-SWIFT (megatron rlhf --rlhf_type grpo ...), verl (python -m verl.trainer.main_ppo ...) "
            "or TRL (GRPOConfig) is recognised; name one with --from swift, verl or trl"
        )
    if len(runs) > 1:
        raise ValueError(f"it starts {len(runs)} runs: leave one in the file")
    (found,) = runs
    for more in lists:  # a command broken in two by a comment or a line without its backslash
        name = next(iter(more.values), "")
        text = f"{name} and what follows stand apart from the command: taken as part of it; a \\ is missing before them"
        dropped = (*found.dropped, *more.dropped)
        found = found._replace(values=found.values | more.values, notes=(*found.notes, text), dropped=dropped)
    return found._replace(notes=(*found.notes, *_cut_off(found, commands)))


def _cut_off(found: _Found, commands: list[Command]) -> Iterator[str]:
    """Yield commands whose arguments look like the run's: a ; & or | without quotes has cut them off."""
    known = tables.load(found.source).known
    for first, *words in (command.words for command in commands):
        given = [name for name in options(words)[0] if name in known]
        if len(given) > 1 and words[0].startswith("--") and not first.startswith("-"):
            yield f"{first[:40]} {words[0]} ... is a command of its own to a shell: put quotes around text with ; & |"


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text)


def _from_yaml(raw: Mapping[str, Any], source: str | None) -> _Found:
    if "compute_environment" in raw or ("num_processes" in raw and "mixed_precision" in raw):
        raise ValueError("this is accelerate's config; convert takes the GRPOConfig, and --gpus N for num_processes")
    flat = {name: value for name, value in flatten(raw) if not name.startswith(("defaults", "hydra."))}
    if source is None:
        source = "verl" if "actor_rollout_ref" in raw else _nearest_project(raw)
    if source == "verl":
        for name, value in flat.items():  # OmegaConf's way to name another key
            if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
                flat[name] = flat.get(match.group(1), value)
        return _Found(source, flat, {}, [])
    values = {str(name): value for name, value in raw.items()}
    env = values.pop("ENV", None) if source == "swift" else None
    variables = {str(key): str(value) for key, value in env.items()} if isinstance(env, Mapping) else {}
    if source == "trl":
        variables = {name: str(values.pop(name)) for name in _ACCELERATE if name in values}
    return _Found(source, values, variables, [])


def _nearest_project(given: Mapping[str, Any]) -> str:
    """Return the project that knows most of these arguments."""
    counts = {project: len(tables.load(project).known & {*given}) for project in ("swift", "trl")}
    if "rlhf_type" in given:
        counts["swift"] += len(given)
    best = max(counts, key=lambda project: counts[project])
    if counts[best] < 2 or counts["swift"] == counts["trl"]:
        sections = [name for name in given if name in Config.model_fields]
        what = "it is a config of ours already" if len(sections) > 1 else "these arguments do not show whose they are"
        raise ValueError(f"{what}; name the project with --from swift, verl or trl")
    return best


def _from_command(command: Command, commands: list[Command], folder: Path) -> _Found | None:
    """Return the run that a command starts, None if it starts none."""
    words = command.words
    for number, word in enumerate(words):
        pair = (os.path.basename(word), *words[number + 1 : number + 2])
        if pair in (("megatron", "sft"), ("swift", "rlhf")):
            raise ValueError(f"{' '.join(pair)} is another trainer of ms-swift: convert reads megatron rlhf")
        if pair == ("megatron", "rlhf") or re.search(r"_megatron[./]rlhf(\.py)?$", word):
            return _make("swift", words, number, number + 1 + (pair[-1] == "rlhf"), command, commands, folder)
        if re.search(r"^verl\.|\bmain_(ppo|dapo)\b", word) and "=" not in word:
            return _make("verl", words, number, number + 1, command, commands, folder)
        if pair == ("trl", "grpo") or _TRAINER.search(word):
            return _make("trl", words, number, number + 1 + (pair == ("trl", "grpo")), command, commands, folder)
    return None


def _bare(command: Command, commands: list[Command], source: str | None, folder: Path, alone: bool) -> _Found | None:
    """Return the run of a list of arguments without a command. `alone`: nothing else in the text starts a run."""
    words = command.words
    if not (_OVERRIDE.match(words[0]) or (words[0].startswith("--") and len(words) > 1)):
        return None
    if source is None or not alone:
        overrides = any(_OVERRIDE.match(word) for word in words)
        source = "verl" if overrides else _nearest_project(options(words)[0])
    return _make(source, words, 0, 0, command, commands, folder)


def _make(
    source: str,
    words: tuple[str, ...],
    launched: int,
    first: int,
    command: Command,
    commands: list[Command],
    folder: Path,
) -> _Found:
    """Return the run of these words; `launched` of them are the launcher's, and the arguments begin at `first`."""
    variables = dict(command.variables)
    launcher, _ = options(words[:launched])
    for name, value in launcher.items():
        variables[name] = str(value[0] if isinstance(value, list) else value)
    if source == "verl":
        values, unknown, lost = _overrides(words[first:], variables)
        return _Found(source, values, variables, commands, unknown, lost, command.unknown)
    values, before = options(words[first:])
    notes: list[str] = []
    dropped: list[str] = []
    for word in before:
        if source == "swift" and word.endswith((".yaml", ".yml")):
            values = _named(folder, word) | values
        elif is_unset(word):
            notes.append(f"{word}: {_UNSET_WORD}")
        elif word:
            dropped.append(f"{word}: no argument")
    if source == "trl":
        if given := values.pop("config", None):
            values = _named(folder, str(given)) | values
        for name in ("config_file", "accelerate_config"):
            file = variables.pop(name, "") or str(values.pop(name, ""))
            if file.endswith((".yaml", ".yml")):
                launch = _named(folder, file)
                variables = {key: str(launch[key]) for key in _ACCELERATE if key in launch} | variables
        variables |= {name: str(values.pop(name)) for name in _ACCELERATE if name in values}
    return _Found(source, values, variables, commands, tuple(notes), tuple(dropped), command.unknown)


def _named(folder: Path, name: str) -> dict[str, Any]:
    """Return the mapping in a YAML file that a command names."""
    path = next((place for place in (folder / name, Path(name)) if place.is_file()), None)
    if path is None:
        text = "is not set in the script" if is_unset(name) else "is not there"
        raise ValueError(f"{name}, which the command reads, {text}: put it beside the script")
    raw = read_yaml(_read(path))
    if raw is None:
        raise ValueError(f"{name}: not a mapping of names to values")
    return {str(key): value for key, value in raw.items()}


def _overrides(
    words: tuple[str, ...], variables: dict[str, str]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return Hydra's overrides with values as YAML, notes on words that are not known, and what has no counterpart."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    dropped: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if (flag := _HYDRA.get(name, name)).startswith("--"):
            if not equals and flag in _HYDRA.values():
                value = next(rest, "")
            variables[flag[2:].replace("-", "_")] = value
            if flag not in _HYDRA.values():
                dropped.append(f"{word}: no setting of the run")
        elif word.startswith("~"):
            gone = [key for key in values if key == name[1:] or key.startswith(f"{name[1:]}.")]
            for key in gone:
                del values[key]
            removed = f"taken out: {', '.join(gone)}" if gone else "nothing is given before it to take out"
            dropped.append(f"{word}: {removed}")
        elif equals and "." in name:
            try:
                read = yaml_text.read(value)
            except ValueError:
                read = value
            values[name.lstrip("+")] = value if is_unset(value) or isinstance(read, Mapping) else read
        elif is_unset(word):
            notes.append(f"{word}: {_UNSET_WORD}")
        elif word.strip():
            raise ValueError(f"{word[:60]!r} is no override of verl: write name.of.key=value")
    given = {flag: variables[name] for flag in _HYDRA.values() if (name := flag[2:].replace("-", "_")) in variables}
    own = given.get("--config-name", _VERLS_OWN[0]).removesuffix(".yaml") in _VERLS_OWN
    if not own or os.path.normpath(given.get("--config-path", "config")) != "config" or "--config-dir" in given:
        flags = " ".join(f"{flag} {value}" for flag, value in given.items())
        dropped.append(f"{flags}: that file is not read; what it sets is taken from verl's defaults")
    return values, tuple(notes), tuple(dropped)
