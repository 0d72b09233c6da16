"""Small models, dense and with experts, against the CPU in float32; and their memory, offloaded and back.

``python -m tools.acceptance.parts.parity MODEL OUT`` is the reference: a process of its own, which sees no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer import noise

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.data.records import Experts
from gspo_hpc.exchange.exchange import Key
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.policy.process_groups import drop_layout
from gspo_hpc.system.environment import no_gpus
from gspo_hpc.system.text import MIB
from gspo_hpc.training import update
from gspo_hpc.training.update import with_experts

from .. import REPO, measure, models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import config, make_policy

KINDS = ("llama", "qwen3_moe")
FLOAT32 = 1e-4  # mean difference of log-probs in nats, and difference of the gradient's norm from 1
OVER_CPU = 1.5  # of the CPU's own mean difference between bfloat16 and float32
NORM = 0.03
# Near a tie rounding decides which experts a token goes to, and the log-probs of it and of all tokens after it are far
# off. So the experts that the reference chose are repeated, and the choices are compared apart from the log-probs.
OTHER_EXPERTS = 0.01  # share of the choices of a token and layer, in float32
# Bytes that may stay allocated while everything is offloaded. Transformer Engine keeps workspaces for matrix products
# and for each stream of grouped ones, on an H100 of 32 MiB and a little (get_cublas_workspace in its
# cpp_extensions/gemm.py).
LEFT = {"torch": 64 << 20, "transformer_engine": (64 << 20) + 5 * (33 << 20)}


@dataclass(frozen=True)
class Reference:
    """Results of the CPU in float32, and the mean error of its bfloat16 log-probs."""

    logprobs: np.ndarray
    norm: float  # of the gradient
    gap: float
    experts: dict[Key, Experts]  # that the tokens went to; of a dense model empty


def run(env: Environment, record: Recorder) -> None:
    """Compare every way to compute the small models."""
    for kind in KINDS:
        model = models.small(env, kind)
        reference = _reference(env, model, kind)
        for dtype, layers in _ways(env, record, kind):
            _compare(env, record, kind, dtype, layers, reference)


def _ways(env: Environment, record: Recorder, kind: str) -> list[tuple[str, str]]:
    ways = [("float32", "torch"), ("bfloat16", "torch")]
    if not env.cuda:
        record.no_meaning(f"{kind}, layers of Transformer Engine")
    elif importlib.util.find_spec("transformer_engine") is None:
        record.skip(f"{kind}, layers of Transformer Engine", "not installed: transformer_engine")
    else:
        ways.append(("bfloat16", "transformer_engine"))
    return ways


def _compare(env: Environment, record: Recorder, kind: str, dtype: str, layers: str, reference: Reference) -> None:
    what, full = f"{kind}, {dtype}, layers {layers}", dtype == "float32"
    policy, groups, settings = _policy(env, models.small(env, kind), dtype, layers)
    if reference.experts:
        other = _other_experts(_experts(policy, groups, settings), reference.experts)
        name = f"{what}: choices of experts that differ, share"
        if full:
            record.at_most(name, other, OTHER_EXPERTS)
        else:
            record.figure(name, f"{other:.3g}")
        groups = with_experts(groups, reference.experts)
        what += ", the reference's experts"
    logprobs, norm = _results(policy, groups, settings)
    gaps = np.abs(logprobs - reference.logprobs)
    limit = FLOAT32 if full else OVER_CPU * reference.gap
    record.at_most(f"{what}: log-probs, mean difference", float(gaps.mean()), limit, " nats")
    record.figure(f"{what}: log-probs, largest difference", f"{gaps.max():.3g} nats")
    ratio, limit = norm / reference.norm, FLOAT32 if full else NORM
    record.check(f"{what}: norm of the gradient, ratio", f"{ratio:.5f}", f"1 +- {limit:g}", abs(ratio - 1.0) <= limit)
    _offloaded(env, record, what, policy, groups, settings)
    del policy
    drop_layout()
    if env.cuda:
        torch.cuda.empty_cache()


def _offloaded(env: Environment, record: Recorder, what: str, policy: Any, groups: Any, settings: Any) -> None:
    """Offload everything, bring it back, and compare memory with the plan and log-probs with those before."""
    planned = parameters.state(policy.arch, settings, 0)._asdict()
    for kind, taken in policy.held().items():
        ratio = taken / planned[kind]
        figure = f"{taken / 2**20:.2f} MiB, {ratio:.4f} of the plan"
        record.check(f"{what}: {kind}", figure, "the plan +- 2%", abs(ratio - 1.0) <= 0.02)
    before, logprobs = _fingerprint(policy), _logprobs(policy, groups, settings)
    began = time.perf_counter()
    freed = policy.offload()
    gone = time.perf_counter() - began
    left = f"{what}: still allocated while offloaded"
    if env.cuda:
        record.at_most(left, torch.cuda.memory_allocated() / MIB, LEFT[settings.model.layers] / MIB, " MiB")
    else:
        record.no_meaning(left)
    began = time.perf_counter()
    policy.restore()
    measure.synchronize(env)
    back = time.perf_counter() - began
    same = before == _fingerprint(policy)
    figure = f"{freed / MIB:.2f} MiB in {gone:.3f} s and {back:.3f} s; {'the same bits' if same else 'other bits'}"
    record.check(f"{what}: there and back, weights", figure, "the same bits", same)
    gap = float(np.abs(logprobs - _logprobs(policy, groups, settings)).max())
    record.figure(f"{what}: there and back, log-probs, largest difference", f"{gap:.3g} nats")
    result = update.step(policy, groups, algorithms.resolve(settings.algorithm), settings)
    good = result is not None and not result.skipped
    record.check(f"{what}: there and back, an update", "made" if good else "not made", "made", good)


def _fingerprint(policy: Any) -> list[int]:
    return [int(torch.hash_tensor(parameter.detach()).item()) for parameter in policy.parameters()]


def _policy(env: Environment, model: Path, dtype: str, layers: str) -> tuple[Any, Any, Any]:
    settings = config(
        env,
        model,
        dtype,
        layers,
        batch={"global_batch_size": 32, "num_generations": 8, "micro_batch_tokens": 4096},
        rollout={"max_prompt_length": 64, "max_response_length": 64},
    )
    policy = make_policy(model, settings)
    return policy, noise(policy, 4, 8, 40, 60, 0), settings


def _results(policy: Any, groups: Any, settings: Any) -> tuple[np.ndarray, float]:
    """Return log-probs, and the norm of the gradient of one step."""
    logprobs = _logprobs(policy, groups, settings)
    result = update.step(policy, groups, algorithms.resolve(settings.algorithm), settings)
    assert result is not None
    return logprobs, float(result.grad_norm)


def _experts(policy: Any, groups: Any, settings: Any) -> dict[Key, Experts]:
    """Return the experts that the model chooses by itself."""
    return update.logprob_pass(policy, groups, "old_logprobs", settings, replay=False, record=True).experts


def _other_experts(chosen: dict[Key, Experts], reference: dict[Key, Experts]) -> float:
    """Return the share of the choices [token, layer] in which the sets of experts differ."""
    assert chosen.keys() == reference.keys()
    differs = [(np.sort(chosen[key], -1) != np.sort(reference[key], -1)).any(-1).ravel() for key in reference]
    return float(np.concatenate(differs).mean())


def _logprobs(policy: Any, groups: Any, settings: Any) -> np.ndarray:
    passed = update.logprob_pass(policy, groups, "old_logprobs", settings)
    return np.concatenate(list(passed.logprobs.values()))


def _reference(env: Environment, model: Path, kind: str) -> Reference:
    out = env.work / f"reference-{kind}.npz"
    command = [sys.executable, "-m", "tools.acceptance.parts.parity", str(model), str(out)]
    subprocess.run(command, cwd=REPO, env=os.environ | no_gpus(), check=True)
    found = np.load(out)
    experts = {(int(slot), int(index)): found[f"experts_{slot}_{index}"] for slot, index in found["keys"]}
    return Reference(found["logprobs"], float(found["norm"]), float(found["gap"]), experts)


def main(model: Path, out: Path) -> None:
    """Write what the model gives on the CPU."""
    env = Environment("cpu", out.parent)
    policy, groups, settings = _policy(env, model, "float32", "torch")
    experts = _experts(policy, groups, settings) if policy.arch.experts is not None else {}
    logprobs, norm = _results(policy, with_experts(groups, experts), settings)
    drop_layout()
    policy, groups, settings = _policy(env, model, "bfloat16", "torch")
    rounded = _logprobs(policy, with_experts(groups, experts), settings)
    chosen: dict[str, Any] = {f"experts_{slot}_{index}": found for (slot, index), found in experts.items()}
    np.savez(
        out,
        logprobs=logprobs,
        norm=np.array(norm),
        gap=np.abs(rounded - logprobs).mean(),
        keys=np.array(list(experts), np.int64).reshape(-1, 2),
        **chosen,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
