"""Checks of what a run needs of the files of this machine, as far as a few reads show it: one list of them.

`train` and `submit` refuse a run with it, `doctor` reports it, and `plan` says it before anything is asked for. So
nothing here imports what a plan does without, runs a user's code or reads a large file to its end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gspo_hpc.config import derived
from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config, RewardModel
from gspo_hpc.config.sections.reward_models import in_place_of_policy
from gspo_hpc.launch import mounts

if TYPE_CHECKING:
    from gspo_hpc.data.rows import Row
    from gspo_hpc.data.sources.parts import Part

# Paths that go into #SBATCH lines and into the script: without characters that sbatch or a shell would interpret.
PLAIN_PATH = re.compile(r"[A-Za-z0-9 ._+=,:@/-]+")


class Problem(NamedTuple):
    """The reason why a run would be refused."""

    key: str  # the setting that names what is wrong
    text: str
    fix: str = ""  # a line of its own
    absent: str = ""  # what a run does about something that is not on this machine; empty if it is here and wrong
    downloaded: bool = False  # whether a run gets what is absent by itself

    def __str__(self) -> str:
        return "\n".join([f"{self.key}: {self.text}", *([self.fix] if self.fix else [])])


Check = Callable[[Config], Iterator[Problem]]


def problems(config: Config, checks: Sequence[Check] | None = None) -> list[Problem]:
    """Return what keeps a run of `config` from being started from here."""
    return [problem for check in checks or CHECKS for problem in check(config)]


def refuse(config: Config, checks: Sequence[Check] | None = None) -> None:
    """Raise ValueError for every problem, and for what is not on this machine."""
    if found := problems(config, checks):
        raise ValueError("\n".join(map(str, found)))


def notifications(config: Config) -> Iterator[Problem]:
    """Check that there is an address at every place, that nobody else may read it, and that apprise knows its service.

    An address may hold a password, and is not shown.
    """
    if not config.notify.urls:
        return
    from gspo_hpc.launch.notify import addresses, sender

    for place in config.notify.urls:
        try:
            for number in sender.unknown(addresses.at(place)):
                text = f"{place}: apprise knows no service of address {number}"
                yield Problem("notify.urls", text, "correct it; addresses look like SERVICE://..., such as json://HOST")
        except addresses.AddressAbsent as mistake:
            yield Problem("notify.urls", str(mistake).removeprefix("notify.urls: "), absent="A run needs it")
        except ValueError as mistake:
            yield Problem("notify.urls", str(mistake).removeprefix("notify.urls: "))


def reward_functions(config: Config) -> Iterator[Problem]:
    """Check that every reward function can be called with its arguments."""
    if not config.reward.functions:
        return
    from gspo_hpc.rewards import registry

    for number, (name, text, absent) in registry.wrong_terms(config.reward).items():
        key = f"reward.functions[{number}].function"
        yield Problem(key, f"{name}: {text}", absent="A run needs the file" if absent else "")


def environments(config: Config) -> Iterator[Problem]:
    """Check that the environment can be made, and that there is one where its reward is asked for."""
    from gspo_hpc.rewards.catalogue import TURN

    name = config.environment.name
    for number, term in enumerate(config.reward.functions):
        if term.function == TURN:
            yield Problem(f"reward.functions[{number}].function", f"{TURN} is no reward function; give environment")
    if config.environment.talks and not config.data.chat_template:
        yield Problem("data.chat_template", "replies of an environment stand in the chat template", "set it to true")
    yield from _tools(config)
    if name is None:
        for number, term in enumerate(config.reward.functions):
            if term.function == "environment":
                text = "there is no environment whose reward it could be"
                yield Problem(f"reward.functions[{number}].function", f"environment: {text}", "set environment.name")
        return
    from gspo_hpc.rewards.environments import registry

    try:
        registry.check(config.environment)
    except ValueError as mistake:
        absent = "A run needs the file" if isinstance(mistake, own_code.FileAbsent) else ""
        yield Problem("environment.name", str(mistake), absent=absent)


def _tools(config: Config) -> Iterator[Problem]:
    """Check that every tool is there, and that nothing else gives the chat template its tools."""
    if not config.environment.tools:
        return
    from gspo_hpc.models import model_folder
    from gspo_hpc.rewards.environments import tools

    if "tools" in config.data.chat_template_kwargs:
        yield Problem("data.chat_template_kwargs", "environment.tools gives the template its tools", "leave out tools")
    try:
        tools.check(config.environment)
        if template := model_folder.template_of(config):
            tools.Toolbox.of(config.environment, template)
    except ValueError as mistake:
        absent = "A run needs the file" if isinstance(mistake, own_code.FileAbsent) else ""
        yield Problem("environment.tools", str(mistake), absent=absent)


def observers(config: Config) -> Iterator[Problem]:
    """Check that every observer can be called with the record of a step."""
    for number, name in enumerate(config.tracking.observers):
        try:
            own_code.check_observer(name)
        except ValueError as mistake:
            absent = "A run needs the file" if isinstance(mistake, own_code.FileAbsent) else ""
            yield Problem(f"tracking.observers[{number}]", f"{name}: {mistake}", absent=absent)


def prometheus(config: Config) -> Iterator[Problem]:
    """Check that the folder is there into which rank 0 writes for Prometheus. It may be one of the node only."""
    folder = config.tracking.prometheus
    if folder is None or os.path.isdir(folder):
        return
    if os.path.lexists(folder):
        yield Problem("tracking.prometheus", f"{folder} is not a folder")
    else:
        yield Problem("tracking.prometheus", f"there is no folder {folder}", "make it", "The node of rank 0 needs it")


def data(config: Config) -> Iterator[Problem]:
    """Check names of data files and their first rows, of which built-in reward functions must be able to grade one."""
    from gspo_hpc.data.sources import parts

    told = list[Problem]()
    for part in parts.every(config.data):
        rows = yield from _data(config, part)
        if rows:
            told += (one for one in _grading(config, rows, part) if one not in told)
    yield from told


def _data(config: Config, part: Part) -> Generator[Problem, None, list[Row]]:
    """Check one part of the data; return those of its first rows that are looked at."""
    from gspo_hpc.data import counting

    key, name = part.key, part.path
    if not os.path.exists(name):
        from gspo_hpc.data import hub_data

        if hub_data.is_name(name):
            if (wrong := hub_data.wrong_name(name)) is not None:
                yield Problem(key, wrong)
            else:
                text, absent = f"{name} is not in the cache of the hub", "A run downloads it"
                if hub_data.is_task(name):
                    text, absent = f"the rows of {name} are not made yet", "A run makes them"
                yield Problem(key, text, absent=absent, downloaded=True)
            return []
    if not counting.is_there(name):
        if (wrong := counting.wrong_name(name)) is not None:
            yield Problem(key, wrong)
        else:
            fix = f"correct the path; relative paths start at {os.getcwd()}"
            yield Problem(key, f"{name} is not there", fix, absent="A run needs the file")
        return []
    fields = counting.fields(name)
    if part.source is None and fields is not None and counting.prompt_field(fields, config.data.prompt_key) is None:
        return []  # a rule of the plan says so, with the key to take
    from gspo_hpc.data import rows

    try:
        return rows.first_of(part, config.data)
    except ModuleNotFoundError as error:
        text = f"{name} cannot be looked at: {error.name}, which reads such files, is not installed here"
        yield Problem(key, text, absent="A run needs it")
    except ValueError as mistake:
        yield Problem(key, str(mistake))
    return []


def _grading(config: Config, rows: Sequence[Row], part: Part) -> Iterator[Problem]:
    """Yield why built-in reward functions cannot grade the first row, or rows that lack a field which it has.

    A user's own are tried only when a run is started.
    """
    if not config.reward.functions:
        return
    from gspo_hpc.data.rows import known_fields, lacking
    from gspo_hpc.rewards import builtin, registry

    wrong = {problem.key for problem in reward_functions(config)}
    looked_at = [rows[0], *(one.row for one in lacking(rows, known_fields(rows[0])))]
    for number in registry.grading_terms(config, part.source, trains=part.trains).values():
        term = config.reward.functions[number]
        key = f"reward.functions[{number}].function"
        if term.function not in builtin.REGISTRY or key in wrong:
            continue
        for row in looked_at:
            if (why := builtin.refusal(term.function, term.args, row.fields)) is not None:
                yield Problem(key, f"{term.function} cannot grade {row.where}: {why}")


def model(config: Config) -> Iterator[Problem]:
    """Check the folder of the model: its config.json, the headers of its weights, its tokenizer."""
    yield from _model(config, "model.path")


def teacher(config: Config) -> Iterator[Problem]:
    """Check the folder of the teacher as that of the model, and that both have one tokenizer."""
    if not config.algorithm.has_teacher:
        return
    of_teacher = derived.teacher_config(config)
    wrong = False
    for problem in _model(of_teacher, "algorithm.teacher"):
        wrong = True
        yield problem
    if wrong:
        return
    from gspo_hpc.models import hub, tokenizers

    folders = [hub.with_cached_folder(one).model.path for one in (config, of_teacher)]
    if all(path is not None and os.path.isdir(path) for path in folders):
        own, its = (Path(str(path)) for path in folders)
        if (differs := tokenizers.difference(own, its)) is not None:
            yield Problem("algorithm.teacher", f"{its} has another tokenizer than model.path {own}: {differs}")


def reward_models(config: Config) -> Iterator[Problem]:
    """Check the folders of reward models."""
    for number, one in enumerate(config.reward.models):
        yield from _model(in_place_of_policy(config, one), f"reward.models[{number}].path", one)


def _model(config: Config, key: str, scores: RewardModel | None = None) -> Iterator[Problem]:
    """Check the folder of a config's model, which the setting `key` names."""
    path = config.model.path
    if path is None:
        return
    if not os.path.isdir(path):
        from gspo_hpc.models import hub

        if (wrong := hub.not_a_folder(path)) is not None:
            yield Problem(key, wrong)
            return
        config = hub.with_cached_folder(config)
        if config.model.path == path:
            text, then = hub.absence(path)
            yield Problem(key, f"{path} {text}", absent=f"A run {then}", downloaded=hub.is_name(path))
            return
    from gspo_hpc.models import model_folder

    unreadable = scores is None and _plan_says(config)
    for check, text, fix, absent in model_folder.problems(config, scores):
        if check != "model" or not unreadable:
            yield Problem(key, text.removeprefix("model.path "), fix, "A run needs it" if absent else "")


