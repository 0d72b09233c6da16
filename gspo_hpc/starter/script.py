"""Complete the config that a script of another project becomes: its data, its reward functions, and sizes that work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader, yaml_text
from gspo_hpc.config.schema import Config
from gspo_hpc.data import counting, hub_data
from gspo_hpc.data.files.formats import DATA_FILES
from gspo_hpc.importers.convert import Converted
from gspo_hpc.models import hub_cache
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.starter import rewards
from gspo_hpc.starter.python_code import Code, Dataset
from gspo_hpc.starter.rewards import Rewards
from gspo_hpc.system.text import first_line

_ROUNDS = 4  # fixes that are made one after another; each mends at least one rule
_DATASET = re.compile(rf"(?:HF::|MS::)?(?P<repo>{hub_cache.REPO})(?::(?P<subset>[\w.-]+))?(?:#\d+)?")

# What is written for a setting that a script does not give, and why.
_INSTEAD: dict[str, tuple[Any, str]] = {
    "model.path": ("Qwen/Qwen3-0.6B", "the model of the original is not known"),
    "batch.micro_batch_size": (1, "the original gives none; as many as fit into memory are faster"),
}


@dataclass(frozen=True)
class Completed:
    """The config of a project that begins from a script, its reward functions, and what is to be said of them."""

    text: str
    rewards: Rewards | None  # None: those of the script are not known by name
    own_rows: int  # rows of the template's data that a rollout needs at least; 0 where the script names its own data
    notes: tuple[str, ...]
    warnings: tuple[str, ...]  # of the plan of this config


def completed(converted: Converted, script: str, source: Path, folder: Path, data: str, function: str) -> Completed:
    """Return the config of a converted script with everything that a run needs.

    `script`: its text; `folder`: that of the project; `data` and `function`: those of the template, for what the
    script does not name.
    """
    code = Code(script) if source.suffix == ".py" else Code("")
    text = Text(re.sub(r"#\n# A run also needs:\n(#   .*\n)+", "", converted.text))
    notes: list[str] = []
    for key, value in _paths(converted.config):
        if found_path := _path_here(key, value, source, folder, notes):
            text.put(key, *found_path)
    _put_sources(text, converted.config, source, folder, notes)
    own_data = converted.config.data.train is None and not converted.config.data.sources
    if own_data and (found := _dataset(converted.values, code)) is not None:
        own_data = False
        name = _hub_name(found)
        text.put("data.train", name, "files of a dataset on the hub, where they usually are: see there")
        text.carry("dataset_name", "dataset")
        notes.append(f"data.train is {name}, as hubs usually have it: see that the dataset {found.repo} has such files")
        if (field := code.prompt_key()) is not None:
            text.put("data.prompt_key", field, f"{source.name} makes its prompts of this field")
        else:
            notes.append("data.prompt_key is prompt: change it if the rows of the dataset call their prompt otherwise")
    elif own_data:
        text.put("data.train", data, "the data of the original is not known")
        notes.append("data is that of this project, for the original's is not known")
    notes += _prompt_key(text, folder)
    made = _rewards(converted, code, source, code.prompt_key() or "prompt")
    if made is not None:
        notes += made.notes
        listed = [
            {"function": f"reward.py:{name}"} | ({} if weight is None else {"weight": weight})
            for name, weight in made.functions
        ]
        text.put("reward.functions", listed, f"those of {source.name}")
        if not made.unfilled:
            text.carry("reward_funcs", "reward_weights", "custom_reward_function.path", "custom_reward_function.name")
    elif not converted.config.reward.functions:
        text.put("reward.functions", [{"function": function}], "that of the original is not known")
        notes.append("reward is that of this project, for the original's is not known")
    notes += _given(text)
    warnings: list[str] = []
    try:
        notes += _repaired(text, folder)
        plan = make_plan(text.config())
        prompts = int(plan.quantities.get("num_rollout_prompts") or 1)
        warnings = [*(one.reason for one in plan.not_run), *plan.warnings]
    except ValueError as error:  # of a model whose config cannot be read
        notes.append(f"the sizes cannot be checked: {first_line(str(error))}")
        prompts = 1
    return Completed(text.text, made, prompts if own_data else 0, tuple(notes), tuple(warnings))


class Text:
    """The text of a config, whose settings are changed without losing its comments."""

    def __init__(self, text: str) -> None:
        self.text = text

    def put(self, key: str, value: Any, comment: str) -> None:
        """Write a setting into its section, in place of the line that it has."""
        section, _, name = key.partition(".")
        line = f"  {name}: {yaml_text.write_line(value)} # {comment}"
        block = re.search(rf"^{section}:\n((?:[ ].*\n)*)", self.text, re.MULTILINE)
        if block is None:
            config, remarks, rest = self.text.partition("\n#\n")  # what the conversion says follows the config
            self.text = f"{config.rstrip()}\n\n{section}:\n{line}\n{remarks}{rest}"
            return
        old = re.compile(rf"^(?:  # .*\n)*  {name}:.*\n", re.MULTILINE)
        lines = block[1]
        new = old.sub(lambda _: f"{line}\n", lines, count=1) if old.search(lines) else f"{lines}{line}\n"
        self.text = self.text[: block.start(1)] + new + self.text[block.end(1) :]

    def carry(self, *arguments: str) -> None:
        """Take arguments out of what is not carried over, which the conversion by itself says of them."""
        dropped = re.search(r"^#\n# Not carried over:\n((?:#   .*\n?)+)", self.text, re.MULTILINE)
        if dropped is None:
            return
        names = "|".join(map(re.escape, arguments))
        left = re.sub(rf"^#   (?:--)?(?:{names})[= ].*\n?(?:#     .*\n?)*", "", dropped[1], flags=re.MULTILINE)
        title = "#\n# Not carried over:\n" if left else ""
        self.text = self.text[: dropped.start()] + title + left + self.text[dropped.end() :]

    def config(self) -> Config:
        """Return the config that the text is."""
        return loader.from_dict(yaml_text.read(self.text) or {})


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    given = {"model.path": config.model.path, "data.train": config.data.train, "data.eval": config.data.eval}
    yield from ((key, value) for key, value in given.items() if value)


def _put_sources(text: Text, config: Config, source: Path, folder: Path, notes: list[str]) -> None:
    """Write the files of sources as they are known here."""
    changed, listed = False, []
    for one in config.data.sources:
        path, mark, count = one.files.partition("#")
        here = _path_here(f"data.sources, {one.name}", path, source, folder, notes)
        changed = changed or here is not None
        files = f"{path if here is None else here[0]}{mark}{count}"
        listed.append({"name": one.name, "files": files} | ({} if one.weight is None else {"weight": one.weight}))
    if changed:
        text.put("data.sources", listed, "files from the folder of this config")


def _path_here(key: str, value: str, source: Path, folder: Path, notes: list[str]) -> tuple[str, str] | None:
    """Return a path as it is known here, with a comment: with the values of variables, from the project's folder.

    None where it stays as it is.
    """
    path = os.path.expanduser(re.sub(r"\$\{?(\w+)\}?", lambda match: os.environ.get(match[1], match[0]), value))
    if "$" in path:
        notes.append(f"{key} is {path}: a variable in it is not set here; write the path out")
        return None
    whole = not os.path.isabs(path)
    there = [place / path for place in (source.parent, Path()) if whole and (place / path).exists()]
    if there:
        return os.path.relpath(there[0], folder), f"{value}, from the folder of this config"
    if whole and key.startswith("data.") and not hub_data.is_name(path):
        notes.append(f"{key}: {value} is not there")
        return os.path.relpath(source.parent / path, folder), f"{value}, as if it lay beside {source.name}"
    return None if path == value else (path, f"{value} of the user who made this config")


def _dataset(values: Mapping[str, Any], code: Code) -> Dataset | None:
    """Return the dataset on the hub that a script trains on, if it names one and no other."""
    given = values.get("dataset_name", values.get("dataset"))
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if len(named) == 1 and (match := _DATASET.fullmatch(str(named[0]))) and not Path(str(named[0])).exists():
        subset, split = (str(values.get(key) or "") for key in ("dataset_config", "dataset_train_split"))
        return Dataset(match["repo"], subset or match["subset"] or "", split or "train")
    return code.dataset()


def _hub_name(dataset: Dataset) -> str:
    """Return the name of a split's files: those in the cache if it has any, else as the hub usually names them."""
    folder = hub_cache.snapshot("dataset", dataset.repo, hub_cache.MAIN)
    subset = dataset.subset if dataset.subset not in ("", "default") else "data"
    usual = f"{subset}/{dataset.split}-*.parquet"
    for pattern in (usual, *(f"{subset}/{dataset.split}*{end}" for end in DATA_FILES)):
        if any(folder.glob(pattern)):
            return f"{dataset.repo}:{pattern}"
    for end in DATA_FILES:
        if (folder / f"{dataset.split}{end}").is_file():
            return f"{dataset.repo}:{dataset.split}{end}"
    return f"{dataset.repo}:{usual}"


