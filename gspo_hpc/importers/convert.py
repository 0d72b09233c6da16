"""Turn the run of another project into a config of ours.

It is read from a Megatron-SWIFT command line, verl's overrides or a TRL GRPOConfig, without a shell and without the
projects themselves. The YAML says what is not carried over and where a size has another meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.importers import swift, tables, trl, verl
from gspo_hpc.importers.draft import Draft, Source, comments
from gspo_hpc.importers.recognise import recognise
from gspo_hpc.importers.shell import Command


@dataclass(frozen=True)
class Converted:
    """A run of another project as a config of ours."""

    project: str
    config: Config
    text: str  # the YAML, with everything that is to be said as comments
    differs: tuple[str, ...]  # where a size means something else
    dropped: tuple[str, ...]  # what has no counterpart
    assumed: tuple[str, ...]  # what was not given


PROJECTS: dict[str, tuple[str, str, str, Callable[[Draft, list[Command], int | None, int | None], None]]] = {
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
    found = recognise(text, source, folder)
    project, kind, sign, converter = PROJECTS[found.source]
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
    return Converted(project, config, written, tuple(draft.differs), tuple(draft.dropped), tuple(draft.assumed))
