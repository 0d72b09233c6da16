"""Weights from the trainer to the engines, and the proof that they arrived.

Floor 4. After every sync the engines and the trainer compute the log-probs of one small probe; if they differ by more
than the configured gap, the run stops: training on rollouts of other weights than one believes is worse than stopping.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gspo_hpc.batch import build
from gspo_hpc.config import Config
from gspo_hpc.engine import Engine, EngineDied
from gspo_hpc.packing import Sample
from gspo_hpc.passes import offload_trainer
from gspo_hpc.pipeline import response_logprobs
from gspo_hpc.policy import Policy
from gspo_hpc.process_groups import broadcast_bytes
from gspo_hpc.records import Completion, Group, Prompt


class ProbeMismatch(RuntimeError):
    """Engine and trainer disagree on the log-probs of the probe."""


@dataclass(frozen=True)
class Synced:
    """What a sync left behind. Gaps are in nats, over all engines that took part and live."""

    fingerprint: str  # of the weights, bit for bit
    gap_max: float
    gap_mean: float


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Each tensor with the running fingerprint of all tensors up to it."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        digest.update(int(torch.hash_tensor(tensor).item()).to_bytes(8, "little", signed=False))
        yield name, tensor, digest.hexdigest()[:16]


def synchronize(
    policy: Policy, engine: Engine | None, probe: Sequence[Sequence[int]]
) -> tuple[Synced, EngineDied | None]:
    """Wake `engine`, fill it with the current weights and check it on the probe; with None, only take part. Collective.

    Where the trainer is offloaded, it is when this is over: the engines have the memory.

    An engine that dies on the way is returned as its death, to be revived and filled again; nobody else is kept from
    going on. Raises ProbeMismatch, on every rank.
    """
    death: EngineDied | None = None
    if engine is not None:
        try:
            engine.wake_up(["weights"])
        except EngineDied as error:
            death = error
    fingerprint, death = _push(policy, engine if death is None else None, death)
    gap_max, gap_mean, death = _check(policy, engine if death is None else None, probe, death)
    return Synced(fingerprint, gap_max, gap_mean), death


def _push(policy: Policy, engine: Engine | None, death: EngineDied | None) -> tuple[str, EngineDied | None]:
    """Stream the current weights into `engine` (or only take part, where it is None): the fingerprint."""
    last = ""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor, so_far in fingerprint(policy.stream()):
            last = so_far
            yield name, tensor

    if engine is None:
        for _ in tensors():
            pass
    else:
        with _single_threaded(policy.ranks.device):
            try:
                engine.update_weights(tensors())  # takes the stream to its end even where it fails
            except EngineDied as error:
                death = error
    return broadcast_bytes(last.encode(), policy.ranks.device).decode(), death


@contextlib.contextmanager
def _single_threaded(device: torch.device) -> Iterator[None]:
    """On the CPU, copy with one thread: the engine, which unpacks at the same time, needs the other cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def probe_sequences(prompts: Sequence[Prompt], budget: int) -> list[list[int]]:
    """Up to four token sequences of the training prompts, together at most `budget` tokens, at least 2 each."""
    chosen = prompts[: max(1, min(4, budget // 2, len(prompts)))]
    each = max(2, budget // len(chosen))
    return [prompt.tokens[-each:].tolist() for prompt in chosen if len(prompt.tokens) >= 2]


def trainer_logprobs(policy: Policy, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-prob of every token but the first of each sequence, [len - 1] each, under the trainer's weights."""
    groups = {}
    samples = []
    for slot, tokens in enumerate(sequences):
        rest = np.asarray(tokens[1:], dtype=np.int32)
        completion = Completion(rest, np.zeros(len(rest), np.float32), "", "stop", 0)
        prompt = Prompt(slot, np.asarray(tokens[:1], dtype=np.int32), "", {})
        groups[slot] = Group(slot, prompt, (completion,))
        samples.append(Sample(slot, 0, 1, len(rest)))
    batch = build(groups, samples, share_prompts=False).to(policy.ranks.device)
    logprobs = response_logprobs(policy, [batch], temperature=1.0)[0].cpu().numpy()
    ends = np.cumsum([sample.response_len for sample in samples])
    return np.split(logprobs, ends[:-1])


def _check(
    policy: Policy, engine: Engine | None, sequences: Sequence[Sequence[int]], death: EngineDied | None
) -> tuple[float, float, EngineDied | None]:
    """Largest and mean |difference| of the probe's log-probs over all engines."""
    ours = trainer_logprobs(policy, sequences)
    if offload_trainer(policy.config):
        policy.lend()
    theirs: list[np.ndarray] = []
    if engine is not None:
        try:
            engine.wake_up()  # the rest, for which there is room now
            theirs = engine.prompt_logprobs([list(tokens) for tokens in sequences])
        except EngineDied as error:
            death = error
    gap_max = gap_mean = 0.0
    if theirs:
        gaps = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
        gap_max, gap_mean = float(gaps.max()), float(gaps.mean())
        if not np.isfinite(gaps).all():
            gap_max = gap_mean = float("inf")
    if policy.ranks.world_size > 1:
        pair = torch.tensor([gap_max, gap_mean], dtype=torch.float64, device=policy.ranks.device)
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        gap_max, gap_mean = pair.tolist()
    limit_max, limit_mean = probe_limits(policy.config)
    if gap_max > limit_max or gap_mean > limit_mean:
        raise ProbeMismatch(
            f"after the weight sync, engine and trainer disagree on the probe: max |log-prob difference| {gap_max:.2e} "
            f"(allowed {limit_max:g}), mean {gap_mean:.2e} (allowed {limit_mean:g}). The engine does not have the "
            "trainer's weights, or computes in another precision (rollout.dtype, rollout.probe_max_gap)"
        )
    return gap_max, gap_mean, death


def probe_limits(config: Config) -> tuple[float, float]:
    """Allowed (max, mean) gap: as configured, else by precision."""
    full = (config.rollout.dtype or config.model.dtype) == "float32" and config.model.dtype == "float32"
    limit_max = config.rollout.probe_max_gap
    limit_mean = config.rollout.probe_mean_gap
    return (
        limit_max if limit_max is not None else (1e-3 if full else 0.5),
        limit_mean if limit_mean is not None else (1e-4 if full else 0.05),
    )
