"""Texts by which errors of CUDA, NCCL, Megatron-Core, vLLM, Slurm, the kernel and this package are recognized."""

from __future__ import annotations

import re

from gspo_hpc.system.files import DISK_FULL

_IGNORE = re.IGNORECASE
CUDA_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks|larger than the available KV cache"
    r"|less than desired GPU memory utilization|NCCL.*out of memory",
    _IGNORE,
)
ENGINE_MEMORY = re.compile(
    r"cache blocks|KV cache|gpu_memory_utilization|GPU memory utilization|vLLM|EngineCore|gpu_worker|gpu_model_runner"
)
HOST_MEMORY = re.compile(
    r"oom[-_ ]kill|OOM[- ]?[Kk]ill|Out [Oo]f [Mm]emory|OUT_OF_MEMORY|Cannot allocate memory|\bMemoryError|"
    r"out of memory\?|DefaultCPUAllocator|std::bad_alloc|less than requested memory for kv"
)
NCCL = re.compile(r"nccl", _IGNORE)
NCCL_FAULT = re.compile(
    r"nccl\w*error|ncclUnhandled|ncclSystem|ncclRemote|NCCL error|NCCL WARN|collective operation timeout|"
    r"Watchdog caught|NET/IB|NET/Socket",
    _IGNORE,
)
TENSOR_PARALLEL = re.compile(
    r"must be divisible by tensor parallel size|(divisible by|multiple of)\s*`?tensor_model_parallel_size|"
    r"tensor[- _](model[- _])?parallel\w*.{0,60}(mismatch|divisible|not equal|does not (match|divide)|different)|"
    r"size mismatch for .*copying a param|AssertionError: \d+ is not divisible by \d+",
    _IGNORE,
)
VERSIONS = re.compile(
    r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|libcuda\.so|libcudart|"
    r"libnccl\.so|NVML.*(mismatch|version)|Driver/library version mismatch|undefined symbol|"
    r"no kernel image is available|unsupported display driver|forward compatibility was attempted|"
    r"PTX was compiled with an unsupported toolchain|NCCL version mismatch|requires torch|"
    r"(ImportError|ModuleNotFoundError|AttributeError).*(torch|megatron|vllm|transformer_engine|flash_attn)|"
    r"version .* (is|are) not (supported|compatible)",
    _IGNORE,
)
MIG = re.compile(r"\bMIG\b|MIG-[0-9a-f]{8}-", _IGNORE)
DUPLICATE_GPU = re.compile(r"Duplicate GPU detected", _IGNORE)
DEVICE_COUNT = re.compile(r"invalid device ordinal|device >= 0 && device < num_gpus", _IGNORE)
MIG_DEVICES = re.compile(f"{MIG.pattern}|{DUPLICATE_GPU.pattern}|{DEVICE_COUNT.pattern}", _IGNORE)
DISK = re.compile(f"{DISK_FULL}|No space left on device|Disk quota exceeded", _IGNORE)
HANGS = re.compile(r"(rank \d+ on \S+) (hangs in '(\w+)' for \d+ s|has not been heard of for \d+ s)")
NOT_UP = re.compile(r"not up within")
KILLED = re.compile(r"was killed|SIGKILL|exit code -9")
KILLED_SUPERVISOR = re.compile(r"signal \d+ ended the supervisor on (\S+):")
CRASHED = re.compile(r"SIG(SEGV|BUS|ILL|FPE|ABRT)\b|Segmentation fault|Bus error|Illegal instruction|\(Aborted")
LOST_NODE = re.compile(
    r"no answer from (\S.*?): the job goes back|rank \d+ on (\S+) has gone and its step has not|Node failure on (\S+)"
)
NODE_SILENT = re.compile("no answer from ")
MISMATCH = re.compile(
    "ProbeMismatch|GapMismatch|stale prefix cache: |engine and trainer disagree on the probe|"
    "engine and trainer disagree on the tokens"
)
ENGINE_DEATH = re.compile(r"engine died \((.*?)\); restart")
ENGINE_LOST = re.compile(r"EngineLost|died \d+ times \(faults\.max_engine_restarts")
CHANGED = re.compile(r"was started with another config|is not the (?:file|folder) .* was started with")
GIVES_UP = re.compile(r"gives up: ")
UNGRADED = "no completion of the first rollout"  # in the refusal of a run whose reward functions all fail