def adapter(config: Config) -> Iterator[Problem]:
    """Check the folder of adapters that a run begins with."""
    if config.adapter.type is None or config.adapter.path is None:
        return
    from gspo_hpc.models import peft_config

    if (wrong := peft_config.obstacle(config.adapter)) is not None:
        key, _, text = wrong.partition(" ")
        yield Problem(key, text) if key.startswith("adapter.") else Problem("adapter.path", wrong)


def _plan_says(config: Config) -> bool:
    """Return whether the plan refuses the model by its config.json, so that it need not be said again."""
    from gspo_hpc.models import architecture

    assert config.model.path is not None
    try:
        architecture.planned(config.model.path)
    except ValueError:
        return True
    return architecture.untrained(config.model.path, config.model.provider) is not None


def run_directory(config: Config) -> Iterator[Problem]:
    """Check that the run directory is new, or of a run that this config may continue."""
    place = mounts.existing(config.run_dir)
    if place != Path(os.path.abspath(config.run_dir)) and place.is_dir():
        return  # a new folder in one that is there
    from gspo_hpc.runs import directory, same_run

    try:
        run = directory.of_this_run(config)
        if run.info.exists() and (started := _as_started(config)) is not None:
            changed = same_run.changes(run, started, most_bytes=WHOLE_FILE_BYTES)
            if changed and (run.holder() is not None or same_run.made_progress(run)):
                yield Problem("run.dir", changed)
    except ValueError as mistake:
        yield Problem("run.dir", str(mistake))
    except OSError as error:
        yield Problem("run.dir", f"{error.filename or config.run_dir}: {error.strerror}")


