"""Weight syncs as a run makes them: trainer and engine take turns at the memory, which stays flat."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from gspo_hpc.config.derived import gap_limits
from gspo_hpc.policy.policy import Policy
from gspo_hpc.system.text import MIB
from gspo_hpc.training.sync import WeightSync
from gspo_hpc.training.telemetry.accelerator import Accelerator

from .. import engines, measure, models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import config, make_policy, planned

WARM_UP = 3  # syncs, after which memory has to stay the same
OFF_PLAN = 0.15
PROBE_TOKENS = 24


def run(env: Environment, record: Recorder) -> None:
    """Sync the dense model again and again, with other weights each time."""
    turns(env, record, models.dense(env), env.sizes.dtype, env.sizes.syncs)


def turns(env: Environment, record: Recorder, model: Path, dtype: str, count: int) -> None:
    """Make `count` syncs into one engine, which sleeps in between while the trainer is on the GPU."""
    # The probe decides in here, not the gate of a run, which would end at the first gap.
    settings = config(
        env,
        model,
        dtype,
        memory={"offload_trainer": True},
        rollout={"probe_max_gap": 1e6, "probe_mean_gap": 1e6},
    )
    limits = gap_limits(config(env, model, dtype))
    policy = make_policy(model, settings)
    device = Accelerator(policy.ranks.device)
    engine = engines.make(env, model, f"sync-{dtype}", dtype=dtype, enforce_eager=True)
    policy.offload()
    engine.start()
    probe = [tokens[:PROBE_TOKENS] for tokens in engines.requests(env, model, 4)]
    weight_sync = WeightSync(policy, probe)
    seconds, sizes, worst, peak = 0.0, [], (0.0, 0.0), 0
    try:
        for number in range(count):
            engine.sleep(2)
            policy.restore()
            _change(policy, number)
            device.reset_peak()
            began = time.perf_counter()
            synced, death = weight_sync.run(engine)
            measure.synchronize(env)
            seconds = time.perf_counter() - began
            assert death is None, death
            gap = synced.gap
            found = (gap.weighted_max, gap.weighted_mean) if limits.weighted else (gap.max, gap.mean)
            worst = max(worst[0], found[0]), max(worst[1], found[1])
            peak = device.peak_memory()
            sizes.append(measure.memory_used(env, engine.pids()))
            print(f"sync {number}: {seconds:.2f} s, {sizes[-1] / MIB:.0f} MiB taken", flush=True)
    finally:
        engine.close()
        device.close()
    what = f"{count} syncs, {dtype}"
    record.at_most(f"{what}: probe, largest difference", worst[0], limits.max, " nats")
    record.at_most(f"{what}: probe, mean difference", worst[1], limits.mean, " nats")
    size = policy.held()["weights"] or sum(p.numel() * p.element_size() for p in policy.parameters())
    figure = f"{seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s with wake-up and probe"
    record.figure(f"{what}: the last one", figure)
    if count > WARM_UP:
        growth = (max(sizes[WARM_UP:]) - sizes[WARM_UP - 1]) / MIB
        record.at_most(f"{what}: growth of memory after sync {WARM_UP}", growth, measure.FLAT / MIB, " MiB")
    parts = planned(env, settings)
    own = sum(parts["sync"][part] for part in ("weights", "buckets"))
    own = max(own, sum(parts["save"][part] for part in ("weights", "gradients", "optimizer")))  # all home as it begins
    figure = f"{peak / 2**30:.2f} GiB, {peak / own:.3f} of the plan"
    good = peak <= (1 + OFF_PLAN) * own
    record.check(f"{what}: the trainer's peak", figure, f"at most {1 + OFF_PLAN:g} of the plan", good, gpu_only=True)


def _change(policy: Policy, number: int) -> None:
    """Scale all weights a little, so that an engine that keeps its old ones is found out."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02 if number % 2 else 1 / 1.02)
