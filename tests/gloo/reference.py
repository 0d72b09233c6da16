"""What results are held against: transformers, one sample at a time, and other results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import parameters
from tests.gloo import cases
from tests.gloo.layouts import Arrays


class _Routers(TorchFunctionMode):
    """Within it torch.topk, which transformers' routers call once a layer and nothing else does, gives every token but
    the last of the sequence the experts of `given` [tokens - 1, layers, top_k], and notes what it would have chosen."""

    def __init__(self, given: np.ndarray | None, layers: list[int]) -> None:
        super().__init__()
        self.given, self.layers = given, iter(layers)
        self.own: dict[int, np.ndarray] = {}  # by layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return result
        layer = next(self.layers)
        self.own[layer] = result[1][:-1].numpy()
        if self.given is None:
            return result
        chosen = torch.cat((torch.from_numpy(self.given[:, layer].astype(np.int64)), result[1][-1:]))
        return args[0].gather(1, chosen), chosen


def huggingface_logprobs(folder: Path, given: bool = False) -> Arrays:
    """Log-probs, and logits, of each completion on its own, unpacked, through transformers; with experts also those of
    each token, in order.

    `given`: tokens go to the experts of `cases.given_experts`.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    result = {}
    for group in cases.given_experts(cases.groups(), str(folder)) if given else cases.groups():
        for index, completion in enumerate(group.completions):
            tokens = torch.tensor(np.concatenate([group.prompt.tokens, completion.tokens]), dtype=torch.int64)
            experts = np.concatenate((group.prompt_experts, completion.experts)) if given else None
            with torch.no_grad(), _Routers(experts, layers) if layers else contextlib.nullcontext() as routers:
                logits = model(tokens[None]).logits[0]
            logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[1:, None])[:, 0]
            places = len(group.prompt.tokens) - 1 + completion.sampled
            result[f"{group.slot}-{index}"] = logprobs.numpy()[places]
            result[f"logits/{group.slot}-{index}"] = logits.numpy()[places]
            for layer, own in routers.own.items() if layers else ():
                result[f"experts/{group.slot}-{index}-{layer}"] = np.sort(own, -1)
    return result


def assert_equal_steps(one: Arrays, many: Arrays) -> None:
    """Logits, log-probs, losses, entropies, gradient norms, every weight, and every gradient of the first step: norm of
    the difference over norm of the value."""
    assert one["grad_norm"].min() > 1e-3  # there was something to compare
    assert sum(name.startswith("logits/") for name in one) == 12
    assert one.keys() == many.keys() and any(name.startswith("gradient/") for name in many)
    for name in _compared(many):
        expected = one[name]
        if name in ("skipped", "overflowed"):
            assert not expected.any() and not many[name].any()
            continue
        scale = np.linalg.norm(expected) if name != "loss" else 1.0  # of the losses each sums up to nearly nothing
        assert np.linalg.norm(many[name] - expected) <= 1e-5 * scale, name


def _compared(arrays: Arrays) -> Iterator[str]:
    """All but the counts of tokens: a prompt is computed once for each micro-batch, which layouts fill differently."""
    return (name for name in arrays if not name.startswith("experts/"))


def assert_takes_what_is_planned(held: np.ndarray, arch: Architecture, settings: Config) -> None:
    """held [ranks, 5]: pipeline stage, bytes of weights, gradients and optimizer, and of the copy for a save. Exactly,
    but where a distributed optimizer fills its buffers up to equal parts for all ranks; of the copy, the plan counts
    norms once for each rank that has them."""
    stages = held[:, 0].tolist()
    copied = sum(parameters.copied_by_node(arch, settings, stage) for stage in stages) / len(stages)
    assert 0.96 * copied <= held[:, 4].sum() <= 1.001 * copied
    for stage, *taken, _ in held.tolist():
        planned = parameters.state(arch, settings, stage)
        slack = 0.02 if settings.optimizer.distributed else 0.0
        np.testing.assert_allclose(taken, [planned.weights, planned.gradients, planned.optimizer], rtol=slack)
