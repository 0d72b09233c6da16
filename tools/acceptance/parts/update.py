"""Passes of a random model of some size: operations a second, memory at the peak against the plan, and a trace."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.training import update as updates
from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.profiling import trace_path, traced

from .. import measure, models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import completions, config, make_policy, planned

UTILISATION = 0.25  # least share of the GPU's peak in an update
OFF_PLAN = 0.15
LONGEST = 8  # kernels of the trace that are listed


def run(env: Environment, record: Recorder) -> None:
    """Time an update and a log-prob pass, and trace another update."""
    model = models.dense(env)
    settings = config(env, model)
    policy = make_policy(model, settings)
    device = Accelerator(policy.ranks.device)
    groups = completions(env, policy, env.sizes.groups)
    objective = algorithms.resolve(settings.algorithm)
    monitor = PassMonitor()
    works: dict[str, Callable[[], object]] = {
        # The update comes first: Adam's moments, which the plan counts in both, are made by the first step.
        "update": lambda: updates.step(policy, groups, objective, settings, monitor=monitor),
        "logprobs": lambda: updates.logprob_pass(policy, groups, "old_logprobs", settings, monitor=monitor),
    }
    for phase, work in works.items():
        work()  # once, for what is slow the first time
        monitor.clear()
        device.reset_peak()
        measure.synchronize(env)
        began = time.perf_counter()
        for _ in range(env.sizes.repeats):
            work()
        measure.synchronize(env)
        seconds = (time.perf_counter() - began) / env.sizes.repeats
        flops = sum(counts.flops for counts in monitor.counts.values()) / env.sizes.repeats
        _speed(env, record, phase, flops / seconds, seconds, device)
        _memory(env, record, phase, device.peak_memory(), planned(env, settings))
    _beside(env, record, planned(env, settings)["update"]["cuda_and_nccl"])
    device.close()
    _trace(env, record, works["update"])


def _speed(env: Environment, record: Recorder, phase: str, rate: float, seconds: float, device: Accelerator) -> None:
    tokens = 8 * env.sizes.groups * env.sizes.length
    figure = f"{seconds:.3f} s, {tokens / seconds:,.0f} completion tokens/s, {rate / 1e12:.3g} TFLOP/s"
    record.figure(f"{phase}: speed", figure)
    if not device.peak_flops:
        record.no_meaning(f"{phase}: share of the GPU's peak (MFU)")
        return
    share = rate / device.peak_flops
    bound = f"at least {100 * UTILISATION:g}%" if phase == "update" else ""
    if bound:
        record.check(f"{phase}: share of the GPU's peak (MFU)", f"{100 * share:.1f}%", bound, share >= UTILISATION)
    else:
        record.figure(f"{phase}: share of the GPU's peak (MFU)", f"{100 * share:.1f}%")


def _memory(env: Environment, record: Recorder, phase: str, peak: int, phases: dict[str, dict[str, int]]) -> None:
    """Compare what torch had at the peak with the plan's parts of this process, all of which are on the GPU here."""
    own = {part: size for part, size in phases[phase].items() if part not in ("cuda_and_nccl", "engine_asleep")}
    own |= {part: phases["save"][part] for part in ("weights", "gradients", "optimizer")}
    ratio = peak / sum(own.values())
    told = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in own.items())
    figure = f"{peak / 2**30:.2f} GiB, {ratio:.3f} of the plan ({told})"
    bound = f"the plan +- {100 * OFF_PLAN:g}%"
    record.check(f"{phase}: memory at the peak", figure, bound, abs(ratio - 1.0) <= OFF_PLAN, gpu_only=True)


def _beside(env: Environment, record: Recorder, limit: int) -> None:
    """Compare what the card holds beside torch's allocator, CUDA's context and libraries, with the plan's figure."""
    what = "taken of the GPU beside torch's allocator"
    if not env.cuda:
        record.no_meaning(what)
        return
    size = measure.memory_used(env) - torch.cuda.memory_reserved()
    record.at_most(what, size / 2**30, limit / 2**30, " GiB")


def _trace(env: Environment, record: Recorder, work: Callable[[], object]) -> None:
    path = trace_path(env.work / "traces", 0, 0)
    with traced(path):
        work()
        measure.synchronize(env)
    seconds, kernels = _kernels(path)
    record.check(
        "trace of an update", f"{path.stat().st_size / 1e6:.1f} MB", "a file with kernels", bool(kernels), gpu_only=True
    )
    for name, share in kernels:
        record.figure(f"trace: {name}", f"{100 * share:.1f}% of {seconds:.3f} s in kernels")


def _kernels(path: Path) -> tuple[float, list[tuple[str, float]]]:
    """Return the seconds that kernels took in a trace, and the longest of them with their shares."""
    with gzip.open(path, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    found: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            found[event["name"][:80]] += event["dur"] / 1e6
    total = sum(found.values())
    longest = sorted(found.items(), key=lambda item: -item[1])[:LONGEST]
    return total, [(name, seconds / total) for name, seconds in longest]
