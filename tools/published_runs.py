"""Published runs of others, each as a config that `gspo-hpc plan` reads, with the seconds of its step.

tools/estimates.py compares them with the estimates and writes the configs into docs/estimates/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, engines, memory, moments, parameters, passes, time
from gspo_hpc.planning.estimates.time import Times
from gspo_hpc.planning.plan import Plan, make_plan
from gspo_hpc.system.text import GIB

NEMO = "https://docs.nvidia.com/nemo/rl/{}/about/performance-summary.html"
VERL = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"
VERL_RECIPE = (
    "https://github.com/volcengine/verl/blob/15a9b0f58a8be2445417493ae7911439c9700cf2/recipe/fully_async_policy/shell/"
    "grpo_30b_a3b_base_math_megatron_96_32.sh"
)
ONE_STEP = "https://verl.readthedocs.io/en/latest/advance/one_step_off.html"
UNIRL = "https://github.com/haonan3/UniRLReport/blob/{}/artifacts/reported_results/2026-09-30-qwen3-4b-drpo/{}"


@dataclass(frozen=True)
class Run:
    """A published one. Seconds of a step as these projects count steps: a rollout with all its updates."""

    key: str  # the name of its file
    title: str
    source: str
    seconds: float
    config: dict[str, Any]
    tokens: float | None  # of a response; None: not published
    calibration: bool = False
    logprobs: float | None = None  # updates for which old log-probs are computed, as a share; None: as we do
    phases: dict[str, float] = field(default_factory=dict)  # seconds, where they are published
    former: bool = False  # whether constants were chosen with it once, so that it is no prediction

    @property
    def is_known_prediction(self) -> bool:
        """True if its lengths are published and it is held out."""
        return self.role == "prediction" and self.tokens is not None

    @property
    def kind(self) -> str:
        """The order of generation and training: in turns, or side by side."""
        return "side by side" if self.config["rollout"].get("max_staleness") else "in turns"

    @property
    def role(self) -> str:
        """The use of the run: calibration, a prediction, or nothing, because it was calibrated on before."""
        return "calibration" if self.calibration else "former calibration" if self.former else "prediction"

    def plan(self) -> Plan:
        """Return the plan of its config."""
        return make_plan(from_dict(self.config))

    @property
    def response_tokens(self) -> float:
        """The length of a response: as published, or else that with which the update takes what is published."""
        return _inferred(self.key) if self.tokens is None else self.tokens

    @property
    def printed(self) -> float:
        """The seconds of a rollout that `gspo-hpc plan --response-tokens` prints: those of a run of gspo_hpc."""
        config, found = _planned(self.key)
        times, _ = time.of_plan(config, found, self.response_tokens)
        assert times is not None, self.key
        return times.rollout

    def file(self) -> str:
        """Return the text of its file: its config, below its source, the command, and what the command prints."""
        role = {
            "calibration": "used for calibration",
            "former calibration": "not used for calibration any more, because its length is fitted to its update",
        }.get(self.role, "held out: no constant was determined by it")
        system = self.estimate().rollout
        other = f"; estimated for their system: {system:.1f} s" if f"{system:.1f}" != f"{self.printed:.1f}" else ""
        head = (
            f"{self.title}: {self.seconds:g} s a step, {self.source}",
            role,
            f"gspo-hpc plan docs/estimates/{self.key}.yaml --response-tokens {self.response_tokens:g}",
            f"prints for a rollout of gspo_hpc: {self.printed:.1f} s{other} (docs/estimates.md)",
        )
        return "".join(f"# {line}\n" for line in head) + "\n" + yaml.safe_dump(self.config, sort_keys=False)

    def estimate(self) -> Times:
        """Return what `gspo-hpc plan --response-tokens` says, with the passes and the full engines of their system."""
        return self.estimate_for(self.response_tokens)

    def estimate_for(self, tokens: float) -> Times:
        """Return the same for responses of another length."""
        return self.estimate_of(*_planned(self.key), tokens)

    def estimate_of(self, config: Config, found: Plan, tokens: float) -> Times:
        """Return the same with another config, of which the plan is given."""
        device, model = devices.find(str(config.cluster.gpu), config.cluster.network_gb_per_s), time.sizes_of(config)
        given = time.work(config, int(found.quantities["generation_batch_size"]), tokens)
        assert found.memory is not None, (self.key, found.broken)
        generation = None
        if self.kind == "side by side":  # their engines take new prompts in the place of sequences that end
            steady = engines.steady(model, config, device, given, found.memory.cache_tokens)
            generation = engines.prefill(model, config, device, given) + steady
        times = time.estimate(model, config, device, given, found.memory.cache_tokens, generation)
        if self.logprobs is not None:
            forward = passes.forward_flops(model, config, given)
            whole = passes.seconds(model, config, device, forward, times.tokens, 1, 1.0)
            times.seconds["old_logprobs"] = self.logprobs * whole
        return times


@cache
def _planned(key: str) -> tuple[Config, Plan]:
    (run,) = (one for one in (*RUNS, *PLANNED_ONLY) if one.key == key)
    return from_dict(run.config), run.plan()


@cache
def _inferred(key: str) -> float:
    (run,) = (one for one in RUNS if one.key == key)
    return inferred(run)


def inferred(run: Run) -> float:
    """Return the length, to ten tokens, with which the update of a run takes what is published, by bisection."""
    low, high = 50.0, float(run.config["rollout"]["max_response_length"])
    while high - low > 1.0:
        middle = (low + high) / 2
        less = run.estimate_for(middle).seconds["update"] < run.phases["update"]
        low, high = (middle, high) if less else (low, middle)
    return round(high, -1)


_HUB = {
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
}  # all other models are Qwen's


def sections(
    gpu: str, nodes: int, node: int, model: str, layout: tuple[int, int, int, int], engine: int, apart: int
) -> dict[str, dict[str, Any]]:
    """Return the sections that all configs have; a layout is TP, CP, EP and PP, and nodes may be apart for engines."""
    tp, cp, ep, pp = layout
    # A run needs a length, data and a reward besides: these are those of the presets, and no estimate depends on them.
    found: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 100},
        "cluster": {"nodes": nodes, "gpus_per_node": node, "gpu": gpu},
        "model": {"path": _HUB.get(model, f"Qwen/{model}")},
        "data": {"train": "data/train.jsonl"},
        "reward": {"functions": [{"function": "number_match"}]},
        "parallel": {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": tp > 1,
        },
        "rollout": {"tensor_parallel_size": engine},
        "optimizer": {"distributed": True},
    }
    if ep > 1:
        found["parallel"] |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    if apart:
        found["cluster"]["generation_nodes"] = apart
        found["rollout"] |= {"mode": "server", "max_staleness": 1}
    return found


def nemo(
    version: str, model: str, gpus: int, seconds: float, layout: tuple[int, int, int, int], engine: int, length: int,
    longest: int, *, apart: int = 0, staleness: int = 1, gpu: str = "H100-80GB", recompute: str | None = "full",
    calibration: bool = False, updates: int = 4, ends: tuple[int, int] | None = None, group: int = 32,
) -> Run:  # fmt: skip
    """Return a run of NeMo-RL: bf16, updates of 512 completions, with a reference policy.

    `ends`: layers of the first and of the last pipeline stage, where its recipe sets them.

    Its tables give layouts, batches and average lengths, prompts included; prompts of OpenMathInstruct-2 have about 120
    tokens. It computes old log-probs for every update. The nodes of GB200 have four GPUs and NVLink between them.
    """
    node = 4 if gpu.startswith("GB") else 8
    config = sections(gpu, gpus // node, node, model, layout, engine, apart)
    if node == 4:
        config["cluster"]["network_gb_per_s"] = 900.0
    config["batch"] = {
        "micro_batch_tokens": longest,
        "global_batch_size": 512,
        "steps_per_generation": updates,
        "num_generations": group,
        "share_prompts": False,
    }
    config["rollout"] |= {
        "max_prompt_length": 240,
        "max_response_length": longest - 240,
        "engine": {"gpu_memory_utilization": 0.8 if apart else 0.6},
    }
    if apart:
        config["rollout"]["max_staleness"] = staleness
    if ends is not None:
        first, last = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
        config["parallel"] |= dict(zip((first, last), ends, strict=True))
    config["algorithm"] = {"kl_beta": 0.01}
    config["memory"] = {"recompute_granularity": recompute}
    split = f", {gpus - apart * node} + {apart * node}" if apart else ""
    off = f", {staleness} off" if apart and staleness > 1 else ""
    title = f"{model}, {gpus} {gpu.split('-')[0]}{split}{off}"
    key = f"nemo_{version}_{model}_{gpus}_{gpu.split('-')[0]}{'_async' * bool(apart)}".lower().replace("-", "_")
    return Run(key.replace(".", "_"), title, NEMO.format(version), seconds, config, length - 120.0, calibration, True)


def _verl(gpus: int, seconds: float, phases: tuple[float, ...], apart: int = 0, former: bool = False) -> Run:
    """Qwen2.5-Math-7B on H20: 512 prompts of 16 completions, mini-batches of 32 prompts, responses up to 28k tokens.

    Its trainer is FSDP2 with sequences divided over 4 ranks; engines have 4 GPUs (its recipes).
    """
    config = sections("H20", gpus // 8, 8, "Qwen2.5-7B", (1, 4, 1, 1), 4, apart)
    config["batch"] = {
        "micro_batch_tokens": 61440,
        "global_batch_size": 512,
        "steps_per_generation": 16,
        "num_generations": 16,
        "share_prompts": False,
    }
    config["rollout"] |= {
        "max_prompt_length": 304,
        "max_response_length": 28672,
        "engine": {"gpu_memory_utilization": 0.8},
    }
    config["memory"] = {"recompute_granularity": "full"}
    names = ("generation", "old_logprobs", "update")
    # Side by side, what their page calls generation is the wait of a trainer.
    told = dict(zip(("waiting", "update") if apart else names, phases, strict=True))
    split = f", {gpus - apart * 8} + {apart * 8}" if apart else ""
    key = f"verl_qwen2_5_math_7b_{gpus}_h20{'_async' * bool(apart)}"
    title = f"Qwen2.5-Math-7B, {gpus} H20{split}"
    return Run(key, title, VERL, seconds, config, None, False, 0.0 if apart else None, told, former)


def _verl_experts(gpus: int, seconds: float, phases: dict[str, float], apart: int = 0) -> Run:
    """Qwen3-30B-A3B-Base on H20 with Megatron: 512 prompts of 16, mini-batches of 128 prompts, up to 8k tokens.

    The script of the run side by side, in verl's repository since 2025-11-11, has engines in eager mode. That of the
    run in turns is not published; the page compares the two as the same settings.
    """
    config = sections("H20", gpus // 8, 8, "Qwen3-30B-A3B-Base", (2, 2, 8, 1), 4, apart)
    config["batch"] = {
        "micro_batch_tokens": 20480,
        "global_batch_size": 2048,
        "steps_per_generation": 4,
        "num_generations": 16,
        "share_prompts": False,
    }
    config["rollout"] |= {
        "max_prompt_length": 300,
        "max_response_length": 8192,
        "engine": {"enforce_eager": True},
    }
    config["algorithm"] = {"kl_beta": 0.001}
    config["memory"] = {"recompute_granularity": "full", "offload_optimizer": True}
    split = f", {gpus - apart * 8} + {apart * 8}" if apart else ""
    key = f"verl_qwen3_30b_a3b_{gpus}_h20{'_async' * bool(apart)}"
    title = f"Qwen3-30B-A3B-Base, {gpus} H20{split}"
    return Run(key, title, VERL, seconds, config, None, False, 0.0 if apart else None, phases)


def _known(
    system: str, part: str, seconds: float, tokens: float, phases: tuple[float, ...], *,
    engine: int = 2, longest: int = 8192, file: str = "", calibration: bool = False,
) -> Run:  # fmt: skip
    """Qwen3-4B-Base on 16 H20 by verl or UniRL: 64 prompts of 8 completions, updates of 16 prompts, lengths published.

    Both shard everything over all ranks with FSDP, leave it on the GPUs while engines generate, take the old log-probs
    from the engines, and have no reference.
    Prompts have about 155 tokens in the two steps of which verl's console is published.
    """
    config = sections("H20", 2, 8, "Qwen3-4B-Base", (1, 1, 1, 1), engine, 0)
    config["batch"] = {
        "micro_batch_tokens": 10240,
        "global_batch_size": 128,
        "steps_per_generation": 4,
        "num_generations": 8,
        "share_prompts": False,
    }
    config["rollout"] |= {
        "max_prompt_length": 310,
        "max_response_length": longest,
        "engine": {"gpu_memory_utilization": 0.4 if system == "verl" else 0.3},
    }
    config["algorithm"] = {"correction": "bypass"}
    config["memory"] = {"recompute_granularity": "full", "offload_trainer": False}
    names = ("generation", "update", "sync", "rewards")
    key = re.sub(r"[^a-z0-9]+", "_", f"{system} qwen3 4b 16 h20 {part}".lower())
    told = dict(zip(names, phases, strict=False))
    title = f"Qwen3-4B-Base, 16 H20, {system}, {part}"
    return Run(
        key,
        title,
        UNIRL.format(_COMMITS[file or _BANDS], file or _BANDS),
        seconds,
        config,
        tokens,
        calibration,
        0.0,
        told,
    )


# Of verl's steps on H20 whose lengths are published one row calibrates, and the others are predictions. Which does what
# was settled before an estimate of any of them was computed.
_BANDS, _SHORT, _FIXED = "natural_long_by_phase.csv", "natural_performance.csv", "performance.csv"
_COMMITS = dict.fromkeys((_BANDS, _SHORT), "7c656350352385e2ebec613d521949ba8b3ff402")
CUT_SHARE = 0.2192  # of the responses of the calibration row that were cut at 8,192 tokens
_COMMITS[_FIXED] = "26c83341b8c5560f83d788d2e171afeefc60250b"
KNOWN_H20 = (
    _known("verl", "steps 101-200", 153.3, 4529.6, (87.79, 62.11, 3.37), calibration=True),
    _known("verl", "steps 2-100", 115.8, 3240.0, (67.83, 44.71, 3.23)),
    _known("verl", "steps 201-300", 148.3, 4402.6, (84.73, 60.14, 3.31)),
    _known("verl", "steps 301-400", 137.2, 4091.8, (78.41, 55.42, 3.31)),
    _known("verl", "steps 401-500", 138.2, 4139.2, (78.90, 55.90, 3.37)),
    _known("verl", "short", 56.62, 1084.1, (35.24, 18.05, 3.25), file=_SHORT),
    _known("verl", "all 4096", 106.3, 4096.0, (48.27, 54.79, 3.18), longest=4096, file=_FIXED),
    _known("UniRL", "steps 2-100", 117.0, 3625.8, (59.68, 51.96, 2.80, 1.63)),
    _known("UniRL", "steps 101-200", 123.4, 3976.1, (62.70, 56.10, 2.85, 0.85)),
    _known("UniRL", "steps 201-300", 132.3, 4499.9, (65.33, 62.43, 2.88, 0.71)),
    _known("UniRL", "steps 301-400", 150.4, 5156.3, (74.08, 71.51, 2.93, 1.01)),
    _known("UniRL", "steps 401-500", 133.1, 4432.8, (65.76, 62.18, 2.91, 1.29)),
    _known("UniRL", "short", 56.35, 1060.5, (31.88, 18.14, 2.87, 1.94), file=_SHORT),
    _known("UniRL", "short, engines of 1", 71.69, 1075.1, (49.42, 18.43, 1.43, 1.27), engine=1, file=_SHORT),
    _known(
        "UniRL", "all 4096, engines of 1", 96.67, 4096.0, (38.11, 52.84, 1.18, 3.27), engine=1, longest=4096,
        file=_FIXED,
    ),
)  # fmt: skip

RUNS = (
    *KNOWN_H20,
    nemo("0.5.0", "Llama-3.1-8B", 16, 92.8, (1, 1, 1, 2), 1, 1019, 4096, calibration=True),
    nemo("0.6.0", "Qwen3-30B-A3B", 32, 192, (1, 1, 8, 1), 2, 3203, 4096, recompute=None, calibration=True),
    _verl(32, 790, (357, 108, 314), former=True),
    nemo("0.5.0", "Qwen3-30B-A3B", 32, 198, (1, 1, 8, 1), 2, 3196, 4096, recompute=None),
    nemo("0.5.0", "Qwen3-32B", 32, 376, (4, 1, 1, 4), 4, 3251, 4096, recompute=None),
    nemo("0.5.0", "Llama-3.1-8B", 8, 91.0, (1, 1, 1, 1), 1, 1066, 4096, gpu="GB200", calibration=True),
    nemo("0.5.0", "Qwen3-32B", 16, 381, (2, 1, 1, 1), 1, 3253, 4096, gpu="GB200", recompute=None),
    nemo("0.6.0", "Qwen3-30B-A3B", 16, 221, (1, 1, 16, 1), 1, 3199, 4096, gpu="GB200", recompute=None),
    _verl(64, 365, (151, 70, 133)),
    _verl(128, 356, (178, 54, 114)),
    _verl_experts(128, 498, {"generation": 348, "old_logprobs": 29, "reference": 21, "update": 86}),
    nemo("0.5.0", "Llama-3.1-8B", 16, 64.8, (1, 1, 1, 1), 1, 1123, 4096, apart=1),
    nemo("0.6.0", "Qwen3-30B-A3B", 32, 152, (1, 1, 8, 2), 2, 3201, 4096, apart=2, recompute=None),
    nemo("0.6.0", "Qwen3-30B-A3B", 192, 34.5, (1, 1, 8, 1), 2, 3206, 4096, apart=8, staleness=8, recompute=None),
    nemo("0.5.0", "Qwen3-32B", 64, 200, (4, 1, 1, 4), 4, 3252, 4096, apart=4, recompute=None),
    nemo(
        "0.6.0",
        "Qwen3-235B-A22B",
        256,
        231,
        (4, 1, 16, 8),
        8,
        5721,
        8192,
        apart=16,
        updates=1,
        ends=(11, 11),
    ),  # fmt: skip
    _verl(32, 295, (21, 270), apart=2),
    _verl(64, 189, (28, 157), apart=4),
    _verl(128, 151, (33, 113), apart=8),
    _verl_experts(128, 283, {"waiting": 22, "reference": 50, "update": 207}, apart=12),
)
# What this version plans, but does not run: engines over nodes, and the training of DeepSeek-V3.
PLANNED_ONLY = (
    nemo("0.6.0", "Qwen3-235B-A22B", 128, 395, (2, 2, 16, 8), 16, 5698, 8192, updates=1, ends=(11, 11)),
    nemo("0.6.0", "DeepSeek-V3", 256, 134, (1, 1, 16, 16), 32, 701, 1536, updates=1, ends=(3, 2), group=16),
    nemo("0.6.0", "DeepSeek-V3", 512, 64.1, (1, 1, 16, 16), 32, 710, 1536, apart=32, updates=1, ends=(3, 2), group=16),
)


def planned_only() -> str:
    """Return what their estimates are worth, in one sentence for each."""
    found = []
    for run in PLANNED_ONLY:
        seconds = run.estimate().rollout
        error = seconds / run.seconds - 1.0
        found.append(f"- {run.title}: {run.seconds:g} s published, {seconds:,.1f} s estimated ({error:+.0%}).")
    return "\n".join(found)


SWIFT = "https://github.com/modelscope/ms-swift/blob/main/examples/megatron/"
_BLOCKWISE = ("logits", "head_input")  # what our head takes, and theirs does not
_LOGITS = 2 + 4 + 4  # bytes of a logit where none is cut into blocks: in 16 bits, in fp32, and its gradient


@dataclass(frozen=True)
class Held:
    """The memory of a GPU that a published run of Megatron reports for its update: what the allocator has reserved."""

    title: str
    source: str
    gib: float
    config: dict[str, Any]

    @property
    def mixture(self) -> bool:
        """True if the model has experts."""
        arch = architecture.find(from_dict(self.config))
        assert arch is not None
        return arch.experts is not None

    def estimate(self) -> float:
        """Return the GiB of tensors that we count for the same update.

        Logits are as many as they compute at once, and there is no engine. What CUDA and NCCL take for themselves is
        left out: it is not the allocator's.
        """
        config = from_dict(self.config)
        arch = architecture.find(config)
        assert arch is not None
        tokens = moments.micro_batch_tokens(config) / config.parallel.context_parallel_size
        logits = arch.vocab_size / config.parallel.tensor_model_parallel_size * tokens * _LOGITS
        sizes: list[float] = []
        for stage in memory.stages(config):
            passes = moments.of_update(arch, config, stage, parameters.state(arch, config, stage))
            sizes.append(sum(passes["update"].values()))
            if head := passes.get("head_backward"):
                sizes.append(sum(size for name, size in head.items() if name not in _BLOCKWISE) + logits)
        return max(sizes) / GIB


def _swift(
    script: str, model: str, gpus: int, gib: float, layout: tuple[int, int, int, int], *,
    recompute: str | None = "full", offload: bool = False,
) -> Held:  # fmt: skip
    """Return a run of ms-swift on A800: one packed micro-batch of 8,192 tokens, and a distributed optimizer."""
    config = sections("A800-80GB", max(1, gpus // 8), min(gpus, 8), model, layout, 1, 0)
    config["batch"] = {"micro_batch_tokens": 8192, "global_batch_size": 16, "num_generations": 2}
    config["rollout"] |= {"max_prompt_length": 1024, "max_response_length": 7168}
    config["memory"] = {"recompute_granularity": recompute, "offload_optimizer": offload}
    return Held(f"{model}, {gpus} A800", SWIFT + script, gib, config)


HELD = (
    _swift("base_to_chat.sh", "Qwen2.5-14B", 8, 65, (4, 1, 1, 1), recompute=None),
    _swift("dense/72b_offload.sh", "Qwen2.5-72B", 8, 65, (8, 1, 1, 1), offload=True),
    _swift("moe/qwen3_moe.sh", "Qwen3-30B-A3B", 16, 60, (1, 1, 8, 2)),
    _swift("mcore_bridge/full/moe.sh", "Qwen3-30B-A3B", 8, 76, (4, 1, 4, 2)),
    _swift("moe/qwen3_moe_offload.sh", "Qwen3-30B-A3B", 4, 75, (1, 1, 4, 1), offload=True),
)
