"""Turn the run of another project into a config of ours.

It is read from a script or a command line of ms-swift, verl or TRL, from their YAML, or from the GRPOConfig in a Python
file, without a shell and without the projects themselves. What is not carried over is said, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.importers import adapters, report, swift, swift_hf, tables, trl, verl
from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft, Source
from gspo_hpc.importers.objective.verl import OTHER_METHOD
from gspo_hpc.importers.prompt_texts import BOUNDS_OF_IMAGES
from gspo_hpc.importers.report import Argument, comments
from gspo_hpc.importers.scripts.builtins import presumed
from gspo_hpc.importers.scripts.scope import is_unset, may_be_empty
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts.recognise import POSSIBLE, recognise
from gspo_hpc.importers.texts.sources import Found, SeveralRunsError
from gspo_hpc.importers.versions import trl as versions
from gspo_hpc.system.redact import hidden, without_secrets

# Sections of our config that say how a run trains: an argument that decides a key of one is a training argument.
_TRAINING = {"model", "batch", "algorithm", "rollout", "optimizer", "data", "parallel", "memory"}

# Keys that say what is trained, and not how; and the data of a run, which is no file of ours as a rule.
_WHICH = {"algorithm.name", "model.path", "data.train", "data.sources", "data.eval", "data.chat_template_kwargs"}
# Keys that say on which GPUs engines run, which is not how a run trains either.
_WHERE = {"rollout.mode", "rollout.engines_per_node", "rollout.tensor_parallel_size"}
# Keys of which a run says at least one, if it says any: where all that it says is not known, the rest are defaults.
_HOW = {
    *("batch.micro_batch_size", "batch.global_batch_size", "batch.num_generations", "rollout.max_response_length"),
    *("rollout.temperature", "optimizer.lr", "run.max_steps", "adapter.rank"),
}
_DATA = {"dataset", "dataset_name", "dataset_mixture", "datasets"}


@dataclass(frozen=True)
class Converted:
    """A run of another project as a config of ours. Each argument of the run is in exactly one of three lists."""

    project: str
    values: Mapping[str, Any]  # all arguments of the run, by their present names
    config: Config
    text: str  # the YAML, with everything that is to be said as comments
    carried: tuple[Argument, ...]
    left: tuple[Argument, ...]  # not carried over, each with the reason
    strange: tuple[Argument, ...]  # not known as arguments of the project
    differs: tuple[str, ...]  # where a size means something else
    dropped: tuple[str, ...]  # the second and third list in words, arguments with one reason together
    assumed: tuple[str, ...]  # what was not given
    open: tuple[str, ...]  # arguments of the second list whose value only running the script would tell


_ADDS = "what it adds is not known"  # the end of a note on a word that may be any number of arguments

# Options of torchrun, accelerate and deepspeed that say how many ranks there are.
_SIZES = {
    *("num_processes", "num_machines", "nnodes", "nproc_per_node"),
    *("config_file", "num_gpus", "num_nodes", "include"),
}
Convert = Callable[[Draft, list[Command], int | None, int | None], None]
PROJECTS: dict[str, tuple[str, str, str, Convert]] = {
    "swift": ("Megatron-SWIFT", "command line", "--", swift.convert),  # name, what is read, sign of an argument
    "swift_hf": ("ms-swift", "command line", "--", swift_hf.convert),
    "verl": ("verl", "list of overrides", "", verl.convert),
    "trl": ("TRL", "GRPOConfig", "", trl.convert),
}
_EPSILON = {"verl": "1e-6", "trl": "1e-4", "swift": "1e-4", "swift_hf": "1e-4"}  # of the deviation


def convert(
    text: str,
    source: str | None = None,
    gpus: int | None = None,
    rows: int | None = None,
    folder: Path = Path(),
    name: str = "",
) -> Converted:
    """Return the config that `text` amounts to: a script, a command line, YAML or a Python file.

    `source` names the project if the text does not show it; `gpus` (GPUs that train) takes precedence over what the
    text says, and `rows` (prompts of the data) is used if it does not say. `folder` and `name` are those of the text's
    file: files that it names are looked for beside it and above. Raises ValueError with one line for each mistake.
    """

    def read(given: Collection[str] = ()) -> Found:
        return _without_secrets(recognise(text, source, folder.resolve(), name, given))  # also of its bare name

    def again(given: Collection[str]) -> presumed.Outcome:
        try:
            other = read(given)
        except SeveralRunsError as error:
            return presumed.Outcome(others=tuple(map(_run, error.runs)), refused=str(error))
        except ValueError as error:
            return presumed.Outcome(refused=str(error))
        try:
            return _outcome(_converted(text, other, gpus, rows, folder, name), other)
        except ValueError as error:
            return presumed.Outcome(_run(other), refused=str(error), added=frozenset(other.left))

    found = read()
    converted = _converted(text, found, gpus, rows, folder, name)
    notes = [*presumed.told(found.missed, _outcome(converted, found), again)]
    if notes:
        more = _without_secrets(found._replace(notes=(*found.notes, *notes)))
        return _converted(text, more, gpus, rows, folder, name)
    return converted


def _run(found: Found) -> presumed.Run:
    """Return a run as it is compared with others."""
    project, _, sign, _ = PROJECTS[found.source]
    around = [name for name in (*parts.DECIDED, *BOUNDS_OF_IMAGES) if name in found.variables]
    given = {f"{sign}{name}": value for name, value in found.values.items()}
    return presumed.Run(project, given | {name: found.variables[name] for name in around})


def _outcome(converted: Converted, found: Found) -> presumed.Outcome:
    """Return what is compared of two readings of a script."""
    sections = as_dict(converted.config)
    keys: dict[str, tuple[str, ...]] = dict(parts.DECIDED)
    keys |= {re.split(r"[\s=]", argument.given, maxsplit=1)[0]: argument.keys for argument in converted.carried}
    opened = (re.split(r"[\s=]", label, maxsplit=1)[0] for label in converted.open if not may_be_empty(label))
    return presumed.Outcome(
        _run(found),
        tuple(map(_run, found.possible)),
        perhaps=POSSIBLE in found.notes,
        settings={f"{section}.{key}": value for section, held in sections.items() for key, value in held.items()},
        carried=keys,
        open=tuple(dict.fromkeys(opened)),
        added=frozenset(found.left),
        around={name: found.variables[name] for name in BOUNDS_OF_IMAGES if name in found.variables},
    )


def _converted(text: str, found: Found, gpus: int | None, rows: int | None, folder: Path, name: str) -> Converted:
    """Return the config of a run that is recognised in a text."""
    project, kind, sign, converter = PROJECTS[found.source]
    kind = kind if found.commands or found.source == "trl" else "file"
    description = Source(project, kind, sign, tables.load(found.source))
    draft = Draft(description, found.values, found.variables, found.unknown)
    draft.assumed += found.notes
    draft.doubts, draft.doubted, draft.might = found.doubts, found.doubted, found.might
    draft.places = found.places
    place = folder if name else None  # a text from standard input lies nowhere
    taken = versions.settle(draft, text, place) if found.source == "trl" else frozenset[str]()
    draft.rename()
    draft.copy()
    converter(draft, found.commands, gpus, rows)
    parts.environment(draft)
    if draft.problems:  # what is said not to be given may be among them
        wrong = " ".join(draft.problems)
        empty = (note for note in found.notes if "is empty, since $" in note)
        draft.problems += [note for note in empty if note.split()[0].lstrip("-") in wrong]
        adds = [note for note in found.notes if note.endswith(_ADDS)]
        method = [problem for problem in draft.problems if problem.endswith(OTHER_METHOD)]
        draft.problems = (not adds and method) or draft.problems + adds  # nothing else matters to another method
    config, body = draft.finish()
    if config.model.dtype != "float32":
        draft.differs.append(
            f"logits and log-probs are in float32 here, and may be rounded to the model's type in {project}"
        )
    divided = config.algorithm.advantage in ("batch_std", "gdpo")
    divided |= config.algorithm.advantage == "reinforce_baseline" and found.source != "verl"
    if (config.algorithm.normalize_advantage or divided) and draft.settings.get("reward.functions") is None:
        of_swift = config.algorithm.advantage == "gdpo" and found.source.startswith("swift")
        epsilon = "1e-8" if of_swift else _EPSILON[found.source]
        draft.differs.append(
            f"advantages are divided by the deviation of the rewards + {epsilon} there, and by "
            "the deviation alone here, where equal rewards give 0"
        )
    if config.adapter.type and found.source != "verl":
        adapters.sampled(draft, always=found.source == "swift")
    if found.source == "trl" and not draft.switch("use_vllm"):
        draft.differs.append(
            "without use_vllm a completion ends at the tokenizer's end token alone there; here also at the further "
            "ones of the model's generation_config.json"
        )
    heads = "actor_rollout_ref.model.mtp.enable_train"  # which have a loss of their own
    moved = config.algorithm.kl_beta > 0 and config.algorithm.kl_placement != "reward"
    moved |= config.algorithm.entropy_coef > 0 or config.algorithm.entropy_target > 0
    if not moved and not (found.source == "verl" and draft.switch(heads)):
        draft.differs.append(
            f"an update in which no completion has an advantage makes no step here; in {project} Adam steps with a "
            "gradient of 0, by its momentum and weight decay"
        )
    carried, left, strange = ([item for item in part if item.name not in taken] for part in draft.lists())
    left += [Argument(given, given, why=why) for given, why in found.left.items()]
    for item in _launched(found, draft, gpus):
        (left if item.why else carried).append(item)
    if strange:
        named = f"{len(strange)} arguments are no" if len(strange) > 1 else f"{strange[0].given} is no"
        draft.assumed.append(
            f"{named} known argument{'s' * (len(strange) > 1)} of {project}, and may change what is trained: see the "
            "end of the YAML"
        )
    told = [*carried, *(argument for argument in left if argument.name in draft.doubted)]
    if not _tells_how({key for argument in told for key in argument.keys}, {argument.name for argument in left}):
        lost = draft.open_arguments()[:3]
        why = f"; {', '.join(lost)}: known only when the script runs" if lost else ""
        raise ValueError(
            f"no argument of {project} that says how to train is in it, so there is nothing to convert{why}"
        )
    _refuse_untold(project, [argument for argument in told if argument.keys], left)
    _refuse_lost(draft, {key for argument in told for key in argument.keys})
    if config.model.path is not None and "seed-oss" in config.model.path.lower():
        draft.differs.append(
            f"{config.model.path}: updates have the dropout of its config.json there (0.1 where it gives none), and "
            "none here"
        )
    if config.moe.aux_loss_coeff or config.moe.z_loss_coeff:
        whole = found.source == "verl" and config.parallel.context_parallel_size > 1
        draft.differs.append(
            "losses of the routers are means over the tokens of a micro-batch, in which a prompt counts once for its "
            "group; there it counts with each completion, as here with batch.share_prompts: false"
            + ", and the mean is over the whole update"
            * whole
        )
    dropped = report.by_reason(left, sign)
    unknown = f"not known as arguments of {project}: " + "; ".join(argument.given for argument in strange)
    head = [
        f"# Converted from a {kind} of {project} by gspo-hpc convert. Sizes count completions.",
        "# Before a run: gspo-hpc plan FILE",
    ]
    tail = comments("Where a size means something else:", draft.differs)
    tail += comments("Assumed, or still to be given:", draft.assumed)
    tail += comments("Not carried over:", dropped)
    tail += comments(f"Not known as arguments of {project}:", [argument.given for argument in strange])
    missing = [key for key in config.missing() if key != "reward.functions"]
    missing += ["reward.functions"] * ("reward.functions" not in draft.settings)  # where no teacher alone teaches
    missing += ["data.eval"] * (
        config.eval.interval is not None and not config.data.eval and config.data.train_ratio == 1
    )
    tail += comments("A run also needs:", [", ".join(missing)] if missing else [])
    tail += comments("Carried over:", ["; ".join(report.by_key(carried))])
    written = "\n".join(head) + "\n" + body + "\n".join(tail) + "\n"
    return Converted(
        project,
        {name: value for name, value in draft.values.items() if name not in taken},
        config,
        written,
        tuple(carried),
        tuple(left),
        tuple(strange),
        tuple(draft.differs),
        (*dropped, *([unknown] if strange else ())),
        tuple(draft.assumed),
        tuple(dict.fromkeys((*draft.open_arguments(), *draft.around, *filter(may_be_empty, found.left)))),
    )


def _without_secrets(found: Found) -> Found:
    """Return a run without the tokens, passwords and addresses of webhooks in it, which no config needs."""
    return found._replace(
        values=dict(hidden("", found.values)),
        launcher=hidden("", found.launcher),
        left={without_secrets(given): why for given, why in found.left.items()},
        notes=tuple(map(without_secrets, found.notes)),
    )


def _tells_how(decided: set[str], left: set[str]) -> bool:
    """Tell whether a run says how it trains, or at least with which model on which data: all else has defaults.

    `decided`: keys of ours that its arguments decide; `left`: arguments that are not carried over.
    """
    how = {key for key in decided if key.partition(".")[0] in _TRAINING or key == "run.max_steps"} - _WHICH - _WHERE
    return bool(how) or ("model.path" in decided and bool({"data.train", "data.sources"} & decided or left & _DATA))


def _refuse_untold(project: str, told: Iterable[Argument], left: Iterable[Argument]) -> None:
    """Raise ValueError where all arguments that say how a run trains may stand in a word that is not known."""
    sections = {key.partition(".")[0] for argument in told for key in argument.keys if key not in _WHICH | _WHERE}
    steps = any("run.max_steps" in argument.keys for argument in told)
    words = [argument.given for argument in left if argument.given.startswith("**") or may_be_empty(argument.given)]
    if words and not steps and not sections & {"batch", "algorithm", "rollout", "optimizer"}:
        raise ValueError(
            f"{words[0]}: known only when the script runs, and no other argument of {project} says how it trains: "
            "write NAME=VALUE for each argument in its place"
        )


def _refuse_lost(draft: Draft, told: Collection[str]) -> None:
    """Raise ValueError where a run gives no size, rate or objective whose value is known: the rest are defaults.

    `told`: keys of ours that arguments with known values decide.
    """
    lost = [name for name, keys in draft.lost.items() if is_unset(draft.values.get(name)) and _HOW & {*keys}]
    if lost and not any(key in _HOW or key.startswith("algorithm.") for key in {*told} - _WHICH):
        labels = ", ".join(draft.label(name) for name in lost[:3]) + (f" and {len(lost) - 3} more" if lost[3:] else "")
        raise ValueError(
            f"{labels}: known only when the script runs, and so is all that says how {draft.source.project} trains: "
            "write the values in their places"
        )


def _launched(found: Found, draft: Draft, gpus: int | None) -> Iterator[Argument]:
    """Yield what becomes of the options of the program that starts the ranks."""
    for name, value in found.launcher.items():
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        given = f"--{name}" if value is True else report.plain(f"--{name} {text}")[:80]
        if name not in _SIZES:
            yield Argument(name, given, why="of the launcher: Slurm starts the ranks here")
        elif gpus is not None:
            yield Argument(name, given, why="--gpus takes precedence over it")
        elif is_unset(text):
            yield Argument(name, given, why=f"{draft.why_unset(text)}; it is left out")
        elif name == "include" and "num_gpus" not in found.variables:
            yield Argument(name, given, why="its nodes have different numbers of GPUs; here all have equally many")
        else:
            yield Argument(name, given, ("cluster.nodes", "cluster.gpus_per_node"))
