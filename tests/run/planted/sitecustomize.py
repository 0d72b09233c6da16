"""Plants what GSPO_HPC_TEST_PLANTED names in one rank. Python imports this at its start.

The rank is GSPO_HPC_TEST_PLANTED_RANK, or 1; several are joined by commas, as names are. Faults happen in the first
attempt:

"error": rank 1 fails, and its process groups never end. On gloo groups end at once; NCCL waits for kernels that the
other ranks never join. Here the store of the job is asked for what nobody ever tells.

"exchange": rank 1 is killed in a save, when it is to send its pieces of an optimizer's state that ranks share.

"stale": an engine keeps its prefix cache at weight syncs, and says that the probe found nothing in it.

"kept": an engine keeps its prefix cache at weight syncs.

"keys": a rank that generates gives its engine other keys than it has received.

"scored": a rank is killed once the first group of rollout 0 is on disk with its scores of reward models.

"deaths": of ranks that generate, each once: the engine of the first that finishes a group of rollout 1 is killed, then
the first that finishes one of rollout 2, and the first of these ranks once rollout 2 is sampled.

When one happens, the file GSPO_HPC_TEST_PLANTED_NOTE is made; for "deaths" one for each, with its name
appended. An order of events, which the clock decides otherwise, is that of every attempt:

"middle": engines of a rank that generates go on with a rollout once newer weights have come, after three groups.

"between": second messages of a few groups are answered after the end of the rollout, which does not need them.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def note() -> None:
    """Leave a mark of the moment."""
    Path(os.environ["GSPO_HPC_TEST_PLANTED_NOTE"]).touch()


def failing(job: Any) -> None:
    """Change the module of the job that trains."""

    def never() -> None:
        from gspo_hpc.policy.process_groups import store

        store().wait(["what nobody tells"], datetime.timedelta(hours=1))

    def fail(*arguments: object, **named: object) -> NoReturn:
        note()
        raise RuntimeError("the planted one")

    job.stop = never
    job.start_rollout_worker = fail


def dying(shared_optimizer: Any) -> None:
    """Change the module that brings an optimizer's state together."""

    def die(*arguments: object, **named: object) -> None:
        note()
        os.kill(os.getpid(), signal.SIGKILL)

    shared_optimizer._exchange_batch = die


def hiding(engine: Any) -> None:
    """Change the module of the engine."""
    engine.Engine.reset_prefix_cache = lambda self: note()
    engine.Engine.cached_tokens = lambda self, tokens: 0


def keeping(engine: Any) -> None:
    """Change the module of the engine."""
    engine.Engine.reset_prefix_cache = lambda self: note()


def wrong_keys(generators: Any) -> None:
    """Change the module of the ranks that generate."""
    fill = generators.EngineFiller._fill

    def fill_wrongly(self: Any, engine: Any, stream: Any) -> Any:
        def changed(memory: Any) -> Any:
            for parts in stream(memory):
                for part in parts:
                    if "k_norm.weight" in part.name:
                        part.tensor.mul_(1.5)
                        note()
                yield parts

        return fill(self, engine, changed)

    generators.EngineFiller._fill = fill_wrongly


def dying_scored(journal: Any) -> None:
    """Change the module of the journals."""
    append = journal.Journal.append

    def append_and_die(self: Any, groups: Any) -> None:
        append(self, groups)
        if self.path.suffix == ".scored" and self.path.parent.name == "000000":
            note()
            os.kill(os.getpid(), signal.SIGKILL)

    journal.Journal.append = append_and_die


def waiting_for_weights(generation: Any) -> None:
    """Change the module of a call of generation."""
    step = generation.Generation._step_engine

    def wait_and_step(self: Any) -> None:
        most = self.config.batch.steps_per_generation * self.request.rollout  # steps before this rollout
        come = self.recovery.or_weights(self.stop_requested)
        while len(self._finished) >= 3 and self.recovery.weights_version < most and not come():
            time.sleep(0.01)
        step(self)

    generation.Generation._step_engine = wait_and_step


