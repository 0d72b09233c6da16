"""The grade of exactness of a run: how far a run resumed after a kill equals one without it.

docs/exactness.md describes the three grades and what they rest on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gspo_hpc.config.derived import engine_dtype, trains_adapters
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import devices

Grade = Literal["bitwise", "journal-exact", "checkpoint-exact"]

MEANING: dict[Grade, str] = {
    "bitwise": "resumed after any kill, the run equals the undisturbed one bit for bit, on any nodes of the same kind",
    "journal-exact": "after a kill, finished groups are trained on as they are and give the same weights bit for bit; "
    "groups that were unfinished are sampled again and come out differently",
    "checkpoint-exact": "a resumed run begins with exactly the state of its newest checkpoint; its next rollout keeps "
    "the groups that were finished, and all that follows is rounded differently",
}
_COST = (
    "run.deterministic=true is slower: vLLM runs its batch-invariant kernels (VLLM_BATCH_INVARIANT), gradients are "
    "added without atomic operations, and sums over ranks neither use NCCL's rings nor overlap with computation; it "
    "has not been run on GPUs yet (docs/exactness.md)"
)
_BEFORE_HOPPER = re.compile(r"A\d|L[24]|RTX[34A]|RTX\d+Ada")  # names of GPUs of compute capability 8
# Arguments of vLLM with which its kernels are not known to be independent of the batch.
_NOT_INVARIANT = ("quantization", "speculative_config", "enable_dbo", "kv_cache_dtype", "cpu_offload_gb")


TO_RAISE = "to raise the grade"  # in front of the settings, wherever a person reads them


@dataclass(frozen=True)
class Exactness:
    """The grade of a run, why it is not higher, and what raises it."""

    grade: Grade
    reasons: tuple[str, ...]  # empty for the highest grade
    settings: tuple[str, ...]  # key=value
    cost: str  # of these settings, or of what already raised the grade; may be empty

    @property
    def meaning(self) -> str:
        """The sentence that the grade promises."""
        return MEANING[self.grade]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"grade": self.grade, "meaning": self.meaning} | {
            name: value if isinstance(value, str) else list(value)
            for name, value in asdict(self).items()
            if name != "grade"
        }


def assess(config: Config) -> Exactness:
    """Return the grade of a run with this config."""
    engines, trainer = list(_of_engines(config)), list(_of_trainer(config))
    grade: Grade = "checkpoint-exact" if trainer else "journal-exact" if engines else "bitwise"
    found = [*trainer, *engines]
    settings = dict.fromkeys(setting for _, setting in found if setting)
    cuda = config.cluster.platform == "cuda"
    return Exactness(grade, tuple(reason for reason, _ in found), tuple(settings), _COST if cuda else "")


def _of_engines(config: Config) -> Iterator[tuple[str, str]]:
    """Yield why a completion may depend on what else is in the batch, and the setting that changes it."""
    rollout = config.rollout
    if rollout.unfinished != "wait":
        yield (
            f"with rollout.unfinished {rollout.unfinished} the clock decides which groups a rollout trains on",
            "rollout.unfinished=wait",
        )
    if rollout.in_flight_updates:
        yield (
            "with rollout.in_flight_updates the clock decides which weights sample a token",
            "rollout.in_flight_updates=false",
        )
    if config.cluster.platform == "cpu":
        if engine_dtype(config) != "float32":
            yield "engines in 16 bits round differently with what else is in the batch", "rollout.dtype=float32"
        return
    if not config.run.deterministic:
        yield "engines add in an order that depends on what else is in the batch", "run.deterministic=true"
    else:  # what is left then
        if (found := devices.before_ampere(config.cluster)) is not None:
            yield f"vLLM's batch-invariant kernels need GPUs of compute capability 8.0, and {found[0]} is older", ""
        else:
            yield from _of_head(config)
        if trains_adapters(config) and config.adapter.engine == "adapters":
            why = "vLLM up to 0.29 at least adds up what adapters give in an order that depends on the batch"
            yield why, "adapter.engine=merged"
    for name in _NOT_INVARIANT:
        if rollout.engine.get(name) not in (None, False, 0, "auto"):
            yield f"kernels of rollout.engine.{name} are not known to be independent of the batch", ""


def _of_head(config: Config) -> Iterator[tuple[str, str]]:
    """Yield why logits may depend on what else is in the batch: on GPUs before Hopper, in 16 bits with a head in fp32.

    vLLM's batch-invariant mode replaces aten::mm, addmm, matmul and linear there, and not aten::mm.dtype, by which this
    head multiplies (0.22 to 0.33, model_executor/determinism/batch_invariant.py). Later GPUs need no replacement.
    """
    overrides = config.rollout.engine.get("hf_overrides")
    chosen = overrides.get("head_dtype") if isinstance(overrides, dict) else None
    if engine_dtype(config) == "float32" or chosen not in (None, "float32"):
        return
    name = config.cluster.gpu
    if name is not None:
        try:
            name = devices.find(name).name
        except ValueError:  # a rule says so
            return
        if _BEFORE_HOPPER.match(name) is None:
            return
    which = "; cluster.gpu does not say which GPUs these are" if name is None else f", such as {name}"
    yield (
        f"the head of an engine in 16 bits has no batch-invariant kernel on GPUs before Hopper{which}",
        "rollout.engine.hf_overrides.head_dtype=model",
    )


def _of_trainer(config: Config) -> Iterator[tuple[str, str]]:
    """Yield why an update may come out differently when it is repeated, and the setting that changes it."""
    if config.cluster.platform == "cpu":
        return
    if not config.run.deterministic:
        yield "kernels and sums over ranks add in an order that varies from run to run", "run.deterministic=true"
    if config.model.fp8 is not None:
        yield "the scales of 8-bit products are not in a checkpoint", "model.fp8=null"
    if config.model.provider != "own":
        yield f"kernels of model.provider {config.model.provider} are not known to be deterministic", ""
    if config.moe.token_dispatcher == "flex":
        yield "DeepEP's kernels are not known to be deterministic", "moe.token_dispatcher=alltoall"