def run_place(config: Config) -> Iterator[Problem]:
    """Check that the run directory can be made, and that this user may write to it; another machine may have it."""
    path = os.path.abspath(config.run_dir)
    place = mounts.existing(path)
    mount = mounts.holding(place)
    if mount is not None and mount.is_view:
        text = f"{path} is in {mount.point}, where the kernel shows what it knows ({mount.kind}) and nobody can write"
        yield Problem("run.dir", f"{text}: give another folder")
    elif place.is_dir() and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        why = "is mounted read-only" if mount is not None and "ro" in mount.options else "is not writable for you"
        yield Problem(
            "run.dir", f"{path} cannot be written here: {place} {why}", absent="A run writes everything there"
        )


def _as_started(config: Config) -> Config | None:
    """Return the config with the paths and steps that a run of it keeps; None if they are not known here."""
    from gspo_hpc.data import hub_data
    from gspo_hpc.models import hub
    from gspo_hpc.planning.quantities import with_steps

    config = hub_data.with_cached_files(hub.with_cached_folder(config))
    config = with_steps(config, rows(config, WHOLE_FILE_BYTES))
    path = config.model.path
    known = path is not None and os.path.isdir(path) and config.run.max_steps is not None
    return config if known else None


def path_in_script(config: Config) -> Iterator[Problem]:
    """Check that a batch script can name the run directory."""
    path = os.path.abspath(config.run_dir)
    if not PLAIN_PATH.fullmatch(path):
        wrong = sorted(set(path) - set("".join(PLAIN_PATH.findall(path))))
        text = f"{path!r} has {' '.join(map(repr, wrong))}, which is not safe in a batch script: choose another path"
        yield Problem("run.dir", text)


