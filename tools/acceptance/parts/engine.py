"""vLLM in eager mode: start, generate, sleep at both levels, wake in stages; weights come back to where they were."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from gspo_hpc.config.constants import TRANSFER_BUCKET_BYTES
from gspo_hpc.engine.engine import Engine, Sampling
from gspo_hpc.ops.weight_parts import stream_of
from gspo_hpc.planning.estimates.memory import ENGINE
from gspo_hpc.planning.estimates.phases import HEADROOM

from .. import engines, measure, models
from ..environment import Environment
from ..rows import Recorder

GREEDY = 32  # tokens of the completions that are compared, at most
GAP = 1e-3  # nats between log-probs of the same weights in the same engine


def run(env: Environment, record: Recorder) -> None:
    """Take one engine through everything that a run asks of it."""
    model = models.dense(env)
    idle = measure.memory_used(env)  # with this process's own context
    engine = engines.make(env, model, "engine", enforce_eager=True)
    began = time.perf_counter()
    engine.start()
    record.figure("start", f"{time.perf_counter() - began:.1f} s")
    try:
        Passage(env, record, engine, model, idle).run()
    finally:
        engine.close()


class Passage:
    """One engine on its way through sleep and wake-up, compared with itself."""

    def __init__(self, env: Environment, record: Recorder, engine: Engine, model: Path, idle: int) -> None:
        self._env, self._record, self._engine, self._model, self._idle = (
            env,
            record,
            engine,
            model,
            idle,
        )
        self._prompts = engines.requests(env, model, 8)
        # vLLM measures its share of the card as it starts; these tell what takes more than that later on.
        self._memory("started", None)
        self._before = self._tokens()
        self._memory("after completions", None)
        self._logprobs = self._probe()

    def run(self) -> None:
        """Generate twice, sleep at level 1 and wake in two stages, then the same at level 2 with new weights."""
        self._compare("generated again")
        self._memory("awake", self._planned())
        self._timed("sleep at level 1", lambda: self._engine.sleep(1))
        self._memory("asleep at level 1", ENGINE)
        self._timed("wake-up of the weights", lambda: self._engine.wake_up(["weights"]))
        self._memory("with weights alone", None)
        self._timed("wake-up of the rest", self._engine.wake_up)
        self._compare("after level 1")
        self._timed("sleep at level 2", lambda: self._engine.sleep(2))
        self._memory("asleep at level 2", ENGINE)
        self._engine.wake_up(["weights"])
        self._refuses()
        self._timed(
            "weights from a folder", lambda: self._engine.update_weights(stream_of(engines.stored(self._model)))
        )
        self._engine.wake_up()
        self._compare("after level 2 and new weights")

    def _tokens(self) -> list[list[int]]:
        length = min(GREEDY, self._env.sizes.length)
        return engines.generate(self._engine, self._prompts, Sampling(temperature=0.0, max_tokens=length))

    def _probe(self) -> np.ndarray:
        return np.concatenate(self._engine.prompt_logprobs(self._prompts[:4]))

    def _compare(self, when: str) -> None:
        """Compare greedy completions and log-probs with those at the start.

        In 16 bit a near tie may go the other way; log-probs of given tokens cannot.
        """
        gap = float(np.abs(self._probe() - self._logprobs).max())
        self._record.at_most(f"{when}: log-probs of prompts, largest difference", gap, GAP, " nats")
        same = sum(a == b for a, b in zip(self._tokens(), self._before, strict=True))
        self._record.figure(f"{when}: greedy completions that are the same", f"{same} of {len(self._before)}")

    def _refuses(self) -> None:
        try:
            self._engine.prompt_logprobs(self._prompts[:1])
        except RuntimeError:
            refused = True
        else:
            refused = False
        self._record.check("asked to compute without weights", "refused" if refused else "computed", "refused", refused)

    def _timed(self, what: str, work: object) -> None:
        assert callable(work)
        began = time.perf_counter()
        work()
        self._record.figure(what, f"{time.perf_counter() - began:.2f} s")

    def _planned(self) -> int:
        """Return the share of the card that a plan gives an engine, and the headroom that it asks for beside it."""
        card = torch.cuda.mem_get_info()[1] if self._env.cuda else 0
        return int(card * (engines.SHARE + HEADROOM))

    def _memory(self, when: str, limit: int | None) -> None:
        """Record what the engine has of the GPU, at most a limit and the buckets of a weight sync."""
        what = f"{when}: taken of the GPU"
        if not self._env.cuda:
            self._record.no_meaning(what)
            return
        size = (measure.memory_used(self._env) - self._idle) / 2**30
        if limit is None:
            self._record.figure(what, f"{size:.2f} GiB")
        else:
            self._record.at_most(what, size, (limit + 2 * TRANSFER_BUCKET_BYTES["cuda"]) / 2**30, " GiB")
