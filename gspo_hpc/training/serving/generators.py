"""The job of a rank that only generates: it does what the ranks that train ask for, in order.

It keeps a copy of the newest weights in host memory. So an engine that dies is started again and filled here, and the
ranks that train notice no more than the time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.config.constants import TRANSFER_BUCKET_BYTES
from gspo_hpc.config.derived import gap_limits
from gspo_hpc.config.schema import Config
from gspo_hpc.data.carried import Enough, Place
from gspo_hpc.data.records import Floats
from gspo_hpc.engine import transfer
from gspo_hpc.engine.engine import Engine, EngineDied, Sampling
from gspo_hpc.exchange import generator_starts
from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.peers import engine_peers, engine_place
from gspo_hpc.exchange.transport import gather_unordered
from gspo_hpc.exchange.weight_broadcast import WeightBroadcast
from gspo_hpc.ops.weight_parts import Fingerprint, Memory, Part, Scratch, Stream
from gspo_hpc.policy.passes import Abandoned
from gspo_hpc.policy.process_groups import Ranks, any_rank, store
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.notices import POLL_SECONDS
from gspo_hpc.rollout.worker import Interrupted, JudgesOverBudget, RolloutWorker
from gspo_hpc.runs import journal
from gspo_hpc.system.progress import mark, waiting
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training import probe
from gspo_hpc.training.agreement.explain import PairScores, ask_engine, likeliest
from gspo_hpc.training.agreement.gap import Gap
from gspo_hpc.training.bringup import read_architecture, start_rollout_worker
from gspo_hpc.training.observers.memory import MemoryWatch
from gspo_hpc.training.probe import Trainer
from gspo_hpc.training.sampling import carrying
from gspo_hpc.training.sampling.judged import signal_of
from gspo_hpc.training.serving import scored_calls
from gspo_hpc.training.serving.commands import EXPLAIN, GENERATE, WEIGHTS, Commands, Values
from gspo_hpc.training.serving.connection import weight_broadcast
from gspo_hpc.training.serving.engines import sizes

_NO_CAUSE = (
    "unknown: engines that were checked with the same weights agreed, and one that was started again in a rollout does "
    "not; the ranks that train are at work, and cannot be asked for more"
)


class WeightsDiffer(RuntimeError):
    """Other weights arrived than were sent."""


class EngineFiller:
    """The weights of this rank's engine: received from the ranks that train, kept, and given to it again."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._broadcast: WeightBroadcast | None = None  # once there are weights to come
        self._kept = KeptWeights()
        self._place = engine_place(config, ranks.local_rank)  # among the ranks on the engine's GPUs; 0 owns it
        self._relay = self._make_relay()
        self._sender: transfer.WeightSender | None = None
        self._sequences: list[list[int]] = []  # of the probe
        self._trainer = Trainer([])  # what it computes of them
        self._first: Gap | None = None  # of the run's first sync
        self._examine_head = True  # until it has been
        self._ask_trainer: Callable[[], PairScores] | None = None  # while the ranks that train wait for an answer
        self.gap = Gap()  # since the newest weights came, of all engines that were checked

    def expect(self, command: Values) -> None:
        """Take from a command what the engine's log-probs are compared with once the weights that follow are there."""
        self.gap = Gap()
        self._sequences = command["sequences"]
        self._trainer = Trainer.from_values(command["trainer"])
        self._first = None if command["first"] is None else Gap(**command["first"])

    def receive(self, engine: Engine | None) -> tuple[str, EngineDied | None]:
        """Receive all weights and fill `engine`; return their fingerprint, and how it died, if it did. Collective."""
        ranks, broadcast = self._ranks, self._meet()
        fingerprint = Fingerprint(ranks.rank, ranks.world_size)  # every rank has all parts, and hashes its share
        self._kept.begin()
        keep = self._kept if self._place == 0 else None

        def stream(memory: Memory) -> Iterator[Sequence[Part]]:
            for parts in broadcast.stream(memory, keep):
                for part in parts:
                    fingerprint.add(part)
                yield parts

        death = self._fill(engine, stream)
        values = fingerprint.values().cpu()
        if ranks.world_size > 1:
            dist.reduce(values, 0)
        return fingerprint.text(values), death

    def refill(self, engine: Engine | None) -> EngineDied | None:
        """Fill `engine` with the weights that are kept, and check it; return how it died, if it did. Collective."""

        def stream(memory: Memory) -> Iterator[Sequence[Part]]:
            if self._place == 0:
                yield from self._kept.stream(memory, self._relay)
            elif self._relay is not None:
                yield from self._relay.stream(memory)

        takes_part = engine is not None or self._relay is not None
        return self.check(engine, self._fill(engine, stream) if takes_part else None)

    def check(self, engine: Engine | None, death: EngineDied | None) -> EngineDied | None:
        """Compare the probe's log-probs of `engine`, if it did not die, with the trainer's. Collective.

        Raises ProbeMismatch, on every rank.
        """
        alive = engine if death is None else None
        limits = gap_limits(self._config)
        gap, death = probe.compare(
            alive,
            self._sequences,
            self._trainer,
            self._ranks,
            limits,
            death,
            self._first,
            self._cause,
            examine_head=self._examine_head,
        )
        self.gap = self.gap.with_largest(gap)
        if alive is not None and death is None:
            self._examine_head = False
        return death

    @contextlib.contextmanager
    def asking(self, trainer: Callable[[], PairScores]) -> Iterator[None]:
        """Ask `trainer` for what is needed to name the cause of a gap within the block; every rank calls it then."""
        self._ask_trainer = trainer
        yield
        self._ask_trainer = None

    def _cause(self, engine: Engine | None, theirs: list[Floats]) -> str:
        if self._ask_trainer is None:
            return _NO_CAUSE
        answers = ask_engine(engine, self._sequences, theirs)
        return likeliest(self._trainer.logprobs, self._ask_trainer(), answers, self._ranks.exchange.transport)

    def _fill(self, engine: Engine | None, stream: Stream) -> EngineDied | None:
        if engine is not None:
            try:
                engine.update_weights(stream, self._get_sender())
            except EngineDied as error:
                return error
        elif self._relay is not None:  # a worker of the engine is on this GPU
            self._get_sender().send(stream)
        else:
            for _ in stream(Scratch(torch.device(self._config.cluster.platform))):
                pass
        return None

    def _meet(self) -> WeightBroadcast:
        """Return the group in which weights come, made with the first of them. Collective."""
        if self._broadcast is None:
            ranks = self._ranks
            self._broadcast = weight_broadcast(self._config, ranks, ranks.rank + 1, ranks.world_size + 1)
        return self._broadcast

    def _make_relay(self) -> WeightBroadcast | None:
        """Return the group of the ranks on an engine's GPUs, whose owner alone keeps weights; None if it is alone."""
        size, ranks = self._config.rollout.tensor_parallel_size, self._ranks
        if size == 1 or self._place is None:
            return None
        assert ranks.job_store is not None
        met_at = dist.PrefixStore(f"kept/{ranks.rank - self._place}", ranks.job_store)
        return WeightBroadcast(met_at, self._place, size, "gloo", ranks.timeout)

    def _get_sender(self) -> transfer.WeightSender:
        """Return this rank's memory for the workers of an engine, made once. Collective among the engine's ranks."""
        if self._sender is None:
            config, ranks = self._config, self._ranks
            size, platform = config.rollout.tensor_parallel_size, config.cluster.platform
            peers = engine_peers(config, ranks.rank, ranks.local_rank, ranks.timeout, store)
            self._sender = transfer.WeightSender(platform, size, TRANSFER_BUCKET_BYTES[platform], peers)
        return self._sender


