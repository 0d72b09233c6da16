"""Weight syncs of which others have published the seconds, beside the estimate: tools/estimates.py prints the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from published_runs import KNOWN_H20, VERL, Run, sections

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.estimates import devices, passes, time

HEADS = "| sync | engines | used as | published s | estimated s |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Sync:
    """One that verl's page has, from trainers to engines on GPUs of their own, on H20.

    Layouts are not published. The trainers' are those of verl's runs of the same model, or of its size.
    """

    model: str
    gpus: int  # that train, and as many that generate
    engine: int  # GPUs of one; not published
    layout: tuple[int, int, int, int]  # of the trainers: TP, CP, EP, PP; not published
    seconds: float  # tensor by tensor
    bucketed: float  # with verl's checkpoint engine

    def estimate(self) -> float:
        """Return the seconds that we count for it."""
        nodes = self.gpus // 8
        found: dict[str, Any] = sections("H20", max(1, 2 * nodes), 8, self.model, self.layout, self.engine, nodes)
        found["rollout"] |= {"mode": "server", "max_staleness": 1}
        if not nodes:  # both on one node
            found["rollout"]["engines_per_node"] = self.gpus // self.engine
        found["batch"] = {"micro_batch_tokens": 8192, "global_batch_size": 512, "num_generations": 16}
        config = from_dict(found)
        return passes.sync(time.sizes_of(config), config, devices.find("H20"))


SYNCS = (
    Sync("Qwen2.5-7B", 4, 4, (4, 1, 1, 1), 0.12, 0.02),
    Sync("Qwen3-30B-A3B", 16, 4, (2, 1, 8, 1), 15.76, 4.38),
    Sync("Qwen3-235B-A22B", 64, 8, (4, 1, 8, 4), 58.57, 23.70),
)


def _colocated() -> Iterator[tuple[str, str, str, list[Run]]]:
    """Return kinds of rows of the benchmark: system, engines, use, and the rows."""
    for system in ("verl", "UniRL"):
        for tp in (2, 1):
            for calibrates in (True, False):
                runs = [
                    run
                    for run in KNOWN_H20
                    if f", {system}, " in run.title
                    and run.config["rollout"]["tensor_parallel_size"] == tp
                    and run.calibration == calibrates
                ]
                if runs:
                    count = "" if calibrates else f", {len(runs)} rows"
                    yield f"{system}{count}", f"TP {tp}", "calibration" if calibrates else "held out", runs


def table() -> str:
    """Return the rows of the table."""
    lines = []
    for name, engines, used, runs in _colocated():
        told, ours = [run.phases["sync"] for run in runs], [run.estimate().seconds["sync"] for run in runs]
        lines.append(
            f"| Qwen3-4B-Base, 16 H20, {name} | the same GPUs, {engines} | {used} | {_span(told)} | {_span(ours)} |"
        )
    for sync in SYNCS:
        told = [sync.bucketed, sync.seconds]
        name = f"[{sync.model}, {sync.gpus} + {sync.gpus} H20, verl]({VERL})"
        lines.append(f"| {name} | GPUs of their own | held out | {told[0]:g} or {told[1]:g} | {sync.estimate():.1f} |")
    return "\n".join(lines)


def _span(seconds: list[float]) -> str:
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return low if low == high else f"{low} to {high}"