def _from(folder: Path, path: str) -> str:
    """Return a path from the project's folder as one from here; the folder need not be there yet."""
    return os.path.normpath(folder / path)


def _prompt_key(text: Text, folder: Path) -> list[str]:
    """Name the field with the prompt where rows that are here have a usual one and not the one named."""
    data = text.config().data
    found = counting.fields(_from(folder, data.train)) if data.train is not None else None
    if not found or counting.prompt_field(found, data.prompt_key) is not None:
        return []
    field = next((name for name in counting.PROMPT_FIELDS if name in found), None)
    if field is None:
        return []
    text.put("data.prompt_key", field, f"rows have no {data.prompt_key}")
    return [f"data.prompt_key is {field}; the fields of a row are {', '.join(found)}"]


def _rewards(converted: Converted, code: Code, source: Path, prompt_key: str) -> Rewards | None:
    """Return the reward functions that a script names; None if it names none."""
    values = converted.values
    if path := values.get("custom_reward_function.path"):
        named = Path(os.path.expanduser(os.path.expandvars(str(path))))
        found = next((place / named for place in (source.parent, Path()) if (place / named).is_file()), None)
        return rewards.of_verl(found, str(values.get("custom_reward_function.name") or "compute_score"), source.name)
    given = values.get("reward_funcs")
    names = [given] if isinstance(given, str) else list(map(str, given)) if isinstance(given, list) else []
    names = [name for name in names if not name.startswith("$")]
    return (
        rewards.of_trl(names, _numbers(values.get("reward_weights")), code, source.name, prompt_key) if names else None
    )


