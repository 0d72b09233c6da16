"""Settings of an engine, and what follows from them for vLLM: its arguments and its processes' environment."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gspo_hpc.config.constants import LORA_RANKS, TRANSFER_BUCKET_BYTES
from gspo_hpc.config.engine_arguments import OWN_ENGINE_ARGUMENTS
from gspo_hpc.engine import compat
from gspo_hpc.engine.adapters import loader
from gspo_hpc.engine.processes import START_SECONDS
from gspo_hpc.engine.worker import EXTENSION
from gspo_hpc.system.environment import brief_spinning, offline
from gspo_hpc.system.text import GIB

_GROUP_PROMPTS = {
    "kv_connector": "GroupPrompts",
    "kv_connector_module_path": "gspo_hpc.engine.group_prompts",
    "kv_role": "kv_both",
}
_COMMON = {
    "VLLM_ENGINE_READY_TIMEOUT_S": f"{START_SECONDS:.0f}",  # vLLM's own limit for its processes
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    **offline(),
    "VLLM_HOST_IP": "127.0.0.1",  # an engine does not reach beyond its node
    "SPT_NOENV": "1",  # else setproctitle overwrites the environment that /proc shows, and our mark in it
}
_CPU = {
    # vLLM's core runs in the process that we start: one import of vLLM less, and a second process would only take turns
    # with it at the same cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM takes one core for itself, and all engines take the same
    **brief_spinning(),
    # Splits long contexts over threads in a way that depends on what else is in the batch: with it, the same seed
    # does not give the same log-probs to the last bit.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
}

# The trainer adds logits up in fp32. Rounded to 16 bits, a log-prob is off by up to 0.06 where |logit| is 16.
HEAD_DTYPE = "float32"

# Hidden size from which an engine on a CPU has more than one thread. Operations of a smaller model take microseconds,
# of which a second thread saves little on idle cores; where anything else wants a core, every operation waits for it.
_WIDE = 256


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a completion. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: no limit
    max_tokens: int = 256


@dataclass(frozen=True)
class EngineAdapters:
    """Adapters that an engine keeps apart from its weights, and gets in versions."""

    rank: int
    alpha: float
    shapes: Mapping[str, tuple[int, ...]]  # of all matrices, by the name of their layer with lora_A or lora_B

    def targets(self) -> list[str]:
        """Return the last parts of the names of layers that have adapters."""
        return sorted({name.split(".")[-2] for name in self.shapes})


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine. `engine_args` go to vllm.LLM as they are."""

    model_path: str
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    first_gpu: int = 0  # how many GPUs behind that of the process that owns it its own begin
    max_model_len: int = 2048
    platform: Literal["cpu", "cuda"] = "cpu"
    kv_cache_gb: float = 1.0  # CPU only
    threads: int | None = None  # CPU only, of each worker; default: CPUs that this process may use / workers
    seed: int = 0
    timeout: float = 300.0  # seconds without a token, or for a bucket of weights, before the engine counts as hung
    bucket_bytes: int = TRANSFER_BUCKET_BYTES["cpu"]  # weights that travel at once
    log_path: Path | None = None  # output of the engine's processes; default: this process's own
    # Log-probs of sampled tokens: under the distribution that they were sampled from, at its temperature and with what
    # top_p and top_k leave of it; or under the model's whole distribution at temperature 1.
    whole_distribution: bool = False
    starts_asleep: bool = False  # at level 2: without weights, and without a cache
    loads_weights: bool = True  # else it starts with noise, and computes nothing before its owner has sent all weights
    dequantized: bool = False  # weights are quantized in the folder, and sent in `dtype`: the engine computes in that
    batch_invariant: bool = False  # completions do not depend on what else is in the batch; GPUs only
    adapters: EngineAdapters | None = None  # it computes nothing before its owner has sent these as well
    classifies: bool = False  # a model of sequences, which gives a number for each and generates nothing
    report_experts: bool = False  # have vLLM report every token's experts, for the trainer to replay; GPUs only
    engine_args: dict[str, Any] = field(default_factory=dict)


