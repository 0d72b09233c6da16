"""Float32, the precision of comparisons: an update within its memory, and syncs whose probe is strict."""

from __future__ import annotations

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.policy.process_groups import drop_layout
from gspo_hpc.training import update
from gspo_hpc.training.telemetry.accelerator import Accelerator

from .. import measure, models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import completions, config, make_policy, planned
from . import sync

SYNCS = 2
OVER_PLAN = 0.15


def run(env: Environment, record: Recorder) -> None:
    """Make an update, whose peak shows whether attention keeps whole scores, and a few syncs."""
    _update(env, record)
    drop_layout()
    sync.turns(env, record, models.dense(env), "float32", SYNCS)


def _update(env: Environment, record: Recorder) -> None:
    model = models.dense(env)
    quarter = {"micro_batch_tokens": env.sizes.micro_batch // 4}
    settings = config(env, model, "float32", batch=quarter)
    policy = make_policy(model, settings)
    device = Accelerator(policy.ranks.device)
    groups = completions(env, policy, env.sizes.groups)
    update.step(policy, groups, algorithms.resolve(settings.algorithm), settings)
    device.reset_peak()
    result = update.step(policy, groups, algorithms.resolve(settings.algorithm), settings)
    measure.synchronize(env)
    assert result is not None
    good = result.grad_norm > 0.0 and not result.skipped
    record.check("update in float32: norm of the gradient", f"{result.grad_norm:.4g}", "finite and not 0", good)
    phases = planned(env, settings)
    own = {part: size for part, size in phases["update"].items() if part not in ("cuda_and_nccl", "engine_asleep")}
    own |= {part: phases["save"][part] for part in ("weights", "gradients", "optimizer")}
    ratio = device.peak_memory() / sum(own.values())
    figure = f"{device.peak_memory() / 2**30:.2f} GiB, {ratio:.3f} of the plan"
    bound = f"at most {1 + OVER_PLAN:g} of the plan"
    record.check("update in float32: memory at the peak", figure, bound, ratio <= 1 + OVER_PLAN, gpu_only=True)
    device.close()