class GeneratorJob:
    """One rank that generates, from the start of its engine to the end of the attempt."""

    def __init__(self, config: Config, ranks: Ranks, rollouts: Path, flag: StopFlag) -> None:
        """`rollouts`: the folder of journals."""
        assert ranks.job_store is not None
        self._config, self._ranks, self._rollouts = config, ranks, rollouts
        self._stop_requested = lambda: flag.requested is not None
        # On a node where ranks train as well, one of these watches its memory.
        alone = ranks.local_rank == 0 and config.cluster.generation_nodes > 0
        self._short: list[str] = []  # why the ranks that train are to stop: this node's memory runs out
        self._memory = MemoryWatch(config, self._short.append, print) if alone else None
        self._commands = Commands(ranks.job_store)
        self._filler = EngineFiller(config, ranks)
        self._worker: RolloutWorker | None = None
        self._announced = 0  # the number of the newest command to take weights in the middle of a call
        self._next_look = 0.0
        self._was_stopped = False

    def run(self) -> str:
        """Start the engine and do what is asked; return the outcome of the attempt."""
        self._worker = worker = start_rollout_worker(
            self._config,
            self._ranks,
            experts=read_architecture(self._config).experts is not None,
            make_room=lambda: None,
            sync_weights=self._filler.refill,
            stop_requested=self._stop_requested,
            rollouts=self._rollouts,
            has_signal=signal_of(self._config),
            in_flight=self if self._config.rollout.in_flight_updates else None,
        )
        self._announce()
        mark("ready")
        while True:
            number, command = self._next()
            if command["kind"] == WEIGHTS:
                self._answer(number, self._receive(worker, number, command))
                worker.recovery.note_weights(command["version"])
            elif command["kind"] == GENERATE:
                self._answer(number, self._generate(worker, command))
            else:
                worker.notices.close()
                self._ranks.exchange.transport.barrier()  # nobody looks into the store any more, which now ends
                self._answer(number, {})
                return str(command["outcome"])

    def _announce(self) -> None:
        """Tell training rank 0 that engines are up, and why, if these ranks have been started again."""
        deaths = generator_starts.own_deaths()
        if deaths and self._ranks.rank == 0:
            assert self._ranks.job_store is not None
            limit = self._config.faults.max_engine_restarts
            print(f"engine died ({deaths[-1]}); restart {len(deaths)} of at most {limit}", flush=True)
            generator_starts.announce(self._ranks.job_store)

    def have_come(self) -> bool:
        """See InFlightWeights: a command to take weights waits behind the call of generation that is at work."""
        if self._ranks.rank or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + POLL_SECONDS
        number = self._commands.count + 1
        if number == self._announced or self._commands.next_kind() != WEIGHTS:
            return False
        self._announced = number
        return True

    def take(self) -> int:
        """See InFlightWeights."""
        assert self._worker is not None
        number, command = self._next()
        answer = self._receive(self._worker, number, command)
        self._answer(number, answer)
        if answer["stopped"]:
            raise Abandoned
        return int(command["version"])

    def close(self) -> None:
        """Close the engine and the reward pool."""
        if self._worker is not None:
            self._worker.close()

    def _next(self) -> tuple[int, Values]:
        """Return the next command with its number, on all ranks that generate."""
        number, command = self._from_rank_0(self._commands.wait)
        return int(number), command

    def _receive(self, worker: RolloutWorker, number: int, command: Values) -> Values:
        """Take new weights, and compare engines and trainer on the probe."""
        filler = self._filler
        filler.expect(command)
        if self._ranks.rank == 0:
            self._commands.acknowledge(number)
        fingerprint, death = filler.receive(worker.engine)
        sent = self._from_rank_0(lambda: self._commands.hear(number))["fingerprint"]
        if self._ranks.rank == 0 and sent != fingerprint:
            raise WeightsDiffer(f"weights with the fingerprint {sent} were sent, and {fingerprint} arrived")
        with filler.asking(lambda: self._pair_scores(number)) if command["explains"] else contextlib.nullcontext():
            death = filler.check(worker.engine, death)
            while any_rank(death is not None, self._ranks.device):
                if death is not None:
                    worker.recovery.restart(death)
                with waiting():  # for engines that start again
                    if any_rank(self._stop_requested(), self._ranks.device):
                        return {"asks": False, "stopped": True}
                death = filler.refill(worker.engine if death is not None else None)
        return {"asks": False, "stopped": False, "fingerprint": sent, "gap": asdict(filler.gap)}

    def _pair_scores(self, number: int) -> PairScores:
        """Return the trainer's answers on pairs of tokens, asked for in the answer to command `number`."""
        self._answer(number, {"asks": True})
        _, command = self._next()
        assert command["kind"] == EXPLAIN, command["kind"]
        return PairScores.from_values(command)

    def _generate(self, worker: RolloutWorker, command: Values) -> Values:
        """Sample and grade what is asked for; finished groups go into this rank's journal.

        After a call that was stopped there is no other: the reward functions may still work on what it left.
        """
        if self._was_stopped:
            return {"stopped": True, "engines": {}, "waited": 0.0, "files": {}, "short": "", "unfinished": {}}
        sampling = Sampling(**command["sampling"])
        request = Request(
            slots=command["slots"],
            prompts={},
            samples=command["samples"],
            sampling=sampling,
            rollout=command["rollout"],
            enough=Enough.from_values(command["enough"]),
            weights_version=command["weights_version"],
            begun={int(slot): Place.from_list(place) for slot, place in command["begun"].items()},
        )
        folder, fingerprint = (self._rollouts / command["folder"]).resolve(), command["fingerprint"]
        if not folder.is_relative_to(self._rollouts.resolve()):  # anybody who reaches the store may have written it
            raise RuntimeError(f"a rollout is to be written to {folder}, which is not in {self._rollouts}")
        writer = None
        if worker.engine is not None and request.slots:
            kind: journal.Kind = "journal" if worker.models is None else "scored"
            writer = journal.Journal(
                folder, self._ranks.rank, fingerprint=fingerprint, rollout=request.rollout, kind=kind
            )
        stopped, waited, engines, files = False, 0.0, dict[str, float](), dict[str, int]()
        over_budget: str | None = None
        try:
            if worker.models is None:
                generated = worker.generate(request, writer)
            else:
                generated = scored_calls.generate(worker, request, folder, fingerprint, writer)
            waited, engines = generated.seconds_waiting_for_rewards, generated.engines
            left, number = generated.unfinished.values(), self._ranks.rank
            files = carrying.write(folder, number, left, fingerprint, request.rollout, "unfinished")
        except Interrupted as why:
            stopped = self._was_stopped = True
            over_budget = why.why if isinstance(why, JudgesOverBudget) else None
        finally:
            if writer is not None:
                writer.close()
        if self._memory is not None:
            self._memory.step({"step": 1 + max(0, command["rollout"])})
        own = [waited, {} if writer is None else sizes([writer.path]), "".join(self._short[:1]), files]
        transport = self._ranks.exchange.transport
        every = [json.loads(one) for one in gather_unordered(transport, json.dumps(own).encode())]
        return {
            "stopped": stopped,
            "over_budget": over_budget,
            "engines": engines,
            "waited": max(seconds for seconds, *_ in every),
            "files": {name: size for _, written, _, _ in every for name, size in written.items()},
            "short": max(short for _, _, short, _ in every),
            "unfinished": {name: size for *_, left in every for name, size in left.items()},
        }

    def _answer(self, number: int, values: Values) -> None:
        if self._ranks.rank == 0:
            self._commands.answer(number, values)

    def _from_rank_0(self, find: Callable[[], object]) -> Any:
        """Return what rank 0 finds, as JSON has it, on all ranks that generate, which wait for it."""
        with waiting():
            found = json.dumps(find() if self._ranks.rank == 0 else None).encode()
            every = self._ranks.exchange.transport.tree_all_reduce(found, lambda parts: parts[0])
        return json.loads(every)


def generate(
    config: Config, ranks: Ranks, rollouts: Path, flag: StopFlag, report: Callable[[BaseException], object]
) -> str:
    """Do the job of a rank that generates; return "done" or "stopped". An error is reported before anything closes."""
    job = GeneratorJob(config, ranks, rollouts, flag)
    try:
        outcome = job.run()
    except BaseException as error:
        report(error)
        with contextlib.suppress(Exception):  # the error that is reported is the one before
            job.close()
        raise
    job.close()
    return outcome
