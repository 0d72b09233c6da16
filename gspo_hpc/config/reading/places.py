"""The places where the settings of a config stand: lines of files, or the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

COMMAND_LINE = "command line"


class Places(dict[str, str]):
    """The place of every key that is given: "FILE:LINE" or "command line".

    Keys are as messages have them: run.max_steps, reward.functions[1].weight; sections are keys, too.
    """

    def around(self, key: str, default: str) -> str:
        """Return the place of a key, or of the nearest one around it."""
        return next((self[name] for name in _outwards(key) if name in self), default)

    def setting(self, key: str) -> str | None:
        """Return the place of a setting, or of the free-form value around it; None if it is not given."""
        return next((self[name] for name in _outwards(key) if "." in name and name in self), None)

    def override(self, key: str) -> None:
        """Note that the command line gives a key."""
        for stale in [one for one in self if one == key or one.startswith((f"{key}.", f"{key}["))]:
            del self[stale]
        self.setdefault(key.split(".")[0], COMMAND_LINE)
        self[key] = COMMAND_LINE


def _outwards(key: str) -> Iterator[str]:
    """Yield a key and everything around it: a.b[0].c, a.b[0], a.b, a."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


def together(places: Iterable[str]) -> str:
    """Return places in one short text: "run.yaml:7, :12, command line"."""
    lines: dict[str, set[int]] = {}
    others: list[str] = []
    for place in dict.fromkeys(places):
        file, _, line = place.rpartition(":")
        if file and line.isdecimal():
            lines.setdefault(file, set()).add(int(line))
        else:
            others.append(place)
    files = [f"{file}:" + ", :".join(map(str, sorted(found))) for file, found in lines.items()]
    return ", ".join(files + others)
