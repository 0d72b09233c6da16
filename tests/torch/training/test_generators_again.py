"""Ranks that generate and start again: what training rank 0 gives them, over a real store and gloo.

It takes ten seconds, for one process that imports torch and is killed while it receives weights. It would catch a loss
that training ranks notice, weights that come again in part or with other bytes, groups that are asked for twice or not
at all, an answer of the ranks before that is forgotten, and a file of theirs that is not read.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.carried import Enough
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.exchange import generator_starts
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.exchange.weight_broadcast import SentMemory, WeightBroadcast
from gspo_hpc.ops.weight_parts import Part, Scratch
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import Request
from gspo_hpc.runs.journal import Journal
from gspo_hpc.system.environment import GENERATOR_DEATHS
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training.bringup import generation_store
from gspo_hpc.training.serving.commands import GENERATE, WEIGHTS, Commands
from gspo_hpc.training.serving.connection import Connection
from gspo_hpc.training.serving.engines import RemoteEngines

CONFIG = from_dict(
    {"rollout": {"mode": "server", "engines_per_node": 1}, "cluster": {"gpus_per_node": 2, "platform": "cpu"}}
)
LIMIT = datetime.timedelta(seconds=60)
ELEMENTS, BUCKETS = 1 << 16, 4
DEATH = "rank 1, which generates, was killed by SIGKILL"
ANSWER: dict[str, Any] = {"stopped": False, "engines": {}, "waited": 0.0, "short": ""}

# The first start of the rank that generates: it dies with the second bucket.
KILLED = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
from gspo_hpc.exchange.weight_broadcast import WeightBroadcast
from gspo_hpc.ops.weight_parts import Scratch
from gspo_hpc.training.serving.commands import Commands

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
commands = Commands(store)
number, command = commands.wait()
commands.acknowledge(number)
group = WeightBroadcast(dist.PrefixStore("weights", store), 1, 2, "gloo", datetime.timedelta(seconds=60))
for parts in group.stream(Scratch(torch.device("cpu"))):
    if parts[0].name == "w1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def rank_0(store: dist.Store) -> Ranks:
    return Ranks(0, 1, 0, torch.device("cpu"), 0, 1, 0, 1, 0, 1, 0, 1, 1, timeout=LIMIT, job_store=store)


def group_of(slot: int, reward: float = 1.0) -> Group:
    tokens = np.zeros(1, np.int32)
    one = Completion(tokens, np.zeros(1, np.float32), "", "stop", 0, reward, {"number_match": reward})
    return Group(slot, prompt_of(slot), (one, one))


def prompt_of(slot: int) -> Prompt:
    return Prompt(100 + slot, np.arange(3, dtype=np.int32), f"prompt {slot}", {})


def request_of(slots: Sequence[int], enough: Enough | None = None) -> Request:
    return Request(slots, {slot: prompt_of(slot) for slot in slots}, 2, Sampling(), 5, enough)


def finish(folder: Path, *slots: int) -> None:
    writer = Journal(folder, 0, fingerprint="w1", rollout=5)
    writer.append([group_of(slot) for slot in slots])
    writer.close()


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def start_again(store: dist.Store, monkeypatch: pytest.MonkeyPatch, number: int = 2) -> dist.Store:
    """The part of the store of a start that is up."""
    monkeypatch.setenv(GENERATOR_DEATHS, json.dumps([DEATH] * (number - 1)))
    own = generator_starts.own_keys(store)
    generator_starts.announce(own)
    return own


def asked_of(own: dist.Store, slots: Sequence[int], number: int = 1) -> list[Prompt]:
    return SharedPrompts(generation_store(own), f"generate/{number}").fetch(slots)


def test_a_rank_that_dies_while_it_gets_weights_is_given_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket is gathered, to the last one, and the new start gets the same ones."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-W", "ignore", "-c", KILLED, str(store.port)]
    first = subprocess.Popen(words, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})
    connection = Connection(CONFIG, rank_0(store))
    engines = RemoteEngines(CONFIG, rank_0(store), connection, tmp_path, StopFlag())
    memory = SentMemory(torch.device("cpu"), 4 * ELEMENTS, connection)
    gathered = []

    def buckets() -> Iterator[Sequence[Part]]:
        memory.reserve(4 * ELEMENTS)
        for number in range(BUCKETS):
            if number == 2:
                first.wait()  # so it is lost before the last buckets are sent
            weight = memory.allocate(4 * ELEMENTS).view(torch.float32).fill_(number + 0.5)
            gathered.append(number)
            yield [Part(f"w{number}", (ELEMENTS,), weight)]

    values = {"version": 3, "sequences": [], "trainer": {}, "first": None, "explains": True}
    connection.offer(values)
    connection.send(buckets(), memory)
    assert first.returncode == -9
    assert gathered == list(range(BUCKETS))
    connection.note_sent(values, "w1")
    # A store of its own, as another process has: one answers one thread after another.
    own = start_again(dist.TCPStore("127.0.0.1", store.port, is_master=False), monkeypatch)
    seen: dict[str, float] = {}
    commands = Commands(own)

    def generate() -> None:
        number, command = commands.wait()
        assert command == {"kind": WEIGHTS, **values, "explains": False}
        commands.acknowledge(number)
        group = WeightBroadcast(dist.PrefixStore("weights", own), 1, 2, "gloo", LIMIT)
        for parts in group.stream(Scratch(torch.device("cpu"))):
            for part in parts:
                assert part.tensor.eq(part.tensor[0]).all()
                seen[part.name] = float(part.tensor[0])
        commands.answer(number, {"stopped": False, "heard": commands.hear(number)})

    other = threading.Thread(target=generate)
    other.start()
    assert engines.persist(connection.confirm) == {"stopped": False, "heard": {"fingerprint": "w1"}}
    other.join()
    assert seen == {f"w{number}": number + 0.5 for number in range(BUCKETS)}
    assert engines.deaths() == [DEATH]


def test_what_is_left_of_a_call_is_asked_again(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call was answered before the death, of one a group is finished, and one has not begun."""
    connection = Connection(CONFIG, rank_0(store))
    engines = RemoteEngines(CONFIG, rank_0(store), connection, tmp_path, StopFlag())
    answered, begun, waits = (
        engines.start(request_of(slots), tmp_path / f"{number:06d}", "w1")
        for number, slots in enumerate([(0, 1), (2, 3, 4), (5,)])
    )
    before = Commands(store)
    number, _ = before.wait()
    before.answer(number, ANSWER | {"files": {"rank-0000.journal": 7}})
    finish(begun.folder, 3)
    old = begun.folder / "rank-0000.journal"
    own = start_again(store, monkeypatch)
    after = Commands(own)

    def generate() -> None:
        for slots in ([2, 4], [5]):
            number, command = after.wait()
            assert (command["kind"], command["slots"]) == (GENERATE, slots)
            assert [one.index for one in asked_of(own, slots, number)] == [100 + slot for slot in slots]
            after.answer(number, ANSWER | {"files": {"rank-0001.journal": 9}})

    other = threading.Thread(target=generate)
    other.start()
    assert engines.wait(begun).files == {"rank-0000.journal": old.stat().st_size, "rank-0001.journal": 9}
    assert engines.wait(answered).files == {"rank-0000.journal": 7}
    assert engines.wait(waits).files == {"rank-0001.journal": 9}
    other.join()


