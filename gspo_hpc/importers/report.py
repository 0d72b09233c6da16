"""Lay out what became of a run: the YAML with its comments, and what is said of each argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_hpc.config import yaml_text
from gspo_hpc.config.schema import Config
from gspo_hpc.system.redact import without_secrets

_OURS = Config()
_WIDTH = 118
OFF = "switched off or empty in the original run, and absent here"
AHEAD = (
    "generates and trains at the same time, by a trainer that is not read: here, rollout.mode server with "
    "rollout.max_staleness does so"
)
NO_COUNTERPART = "it has no counterpart here"


@dataclass(frozen=True)
class Argument:
    """Fate of one argument of the original run."""

    name: str
    given: str  # with its value, as it was given
    keys: tuple[str, ...] = ()  # of ours, that it decides
    why: str = ""  # it is not carried over


def plain(text: str) -> str:
    """Return a text as one line of printable characters, without secrets that it holds."""
    return without_secrets("".join(char if char.isprintable() else "?" for char in " ".join(text.split())))


def null(value: Any, keys: Sequence[str], settings: Mapping[str, tuple[Any, str]]) -> str:
    """Return why a null or empty argument is not carried over. `keys`: of ours, that it would decide."""
    found = " and ".join(f"{key} is {settings[key][0] if key in settings else _default(key)}" for key in keys)
    return f"it is {'empty' if value == '' else 'null'} in the original run, and {found} here"


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(_OURS, section), name)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken at blanks."""
    lines: list[str] = []
    for word in plain(text).split():
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def comments(title: str, items: Sequence[str]) -> list[str]:
    """Return a block of YAML comments: a title and one item a line, wrapped."""
    if not items:
        return []
    lines = ["#", f"# {title}"]
    for item in items:
        first, *more = wrapped(item, _WIDTH - 6) or [""]
        lines += [f"#   {first}", *(f"#     {part}" for part in more)]
    return lines


def yaml_of(settings: Mapping[str, tuple[Any, str]]) -> str:
    """Return the YAML of settings (key -> value and comment), in the order of the schema."""
    lines: list[str] = []
    for section in Config.model_fields:
        names = type(getattr(_OURS, section)).model_fields
        keys = [key for name in names if (key := f"{section}.{name}") in settings]
        if not keys:
            continue
        lines += ["", f"{section}:"]
        for key in keys:
            value, comment = settings[key]
            comment = plain(comment)
            line = f"  {key.split('.')[1]}: {yaml_text.write_line(value)}"
            if comment and len(line) + len(comment) + 3 > _WIDTH:
                lines += [f"  # {part}" for part in wrapped(comment, _WIDTH - 4)]
                comment = ""
            lines.append(line + (f" # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def by_reason(arguments: Iterable[Argument], flag: str) -> list[str]:
    """Return one line for each reason: the arguments that are not carried over for it, and the reason."""
    alike: dict[str, list[Argument]] = {}
    for argument in arguments:
        alike.setdefault(argument.why, []).append(argument)
    last = [why for why in (NO_COUNTERPART, OFF) if why in alike]
    lines = [f"{'; '.join(item.given for item in items)}: {why}" for why, items in alike.items() if why not in last]
    for why in last:
        if why == OFF:
            lines.append(f"{why}: " + ", ".join(f"{flag}{item.name}" for item in alike[why]))
        else:
            lines.append("these have no counterpart here: " + "; ".join(item.given for item in alike[why]))
    return lines


def by_key(arguments: Iterable[Argument]) -> list[str]:
    """Return one line for each argument that is carried over, with the keys that it decides."""
    return [f"{argument.given} -> {', '.join(argument.keys)}" for argument in arguments]


def with_way_out(problem: str) -> str:
    """Return a mistake; where a condition of the script decides, with what to do about it."""
    if "depends on a condition" not in problem:
        return problem
    return f"{problem}: put a line that decides it (NAME=value) before the condition"


def translated(problem: str, labels: Mapping[str, str]) -> str:
    """Return a mistake in a key of ours as one of the argument that it came from. `labels`: arguments by key."""
    text = problem.removeprefix("config: ")
    for key, label in labels.items():
        if text.startswith(f"{key} "):
            return f"{label}: {text.removeprefix(key).strip()} ({key})"
    return text
