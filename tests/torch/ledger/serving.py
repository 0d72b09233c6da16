"""Runs in server mode on cards that count: ranks that train, and ranks that generate on GPUs of their own.

Both roles are the package's own: commands, journals, the broadcast over gloo, kept weights and their thread, the
sampler ahead, recovery. What carries tensors between GPUs, Megatron and vLLM are replaced as in parts.py.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_hpc.config.schema import Config
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.exchange.weight_broadcast import SentMemory, WeightBroadcast
from gspo_hpc.ops.weight_parts import Scratch
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.notices import NodeTopology
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training import bringup, loop
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.serving import commands, connection, generators, link, weights
from gspo_hpc.training.serving.engines import RemoteEngines
from gspo_hpc.training.serving.sampler import RemoteSampler
from tests.torch.ledger import parts, runs
from tests.torch.ledger.node import Node
from tests.torch.ledger.parts import OWN, Job, LedgerPolicy, LedgerWorker
from tests.torch.ledger.world import World

LIMIT = datetime.timedelta(seconds=20)
JOURNAL = journal.Journal


class Here:
    """An object that stands for that of the role whose thread asks.

    A thread of neither role gets methods that look for the object when they are called.
    """

    def __init__(self, find: Callable[[], Any], **own: Any) -> None:
        vars(self).update(own, _find=find)

    def __getattr__(self, name: str) -> Any:
        try:
            found = self._find()
        except LookupError:
            return lambda *arguments: getattr(self._find(), name)(*arguments)
        return getattr(found, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._find(), name, value)


class Generating(Node):
    """Cards that only generate, in every phase of which the plan has one figure, and those of reward models."""

    def __init__(self, gpus: int, card: int, scoring: Iterable[int] = ()) -> None:
        super().__init__(gpus, card)
        self._scoring = frozenset(scoring)

    def phase(self, gpu: int, name: str) -> Any:
        return super().phase(gpu, "reward_model" if gpu in self._scoring else "generation")


class Talk(Transport):
    """The transport of a rank of a world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def tree_all_reduce(self, mine: bytes, merge: Any) -> bytes:
        merged: bytes = merge(self._world.gather(mine))
        return merged

    def barrier(self) -> None:
        self._world.wait()