def answering_late(generation: Any) -> None:
    """Change the module of a call of generation."""
    from gspo_hpc.rollout.conversations import Conversations

    late: set[int] = set()  # slots
    run, go_on = generation.Generation.run, Conversations._go_on

    def run_with(self: Any) -> Any:
        enough, slots = self.request.enough, self.request.slots
        spare = [] if enough is None else [slot for slot in slots if slot not in enough.required]
        count = 0 if enough is None else (len(slots) - enough.groups) // 2
        late.clear()
        late.update(spare[len(spare) - count :])
        return run(self)

    def go_on_with(self: Any, answered: Any) -> None:
        messages = {(slot, sample): self._open[slot].conversations[sample].messages for slot, sample in answered}
        go_on(self, [key for key in answered if key[0] not in late or not messages[key]])

    generation.Generation.run, Conversations._go_on = run_with, go_on_with


def first(name: str) -> bool:
    """Return True for one process alone, to which this then happens."""
    try:
        os.close(os.open(f"{os.environ['GSPO_HPC_TEST_PLANTED_NOTE']}-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def dying_generators(generators: Any) -> None:
    """Change the module of the ranks that generate."""
    append, generate = generators.journal.Journal.append, generators.GeneratorJob._generate
    wait = generators.GeneratorJob._next
    sampled: list[int] = []

    def append_and_die(self: Any, groups: Any) -> None:
        import psutil

        append(self, groups)
        if self._rollout == 1 and first("engine"):
            for one in psutil.Process().children():
                if "gspo_hpc.engine.host" in one.cmdline():
                    one.kill()
        if self._rollout == 2 and first("in-rollout"):
            os.kill(os.getpid(), signal.SIGKILL)

    def generate_and_tell(self: Any, worker: Any, command: Any) -> Any:
        sampled.append(command["rollout"])
        return generate(self, worker, command)

    def die_or_wait(self: Any) -> Any:
        if sampled[-1:] == [2] and self._ranks.rank == 0 and first("between"):
            os.kill(os.getpid(), signal.SIGKILL)
        return wait(self)

    generators.journal.Journal.append = append_and_die
    generators.GeneratorJob._generate = generate_and_tell
    generators.GeneratorJob._next = die_or_wait


PLANTED = {
    "error": ("gspo_hpc.training.jobs.train", failing),
    "exchange": ("gspo_hpc.checkpoint.shared_optimizer", dying),
    "stale": ("gspo_hpc.engine.engine", hiding),
    "kept": ("gspo_hpc.engine.engine", keeping),
    "deaths": ("gspo_hpc.training.serving.generators", dying_generators),
    "keys": ("gspo_hpc.training.serving.generators", wrong_keys),
    "scored": ("gspo_hpc.runs.journal", dying_scored),
    "middle": ("gspo_hpc.rollout.generation", waiting_for_weights),
    "between": ("gspo_hpc.rollout.generation", answering_late),
}
ORDERS = ("middle", "between")


class Finder:
    """Finds the modules as everybody does, and has each changed once it is loaded."""

    def __init__(self, names: list[str]) -> None:
        """`names` of PLANTED."""
        self._changes: dict[str, list[Any]] = {}
        for name in names:
            self._changes.setdefault(PLANTED[name][0], []).append(PLANTED[name][1])

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Called for every import."""
        changes = self._changes.pop(name, None)
        if changes is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
ranks = os.environ.get("GSPO_HPC_TEST_PLANTED_RANK", "1").split(",")
if rank in ranks and "gspo_hpc.training.worker" in sys.orig_argv:
    in_first = os.environ.get("GSPO_HPC_ATTEMPT") == "1"
    names = [name for name in os.environ["GSPO_HPC_TEST_PLANTED"].split(",") if in_first or name in ORDERS]
    sys.meta_path.insert(0, Finder(names))  # type: ignore[arg-type]
