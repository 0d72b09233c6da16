"""The parts, in the order in which they are run: first what is cheap and what most others depend on."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

TRAINER = ("torch", "numpy", "megatron.core", "transformers", "safetensors", "pydantic", "yaml")
ENGINE = ("torch", "numpy", "vllm", "transformers", "safetensors", "psutil")
RUN = tuple(dict.fromkeys((*TRAINER, *ENGINE, "pebble", "rich", "jinja2")))


@dataclass(frozen=True)
class Part:
    """A part of the schedule: a module with a function ``run(environment, record)``, run in a process of its own."""

    name: str
    title: str
    seconds: int  # time limit on a GPU
    packages: tuple[str, ...]
    gpus: int = 1
    module: str = ""  # default: the one of that name in tools.acceptance.parts

    @property
    def import_path(self) -> str:
        """The module's full name."""
        return self.module or f"tools.acceptance.parts.{self.name}"


PARTS = (
    Part("kernels", "Attention, log-probs and gathered gradients alone, against float64", 240, ("torch", "numpy")),
    Part("parity", "Log-probs and gradients of small models against the CPU; offloaded and back", 300, TRAINER),
    Part("ratios", "Ratios of unchanged weights between passes that are packed differently", 180, TRAINER),
    Part("update", "Update of a random model: speed, memory against the plan, trace", 240, TRAINER),
    Part("ipc", "Weights into a bare child process", 180, ("torch", "numpy")),
    Part(
        "server",
        "Weights from a process that trains to one that generates, kept and sent again",
        180,
        ("torch", "numpy"),
    ),
    Part("engine", "vLLM in eager mode: start, generate, sleep and wake in stages", 360, ENGINE),
    Part("speed", "The engine against bare vLLM, with CUDA graphs, with seeds and without", 480, ENGINE),
    Part("sync", "Weight syncs, and flat memory", 300, RUN),
    Part("train", "gspo-hpc train, with checkpoints", 480, RUN),
    Part("faults", "SIGTERM in generation and resume", 480, RUN),
    Part("revival", "An engine that is killed in generation", 480, RUN),
    Part("memory", "Memory that runs out, at the engine's start and in a run", 360, RUN),
    Part("float32", "Updates and syncs in float32", 240, RUN),
    Part("adapters", "Adapters that engines keep beside their weights", 300, RUN),
    Part("saves", "How long a save keeps the loop waiting", 180, TRAINER),
    Part("deterministic", "Runs with run.deterministic, left alone and resumed, bit for bit", 360, RUN),
    Part("mixture", "A mixture of experts, with router replay", 300, RUN),
    Part("layouts", "TP 2, DP 2, CP 2 and PP 2 against one rank", 420, (*RUN, "tokenizers"), gpus=2),
    Part("pair", "Runs of two ranks, an engine of two GPUs, a rank that fails", 420, RUN, gpus=2),
)


def missing(packages: Sequence[str]) -> list[str]:
    """Return the packages that this interpreter cannot find."""
    return [name for name in packages if not _found(name)]


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that a sub-package belongs to
        return False
