"""One rank that measures what a step of the trainer allocates, with real tensors: `python measured.py CASES`.

CASES is a list of JSON objects (:class:`Case`); the answer is one of measurements, in the same order. Model, layers,
log-probs, loss, schedule and gradient buffers are the real ones, on the CPU. Products of 16-bit matrices in fp32,
which torch has for GPUs only, are made of copies in fp32 that are not counted, so that what is counted is what a GPU
allocates.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_hpc.algorithms import objective
from gspo_hpc.config import constants
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.models import architecture
from gspo_hpc.ops import logprobs
from gspo_hpc.ops.batch import PackedBatch, build
from gspo_hpc.policy import passes, schedule
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks, start
from tests.storages import Storages
from tests.torch.ledger.card import OnCard, Wide

LEAST = 1024  # bytes: smaller tensors are not counted, such as what has a value for each sample


@dataclass(frozen=True)
class Case:
    """A model, and one micro-batch of it."""

    dtype: str = "bfloat16"
    tied: bool = False
    hidden: int = 256
    vocabulary: int = 1000
    prompt: int = 8
    responses: tuple[int, ...] = (120, 60)
    shared: bool = True
    sequence_parallel: bool = False
    block: int = 1 << 18  # bytes of a block of logits
    block_tokens: int = 64
    adapted: bool = False  # LoRA is trained, beside frozen weights

    @property
    def model(self) -> dict[str, Any]:
        """The content of the model's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.hidden // 4,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "torch_dtype": self.dtype,
        }


def measure(case: Case, ranks: list[Ranks]) -> dict[str, int]:
    """Return what one step has and takes, in bytes.

    `forward` and `backward` are what the two passes of the head take beside what there is when they begin
    (`forward_begins`, `backward_begins`). `after` is what there is when the gradient of the hidden states, of `leaves`
    bytes, goes on into the last layer, and `peak` the most that there is in the passes of the step.
    """
    for name, value in (("LOGITS_BLOCK_BYTES", case.block), ("LOGITS_BLOCK_TOKENS", case.block_tokens)):
        getattr(constants, name).update(cpu=value, cuda=value)
    world = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.model))
        arch = architecture.read(folder)
        parallel = {"tensor_model_parallel_size": world, "sequence_parallel": case.sequence_parallel}
        cluster = {"platform": "cpu", "gpus_per_node": world}
        trained = {"path": folder, "dtype": case.dtype}
        adapter = {"type": "lora"} if case.adapted else {}
        config = from_dict({"cluster": cluster, "parallel": parallel, "model": trained, "adapter": adapter})
        if not ranks:
            ranks.append(start(config))
    policy = Policy(arch, config, ranks[0])
    for parameter in policy.parameters():
        parameter.data.normal_(std=0.02)
    policy.make_optimizer()
    batch = micro_batch(case)
    found: dict[str, int] = {"responses": batch.targets.numel(), "tokens": batch.tokens.numel()}
    function: Any = logprobs._TokenLogprobs
    forward, backward, head, apply = function.forward, function.backward, passes.head, schedule._apply

    with Storages(least=LEAST) as storages:

        def watched(name: str, real: Any) -> Any:
            def call(*arguments: Any) -> Any:
                before, peak = storages.bytes, storages.peak
                storages.peak = before
                result = real(*arguments)
                found[name] = storages.peak - before
                found[f"{name}_begins"] = before
                storages.peak = max(peak, storages.peak)
                return result

            return staticmethod(call)

        def with_hook(policy: Policy, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
            """Note what there is when the gradient goes on into the layers."""

            def note(gradient: torch.Tensor) -> None:
                time.sleep(0.2 * (world > 1))  # for gloo's threads, which let go of what they gathered a little later
                found.update(after=storages.bytes, leaves=gradient.nbytes)

            hidden.register_hook(note)
            return head(policy, hidden, *others, **named)

        def before_step(policy: Policy) -> Any:
            """Note the peak of the passes: the optimizer's step is none of them."""
            found["peak"] = storages.peak
            return apply(policy)

        schedule._apply = before_step
        function.forward, function.backward = watched("forward", forward), watched("backward", backward)
        schedule.head = with_hook
        try:
            schedule.train_step(policy, [batch], objective.resolve(config.algorithm), 1.0, 1.0)
        finally:
            function.forward, function.backward = staticmethod(forward), staticmethod(backward)
            schedule.head, schedule._apply = head, apply
    return found


def micro_batch(case: Case) -> PackedBatch:
    """Return completions of one prompt, in one micro-batch."""
    chance = np.random.default_rng(1)

    def some(count: int) -> Any:
        return chance.integers(0, case.vocabulary, count).astype(np.int32)

    completions = tuple(
        Completion(some(count), np.full(count, -7.0, np.float32), "", "stop", seed, advantage=1.0 - 2.0 * (seed % 2))
        for seed, count in enumerate(case.responses)
    )
    groups = {0: Group(0, Prompt(0, some(case.prompt), "", {}), completions)}
    samples = [Sample(0, number, case.prompt, count) for number, count in enumerate(case.responses)]
    return build(groups, samples, share_prompts=case.shared)


def main() -> None:
    """Measure all cases, and print what was found."""
    logprobs._Blocks, logprobs.torch = OnCard, Wide()  # type: ignore[misc, assignment]
    ranks: list[Ranks] = []  # made once
    cases = (Case(**case | {"responses": tuple(case["responses"])}) for case in json.loads(sys.argv[1]))
    print(json.dumps([measure(case, ranks) for case in cases]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
