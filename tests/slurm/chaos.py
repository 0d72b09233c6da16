"""Random faults over one long run on a real Slurm, and whether it still equals the run that nothing happened to.

    python -m tests.slurm.chaos --faults 20 --steps 200 > table.md          # progress goes to stderr

Starts a Slurm of its own and two runs of the small model on it: one undisturbed, one that is hit again and again, by a
fault and at a moment drawn at random, once it is at work again after the one before. Exits with 1 unless metrics,
samples, final weights and optimizer state of the two are equal bit for bit and nothing is left of any process.

Productive time is what the steps take where no fault hits: the median time of an undisturbed rollout with its updates,
times their number. Its ratio to the wall time is given twice: as it is, and without the time that the job waited in
Slurm's queue. Graders sleep, so that a rollout lasts about as long as one that has something to compute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from gspo_hpc.launch.slurm import commands
from tests.run import harness as runs
from tests.slurm import harness
from tests.slurm.harness import Cluster, SlurmRun

RESULT = "result.json"
UPDATES = 2  # of a rollout, by harness.OVERRIDES
LAYOUT = ("cluster.nodes=1", "cluster.gpus_per_node=2", "rollout.engines_per_node=1")
_PATIENCE = 300.0  # seconds in which a run that was hit must be at work again


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"chaos: {text}", file=sys.stderr, flush=True)


@dataclass
class Scene:
    """What faults are made of."""

    cluster: Cluster
    run: SlurmRun
    chance: random.Random
    lost: list[str] = field(default_factory=list)  # nodes whose slurmd is dead

    def rank(self) -> int:
        """One of the ranks."""
        return self.chance.choice(sorted(self.run.workers()))

    def stop_hard(self) -> None:
        """kill -9 of one rank."""
        self.run.kill(self.rank())


def preempted(scene: Scene) -> None:
    """preemption by a job of higher priority, with the user signal"""
    scene.cluster.user_signal(True)
    scene.cluster.preempt()


def preempted_by_term(scene: Scene) -> None:
    """preemption by a job of higher priority, with SIGTERM only"""
    scene.cluster.user_signal(False)
    scene.cluster.preempt()


def requeued(scene: Scene) -> None:
    """`scontrol requeue`: SIGTERM, and SIGKILL within seconds"""
    commands.requeue(scene.run.job_id)


def one_rank_signalled(scene: Scene) -> None:
    """SIGUSR2 that reaches one rank only"""
    scene.run.kill(scene.rank(), signal.SIGUSR2)


def out_of_time(scene: Scene) -> None:
    """the time limit comes within a minute"""
    end = datetime.now() + timedelta(seconds=harness.NOTICE)
    commands.run(["scontrol", "update", f"JobId={scene.run.job_id}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}"])


def rank_killed(scene: Scene) -> None:
    """kill -9 of a rank"""
    scene.stop_hard()


def rank_hangs(scene: Scene) -> None:
    """SIGSTOP of a rank"""
    scene.run.kill(scene.rank(), signal.SIGSTOP)


def engine_killed(scene: Scene) -> None:
    """kill -9 of an engine"""
    os.kill(scene.chance.choice(harness.engine_cores(scene.run)), signal.SIGKILL)


def killed_in_a_save(scene: Scene) -> None:
    """kill -9 of a rank while a checkpoint is written"""
    checkpoints = scene.run.run_dir / "checkpoints"
    _until("a save", lambda: any(path.name.startswith(".tmp-") for path in checkpoints.iterdir()), 0.001)
    scene.stop_hard()


def checkpoint_damaged(scene: Scene) -> None:
    """a bit of the newest checkpoint is flipped, and a rank is killed"""
    checkpoints = scene.run.run_dir / "checkpoints"
    ranks = set(scene.run.workers().values())
    scene.stop_hard()
    _until("the ranks end", lambda: not ranks & set(scene.run.workers().values()), 0.02)  # they commit no more
    newest = max(path for path in checkpoints.iterdir() if path.name.isdigit())
    path = scene.chance.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    content[scene.chance.randrange(len(content))] ^= 1 << scene.chance.randrange(8)
    path.write_bytes(content)


def node_lost(scene: Scene) -> None:
    """slurmd and all that runs under it are killed"""
    job = commands.job(scene.run.job_id)
    assert job is not None
    node = scene.chance.choice(commands.hostnames(job.nodes))
    scene.cluster.lose(node)
    scene.lost.append(node)


def controller_restarted(scene: Scene) -> None:
    """slurmctld is killed, and comes back after five seconds"""
    scene.cluster.stop_controller()
    time.sleep(5.0)
    scene.cluster.start_controller()


FAULTS: tuple[Callable[[Scene], None], ...] = (
    preempted,
    preempted_by_term,
    requeued,
    one_rank_signalled,
    out_of_time,
    rank_killed,
    rank_hangs,
    engine_killed,
    killed_in_a_save,
    checkpoint_damaged,
    node_lost,
    controller_restarted,
)
SILENT = (engine_killed, controller_restarted)  # the same ranks go on


@dataclass(frozen=True)
class Hit:
    """One fault, and how long the run was not at work for it."""

    name: str
    step: int
    seconds: float
    queued: float  # of these, between the requeue and the start: Slurm's hold, a job of higher priority, free nodes


def hit(scene: Scene, fault: Callable[[Scene], None]) -> Hit:
    """Let the fault happen, and wait until groups or steps come in again that were not there before."""
    run = scene.run
    ranks, step, starts = set(run.workers().values()), run.last_step(), times_in_queue(run)
    began = time.monotonic()
    fault(scene)
    if fault not in SILENT:
        _until("new ranks", lambda: bool(new := set(run.workers().values())) and not new & ranks)
    attempt, groups, done = len(run.attempts()), run.groups(), _done(run, len(run.attempts()))
    _until("work", lambda: run.groups() > groups or _done(run, attempt) > done)
    if fault is out_of_time:
        commands.run(["scontrol", "update", f"JobId={run.job_id}", "TimeLimit=600"])
    for node in scene.lost:
        scene.cluster.revive(node)
    scene.lost.clear()
    queued = times_in_queue(run)
    return Hit(str(fault.__doc__), step, time.monotonic() - began, queued[1] if queued[0] > starts[0] else 0.0)


def disturb(scene: Scene, kinds: Sequence[Callable[[Scene], None]], faults: int, steps: int) -> list[Hit]:
    """All faults, spread over the run: each kind once, then at random."""
    order = [*kinds, *scene.chance.choices(kinds, k=max(0, faults - len(kinds)))][:faults]
    scene.chance.shuffle(order)
    hits: list[Hit] = []
    for number, fault in enumerate(order):
        due = round((number + scene.chance.uniform(0.2, 0.8)) * (steps - UPDATES) / faults)
        _until(f"step {due}", lambda due=due: scene.run.last_step() >= due, patience=3600.0)
        time.sleep(scene.chance.uniform(0.0, 10.0))
        say(f"{number + 1} of {faults}: {fault.__doc__}, after step {scene.run.last_step()}")
        hits.append(hit(scene, fault))
        say(f"at work again after {hits[-1].seconds:.0f} s, {hits[-1].queued:.0f} of them in the queue")
    return hits


def differences(run: SlurmRun, other: SlurmRun, steps: int) -> list[str]:
    """In what the two are not equal."""
    found = []
    if [record["step"] for record in runs.metrics(run.run_dir)] != list(range(steps + 1)):
        found.append("steps are missing, or there twice")
    if runs.comparable(run.run_dir) != runs.comparable(other.run_dir):
        found.append("metrics")
    if runs.samples(run.run_dir) != runs.samples(other.run_dir):
        found.append("samples")
    if harness.final_state(run) != harness.final_state(other):
        found.append("final weights")
    if len({path.name.rsplit("-", 1)[1] for path in run.run_dir.glob("wandb/offline-run-*")}) != 1:
        found.append("W&B runs")
    left = [*(text for _, text in harness.processes_of(run.run_dir)), *runs.left_on_node(run.run_dir)]
    return [*found, *(f"left: {text}" for text in left)]


def rollout_seconds(run: SlurmRun, hits: list[Hit]) -> list[float]:
    """Of every rollout with its updates in which nothing happened."""
    at = {record["step"]: record["time"] for record in runs.metrics(run.run_dir) if record["step"]}
    touched = {one.step // UPDATES for one in hits} | {one.step // UPDATES + 1 for one in hits}
    last = max(at)
    starts = range(UPDATES, last - UPDATES + 1, UPDATES)
    return [at[step + UPDATES] - at[step] for step in starts if step // UPDATES not in touched]


def times_in_queue(run: SlurmRun) -> tuple[int, float]:
    """How often the job was requeued, and how many seconds it waited in the queue the last time."""
    text = commands.run(["scontrol", "show", "job", "--oneliner", run.job_id])
    found = dict(pair.split("=", 1) for pair in text.split() if "=" in pair)
    times = [datetime.fromisoformat(found[key]) for key in ("SubmitTime", "StartTime")]  # a requeue submits it anew
    return int(found["Restarts"]), (times[1] - times[0]).total_seconds()


def _done(run: SlurmRun, attempt: int) -> int:
    """Steps that an attempt has logged."""
    return sum(record.get("attempt") == attempt for record in runs.metrics(run.run_dir))


def _until(what: str, condition: Callable[[], bool], pause: float = 0.1, patience: float = _PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:.0f} s for {what}")
        time.sleep(pause)


@contextmanager
def own_cluster(work: Path) -> Iterator[Cluster]:
    """A Slurm of four nodes, stopped at the end."""
    environment = os.environ | {"GSPO_HPC_SLURM": str(work / "cluster")}

    def call(*arguments: str) -> str:
        command = ["bash", str(harness.SCRIPT), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout

    call("up", "--nodes", "4", "--gpus", "2")
    os.environ["SLURM_CONF"] = call("env").strip().removeprefix("export SLURM_CONF=")
    try:
        yield Cluster()
    finally:
        call("down")


def tiny_config(folder: Path, work: Path) -> Path:
    """configs/tiny_cpu.yaml with the model and data of this machine."""
    raw = yaml.safe_load((harness.PROJECT / "configs" / "tiny_cpu.yaml").read_text())
    raw["model"]["path"] = str(folder / "model")
    raw["data"] = {"train": str(folder / "data" / "train.jsonl"), "eval": str(folder / "data" / "eval.jsonl")}
    path = work / "tiny_cpu.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def main() -> int:
    """Run, compare, and print Markdown."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.chaos", description=__doc__, formatter_class=raw)
    kinds = [fault.__name__ for fault in FAULTS]
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="(default: all)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--grader-seconds", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=0, help="of faults and moments (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=harness.PROJECT / ".cache" / "tiny", help="make_tiny_model.py's")
    parser.add_argument("--work", type=Path, help="a new folder for both runs; one with both is reported once more")
    args = parser.parse_args()
    if not (args.model / "model").is_dir():
        parser.error(f"no model in {args.model}: {sys.executable} tools/make_tiny_model.py --out {args.model}")
    work = (args.work or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    say(f"everything is kept in {work}")
    if not (work / RESULT).exists():
        work.mkdir(parents=True, exist_ok=True)
        with own_cluster(work) as cluster:
            result = both_runs(args, work, cluster)
        (work / RESULT).write_text(json.dumps(result))
    result = json.loads((work / RESULT).read_text())
    config = work / "tiny_cpu.yaml"
    run, undisturbed = SlurmRun(config, work / "run"), SlurmRun(config, work / "undisturbed")
    wrong = differences(run, undisturbed, result["steps"])
    for text in wrong:
        say(f"not equal: {text}")
    report(run, [Hit(**one) for one in result["hits"]], result)
    print(
        "\nEqual to the undisturbed run: "
        + ("**no**" if wrong else "metrics, samples, final weights and optimizer state, bit for bit.")
    )
    return 1 if wrong else 0


def both_runs(args: argparse.Namespace, work: Path, cluster: Cluster) -> dict[str, Any]:
    """The undisturbed one, then the other; what the report needs beside what they leave."""
    config = tiny_config(args.model, work)
    own = (*LAYOUT, f"run.max_steps={args.steps}", "slurm.time_minutes=600", "checkpoint.interval=1")
    undisturbed = SlurmRun(config, work / "undisturbed", own).submit()
    undisturbed.wait_until_ended(timeout=3600.0)
    say("the undisturbed run is done")
    run = SlurmRun(config, work / "run", own, args.grader_seconds).submit()
    began = time.monotonic()
    kinds = [fault for fault in FAULTS if fault.__name__ in args.kinds]
    try:
        hits = disturb(Scene(cluster, run, random.Random(args.seed)), kinds, args.faults, args.steps)
        run.wait_until_ended(timeout=3600.0)
    except BaseException:
        say(run.log())
        raise
    finally:
        subprocess.run(["scancel", run.job_id], capture_output=True, check=False)
    wall = time.monotonic() - began
    return {"hits": [asdict(one) for one in hits], "wall": wall, "steps": args.steps, "seed": args.seed}


def report(run: SlurmRun, hits: list[Hit], result: dict[str, Any]) -> None:
    """The tables."""
    wall, steps = result["wall"], result["steps"]
    whole = rollout_seconds(run, hits)
    productive = statistics.median(whole) * steps / UPDATES
    queued = sum(one.queued for one in hits)
    ends = Counter(record.get("reason") or "lost with its node" for record in run.attempts())
    print(f"{len(hits)} faults over {steps} steps in {steps // UPDATES} rollouts, seed {result['seed']}; ", end="")
    print(f"attempts ended: {', '.join(f'{count} {reason}' for reason, count in ends.most_common())}.\n")
    print("| fault | times | s until the run works again | of these in the queue |\n|---|---|---|---|")
    for name in sorted({one.name for one in hits}):
        times = [(one.seconds, one.queued) for one in hits if one.name == name]
        columns = (", ".join(f"{value:.0f}" for value in values) for values in zip(*times, strict=True))
        print(f"| {name} | {len(times)} | {' | '.join(columns)} |")
    print("\n| wall, s | in the queue, s | productive, s | productive / wall | productive / wall without the queue |")
    print("|---|---|---|---|---|")
    shares = f"{100 * productive / wall:.1f}% | **{100 * productive / (wall - queued):.1f}%**"
    print(f"| {wall:,.0f} | {queued:,.0f} | {productive:,.0f} | {shares} |")


if __name__ == "__main__":
    sys.exit(main())
