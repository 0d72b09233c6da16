"""The files that a config names, as far as `plan` looks at them: what is wrong with them, and what is not there.

A file that is not there is a note, for a run is often planned elsewhere. What `train` would refuse in a file that is
there is refused here too, where it costs a few reads: reward functions that cannot be called or cannot grade the first
row, weights that are cut off. Neither a user's code is run nor a whole file read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.loader import ConfigError
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.reading.places import Places
from gspo_hpc.config.schema import Config


def refuse(config: Config, places: Places) -> None:
    """Raise ConfigError for own code that cannot be called, a row that cannot be graded and a damaged model folder."""
    found = _observers(config) or _uncallable(config) or _cannot_grade(config) or _damaged(config)
    if found:
        raise ConfigError([f"{places.around(key, 'config')}: {key} {text}" for key, text in found.items()])


def absent(config: Config) -> Iterator[str]:
    """Yield a note for each file that a run needs and that does not exist."""
    for key, name in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if name is not None and not is_there(name):
            counted = ": its prompts are not counted" if key == "data.train" else ""
            if ":" in name:
                yield f"{key} {name} is not in the cache of the hub{counted}. A run downloads it."
            else:
                yield f"{key} {name} is not there{counted}. A run needs the file."
    for number, name in enumerate(config.tracking.observers):
        if (file := own_code.file_of(name)) is not None and not file.exists():
            yield f"tracking.observers[{number}]: {file} is not there. A run needs the file."
    if (folder := _model_folder(config)) is not None:
        from gspo_hpc.models import model_folder

        if lacking := model_folder.lacking(folder):
            yield f"model.path {folder} has {' and '.join(f'no {what}' for what in lacking)}. A run needs them."
    if all(":" not in term.function for term in config.reward.functions):
        return
    from gspo_hpc.rewards import registry

    for number, path in registry.absent(config.reward).items():
        yield f"reward.functions[{number}]: {path} is not there. A run needs the file."


def rows(path: str | None) -> int | None:
    """Return the rows of a data file; None if it is not there, or so large that counting takes long."""
    if path is None or not is_there(path):
        return None
    from gspo_hpc.data.counting import count_rows

    return count_rows(path, WHOLE_FILE_BYTES)


def is_there(path: str) -> bool:
    """Return whether there is a file of data, or one that a pattern matches."""
    if os.path.exists(path) or not any(mark in path for mark in "*?"):
        return os.path.exists(path)
    from gspo_hpc.data.counting import files

    return bool(files(path))


def _observers(config: Config) -> dict[str, str]:
    """Return what is wrong with the first observer that cannot be called, as far as its file is there."""
    for number, name in enumerate(config.tracking.observers):
        path = own_code.file_of(name)
        if path is not None and not own_code.source(path).exists():
            continue  # noted among what is absent
        try:
            own_code.check_observer(name)
        except ValueError as mistake:
            return {f"tracking.observers[{number}]": f"is {name!r}: {mistake}"}
    return {}


def _uncallable(config: Config) -> dict[str, str]:
    """Return what is wrong with functions that are neither built in nor in a file, and with wrong arguments."""
    from gspo_hpc.rewards.builtin import REGISTRY

    if all(term.function in REGISTRY and not term.args for term in config.reward.functions):
        return {}
    from gspo_hpc.rewards import registry

    return {f"reward.functions[{number}].function": text for number, text in registry.unknown(config.reward).items()}


def _cannot_grade(config: Config) -> dict[str, str]:
    """Return why built-in functions cannot grade the first row of the training data, if they cannot."""
    path = config.data.train
    if path is None or not is_there(path):
        return {}
    from gspo_hpc.data.counting import first_row
    from gspo_hpc.rewards import builtin

    row = first_row(path, WHOLE_FILE_BYTES)
    if row is None or config.data.prompt_key not in row:  # a rule says so
        return {}
    fields, found = {key: value for key, value in row.items() if key != config.data.prompt_key}, dict[str, str]()
    for number, term in enumerate(config.reward.functions):
        if term.function in builtin.REGISTRY and (why := builtin.refusal(term.function, term.args, fields)) is not None:
            found[f"reward.functions[{number}].function"] = f"{term.function} cannot grade the rows of {path}: {why}"
    return found


def _damaged(config: Config) -> dict[str, str]:
    """Return what is wrong with files that are there in the model's folder."""
    if (folder := _model_folder(config)) is None:
        return {}
    from gspo_hpc.models import model_folder

    lacking = model_folder.lacking(folder)
    problems = [
        None if "weights" in lacking else model_folder.weights(folder),
        None if "tokenizer" in lacking else model_folder.tokenizer(folder, config),
    ]
    texts = [f"{problem.text}; {problem.fix}" for problem in problems if problem is not None]
    return {"model.path": f"is not whole: {'; '.join(texts)}"} if texts else {}


def _model_folder(config: Config) -> Path | None:
    """Return the folder of the model, here or whole in the cache of the hub; None if there is none."""
    path = config.model.path
    if path is None:
        return None
    if not os.path.isdir(path):
        from gspo_hpc.models import hub

        path = str(hub.with_cached_folder(config).model.path)
    folder = Path(path)
    return folder if (folder / "config.json").is_file() else None  # without it, the plan says so
