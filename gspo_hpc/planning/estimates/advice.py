"""Messages about a memory estimate: what does not fit, what fits only just, and what would fix it.

Advice is possible for the config it is given for: nothing that is set already, no size that the
model's heads or the node forbid, and the number that does it where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gspo_hpc.config.derived import offload_trainer
from gspo_hpc.config.engine_arguments import engine_setting
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.builder import PlanBuilder
from gspo_hpc.planning.estimates import devices, parameters
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.memory import Estimate, cache_bytes_per_token, engine_bytes, node_memory
from gspo_hpc.planning.estimates.phases import FRAGMENTATION, HEADROOM, Phase, percent, shown
from gspo_hpc.system.text import in_gib

MOST = 0.95  # of the card, that an engine is advised to take: some is needed by what it does not count


class Case(NamedTuple):
    """An estimate with the config, model and GPU that it was made for."""

    found: Estimate
    config: Config
    arch: Architecture
    device: Device
    explained: bool = True  # whether somebody reads what would fix it: to look for that takes several estimates

    def describe(self, phase: Phase) -> str:
        """Return what a phase takes of the card, with its largest parts."""
        largest = sorted(phase.reserved_parts.items(), key=lambda item: -item[1])[:3]
        parts = [f"{shown(name)} {in_gib(size)}" for name, size in largest if size]
        card = f"{in_gib(self.found.card)} GiB of {self.device.name}"
        return f"{shown(phase.name)} takes {in_gib(phase.reserved)} GiB of the {card} ({', '.join(parts)})"

    def lighter(self, *headrooms: float) -> str:
        """Return what leaves so much of the card: the first of these shares that can be had. Nothing if not read."""
        if not self.explained:
            return ""
        from gspo_hpc.planning.estimates import lighter  # only here: most plans fit

        return lighter.ways(self.arch, self.config, self.device, headrooms)

    @property
    def generation(self) -> Phase:
        """The phase in which engines generate."""
        return self.found.phase("generation")


def case(plan: PlanBuilder) -> Case | None:
    """Return what was estimated, and for what; None if nothing was."""
    arch, device = plan.architecture, devices.card(plan.config.cluster) if plan.memory is not None else None
    if plan.memory is None or arch is None or device is None:
        return None
    return Case(plan.memory, plan.config, arch, device, plan.explained)


def trainer(case: Case) -> Iterator[str]:
    """Yield that the fullest phase of the trainer does not fit, and what would fix it."""
    peak = case.found.peak
    if peak.total > case.found.card:
        yield f"{case.describe(peak)}: out of memory; {case.lighter(0.0, -FRAGMENTATION)}"


def engine(case: Case) -> Iterator[str]:
    """Yield that an engine does not fit beside what stays on its GPU, and what would fix it."""
    generation = case.generation
    if generation.total > case.found.card:
        yield f"{case.describe(generation)}: {_engines(case)}"


def cache(case: Case) -> Iterator[str]:
    """Yield that an engine that fits has no room for the longest sequence, and what would fix it."""
    found, generation = case.found, case.generation
    longest = case.config.rollout.max_prompt_length + case.config.rollout.max_response_length
    if generation.total <= found.card and found.cache_tokens < longest:
        weights = in_gib(generation.parts["engine_weights"])
        yield (
            f"the KV cache of an engine holds {found.cache_tokens:,} tokens beside {weights} GiB of weights a GPU, "
            f"but the longest sequence has {longest:,}: {_engines(case)}"
        )


def node(case: Case, *, certain: bool) -> Iterator[str]:
    """Yield that a node's own memory is too small: where that is certain, or where it is only likely.

    What processes take is a figure of experience; the rest is certain to be there.
    """
    found, config = case.found, case.config
    room, total = node_memory(config), sum(found.host.values())
    if room is None or total <= room or (parameters.least(found.host) > room) != certain:
        return
    largest = sorted(found.host.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{shown(name)} {in_gib(size)}" for name, size in largest)
    yield (
        f"a node takes {in_gib(total)} GiB of its own memory ({parts}), and slurm.mem={config.slurm.mem} gives "
        f"{in_gib(room)}: {_lighter_host(found)}"
    )


def warnings(case: Case) -> Iterator[str]:
    """Yield warnings of what fits only just."""
    found = case.found
    if found.peak.total <= found.card and found.headroom < HEADROOM:
        least = f"{percent(found.headroom)} are left for peaks, less than {HEADROOM:.0%}"
        if found.headroom < 0:
            least = "its tensors fit, but not the fragmentation beside them, so the run may run out of memory"
        yield f"{case.describe(found.busiest)}: {least}; {case.lighter(HEADROOM)}"
    yield from node(case, certain=False)


def _lighter_host(found: Estimate) -> str:
    """Return what to try first if a node's own memory is too small."""
    options = []
    if found.host.get("engine_weights_asleep"):
        options.append("rollout.sleep_level=2")
    if found.host.get("checkpoint_copy"):
        options.append("checkpoint.async_save=false")
    return " or ".join([*options, "a larger slurm.mem (0: all of the node)"])


def _engines(case: Case) -> str:
    """Return the fewest changes after which an engine has room for its weights and the longest sequence.

    If there are none, a sequence for which there is room.
    """
    from gspo_hpc.planning.estimates import lighter  # only here: most engines fit

    config, arch, device = case.config, case.arch, case.device
    rollout, longest = config.rollout, config.rollout.max_prompt_length + config.rollout.max_response_length
    share, memory, colocated = engine_setting(config, "gpu_memory_utilization"), device.memory, rollout.mode != "server"
    found: list[list[str]] = []
    room, with_it = rollout.max_prompt_length, [""]
    for aside in (False, True) if colocated and not offload_trainer(config) else (False,):
        # What the trainer holds, and a sync beside the cache.
        beside = case.generation.parts["cuda_and_nccl"] if aside else case.found.beside_engine
        most = math.floor(100 * min(MOST, 1 - beside / memory)) / 100
        for changed, larger in lighter.engine_sizes(config, arch):
            needed = engine_bytes(arch, changed, device, longest)
            least = math.ceil(100 * needed / memory) / 100
            texts = [f"{key}={value}" for key, value in larger] + ["memory.offload_trainer=true"] * aside
            shared = f"rollout.engine.gpu_memory_utilization={min(max(share, least), most):g}"
            if needed <= share * memory <= memory - beside:
                found.append(texts)
            elif least <= most:
                found.append([*texts, shared])
            else:
                free = int(most * memory) - engine_bytes(arch, changed, device, 0)
                tokens = free // max(1, cache_bytes_per_token(arch, changed))
                room, with_it = max((room, with_it), (tokens, [*texts, shared]))
    if found:
        fewest = [texts for texts in found if len(texts) == min(map(len, found))]
        return " or ".join(" ".join(texts) for texts in fewest[:3])
    pieces = 2 * config.parallel.context_parallel_size
    if (length := room // pieces * pieces - rollout.max_prompt_length) > 0:
        return " ".join([*with_it, f"rollout.max_response_length={length}"])
    return f"no engine that its node and the model's heads allow has room: take {lighter.LARGER}"