class Alone(Transport):
    """The transport of a training rank, each of which has all groups: they only wait for each other."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def tree_all_reduce(self, mine: bytes, merge: Any) -> bytes:
        merged = super().tree_all_reduce(mine, merge)
        self._world.wait()  # or rank 0 has engines write what another rank has not read yet
        return merged

    def barrier(self) -> None:
        self._world.wait()


class Both:
    """One start of a run: the ranks of each role on one node, or on one of each kind."""

    def __init__(self, trainers: Job, generators: Job, folder: Path) -> None:
        self.trainers, self.generators, self._folder = trainers, generators, folder
        self._role = threading.local()
        self._failed = threading.Event()
        self._store = dist.HashStore()
        self._ends: dict[int, Cursor] = {}

    @property
    def host(self) -> int:
        """The bytes of the memory of a node that has both."""
        return self.trainers.node.host + self.generators.node.host

    def run(self, cursor: Cursor, monkeypatch: pytest.MonkeyPatch, model: Path) -> Cursor:
        """Run all ranks, from this position, and return where they ended."""
        self._simulate(monkeypatch, model)
        errors: list[BaseException] = []

        def side(job: Job, other: Job, work: Callable[[], None]) -> None:
            def rank() -> None:
                self._role.job = job
                work()

            try:
                job.world.run(rank)
            except BaseException as error:
                errors.append(error)
                self._failed.set()
                other.world.abort()

        sides = [
            threading.Thread(target=side, args=(self.trainers, self.generators, lambda: self._train(cursor))),
            threading.Thread(target=side, args=(self.generators, self.trainers, self._generate)),
        ]
        for one in sides:
            one.start()
        for one in sides:
            one.join()
        if errors:
            raise errors[0]
        assert len(set(map(repr, self._ends.values()))) == 1
        return self._ends[0]

    def _train(self, cursor: Cursor) -> None:
        job = self.trainers
        world, config = job.world, job.config
        place = world.rank
        exchange = Exchange(Alone(world))
        device = torch.device("cuda", place)
        sizes = (place, world.size, 0, 1, 0, 1, 0, 1, 1)
        ranks = Ranks(place, world.size, place, device, *sizes, LIMIT, exchange, self._store)
        flag = StopFlag()
        made = link.GeneratorLink(config, ranks, self._folder, flag)
        policy = LedgerPolicy(job, ranks)
        if cursor.step > 0:
            parts.load(policy)
        clock: Any = parts.Clock()
        recipe = runs.recipe_of(config)
        data = runs.data_of(recipe)
        sent = made.weights(policy, [[1, 2, 3]], clock, Baseline())
        sampler = RemoteSampler(recipe, data, made.engines, sent, self._folder, Observers(), clock, {})
        session = runs.session_of(job, policy, recipe, data, sampler, made.engines, sent, clock)
        progress = Progress(cursor, job.groups.get(place), evaluated=cursor.step > 0)
        made.engines.end(loop.train(session, progress))
        self._ends[place], job.groups[place] = progress.cursor, progress.groups

    def _generate(self) -> None:
        job = self.generators
        world = job.world
        place = world.rank
        job.node.put(place, OWN, job.parts("generation")[OWN])
        exchange = Exchange(Talk(world))
        sizes = (0, 1, 0, 1, 0, 1, 0, 1, 1)
        ranks = Ranks(place, world.size, place, torch.device("cpu"), *sizes, LIMIT, exchange, self._store)
        one = generators.GeneratorJob(job.config, ranks, self._folder, StopFlag())
        one.run()
        one.close()

    def _simulate(self, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        role, failed, count = self._role, self._failed, self.generators.world.size

        def job() -> Job:
            if not hasattr(role, "job"):
                raise LookupError
            found: Job = role.job
            return found

        world = Here(lambda: job().world)
        here = Here(job, world=world, node=Here(lambda: job().node))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        runs.simulate(here, monkeypatch, model)
        monkeypatch.setattr(journal, "Journal", JOURNAL)
        start = bringup.start_rollout_worker

        def worker(*places: Any, **options: Any) -> LedgerWorker:
            started = start(*places, **options)
            own = LedgerWorker(**{name: vars(started)[name] for name in LedgerWorker.__dataclass_fields__})
            own.job = role.job
            return own

        def nap(seconds: float) -> None:
            if failed.is_set():
                raise threading.BrokenBarrierError
            time.sleep(1e-3)

        class Kept(KeptWeights):
            def finish(self) -> None:
                super().finish()
                if self._filled:
                    here.node.keep_on_host(world.rank, "kept weights", here.travelling.whole)

        class Sent(SentMemory):
            _held: Any = None

            def __init__(self, device: torch.device, half: int, broadcast: Any) -> None:
                super().__init__(torch.device("cpu"), half, broadcast)

            def reserve(self, largest: int) -> None:
                super().reserve(largest)
                self._held = here.node.phase(world.rank, "sync")
                self._held.__enter__()
                here.node.put(world.rank, "buckets", self._bytes.numel())

            def release(self) -> None:
                super().release()
                if self._held is not None and self._bytes.numel() == 0:
                    here.node.drop(world.rank, "buckets")
                    self._held.__exit__(None, None, None)
                    self._held = None

        class Received(Scratch):
            """Buckets of a rank on whose GPU no engine takes them."""

            def __init__(self, device: torch.device) -> None:
                super().__init__(torch.device("cpu"))

            def allocate(self, size: int) -> torch.Tensor:
                place = super().allocate(size)
                with here.node.phase(world.rank, "sync"):
                    here.node.put(world.rank, "buckets", self._bytes.numel())
                return place

        class Engines(RemoteEngines):
            def from_rank_0(self, find: Callable[[], Any]) -> Any:
                return world.first(find() if self.ranks.rank == 0 else None)

        def broadcast(config: Config, ranks: Ranks, member: int, members: int) -> WeightBroadcast:
            assert ranks.job_store is not None
            return WeightBroadcast(dist.PrefixStore("weights", ranks.job_store), member, members, "gloo", LIMIT)

        sums = SimpleNamespace(reduce=lambda values, rank: world.add(values), PrefixStore=dist.PrefixStore)
        monkeypatch.setattr(bringup, "_topology", lambda config, ranks: NodeTopology(ranks.local_rank, count, 1))
        replaced: dict[Any, dict[str, Any]] = {
            commands: {"time": SimpleNamespace(sleep=nap)},
            connection: {
                "role_of": lambda *unused: SimpleNamespace(count=count),
                "weight_broadcast": broadcast,
                "KeptWeights": Kept,
                "_choose_gpu": lambda device: None,  # there is none
            },
            link: {"RemoteEngines": Engines},
            weights: {
                "SentMemory": Sent,
                "TRANSFER_BUCKET_BYTES": {"cuda": weights.TRANSFER_BUCKET_BYTES["cuda"]},
                "dist": sums,
                "score": lambda policy, *unused: SimpleNamespace(logprobs=runs.probed(policy)),
                "rounding_gap": lambda policy, *unused: runs.shaken(policy),
            },
            generators: {
                "start_rollout_worker": worker,
                "weight_broadcast": broadcast,
                "KeptWeights": Kept,
                "Scratch": Received,
                "dist": sums,
                "any_rank": world.any,
                "read_architecture": lambda config: here.arch,
                "MemoryWatch": lambda *unused: None,
                "gather_unordered": lambda transport, mine: world.gather(mine),
                "engine_peers": lambda config, *unused: world.peers(config.rollout.tensor_parallel_size),
            },
        }
        for module, names in replaced.items():
            for name, value in names.items():
                monkeypatch.setattr(module, name, value)
