"""What the reader of Python files calls certain is what the trainer gets when Python runs the file (about 6 s)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from gspo_hpc.importers.texts import python_source
from gspo_hpc.importers.texts.constants import Constants
from gspo_hpc.importers.texts.own_configs import OwnConfigs
from gspo_hpc.importers.texts.syntax import Tree
from tests.unit.importers.python_scripts import DEFAULTS, Writer, run

SCRIPTS = 600
LEAST = 0.46  # share of arguments that are certain, of 0.484 measured


class Ran(NamedTuple):
    """A script, and the arguments that its trainer got, each time that it read them."""

    script: str
    got: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    scripts = [Writer(seed).script() for seed in range(SCRIPTS)]
    results = run(scripts, tmp_path_factory.mktemp("packages"))
    return [Ran(script, got) for script, (got, _) in zip(scripts, results, strict=True) if got]


def _certain(script: str) -> dict[str, Any]:
    """Return the arguments whose values are certain to the reader, those with their defaults among them."""
    found = python_source.read(script)
    values = {**DEFAULTS, **found.defaults, **found.values, **found.changed}
    if found.doubts or found.unread or any(name.startswith("*") for name in values):
        return {}
    return {name: values[name] for name in DEFAULTS if not str(values[name]).startswith("$(")}


def _wrong(scripts: Sequence[Ran]) -> Iterator[tuple[str, str, Any]]:
    yield from ((item.script, name, value) for item in scripts for name, value in _certain(item.script).items()
                if any(got[name] != value for got in item.got))  # fmt: skip


def test_every_value_that_is_certain_is_what_the_trainer_gets_and_enough_are(ran: list[Ran]) -> None:
    assert len(ran) > 0.8 * SCRIPTS
    count = 0
    for item in ran:
        certain = _certain(item.script)
        count += len(certain)
        for name, value in certain.items():
            assert all(got[name] == value for got in item.got), f"{name} is not {value!r}:\n{item.script}"
    assert count / (len(ran) * len(DEFAULTS)) > LEAST


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (Tree, "certain", lambda *_: True),
        (Tree, "generates", lambda *_: False),
        (Constants, "_kept", lambda *_: True),
        (OwnConfigs, "_is_dataclass", lambda *_: True),
    ],
)
def test_a_mistake_of_the_reader_is_found(
    ran: list[Ran], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    assert next(_wrong(ran), None)
