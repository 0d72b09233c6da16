"""Measure what safety costs: heartbeats, journal, tracking and checkpoints against a loop that has none of them.

    .venv/bin/python tools/bench/safety.py > table.md          # progress goes to stderr

It makes three measurements on one training rank, one engine and all cores, with 64 completions per step:

- Short steps, of a tiny model, in one run that a process watches, as under Slurm. In half of the steps nothing is
  journalled, logged, tracked or reported to the watcher, and W&B's process is stopped. All steps do the same work: the
  same prompts and seeds, and a learning rate too small to move a weight, so that the tokens are the same. Steps of both
  kinds are neighbours, in the order safe, bare, bare, safe. The table gives the difference of neighbours, with the
  interval from resampling the pairs. Safety costs a long step just as much, but the time of long steps varies by more
  than that.
- Long steps, of SmolLM2-135M-Instruct, in the same way, for the seconds of a step; and for the CPU seconds of the
  threads and processes that work beside the loop, some of them all the time and not once a step.
- Saves of SmolLM2: checkpoints of the same state in turns, waited for and in the background, with one optimizer step
  after each. "Blocked" is the time that the loop waits. The step that runs while a checkpoint is written shares the
  cores with it; the time that it takes longer than the step after a finished save is part of the cost. --only-saves
  measures nothing else, also of several ranks: `--only-saves --ranks 2 optimizer.distributed=true`.

The last table adds all of this up for a long step, with one save in `checkpoint.interval` steps: the difference of
short steps, half (of two cores) of the CPU seconds beside a long step, though some of them are in that difference
already, and the share of a save.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from step import BENCH, COMPLETIONS, GROUP, MAX_LENGTH, REPO, WARM_UP, cpu_model, our_config, spread

RESULT = "GSPO_HPC_BENCH_RESULT"
SAVES = "GSPO_HPC_BENCH_SAVES"  # in the environment of further ranks: where the first one saves


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"safety.py: {text}", file=sys.stderr, flush=True)


def settings(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The run whose steps are measured: a rollout takes all its prompts."""
    work.mkdir(exist_ok=True, parents=True)
    rows = args.data.read_text("utf-8").splitlines(keepends=True)[: COMPLETIONS // GROUP]
    (work / "data.jsonl").write_text("".join(rows), "utf-8")
    config = our_config(args, work / "run", f"{BENCH / 'graders.py'}:text_reward")
    config["data"]["train"] = str(work / "data.jsonl")
    return config | {
        "optimizer": {"lr": 1e-30},
        "checkpoint": {"interval": 10**6},
        "tracking": {"wandb": "offline"},
    }


class Meter:
    """Switch that turns safety off in half of the steps, and adds up what it takes in the others."""

    def __init__(self) -> None:
        self.on = True
        self.inside = 0.0  # wall seconds of the calls that the loop waits for
        self.rows: list[dict[str, float | bool]] = []
        self._last, self._cpu = time.perf_counter(), _beside()

    def around(self, owner: Any, name: str, *, counted: bool = True) -> None:
        """Measure the method; leave it out where safety is off."""
        original = getattr(owner, name)

        def method(this: Any, *arguments: Any, **named: Any) -> None:
            if self.on:
                began = time.perf_counter()
                original(this, *arguments, **named)
                if counted:
                    self.inside += time.perf_counter() - began

        setattr(owner, name, method)

    def step(self) -> None:
        """A step is over; the next two are of the other kind, of which this one may have been the first."""
        now, cpu = time.perf_counter(), _beside()
        self.rows.append({"on": self.on, "seconds": now - self._last, "inside": self.inside, "beside": cpu - self._cpu})
        Path(os.environ[RESULT]).write_text(json.dumps(self.rows))
        self.on = (len(self.rows) - WARM_UP) % 4 in (0, 3)
        for process in _of_wandb():
            process.send_signal(signal.SIGCONT if self.on else signal.SIGSTOP)
        self.inside, self._cpu, self._last = 0.0, _beside(), time.perf_counter()


def _of_wandb() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def _beside() -> float:
    """CPU seconds until now of what runs beside the loop: the thread that beats, the tracker's, W&B's processes."""
    me = psutil.Process()
    own = {thread.native_id for thread in threading.enumerate() if thread.name.split()[0] in ("control", "tracking")}
    threads = sum(thread.user_time + thread.system_time for thread in me.threads() if thread.id in own)
    return threads + sum(times.user + times.system for times in (child.cpu_times() for child in _of_wandb()))


def rank(argv: list[str]) -> int:
    """One rank, as gspo_hpc.training.worker, with the meter in it."""
    from gspo_hpc.rollout import generation
    from gspo_hpc.runs import journal
    from gspo_hpc.system import control, environment
    from gspo_hpc.training import loop, worker
    from gspo_hpc.training.observers.base import Observers

    os.dup2(2, 1)  # the console is progress
    os.environ[environment.RUN_ID] = os.environ[environment.MARK].partition(":")[0]  # as a job of Slurm has it
    seed = generation.sample_seed
    generation.sample_seed = lambda run, _, *rest: seed(run, 0, *rest)  # every rollout samples the same
    meter = Meter()
    meter.around(journal.Journal, "append")
    meter.around(Observers, "samples")
    meter.around(Observers, "step")
    meter.around(control.Client, "_send", counted=False)  # by a thread of its own, once a second
    finish: Callable[..., None] = loop.finish_step

    def finished(*arguments: Any) -> None:
        finish(*arguments)
        meter.step()

    loop.finish_step = finished  # type: ignore[assignment]
    return worker.main(argv)


def differences(rows: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Return the seconds by which a step with safety takes longer than the bare one beside it.

    They are the Hodges-Lehmann estimate, and the ends of its 95 % interval by the bootstrap (percentiles of 1,000
    resamples of the pairs).
    """
    neighbours = zip(rows[::2], rows[1::2], strict=True)
    pairs = np.array([(a["seconds"] - b["seconds"]) * (1 if a["on"] else -1) for a, b in neighbours])

    def middle(values: np.ndarray) -> float:
        first, second = np.triu_indices(len(values))
        return float(np.median((values[first] + values[second]) / 2))

    source = np.random.default_rng(0)
    found = [middle(source.choice(pairs, len(pairs))) for _ in range(1000)]
    return middle(pairs), *np.percentile(found, (2.5, 97.5))


def measure_steps(args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], float]:
    """Kind and seconds of every measured step; CPU seconds a step of what runs beside the loop."""
    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.launch import local
    from gspo_hpc.system.control import Server

    server, over = Server("127.0.0.1", 1), threading.Event()

    def listen() -> None:
        while not over.is_set():
            server.poll(0.2)

    watcher = threading.Thread(target=listen)
    watcher.start()
    os.environ.update(server.environment() | {RESULT: str(work / "steps.json")})
    before = time.process_time()
    try:
        code = local.train(from_dict(settings(args, work)), worker=[sys.executable, __file__, "--rank"])
    finally:
        over.set()
        watcher.join()
        server.close()
    if code:
        raise RuntimeError(f"the run ended with {code}; its log is in {work}")
    rows: list[dict[str, Any]] = json.loads((work / "steps.json").read_text())
    watching = (time.process_time() - before) / len(rows)  # this process, which has launched the rank as well
    records = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    if len({record["sampled_crc32"] for record in records if record["step"]}) != 1:
        raise RuntimeError("the steps have not done the same work: their tokens differ")
    rows = rows[WARM_UP:]
    return rows, watching + statistics.mean(row["beside"] for row in rows if row["on"])


def place_of(rank: int, args: argparse.Namespace, port: int) -> dict[str, str]:
    """Environment of a rank that saves: they share this machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}


def measure_saves(
    args: argparse.Namespace, work: Path, place: Mapping[str, str] | None = None
) -> dict[str, list[float]]:
    """Seconds blocked, of whole saves, and of the step after a save, of both kinds.

    With several ranks each figure is that of the slowest one.
    """
    import torch
    import torch.distributed as dist
    from trainer import ALONE, make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.checkpoint import shared_optimizer
    from gspo_hpc.checkpoint.saver import Saver
    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.ops.host_memory import HostCopy
    from gspo_hpc.policy import policy as policy_room
    from gspo_hpc.policy.process_groups import stop
    from gspo_hpc.runs import commit
    from gspo_hpc.training import update

    raw = settings(args, work)
    for key, _, value in (text.partition("=") for text in args.overrides):
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = yaml.safe_load(value)
    config = from_dict(raw)
    if args.bucket_size:
        reduction = policy_room.DistributedDataParallelConfig
        setattr(policy_room, reduction.__name__, partial(reduction, bucket_size=args.bucket_size))
    policy = make_policy(args.model, config, place or ALONE)
    for part in policy.optimizer.chained_optimizers if config.optimizer.distributed else ():
        every = shared_optimizer.shares(part)
        sent = [piece.end - piece.begin for one in every for piece in one.pieces if piece.rank != one.owner]
        split = sum(len(one.pieces) > 1 for one in every)
        if policy.ranks.rank == 0:
            travelling = f"{8 * sum(sent) / 2**20:,.0f} MiB of Adam's state"
            say(f"saves: {split} of {len(every)} parameters lie on several ranks, and {travelling} travel")
    objective = algorithms.resolve(config.algorithm)
    groups = noise(policy, 1 if args.only_saves else COMPLETIONS // GROUP, GROUP, 48, MAX_LENGTH, seed=0)

    def make(staging: Path, step: int, known: Mapping[str, commit.Entry]) -> None:
        commit.commit(staging, step, known=known)

    late = 0.0  # seconds that the step has waited for the copy, or has helped with it
    finish = HostCopy.finish

    def slowest(*seconds: float) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def finish_copy(copy: HostCopy) -> None:
        nonlocal late
        began = time.perf_counter()
        finish(copy)
        if threading.current_thread() is threading.main_thread():
            late += time.perf_counter() - began

    setattr(HostCopy, "finish", finish_copy)  # noqa: B010 (a method)
    savers = {"s": Saver(policy, background=False), "a": Saver(policy)}  # the first neither copies nor yields the cores
    found: dict[str, list[float]] = {f"{what}/{kind}": [] for what in ("blocked", "whole", "step") for kind in "sa"}
    for turn in range(args.saves + 1):  # the first of each kind is not measured
        for kind in ("s", "a") if turn % 2 else ("a", "s"):
            if policy.ranks.rank == 0:
                commit.begin(work / "checkpoints", turn)
            dist.barrier()
            staging = commit.staging_path(work / "checkpoints", turn)
            began = time.perf_counter()
            saver = savers[kind]
            saver.save(staging, partial(make, staging, turn))
            blocked = time.perf_counter() - began
            began, late = time.perf_counter(), 0.0
            result = update.step(policy, groups, objective, config)
            seconds = time.perf_counter() - began
            blocked += late
            assert result is not None and not result.skipped
            saver.wait()
            values = slowest(blocked, saver.seconds, seconds)
            if turn:
                for what, value in zip(("blocked", "whole", "step"), values, strict=True):
                    found[f"{what}/{kind}"].append(value)
        if policy.ranks.rank == 0:
            commit.retain(work / "checkpoints", 1)
            say(f"saves: turn {turn} of {args.saves}")
    dist.barrier()  # else another rank would find files that the first is about to remove
    size = sum(path.stat().st_size for path in (work / "checkpoints").rglob("*") if path.is_file())
    found["bytes"] = [float(size)]
    stop()
    return found


def saves_of_ranks(args: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """Measure saves of several ranks: this process is the first, the others are started here."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:]]
    others = [
        subprocess.Popen(command, env=os.environ | place_of(rank, args, port) | {SAVES: str(work)}, stdout=sys.stderr)
        for rank in range(1, args.ranks)
    ]
    saves = measure_saves(args, work, place_of(0, args, port))
    if any(other.wait(60) for other in others):
        raise RuntimeError("a rank failed; stderr has its error")
    return saves


def show_saves(saves: Mapping[str, Sequence[float]], longer: float) -> None:
    """Print what was measured of saves; the ratio is that of the two saves of each turn, which are neighbours."""
    ratios = [100 * a / b for a, b in zip(saves["blocked/a"], saves["blocked/s"], strict=True)]
    head: tuple[str, ...] = ("checkpoint", "s waited for", "s blocked in the background")
    head += ("blocked / waited for, %, pair by pair",)
    head = (*head, "s until committed", "s longer for the step beside it")
    print(f"| {' | '.join(head)} |\n|---|---|---|---|---|---|")
    cells = [f"{saves['bytes'][0] / 2**20:,.0f} MiB", spread(saves["blocked/s"], 2), spread(saves["blocked/a"], 2)]
    cells += [spread(ratios, 1), spread(saves["whole/a"], 2), f"{longer:.2f}"]
    print(f"| {' | '.join(map(str, cells))} |\n")


def main() -> int:
    """Measure, and print Markdown."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=REPO / ".cache" / "sum20" / "train.jsonl")
    parser.add_argument("--tiny", type=Path, default=REPO / ".cache" / "tiny", help="a folder with model/ and data/")
    parser.add_argument(
        "--short-steps", type=int, default=600, help="short steps that are measured, both kinds together; 4, 8, 12 ..."
    )
    parser.add_argument("--steps", type=int, default=8, help="long steps that are measured in the same way")
    parser.add_argument(
        "--saves", type=int, default=5, help="saves of each kind that are measured (default: %(default)s)"
    )
    parser.add_argument("--only-saves", action="store_true", help="measure saves alone, beside steps of one group")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of --only-saves (default: 1)")
    parser.add_argument(
        "--bucket-size", type=int, help="elements of a bucket of gradients in --only-saves, with overlap"
    )
    parser.add_argument("overrides", nargs="*", help="settings of --only-saves, such as optimizer.distributed=true")
    args = parser.parse_args()
    if (args.ranks > 1 or args.bucket_size or args.overrides) and not args.only_saves:
        parser.error("--ranks, --bucket-size and settings go with --only-saves")
    tiny = argparse.Namespace(model=args.tiny / "model", data=args.tiny / "data/train.jsonl", steps=args.short_steps)
    for path in (args.model / "config.json", args.data, tiny.model / "config.json", tiny.data):
        if not path.is_file():
            parser.error(f"{path} is not there: bash tools/quickstart.sh makes it, or with --config tiny")
    if args.steps % 4 or args.steps < 4 or tiny.steps % 4 or tiny.steps < 4:
        parser.error(f"--steps {args.steps} --short-steps {tiny.steps}: multiples of 4, from 4 on")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if SAVES in os.environ:  # another rank of --only-saves --ranks
        measure_saves(args, Path(os.environ[SAVES]), dict(os.environ))
        return 0
    with tempfile.TemporaryDirectory(prefix="gspo_hpc-safety-") as name:
        work = Path(name)
        if args.only_saves:
            os.environ["OMP_NUM_THREADS"] = str(max(1, cores // args.ranks))
            saves = saves_of_ranks(args, work / "saves") if args.ranks > 1 else measure_saves(args, work / "saves")
            print(f"{cores} cores of {cpu_model()}; load average before the start: {load:.1f}, at the end:", end=" ")
            print(f"{os.getloadavg()[0]:.1f}; {args.saves} pairs of saves; medians, with least and most.\n")
            show_saves(saves, statistics.median(saves["step/a"]) - statistics.median(saves["step/s"]))
            return 0
        short, _ = measure_steps(tiny, work / "short")
        rows, beside = measure_steps(args, work / "long")
        os.environ["OMP_NUM_THREADS"] = str(cores)  # before torch is imported
        saves = measure_saves(args, work / "saves")

    from gspo_hpc.config.schema import Checkpoint

    print(f"{COMPLETIONS} completions a step of at most {MAX_LENGTH} tokens, float32; {cores} cores of {cpu_model()};")
    print(f"load average before the start: {load:.1f}; medians, with least and most.\n")
    print("| steps | number | s bare | s with safety | of which the loop waits for | CPU s beside it |")
    print("|---|---|---|---|---|---|")
    step = 0.0
    for model, found in ((tiny.model.parent, short), (args.model, rows)):
        bare, safe = ([row["seconds"] for row in found if row["on"] is on] for on in (False, True))
        inside = statistics.median(row["inside"] for row in found if row["on"])
        aside = statistics.mean(row["beside"] for row in found if row["on"])
        step = statistics.median(bare)
        cells = [model.name, len(found), spread(bare, 3), spread(safe, 3), f"{inside:.4f}", f"{aside:.4f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    shares = differences(short)
    ends = ", ".join(f"{end:.4f}" for end in shares[1:])
    print(
        f"\nA short step takes {shares[0]:.4f} s longer with safety than the bare one beside it (95% interval {ends})."
    )
    print(f"Beside a long one {beside:.4f} CPU s are used, those of the watching process included.\n")
    longer = statistics.median(saves["step/a"]) - statistics.median(saves["step/s"])
    show_saves(saves, longer)
    interval = Checkpoint().interval
    save = (statistics.median(saves["blocked/a"]) + max(0.0, longer)) / interval / step
    parts = [shares[0] / step, beside / cores / step, save]
    most = 100 * (sum(parts) + (shares[2] - shares[0]) / step)
    print(f"| once a step | beside it | a save in {interval} steps | together |\n|---|---|---|---|")
    shown = " | ".join(f"{100 * part:.2f}%" for part in parts)
    print(f"| {shown} | **{100 * sum(parts):.2f}% of a long step** (95%: at most {most:.2f}%) |")
    return 0


if __name__ == "__main__":
    code = rank(sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
    sys.stdout.flush()
    os._exit(code)  # gloo's threads outlive the group