def batch_script(config: Config) -> Iterator[Problem]:
    """Check what only a job on Slurm needs, if the run can be nothing else."""
    if config.cluster.nodes > 1:
        yield from path_in_script(config)


def accelerators(config: Config) -> Iterator[Problem]:
    """Check that this machine can have the GPUs of a run whose ranks are started on it."""
    from gspo_hpc.launch import accelerators

    if config.cluster.platform != "cuda":
        return
    wanted, torch = config.cluster.gpus_per_node, accelerators.torch_build()
    if not accelerators.has_driver():
        text = "cuda, but this machine has no NVIDIA driver (no /dev/nvidiactl, no nvidia-smi)"
        yield Problem("cluster.platform", text, "start the run where the GPUs are, or set cluster.platform=cpu")
    elif torch is not None and torch.endswith("+cpu"):
        yield Problem("cluster.platform", f"cuda, but torch {torch} is built for CPUs", "install torch for CUDA")
    elif (seen := accelerators.visible()) is not None and seen[0] < wanted:
        count, why = seen
        text = f"{wanted} ranks need a GPU each, but {why}"
        fix = f"set cluster.gpus_per_node={count}" if count else "set cluster.platform=cpu"
        yield Problem("cluster.gpus_per_node", text, f"{fix}, or start the run where the GPUs are")


def rows(config: Config, most_bytes: float = math.inf) -> int | None:
    """Return the prompts that are trained on, those held out included; None if they cannot be counted.

    That is so for files that are not here, and for those of more than `most_bytes` that would have to be read.
    """
    from gspo_hpc.data.sources.sizes import sizes

    found = sizes(config.data, config.run.seed, most_bytes)
    return None if found is None else sum(found.values())


INPUTS: tuple[Check, ...] = (notifications, reward_functions, environments, observers, data)
FOLDERS: tuple[Check, ...] = (model, teacher, reward_models, adapter)
CHECKS: tuple[Check, ...] = (*INPUTS, prometheus, *FOLDERS, run_directory, run_place, batch_script)
ON_THIS_MACHINE: tuple[Check, ...] = (accelerators, prometheus)  # of a run whose ranks are started here
