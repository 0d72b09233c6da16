"""Features that this version can plan, but not run: a function for each.

A function looks at a plan and yields a reason if the config uses the feature: what is not run, and what to set instead.
That is all a feature takes. `plan` shows the reason and exits with 2, its JSON has it under `not_run`, `train`,
`submit` and `doctor` refuse the run with the same line, and no fix leads to such a config. Once the feature is run,
delete its function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gspo_hpc.config.derived import engine_over_nodes
from gspo_hpc.models.architecture import is_block_fp8
from gspo_hpc.planning.builder import NotRun, PlanBuilder

Reasons = Callable[[PlanBuilder], Iterator[str]]

_features: dict[str, Reasons] = {}


def planned_only(name: str) -> Callable[[Reasons], Reasons]:
    """Register the decorated function as the feature of that name."""

    def register(reasons: Reasons) -> Reasons:
        assert name not in _features, f"two features have the name {name}"
        _features[name] = reasons
        return reasons

    return register


def found(plan: PlanBuilder) -> Iterator[NotRun]:
    """Yield what a plan uses and this version does not run."""
    for name, reasons in _features.items():
        yield from (NotRun(name, reason) for reason in reasons(plan))


@planned_only("engine_over_nodes")
def _engine_over_nodes(plan: PlanBuilder) -> Iterator[str]:
    size, gpus = plan.config.rollout.tensor_parallel_size, plan.config.gpus_per_engine_node
    if engine_over_nodes(plan.config):
        yield (
            f"rollout.tensor_parallel_size ({size}) above gpus_per_node ({gpus}) can be planned, but this version runs "
            f"no engine over nodes: give rollout.tensor_parallel_size={gpus}"
        )


@planned_only("model_family")
def _family(plan: PlanBuilder) -> Iterator[str]:
    model = plan.config.model
    if model.path is not None and (reason := plan.models.untrained(model.path, model.provider)) is not None:
        yield f"model.path {model.path} can be planned, but this version does not train it: {reason}"


@planned_only("load_format_of_fp8")
def _load_format(plan: PlanBuilder) -> Iterator[str]:
    load_format = plan.config.rollout.engine.get("load_format", "dummy")
    if load_format != "dummy" and is_block_fp8(plan.model_file.content or {}):
        yield (
            f"rollout.engine.load_format {load_format} would read FP8 weights into an engine that computes in "
            "model.dtype, as the trainer does: leave it out, since the first weight sync brings all weights"
        )


@planned_only("gpu_before_turing")
def _before_turing(plan: PlanBuilder) -> Iterator[str]:
    if plan.config.cluster.gpu is None:
        return
    from gspo_hpc.planning.estimates import devices  # only here: most plans name newer GPUs, or none

    found = devices.before_ampere(plan.config.cluster)
    if found is not None and found[1] < (7, 5):
        name, (major, minor) = found
        yield (
            f"cluster.gpu {name} can be planned, but nothing runs on it: it has compute capability {major}.{minor}, "
            "and vLLM from 0.21 on and torch from 2.11 on have kernels for 7.5 (T4) and newer ones"
        )
