"""Messages between ranks that train and ranks that generate in server mode, without engines.

It takes seconds. It would catch a store that grows with every command, engines that are stopped where there is time to
finish, memory of a generating node that nobody is told of, and a sync whose gap is that of one engine.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.policy import process_groups
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.generation import Request
from gspo_hpc.system.signals import MEMORY, StopFlag
from gspo_hpc.training.probe import Trainer
from gspo_hpc.training.serving import connection
from gspo_hpc.training.serving.commands import GENERATE, WEIGHTS, Commands
from gspo_hpc.training.serving.connection import Connection
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.serving.generators import EngineFiller

SERVER = {"rollout": {"mode": "server", "engines_per_node": 1}, "cluster": {"gpus_per_node": 2}}
ANSWER: dict[str, Any] = {"stopped": False, "engines": {}, "waited": 0.0, "files": {}, "short": ""}


def only_rank(store: dist.Store) -> Ranks:
    return Ranks(0, 1, 0, torch.device("cpu"), 0, 1, 0, 1, 0, 1, 0, 1, 1, job_store=store)


def engines(store: dist.Store, folder: Path, flag: StopFlag) -> tuple[RemoteEngines, Any]:
    """The training rank's end, with a call of generation that is not answered yet."""
    config, ranks = from_dict(SERVER), only_rank(store)
    made = RemoteEngines(config, ranks, Connection(config, ranks), folder, flag)
    return made, made.start(Request([], {}, 1, Sampling(), 1), folder / "000001", "w0")


def test_nothing_of_a_command_that_was_answered_stays_in_the_store() -> None:
    store = dist.HashStore()
    asking, asked = Commands(store), Commands(store)
    empty = store.num_keys()
    for kind in (WEIGHTS, GENERATE):
        number = asking.post(kind, {"sequences": [[1, 2]]})
        assert asked.wait() == (number, {"kind": kind, "sequences": [[1, 2]]})
        if kind == WEIGHTS:
            asked.acknowledge(number)
            asking.wait_until_read(number, lambda: None)
            asking.tell(number, {"fingerprint": "w0"})
            assert asked.hear(number) == {"fingerprint": "w0"}
        asked.answer(number, {"stopped": False})
        assert asking.wait_for_answer(number, lambda: None) == {"stopped": False}
        assert store.num_keys() == empty


@pytest.mark.parametrize(("reason", "stops"), [("SIGTERM", True), (f"{MEMORY}: 95% of n1", False)])
def test_engines_finish_what_they_sample_where_there_is_time(reason: str, stops: bool, tmp_path: Path) -> None:
    """A run that restarts for its memory saves first, and for that the rollout ahead has to be whole."""
    store, flag = dist.HashStore(), StopFlag()
    remote, call = engines(store, tmp_path, flag)
    flag.request(reason)
    assert remote._connection is not None
    look = remote._looker(remote._connection, call, lambda groups, failures: None)
    look()
    assert remote._connection.notices.has(f"generate/{call.count}/stop") == stops


def test_the_memory_of_a_generating_node_stops_the_run_once_the_answer_is_there(tmp_path: Path) -> None:
    store, flag = dist.HashStore(), StopFlag()
    remote, call = engines(store, tmp_path, flag)
    generating = Commands(store)

    def answer() -> None:
        number, _ = generating.wait()
        generating.answer(number, ANSWER | {"short": f"{MEMORY}: 95% of n1"})

    other = threading.Thread(target=answer)
    other.start()
    assert not remote.wait(call).stopped
    other.join()
    assert flag.name == f"{MEMORY}: 95% of n1"


class Agreeing:
    """An engine whose log-probs are off by so much."""

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self.settings: Any = type("Settings", (), {"max_model_len": 64})

    def wake_up(self) -> None: ...

    def cached_tokens(self, tokens: list[int]) -> int:
        return 0

    def prompt_logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return [np.full(len(tokens) - 1, -1.0 + self._gap, np.float32) for tokens in sequences]


def test_the_gap_of_a_sync_is_the_largest_of_all_engines_also_of_those_checked_before_one_was_filled_again() -> None:
    config = from_dict(SERVER | {"model": {"dtype": "float32"}})
    filler = EngineFiller(config, only_rank(dist.HashStore()))
    command = {"sequences": [[1, 2, 3]], "first": None}
    command["trainer"] = Trainer([np.array([-1.0, -1.0])]).values()
    for first, then, largest in ((2e-5, 1e-5, 2e-5), (1e-5, 2e-5, 2e-5), (0.0, 1e-5, 1e-5)):
        filler.expect(command)
        for gap in (first, then):
            assert filler.check(Agreeing(gap), None) is None  # type: ignore[arg-type]
        assert filler.gap.max == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize(("platform", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_weights_travel_between_gpus_by_nccl(platform: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(connection, "WeightBroadcast", lambda store, *more: made.append(more))
    ranks = only_rank(dist.HashStore())
    connection.weight_broadcast(
        from_dict(SERVER | {"cluster": {"platform": platform, "gpus_per_node": 2}}), ranks, 1, 3
    )
    assert made == [(1, 3, backend, ranks.timeout)]


def test_a_rank_that_generates_sets_what_cuda_reads_before_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group of weights uses NCCL, as those of ranks that train."""
    events: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(process_groups, "cuda_environment", lambda config: events.append("environment") or {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"sees 1 GPUs on .*needs GPU 1"):
        process_groups.start_generating(from_dict(SERVER | {"cluster": {"platform": "cuda"}}), 1.0, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(f"device {device}"))
    assert process_groups._take_gpu(from_dict(SERVER), 1) == torch.device("cuda", 1)
    assert events == ["environment", "environment", "device 1"]
