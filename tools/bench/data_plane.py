"""Measure the exchange of samples among many processes: bytes, seconds and memory of a rank.

    .venv/bin/python tools/bench/data_plane.py > data_plane.md          # progress goes to stderr

Every rank is a process with the package's own exchange, table, packing, journal and notices over gloo on the loopback
interface, and its own hand-out of prompts over the store of the job; Megatron and vLLM are not imported. Completions
are random tokens of the longest length. A prompt has 512 tokens, a text of 2,048 characters and an answer.

- "A whole rollout" is 512 prompts x 16 x 8,192 tokens, whatever the number of ranks: what 1,024 GPUs have, held by
  fewer ranks. Nothing is scaled down.
- "The share of one of 1,024 ranks" is 8 completions a rank with choices of experts (48 layers, 8 of a token), so the
  rollout grows with the ranks: what a rank pays must not.

- "Decisions" are what every rank derives from the table of 1,024 and of 16,384 ranks, in one process.

Every rank is taken to own an engine, and takes prompts as its engine does, half of its fair share at a time. Rank 0,
which puts all prompts into the store, has a row of its own: its processor time has that of the store.

A pass over the rollout goes from holders to the ranks that compute it, its log-probs go back, and an update's samples
(tokens, log-probs of the engine and of the trainer, experts) go out again. With --replica, several ranks compute a
sample together and hand it on. Seconds are wall time from a barrier to the last rank, and processor time of one rank
(mean over ranks): many processes share few cores here, so that wall time says more about this machine than about a
job. Memory is the growth at the peak beyond what a rank holds before. Every byte that arrives is compared with what
was sent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gspo_hpc.data.packing import Assignment, pack
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import ROW, GroupTable, ShardedGroups, concatenate
from gspo_hpc.exchange.exchange import Exchange, Replicas, keys_by_replica, keys_of_replica
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.rollout.notices import POLL_SECONDS, NodeTopology, Notices
from gspo_hpc.runs.journal import Journal, journals, read_journal
from gspo_hpc.system.text import MIB

PROMPT, TEXT, SAMPLES, BUDGET = 512, 2048, 16, 16384
LAYERS, TOP_K = 48, 8  # of Qwen3-30B-A3B
NODE = 8  # ranks


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"data_plane.py: {text}", file=sys.stderr, flush=True)


def make_group(slot: int, length: int, experts: bool) -> Group:
    """Return the group of a slot: the same on every rank that makes it."""
    rng = np.random.default_rng(slot)

    def chosen(tokens: int) -> np.ndarray | None:
        return rng.integers(0, 128, (tokens, LAYERS, TOP_K), np.uint8) if experts else None

    def completion(index: int) -> Completion:
        values = rng.standard_normal(length, np.float32)
        tokens = rng.integers(0, 150_000, length, np.int32)
        return Completion(tokens, values, "", "length", index, advantage=float(index) - 7.5, experts=chosen(length - 1))

    return Group(slot, make_prompt(slot), tuple(completion(index) for index in range(SAMPLES)), chosen(PROMPT))


def make_prompt(slot: int) -> Prompt:
    """Return the prompt of a slot: the same on every rank that makes it."""
    rng = np.random.default_rng([slot, 1])
    text = rng.integers(32, 127, TEXT, np.uint8).tobytes().decode()
    return Prompt(slot, rng.integers(0, 150_000, PROMPT, np.int32), text, {"answer": str(slot)})


class Rank:
    """One process: what it measures in every phase."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int, listener: int, port: int, folder: Path) -> None:
        self._args, self._rank, self._world, self._folder = args, rank, world, folder
        os.environ["SLURMD_NODENAME"] = f"node-{rank // NODE}"
        fd = listener if rank == 0 else None
        self._store = dist.TCPStore(
            "127.0.0.1", port, world, rank == 0, timedelta(minutes=5), wait_for_workers=False, master_listen_fd=fd
        )
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore("exchange", self._store), rank, world, timedelta(minutes=5))
        members = [other for other in range(world) if other // args.replica == rank // args.replica]
        leaders = tuple(range(0, world, args.replica))
        self._link = Transport(group)
        self._exchange = Exchange(self._link, Replicas(leaders, rank // args.replica, tuple(members)))
        self._found: dict[str, dict[str, float]] = {}

    def run(self) -> dict[str, dict[str, float]]:
        """Return what every phase took on this rank."""
        args, exchange = self._args, self._exchange
        experts = args.mode == "share"
        prompts = args.prompts if args.mode == "whole" else max(1, self._world // 2)
        held = [
            make_group(slot, args.length, experts) for slot in range(prompts) if (slot + 1) % self._world == self._rank
        ]
        self._prompts(prompts)
        with self._phase("table"):
            groups = exchange.gather_table(held)
        with self._phase("packing"):
            assignment = pack(
                groups.table.samples(),
                dp_size=len(exchange.replicas.leaders),
                rank=exchange.replicas.own,
                micro_batch_size=None,
                micro_batch_tokens=BUDGET,
                share_prompts=True,
            )
        with self._phase("samples for log-probs"):
            fetched = exchange.fetch(groups, assignment, training=False, experts=experts)
        keys = [(s.slot, s.index) for batch in assignment.batches for s in batch]
        logprobs = {key: fetched[key[0]].completions[key[1]].tokens.astype(np.float32) for key in keys}
        del fetched
        with self._phase("log-probs back"):
            values, _ = exchange.return_results(groups, assignment, logprobs, None)
        own = {
            slot: group.with_completions(
                tuple(replace(c, old_logprobs=values[slot, i]) for i, c in enumerate(group.completions))
            )
            for slot, group in groups.own.items()
        }
        for slot, group in own.items():
            assert all(_equal(c.tokens.astype(np.float32), c.old_logprobs) for c in group.completions), slot
        with self._phase("samples for the updates"):
            fetched = exchange.fetch(groups.with_own(own), assignment, training=True, experts=experts)
        self._check(fetched, keys, experts)
        del fetched, values, own
        if args.mode == "whole":
            self._journals(held, groups)
        self._notices()
        return self._found

    def _check(self, fetched: dict[int, Group], keys: list[tuple[int, int]], experts: bool) -> None:
        for slot in {slot for slot, _ in keys}:
            there, here = make_group(slot, self._args.length, experts), fetched[slot]
            assert np.array_equal(there.prompt.tokens, here.prompt.tokens)
            for index in (index for other, index in keys if other == slot):
                one, other = there.completions[index], here.completions[index]
                assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
                assert _equal(one.tokens.astype(np.float32), other.old_logprobs) and _equal(one.experts, other.experts)

    def _prompts(self, count: int) -> None:
        """Take prompts as an engine does while it generates; no engine is faster than the others here."""
        counted: Any = _Counted(self._store)
        all_prompts = {slot: make_prompt(slot) for slot in range(count)} if self._rank == 0 else {}
        half = -(-count // (2 * self._world))
        taken: dict[int, Prompt] = {}
        self._link.barrier()
        with self._phase("prompts", counted):
            shared = SharedPrompts(counted, "generate/1")
            if self._rank == 0:
                shared.publish(all_prompts)
            self._link.barrier()
            for _ in range(2):
                end = counted.add("generate/1/next", half)
                slots = range(count)[end - half : end]
                taken |= zip(slots, shared.fetch(slots), strict=True)
        self._link.barrier()
        left = self._rank == 0 and any("/prompt/" in key for key in self._store.list_keys())
        assert not left and self._store.add("generate/1/next", 0) >= count
        for slot, found in taken.items():
            given = make_prompt(slot)
            assert np.array_equal(found.tokens, given.tokens)
            assert (found.index, found.text, found.fields) == (given.index, given.text, given.fields)

    def _journals(self, held: list[Group], groups: ShardedGroups) -> None:
        """Write one journal a rank, and read all of them as a resumed rollout does."""
        folder = self._folder / "rollout"
        if held:
            journal = Journal(folder, self._rank, fingerprint="weights", rollout=0)
            journal.append(held)
            journal.close()
        with self._phase("journals of a resumed rollout"):
            own, every = self._exchange.partition_files(
                lambda: [path.name for path in journals(folder)],
                lambda name: read_journal(folder / name, "weights"),
            )
        assert sorted(every) == groups.table.slots and all(own[slot].prompt.index == slot for slot in own)

    def _notices(self) -> None:
        """Wait as in a rollout, and count what the store of the job is asked."""
        nodes = max(1, self._world // NODE)
        counted: Any = _Counted(self._store)
        notices = Notices(counted, NodeTopology(self._rank % NODE, min(NODE, self._world), nodes))
        self._link.barrier()
        began, counted.asked = time.perf_counter(), 0
        while (waited := time.perf_counter() - began) < 2.0:
            notices.has("done")
            time.sleep(POLL_SECONDS)
        asked = counted.asked / waited
        self._link.barrier()
        began = time.perf_counter()
        if self._rank == self._world - 1:
            notices.post("done")
        while not notices.has("done"):
            time.sleep(0.005)
        sockets = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in _descriptors())
        self._found["notices"] = {"asked": asked, "wall": time.perf_counter() - began, "sockets": sockets}
        self._link.barrier()
        notices.close()

    @contextlib.contextmanager
    def _phase(self, name: str, store: _Counted | None = None) -> Iterator[None]:
        """Measure a phase; what it puts into `store` and gets from there is counted, too."""
        self._link.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present
        before, sent, received = _memory("VmRSS"), self._link.sent, self._link.received
        processor, began = time.process_time(), time.perf_counter()
        yield
        self._found[name] = {
            "wall": time.perf_counter() - began,
            "processor": time.process_time() - processor,
            "sent": self._link.sent - sent + (store.sent if store is not None else 0),
            "received": self._link.received - received + (store.received if store is not None else 0),
            "memory": _memory("VmHWM") - before,
        }


def _equal(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else bool(np.array_equal(one, other))


class _Counted:
    """A store that counts what it is asked, and the bytes of what is put there and got from there."""

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store
        self.asked = self.sent = self.received = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Put values there."""
        self.sent += sum(map(len, values))
        self._store.multi_set(keys, values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values from there."""
        found: list[bytes] = self._store.multi_get(keys)
        self.received += sum(map(len, found))
        return found


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def _memory(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(kind)


def measured(args: argparse.Namespace, world: int) -> list[dict[str, dict[str, float]]]:
    """Return what each of `world` ranks found; they are forked, so that they share what is imported.

    What is imported is frozen: a full collection of Python's garbage would go through all of it, and so copy it, in the
    phase of each rank in which it happens to be due. It took fifty times as long as to pack.
    """
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port, children = listener.getsockname()[1], []
        for rank in range(world):
            if not (child := os.fork()):
                _in_child(partial(_child, args, rank, world, listener.fileno(), port, folder), folder, rank)
            children.append(child)
        listener.close()
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        if failed:
            raise SystemExit(f"ranks {failed} of {world} failed")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _child(args: argparse.Namespace, rank: int, world: int, listener: int, port: int, folder: Path) -> object:
    return Rank(args, rank, world, listener, port, folder).run()


def _in_child(work: Callable[[], object], folder: Path, rank: int) -> None:
    try:
        (folder / f"{rank}.json").write_text(json.dumps(work()))
        os._exit(0)
    except BaseException as error:
        say(f"rank {rank}: {type(error).__name__}: {error}")
        os._exit(1)


def rows(world: int, ranks: list[dict[str, dict[str, float]]]) -> Iterator[str]:
    """Yield the rows of one number of ranks: the most of a rank in every phase, and mean processor time."""
    phases = {name: [rank[name] for rank in ranks] for name in ranks[0] if name != "notices"}
    prompts = phases.pop("prompts")
    phases = {"prompts on rank 0": prompts[:1], "prompts elsewhere": prompts[1:] or prompts} | phases
    for name, of in phases.items():
        most = {key: max(one[key] for one in of) for key in of[0]}
        processor = sum(one["processor"] for one in of) / len(of)
        yield (
            f"| {world} | {name} | {most['received'] / MIB:.2f} | {most['sent'] / MIB:.2f} | {most['wall']:.3f} | "
            f"{processor:.3f} | {most['memory'] / MIB:.1f} |"
        )
    asked = sum(rank["notices"]["asked"] for rank in ranks)
    latest, sockets = (max(rank["notices"][key] for rank in ranks) for key in ("wall", "sockets"))
    store = f"a notice: {asked:.0f} questions/s to the job's store, {sockets:.0f} sockets"
    yield f"| {world} | {store} | | | {latest:.3f} | | |"


def decisions() -> Iterator[str]:
    """Yield the rows of what every rank decides from the table alone: for 1,024 and 16,384 GPUs, 8 ranks a replica.

    "Who sends what" is what a pass decides beside its packing: for its samples, which rank 0 computes in part and holds
    in part, for their results, and the rows of what it computes. The checksum is that of all tokens of an update, which
    its record has.
    """
    yield (
        "| ranks | completions | MiB of table | s processor: join | read | pack a rollout | pack a quarter of it "
        "| who sends what, a rollout | a quarter | checksum of a quarter |"
    )
    yield "|" + "---|" * 10
    for world, prompts in ((1024, 512), (16384, 8192)):
        count = prompts * SAMPLES
        made = np.zeros(count, ROW)
        made["slot"], made["index"] = np.repeat(np.arange(prompts), SAMPLES), np.tile(np.arange(SAMPLES), prompts)
        made["prompt_len"], made["response_len"] = PROMPT, np.random.default_rng(0).integers(100, 8192, count)
        by_grader = (np.zeros((count, 1)), np.zeros((count, 1), np.bool_), np.zeros((count, 1), np.uint8))
        table = GroupTable(made, ("reward",), *by_grader)
        halves = [table.select(table.rows["slot"] % 2 == odd).to_bytes() for odd in (0, 1)]
        own = set(range(prompts)[:: world // 8])
        seconds: list[float] = []
        raw = _timed(seconds, _joined, halves)
        table = _timed(seconds, GroupTable.from_bytes, raw)
        parts = [table.select(table.rows["slot"] < end) for end in (prompts, prompts // 4)]
        dealt = [_timed(seconds, _dealt, part, world // 8) for part in parts]
        for part, assignment in zip(parts, dealt, strict=True):
            _timed(seconds, _senders, part, assignment, own)
        _timed(seconds, parts[-1].tokens_crc32)
        figures = " | ".join(f"{one:.3f}" for one in seconds)
        yield f"| {world} | {count} | {len(raw) / MIB:.2f} | {figures} |"


def _timed(seconds: list[float], work: Callable[..., Any], *given: object) -> Any:
    began = time.process_time()
    found = work(*given)
    seconds.append(time.process_time() - began)
    return found


def _joined(parts: list[bytes]) -> bytes:
    return concatenate([GroupTable.from_bytes(part) for part in parts]).to_bytes()


def _dealt(table: GroupTable, replicas: int) -> Assignment:
    """Return who computes what, as every rank decides it."""
    return pack(
        table.samples(),
        dp_size=replicas,
        rank=0,
        micro_batch_size=None,
        micro_batch_tokens=BUDGET,
        share_prompts=True,
    )


def _senders(table: GroupTable, assignment: Assignment, own: set[int]) -> None:
    """Decide what is sent and received for a pass and for its results, by a rank that computes and holds `own`."""
    for prompts in (True, False):
        keys = keys_of_replica(assignment, 0, prompts=prompts)
        assert keys and keys_by_replica(assignment, own, prompts=prompts) and table.holders
    assert len(table.places(np.array(keys))) == len(keys)


def main() -> None:
    """Measure as the command line says, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--mode", choices=("whole", "share", "decisions"), default="whole")
    parser.add_argument("--replica", type=int, default=1, help="ranks that compute a sample together")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192)
    args = parser.parse_args()
    if args.mode == "decisions":
        print("\n".join(decisions()))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as ranks with GPUs have it
    what = f"{args.prompts} prompts" if args.mode == "whole" else "half a prompt a rank, with experts,"
    print(f"{what} x {SAMPLES} x {args.length} tokens; {args.replica} ranks a replica; {os.cpu_count()} cores\n")
    print("| ranks | phase | MiB received | MiB sent | s wall | s processor | MiB more memory |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for world in args.ranks:
        say(f"{world} ranks; load average {os.getloadavg()[0]:.1f}")
        print("\n".join(rows(world, measured(args, world))), flush=True)


if __name__ == "__main__":
    main()
