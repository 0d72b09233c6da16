"""The environment that a part runs in: the platform, the folder to work in, and sizes that fit the platform."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rows import Platform


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and work. Lengths are in tokens."""

    model: dict[str, Any]  # arguments of make_random_model for the dense model
    light: dict[str, Any]  # the same for the model of whole runs, whose checkpoints must fit on a small disk
    mixture: dict[str, Any]  # settings of a Qwen3-MoE
    dtype: str
    micro_batch: int
    groups: int  # of eight completions each, in an update
    prompt: int
    length: int  # of a completion
    requests: int  # groups of an engine
    attention: tuple[int, int]  # scale of prompt and completion lengths in the test of attention
    vocabulary: int  # of the test of log-probs
    bucket_bytes: int
    run_length: int  # of a completion in a run: seconds of generation, in which a run is disturbed
    rounds: int = 20  # of weights into a child
    syncs: int = 20
    steps: int = 10  # of a run
    noise: int = 64  # groups of eight completions in the test of ratios
    repeats: int = 3  # timed updates
    extra: dict[str, Any] = field(default_factory=dict)  # sections of every config


CUDA = Sizes(
    # The shape of Llama 3.2 1B with Qwen3's norms: 1.2 billion parameters.
    model={
        "hidden": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "intermediate": 8192,
        "vocab": 128_256,
        "std": 0.03,
        "dtype": "bfloat16",
    },
    light={
        "hidden": 1024,
        "layers": 12,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 64,
        "intermediate": 4096,
        "vocab": 32_000,
        "std": 0.04,
        "dtype": "bfloat16",
    },
    mixture={
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 32_000,
    },
    dtype="bfloat16",
    micro_batch=17_408,  # four groups of eight completions with their prompt, so that micro-batches are nearly full
    groups=8,
    prompt=256,
    length=512,
    requests=64,
    attention=(300, 900),
    vocabulary=32_000,
    bucket_bytes=512 << 20,
    run_length=512,
)
_TINY = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 128, "vocab": 128}
CPU = Sizes(
    model=_TINY,
    light=_TINY,
    mixture={
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
    },
    dtype="float32",
    micro_batch=512,
    groups=2,
    prompt=16,
    length=24,
    requests=4,
    attention=(12, 20),
    vocabulary=500,
    bucket_bytes=1 << 20,
    run_length=256,
    noise=4,
    repeats=1,
    extra={"cluster": {"threads_per_rank": 1}},
)


@dataclass(frozen=True)
class Environment:
    """The environment that a part runs in."""

    platform: Platform
    work: Path  # models and runs, kept from part to part

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.platform == "cuda"

    @property
    def sizes(self) -> Sizes:
        """Sizes for the platform."""
        return CUDA if self.cuda else CPU

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return "cuda" if self.cuda else "cpu"
