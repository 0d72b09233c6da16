"""Groups on their way from one rollout to the next, where a rollout ends without those that are unfinished.

What was sampled of them lies in the journals of the rollout that ended, and so do finished groups that it did not use.
Every rank knows where; the rank whose engine takes a group reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gspo_hpc.data.carried import Carried, Place
from gspo_hpc.data.prompts import Position
from gspo_hpc.data.records import Group
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.runs import journal
from gspo_hpc.system.files import wait_until_visible


def by_slot(start: Position, prompts: Sequence[int], rollout: int) -> dict[int, Carried]:
    """Return the groups of a rollout by slot: those that it was given, and those that it drew itself.

    `prompts` [slots] are the places of their prompts in the list of all.
    """
    known = dict(enumerate(start.carried))
    return {slot: known.get(slot) or Carried(prompt, rollout) for slot, prompt in enumerate(prompts)}


def required(start: Position, rollout: int, max_continuations: int, wanted: int) -> frozenset[int]:
    """Return the slots that a rollout of `wanted` groups waits for: those for which later ones have no room in time.

    They are the first, for the oldest groups come first. A group may be carried into `max_continuations` rollouts, so
    of those that rollout b or an earlier one began, only as many may be left as the rollouts up to b +
    `max_continuations` train on.
    """
    most = 0
    for count, one in enumerate(start.carried, 1):
        most = max(most, count - wanted * (one.began + max_continuations - rollout))
    return frozenset(range(most))


def begun(start: Position) -> dict[int, Place]:
    """Return by slot the places of groups of which something was sampled, and that are not finished."""
    return {slot: one.place for slot, one in enumerate(start.carried) if one.place is not None and not one.finished}


def read_finished(start: Position, rollouts: Path, exchange: Exchange) -> dict[int, Group]:
    """Return by slot this rank's share of the finished groups that a rollout is given.

    One that cannot be read is left out: it is sampled anew.
    """
    rank, ranks = exchange.transport.rank, exchange.transport.world_size
    found: dict[int, Group] = {}
    files = CarriedFiles(rollouts)
    for slot, one in enumerate(start.carried):
        if one.finished and one.place is not None and slot % ranks == rank:
            group = files.read(one.place)
            if group is not None:
                found[slot] = replace(group, slot=slot)
    return found


def write(
    folder: Path, rank: int, groups: Iterable[Group], fingerprint: str, rollout: int, kind: journal.Kind
) -> dict[str, int]:
    """Write groups for later rollouts into a file of this rank; return its name and size, nothing without groups.

    Those that an earlier attempt has written there stay as they are.
    """
    held = list(groups)
    if not held:
        return {}
    writer = journal.Journal(folder, rank, fingerprint=fingerprint, rollout=rollout, kind=kind)
    try:
        known = journal.places(writer.path, fingerprint)
        writer.append([group for group in held if group.slot not in known])
    finally:
        writer.close()
    return {writer.path.name: writer.path.stat().st_size}


def places(
    folder: Path, rollout: int, fingerprint: str, exchange: Exchange, written: Mapping[str, int]
) -> dict[int, tuple[Place, bool]]:
    """Return by slot where the groups are that a rollout leaves to later ones, and whether each is finished.

    `written`: names and sizes of files that this rank has just written. Those of earlier attempts count, too.
    Collective.
    """

    def listed() -> dict[str, int]:
        return {path.name: 0 for kind in journal.CARRIED for path in folder.glob(f"rank-*.{kind}")}

    def content(name: str, size: int) -> dict[int, tuple[int, int]]:
        wait_until_visible(folder / name, size)
        return journal.places(folder / name, fingerprint)

    return {
        slot: (Place(rollout, fingerprint, name, offset, length), name.endswith(".spare"))
        for slot, (name, offset, length) in exchange.index_files(listed, written, content).items()
    }


def newest_weights(own: Iterable[Group], exchange: Exchange, least: int) -> int:
    """Return the number of steps that had made the newest weights which sampled a rollout, `least` at least.

    This rank holds its groups `own`. Collective.
    """
    found = {
        group.slot: float(max((version for one in group.completions for version, _ in one.pieces), default=least))
        for group in own
    }
    return int(max([least, *exchange.gather_values(found).values()]))


def metrics(own: Iterable[Group], exchange: Exchange, weights_version: int) -> dict[str, float]:
    """Return how old the tokens of a rollout are, of which this rank holds its groups `own`. Collective.

    `weights_version`: the steps that had made the newest weights that sampled it.
    """
    older: dict[int, float] = {}  # tokens of a group that older weights sampled, by slot, and so on
    steps: dict[int, float] = {}
    most: dict[int, float] = {}
    tokens: dict[int, float] = {}
    for group in own:
        pieces = [(weights_version - version, count) for one in group.completions for version, count in one.pieces]
        tokens[group.slot] = sum(count for _, count in pieces)
        older[group.slot] = sum(count for age, count in pieces if age)
        steps[group.slot] = sum(age * count for age, count in pieces)
        most[group.slot] = max((age for age, _ in pieces), default=0)
    every = max(1.0, sum(exchange.gather_values(tokens).values()))
    by_age = exchange.gather_values(older)
    return {
        "rollout/continued_groups": sum(1 for count in by_age.values() if count),
        "rollout/older_token_fraction": sum(by_age.values()) / every,
        "rollout/token_staleness": sum(exchange.gather_values(steps).values()) / every,
        "rollout/token_staleness_max": max(exchange.gather_values(most).values(), default=0.0),
    }