def _numbers(given: Any) -> list[float]:
    try:
        return [float(one) for one in (given if isinstance(given, list) else str(given or "").split())]
    except (TypeError, ValueError):
        return []


def _given(text: Text) -> list[str]:
    """Write what a run needs and the script does not say; return what that is."""
    notes = []
    for needed in text.config().missing():
        key = needed.split(" ")[0]  # of "A or B", the first
        if key in _INSTEAD:
            value, why = _INSTEAD[key]
            text.put(key, value, why)
            notes.append(f"{key} is {value}: {why}")
        else:
            notes.append(f"{needed} is not given: write it into the config")
    return notes


def is_given(assumed: str) -> bool:
    """Return whether a text asks for a setting that is written where a script does not give it."""
    return any(f"set {key}" in assumed for key in _INSTEAD)


def _repaired(text: Text, folder: Path) -> list[str]:
    """Change sizes that cannot work, each by the planner's nearest fix; return what was changed and why."""
    notes: list[str] = []
    for _ in range(_ROUNDS):
        config = text.config()
        train = config.data.train
        rows = None if train is None else counting.count_rows(_from(folder, train))
        plan = make_plan(config, rows)
        fixes: Sequence[search.Fix] = search.find(config, rows, limit=1) if plan.broken else ()
        fixes = [fix for fix in fixes if all(change.key != "model.path" for change in fix.changes)]  # it asks for one
        if not fixes:
            break
        why = plan.broken[0].rule
        for change in fixes[0].changes:
            text.put(change.key, change.value, f"was {change.before}, which breaks the rule {why}: the nearest fix")
            notes.append(f"{change} in place of {change.before}: the rule {why} was broken")
    if (plan := make_plan(text.config())).broken:
        notes.append(f"the rule {plan.broken[0].rule} is broken: gspo-hpc plan shows fixes")
    return notes
