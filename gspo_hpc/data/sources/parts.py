"""Everything that a config names as data: the files of data.train, data.eval and of every source, with their keys.

No numpy, for commands that answer at once.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, TypeVar

from gspo_hpc.config.schema import Config, Data, Rows, replace

T = TypeVar("T", bound=Rows)

_LIMITED = re.compile(r"(?P<path>.+)#(?P<limit>[1-9]\d{0,9})", re.DOTALL)


class Part(NamedTuple):
    """Files of one key, and what is used of them."""

    key: str  # such as data.sources[0].files
    path: str  # a file, a pattern, a folder or a name on the hub
    limit: int | None = None  # rows that are drawn of it
    source: Rows | None = None

    @property
    def trains(self) -> bool:
        """True if it is trained on."""
        return not self.key.startswith("data.eval") and not self.key.endswith(".eval")


def training(data: Data) -> list[Part]:
    """Return what is trained on: each source, or data.train."""
    if data.sources:
        return [_part(f"data.sources[{place}].files", one.files, one) for place, one in enumerate(data.sources)]
    return [] if data.train is None else [Part("data.train", data.train)]


def unseen(data: Data) -> list[Part]:
    """Return what is evaluated on: what sources name, data.eval, and last the evaluation sets."""
    own = [
        _part(f"data.sources[{place}].eval", one.eval, one)
        for place, one in enumerate(data.sources)
        if one.eval is not None
    ]
    own += [] if data.eval is None else [Part("data.eval", data.eval)]
    return [
        *own,
        *(_part(f"data.eval_sets[{place}].files", one.files, one) for place, one in enumerate(data.eval_sets)),
    ]


def every(data: Data) -> list[Part]:
    """Return all of them, those that are trained on first."""
    return [*training(data), *unseen(data)]


def with_paths(config: Config, paths: dict[str, str]) -> Config:
    """Return the config with other paths of files, by their keys; #N stays."""
    if not paths:
        return config
    data = config.data
    new = {key.removeprefix("data."): path for key, path in paths.items() if "[" not in key}

    def moved(listed: str, place: int, one: T) -> T:
        given = {name: text for name in ("files", "eval") if isinstance(text := getattr(one, name, None), str)}
        keys = {name: f"data.{listed}[{place}].{name}" for name in given}
        changes = {name: paths[key] + _limit(given[name]) for name, key in keys.items() if key in paths}
        return replace(one, **changes) if changes else one

    sources = tuple(moved("sources", place, one) for place, one in enumerate(data.sources))
    sets = tuple(moved("eval_sets", place, one) for place, one in enumerate(data.eval_sets))
    return replace(config, data=replace(data, sources=sources, eval_sets=sets, **new))


def _part(key: str, text: str, source: Rows) -> Part:
    limited = _limit(text)
    return Part(key, text.removesuffix(limited), int(limited[1:]) if limited else None, source)


def _limit(text: str) -> str:
    """Return the end #N of a name, which is empty where it has none, or where a file is called so."""
    match = _LIMITED.fullmatch(text)
    return "" if match is None or os.path.exists(text) else f"#{match['limit']}"
