"""Find prompts that are too long as tokens, or that a chat template refuses, before ranks or nodes are asked for.

Nothing here imports torch or transformers. Where the tokenizer cannot be read without them, or is not on this machine,
ranks find such prompts before the first step, and a note says so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.config.reading import own_code
from gspo_hpc.config.schema import Config
from gspo_hpc.data import counting
from gspo_hpc.data.rows import Row, first_of, load_parts
from gspo_hpc.data.sources import parts
from gspo_hpc.models import hub
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system.terminal import paint

# Text that is tokenized of a file at most: some three seconds. Most data has less.
MOST_CHARACTERS = 8 << 20


class Looked(NamedTuple):
    """Result of a look: how much was looked at, and why not more."""

    prompts: int = 0  # that were tokenized
    longest: int = 0  # tokens
    unchecked: str | None = None  # a clause that says what was not looked at, and why


def check(config: Config, tried: set[str] | None = None) -> None:
    """Raise ValueError, with the words of a rank, for prompts that cannot be used; say on stderr what was not checked.

    `tried`: what was looked at and said for other configs, which is not repeated; this one is added.
    """
    tried = set() if tried is None else tried
    settings = config.model.path, config.rollout.max_prompt_length, config.environment.tools
    if (key := repr(("prompts", config.data, config.run.seed, *settings))) in tried:
        return
    tried.add(key)
    found = look(config)
    if found.unchecked is not None and found.unchecked not in tried:
        tried.add(found.unchecked)
        text = f"prompts as tokens: {found.unchecked}; ranks find prompts that are too long before the first step"
        print(f"{paint('not checked:', '33', sys.stderr)} {text}", file=sys.stderr)


def look(config: Config) -> Looked:
    """Tokenize the prompts of a config whose rows and model were checked before. Raises ValueError as ranks would."""
    path = hub.with_cached_folder(config).model.path
    names = [part.path for part in parts.every(config.data)]
    if path is None or not Path(path).is_dir() or not all(counting.files(name) for name in names):
        return Looked()  # what is not here is told by the checks of the model and of the data
    from gspo_hpc.data.light_tokenizer import LightTokenizer, NotReadable
    from gspo_hpc.rewards.environments import tools

    try:
        shown = tools.shown(config.environment)
        tokenizer = LightTokenizer(Path(path), tools=bool(shown))
    except own_code.FileAbsent:
        return Looked()
    except NotReadable as why:
        return Looked(unchecked=str(why))
    total, longest, left_out = 0, 0, ""
    for number, (name, rows) in enumerate(_parts(config)):
        chosen = _chosen(rows, config)
        some = len(chosen) < len(rows)
        if some and any(one.tokens is not None for one in config.data.sources):
            return Looked(total, longest, f"the prompts of {name}, which is too much text to filter by tokens")
        try:
            lengths = _lengths(chosen, tokenizer, config, shown)
        except ValueError as mistake:
            if tokenizer.doubt is not None:
                return Looked(total, longest, tokenizer.doubt)
            if not some:
                raise
            if config.data.overlong == "drop":
                return Looked(total, longest, f"most prompts of {name}, which is too much text to look at")
            more = f"(of {len(rows):,} prompts, the longest {len(chosen):,} were looked at)"
            raise ValueError(f"{mistake}\n{more}") from None
        whole = all(_whole(part.path) for part in parts.every(config.data))
        if number == 0 and len(lengths) < len(rows) and not some and whole:
            _require_enough(config, len(lengths), len(rows))
        total, longest = total + len(lengths), max(longest, *lengths)
        if some or not whole:
            left_out = f"all but {len(chosen):,} prompts of {name}, which is too much text to look at"
    return Looked(total, longest, left_out or None)


def _require_enough(config: Config, left: int, rows: int) -> None:
    """Raise ValueError if a rollout takes more prompts than are left where others are dropped."""
    taken = int(make_plan(config).quantities["num_rollout_prompts"])
    if left < taken:
        longest = f"rollout.max_prompt_length ({config.rollout.max_prompt_length})"
        if any(one.tokens is not None for one in config.data.sources):
            raise ValueError(
                f"of {rows} prompts, {left} are within {longest} and the tokens of their sources, but a rollout takes "
                f"{taken} different ones: widen tokens of the sources, or give more prompts"
            )
        raise ValueError(
            f"{rows - left} of {rows} prompts are longer than {longest}, and data.overlong=drop leaves {left}, but a "
            f"rollout takes {taken} different ones: raise rollout.max_prompt_length, or set data.overlong=truncate_left"
        )


def _parts(config: Config) -> list[tuple[str, list[Row]]]:
    """Return the prompts that a run trains on, and its unseen ones, each with the file that they are from."""
    from gspo_hpc.data import prompts

    def read(given: list[parts.Part]) -> list[tuple[str, list[Row]]]:
        if all(_whole(part.path) for part in given):
            rows = load_parts(given, config.data, config.run.seed)
            return [(", ".join(part.path for part in given), rows)]
        return [(part.path, first_of(part, config.data)) for part in given]

    train, unseen = read(parts.training(config.data)), read(parts.unseen(config.data))
    if config.data.train_ratio < 1:
        train = [(name, part) for name, rows in train for part in prompts.split(rows, config.data, config.run.seed)]
    return [(name, rows) for name, rows in (*train, *unseen) if rows]


def _whole(name: str) -> bool:
    return sum(part.stat().st_size for part in counting.files(name)) <= WHOLE_FILE_BYTES


def _chosen(rows: list[Row], config: Config) -> list[Row]:
    """Return as many rows as are looked at, in the order of the file.

    They are the longest texts, whose tokens are too many if any are; the shortest ones where those that are too long
    are dropped, since a run is refused only if none is left.
    """
    left = MOST_CHARACTERS
    chosen: list[Row] = []
    for length, row in sorted(
        ((_characters(row), row) for row in rows), key=lambda one: one[0], reverse=config.data.overlong != "drop"
    ):
        left -= length
        if chosen and left < 0:
            break
        chosen.append(row)
    return sorted(chosen, key=lambda row: row.index)


def _characters(row: Row) -> int:
    return len(row.prompt) if isinstance(row.prompt, str) else sum(len(one["content"]) for one in row.prompt)


def _lengths(rows: list[Row], tokenizer: Any, config: Config, shown: Sequence[dict[str, Any]]) -> list[int]:
    """Return the lengths of prompts that are left, in tokens. Raises ValueError as a rank does."""
    from gspo_hpc.data import prompts

    with _no_warnings(prompts.log):  # a rank gives them
        built = prompts.build_prompts(rows, tokenizer, config.data, config.rollout.max_prompt_length, tools=shown)
    return [len(prompt.tokens) for prompt in built]


@contextmanager
def _no_warnings(log: logging.Logger) -> Iterator[None]:
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