def threads_of(model: Mapping[str, Any], workers: int) -> int:
    """Return the threads of each of so many workers on the CPUs of a node; `model` is its config.json."""
    cores = len(os.sched_getaffinity(0)) if model.get("hidden_size", _WIDE) >= _WIDE else 1
    return max(1, cores // workers)


@functools.cache
def has_plugin() -> bool:
    """Return whether vLLM finds this package's plugin. Reading what all installed packages offer takes 20 ms."""
    return any(e.name == "gspo_hpc" for e in importlib.metadata.entry_points(group="vllm.general_plugins"))


def refuse_own_arguments(settings: EngineSettings) -> None:
    """Raise ValueError if `engine_args` holds a key that other settings decide."""
    for key in settings.engine_args:
        if key in OWN_ENGINE_ARGUMENTS:
            raise ValueError(f"rollout.engine.{key} cannot be given: it follows from {OWN_ENGINE_ARGUMENTS[key]}")


def has_exact_head(settings: EngineSettings) -> bool:
    """Return True if an engine is to compute logits in fp32; False where the user has taken that back."""
    overrides = settings.engine_args.get("hf_overrides", {})
    wanted = overrides.get("head_dtype", HEAD_DTYPE) if isinstance(overrides, dict) else None
    return settings.dtype == HEAD_DTYPE or wanted == HEAD_DTYPE


def arguments(settings: EngineSettings, backend: str) -> dict[str, Any]:
    """Return the arguments of vllm.LLM; `backend` names the weight-transfer backend."""
    values: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "enable_prefix_caching": True,  # the samples of a group share their prompt
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if settings.classifies:
        values |= {"runner": "pooling", "convert": "classify"}
    else:
        values |= {
            "logprobs_mode": "raw_logprobs" if settings.whole_distribution else "processed_logprobs",
            "weight_transfer_config": {"backend": backend},
            "worker_extension_cls": EXTENSION,
        }
    if settings.platform == "cpu":
        values |= {
            "enforce_eager": True,  # compiling takes a minute and longer
            "kv_cache_memory_bytes": int(settings.kv_cache_gb * GIB),
            "block_size": 32,  # the least that is fast
            # Where a prompt is computed in parts, vLLM takes back what each part drew of the request's random numbers,
            # which those of a CPU cannot (0.32): the engine dies. A prompt, or what is continued, waits for its turn.
            "enable_chunked_prefill": False,
        }
        if not settings.classifies:
            values["kv_transfer_config"] = _GROUP_PROMPTS
        if settings.tensor_parallel_size == 1:
            values["distributed_executor_backend"] = compat.IN_PROCESS_EXECUTOR
    else:
        values["enable_sleep_mode"] = True
    if not settings.loads_weights:
        values["load_format"] = "dummy"
    if settings.adapters is not None:
        values |= {
            "enable_lora": True,
            "max_loras": loader.PLACES,
            "max_cpu_loras": loader.PLACES + 1,  # the version before goes once the new one is there
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= settings.adapters.rank),
            "lora_target_modules": settings.adapters.targets(),  # else there are places for the head's, too
        }
    if settings.report_experts:
        values["enable_return_routed_experts"] = True
    given = dict(settings.engine_args)
    own: dict[str, Any] = {"quantization_config": None} if settings.dequantized else {}
    if settings.dtype != "float32" and not settings.classifies:  # a head that classifies is in fp32 in any case
        own["head_dtype"] = HEAD_DTYPE
    overrides = given.get("hf_overrides", {})
    if own and isinstance(overrides, dict):
        given["hf_overrides"] = own | overrides
    return values | given


def environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment variables of the engine's processes.

    Raises ValueError where this process sees fewer GPUs than the engine needs.
    """
    values = dict(_COMMON)
    if settings.platform == "cpu":
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)
        values |= _CPU | {"OMP_NUM_THREADS": str(threads)}
        values |= _preloaded()
        if settings.engine_args.get("enforce_eager", True):
            values["TORCHDYNAMO_DISABLE"] = "1"  # else vLLM compiles a function that counts ranks, with a C++ compiler
    else:  # this process's GPU and the ones after it, or GPUs behind these
        visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
        first = torch.cuda.current_device() + settings.first_gpu
        mine = range(first, first + settings.tensor_parallel_size)
        if visible and mine[-1] >= len(visible):
            raise ValueError(
                f"rollout.tensor_parallel_size {settings.tensor_parallel_size} needs GPUs {first} to {mine[-1]}, but "
                f"this process sees {len(visible)}: every task on a node must see all GPUs of the node"
            )
        values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # reads results while the core computes the next ones
        # FlashInfer never samples completions with seeds, as all of ours have; runner V2 imports it all the same.
        values["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if settings.batch_invariant:
            values["VLLM_BATCH_INVARIANT"] = "1"
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible[device] if visible else str(device) for device in mine)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "gspo_hpc" not in plugins.split(","):
        values["VLLM_PLUGINS"] = f"{plugins},gspo_hpc"
    return values


def _preloaded() -> dict[str, str]:
    """Return the libraries that vLLM loads before all others into the processes of its CPU build.

    It does so for the processes that it starts (0.32), and here its core runs in the one that we start. torch's OpenMP
    must be the only one, or threads that are bound share one core; vLLM's wheels may bring an allocator.
    """
    before = os.environ.get("LD_PRELOAD", "")
    site = Path(torch.__file__).parents[1]
    found = []
    for name, folder, patterns in (
        ("libtcmalloc", site / "vllm" / "libs", ("libtcmalloc_minimal*.so*", "libtcmalloc.so*")),
        ("libgomp", site, ("torch.libs/libgomp*.so*", "torch/lib/libgomp*.so*")),
    ):
        files = [str(file) for pattern in patterns for file in sorted(folder.glob(pattern))]
        # A path with a blank or a colon would be taken for two.
        if files and name not in before and not re.search(r"[\s:]", files[0]):
            found.append(files[0])
    return {"LD_PRELOAD": ":".join([*found, *filter(None, [before])])} if found else {}