def test_groups_that_are_finished_count_for_a_call_that_ends_with_enough(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(CONFIG, rank_0(store))
    engines = RemoteEngines(CONFIG, rank_0(store), connection, tmp_path, StopFlag())
    call = engines.start(request_of(range(6), Enough(3, frozenset({1, 4}))), tmp_path / "000005", "w1")
    finish(call.folder, 4, 5)
    own = start_again(store, monkeypatch)
    engines.look_after()
    _, command = Commands(own).wait()
    assert command["slots"] == [0, 1, 2, 3]
    assert command["enough"] == {"groups": 1, "required": [1], "signal": False}


def test_those_that_die_again_are_given_everything_again(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines' deaths of each start stay in the record, and an end needs no work to be done."""
    connection = Connection(CONFIG, rank_0(store))
    engines = RemoteEngines(CONFIG, rank_0(store), connection, tmp_path, StopFlag())
    call = engines.start(request_of([0, 1]), tmp_path / "000005", "w1")
    connection.notices.post("engine died", "rank 0: out of memory")
    start_again(store, monkeypatch)
    engines.look_after()
    finish(call.folder, 0)
    own = start_again(store, monkeypatch, 3)
    engines.look_after()
    commands = Commands(own)
    assert commands.wait()[1]["slots"] == [1]
    assert engines.deaths() == ["rank 0: out of memory", DEATH, DEATH]

    def generate() -> None:
        last = Commands(start_again(store, monkeypatch, 4))
        number, command = last.wait()
        assert command == {"kind": "end", "outcome": "stopped"}
        last.answer(number, {})

    other = threading.Thread(target=generate)
    other.start()
    engines.end("stopped")
    other.join()
