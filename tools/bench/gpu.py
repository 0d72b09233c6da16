"""Measure everything that one GPU can show, in one table: parity with the CPU, speed, memory.

    .venv/bin/python tools/bench/gpu.py --model MODEL > table.md          # progress goes to stderr

Each part runs in a process of its own, and one that fails does not keep the others from running:

- parity: log-probs of a small random model, dense and with experts, on the GPU in float32 and bfloat16, with plain
  layers and with Transformer Engine's where they are installed, against the CPU in float32; the gradient's norm too.
- update: log-prob pass and optimizer step of MODEL: tokens and operations a second, MFU, memory at the peak compared
  with the plan.
- memory: the memory of weights, gradients and optimizer compared with the plan; what is allocated while the trainer is
  on the GPU, and while it is offloaded for the engines.
- engine: generation by our engine and by vllm.LLM alone, with the same requests; tokens a second; GPU memory of the
  engine, awake and asleep, compared with the plan.
- sync: sending the trainer's weights to a live engine, with sleep, wake-up and the probe, as in a run.

`--platform cpu` runs the same on a machine without a GPU, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step import REPO

PARTS = ("parity", "update", "memory", "engine", "bare", "sync")
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}
Rows = list[dict[str, Any]]


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"gpu.py: {text}", file=sys.stderr, flush=True)


def settings(args: argparse.Namespace, sections: dict[str, Any] | None = None) -> Any:
    """A configuration of one rank."""
    from gspo_hpc.config.loader import from_dict

    base: dict[str, Any] = {
        "cluster": {"platform": args.platform, "gpus_per_node": 1},
        "model": {"path": str(args.model), "dtype": args.dtype},
        "batch": {"global_batch_size": 32, "num_generations": 8, "micro_batch_tokens": args.tokens},
        "rollout": {"max_prompt_length": args.prompt, "max_response_length": args.length},
        "run": {"max_steps": 10},
    }
    for name, section in (sections or {}).items():
        base[name] = base.get(name, {}) | section
    return from_dict(base)


def small_model(folder: Path, kind: str) -> Path:
    """A random model of two layers."""
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "head_dim": 64,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1} | SMALL[kind]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def small_results(args: argparse.Namespace) -> Rows:
    """Log-probs and the gradient's norm of a small model in one precision; for `parity` alone."""
    import numpy as np
    from trainer import make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.training import update

    config = settings(args, {"model": {"layers": args.layers}, "batch": {"micro_batch_tokens": 4096}})
    policy = make_policy(args.model, config)
    groups = noise(policy, 4, 8, 40, 60, 0)
    passed = update.logprob_pass(policy, groups, "old_logprobs", config)
    result = update.step(policy, groups, algorithms.resolve(config.algorithm), config)
    assert result is not None
    np.savez(args.out, logprobs=np.concatenate(list(passed.logprobs.values())), norm=np.array([result.grad_norm]))
    return []


def planned(args: argparse.Namespace, config: Any) -> dict[str, dict[str, int]]:
    """Bytes by phase and part that `gspo-hpc plan` would show for this GPU (on a CPU: for an H100)."""
    import torch

    from gspo_hpc.models import architecture
    from gspo_hpc.planning.estimates import devices
    from gspo_hpc.planning.estimates import memory as memory_estimate

    name = torch.cuda.get_device_name() if args.platform == "cuda" else "H100"
    device = devices.of(name) or devices.DEVICES["H100-80GB"]
    found = memory_estimate.estimate(architecture.read(args.model), config, device)
    return {phase.name: phase.parts for phase in found.phases}


def parity(args: argparse.Namespace) -> Rows:
    """Every way to compute the small models, against the CPU."""
    import importlib.util

    import numpy as np

    ways = [(args.platform, "float32", "torch", 1e-4), (args.platform, "bfloat16", "torch", 0.03)]
    if args.platform == "cuda" and importlib.util.find_spec("transformer_engine"):
        ways.append((args.platform, "bfloat16", "transformer_engine", 0.03))
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        for kind in SMALL:
            model = small_model(Path(name) / kind, kind)
            found = {}
            for platform, dtype, layers, limit in [("cpu", "float32", "torch", 0.0), *ways]:
                out = Path(name) / f"{kind}-{platform}-{dtype}-{layers}.npz"
                more = ["--model", str(model), "--dtype", dtype, "--layers", layers, "--out", str(out)]
                child("small_results", [*more, "--platform", platform], args)
                found = dict(np.load(out))
                if not limit:
                    reference = found
                    continue
                gaps = np.abs(found["logprobs"] - reference["logprobs"])
                gap = float(gaps.mean())  # in 16 bit some tokens go to other experts, and are far off
                norm = float(found["norm"][0] / reference["norm"][0])
                good = gap < limit and abs(norm - 1.0) < limit
                what = f"{kind}, {dtype}, layers {layers}: log-probs, mean (largest) difference; gradient's norm, ratio"
                figure = f"{gap:.1e} ({gaps.max():.1e}); {norm:.4f}"
                rows.append({"what": what, "figure": figure, "good": good})
    return rows


def update(args: argparse.Namespace) -> Rows:
    """Passes over MODEL."""
    import torch
    from trainer import make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.policy.passes import PassMonitor
    from gspo_hpc.training import update as updates
    from gspo_hpc.training.telemetry.accelerator import Accelerator

    config = settings(args)
    policy = make_policy(args.model, config)
    device = Accelerator(policy.ranks.device)
    groups = noise(policy, 4, 8, args.prompt, args.length, 0)
    tokens = 32 * args.length
    rows: Rows = []
    monitor = PassMonitor()
    works: dict[str, Callable[[], object]] = {
        "log-prob pass": lambda: updates.logprob_pass(policy, groups, "old_logprobs", config, monitor=monitor),
        "update": lambda: updates.step(policy, groups, algorithms.resolve(config.algorithm), config, monitor=monitor),
    }
    for name, work in works.items():
        work()  # once, for what is slow the first time
        monitor.clear()
        device.reset_peak()
        torch.cuda.synchronize() if args.platform == "cuda" else None
        began = time.perf_counter()
        work()
        torch.cuda.synchronize() if args.platform == "cuda" else None
        seconds = time.perf_counter() - began
        flops = sum(counts.flops for counts in monitor.counts.values()) / seconds
        share = f", MFU {100 * flops / device.peak_flops:.1f}%" if device.peak_flops else ""
        figure = f"{tokens / seconds:,.0f} completion tokens/s, {flops / 1e12:.3g} TFLOP/s{share}"
        rows.append({"what": f"{name} of {args.model.name}, {args.dtype}", "figure": figure})
        parts = planned(args, config)["update" if name == "update" else "logprobs"]
        own = {part: size for part, size in parts.items() if part not in ("cuda_and_nccl", "engine_asleep")}
        if not config.memory.offload_trainer:  # everything is at home here
            own |= {part: planned(args, config)["save"][part] for part in ("weights", "gradients", "optimizer")}
        told = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in own.items())
        figure = f"{device.peak_memory() / 2**30:.2f}, planned {sum(own.values()) / 2**30:.2f} ({told})"
        rows.append({"what": f"{name}: memory at the peak, GiB", "figure": figure})
    return rows


def memory(args: argparse.Namespace) -> Rows:
    """Measure memory with the trainer on the GPU and with it offloaded, and check that all of it comes back."""
    import torch
    from trainer import make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.planning.estimates import parameters
    from gspo_hpc.training import update as updates

    config = settings(args)
    policy = make_policy(args.model, config)
    groups = noise(policy, 4, 8, args.prompt, args.length, 0)
    objective = algorithms.resolve(config.algorithm)
    updates.step(policy, groups, objective, config)
    before = [float(p.detach().float().abs().sum()) for p in policy.parameters()]

    def allocated() -> str:
        if args.platform == "cpu":
            return "not known on a CPU"
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.memory_allocated() / 2**30:.2f} allocated, {(total - free) / 2**30:.2f} taken"

    rows: Rows = [{"what": "trainer at home, GiB", "figure": allocated()}]
    planned = vars(parameters.state(policy.arch, config, 0))
    for kind, taken in policy.held().items():
        figure = f"{taken / 2**30:.3f}, planned {planned[kind] / 2**30:.3f}"
        rows.append({"what": f"{kind}, GiB", "figure": figure, "good": abs(taken / planned[kind] - 1.0) < 0.02})
    began = time.perf_counter()
    freed = policy.offload()
    gone = time.perf_counter() - began
    rows.append({"what": "trainer lent to the engines, GiB", "figure": allocated()})
    began = time.perf_counter()
    policy.restore()
    torch.cuda.synchronize() if args.platform == "cuda" else None
    back = time.perf_counter() - began
    same = before == [float(p.detach().float().abs().sum()) for p in policy.parameters()]
    figure = f"{freed / 2**30:.2f} GiB, {gone:.2f} s and {back:.2f} s"
    rows.append({"what": "there and back", "figure": figure, "good": same})
    return rows


def _requests(args: argparse.Namespace) -> list[list[int]]:
    import numpy as np

    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return [rng.integers(vocabulary // 10, vocabulary, args.prompt).tolist() for _ in range(args.requests)]


def engine(args: argparse.Namespace) -> Rows:
    """Our engine: groups of eight completions of one prompt, all of the full length."""
    import numpy as np

    from gspo_hpc.data.records import Prompt
    from gspo_hpc.engine.engine import Engine, EngineSettings, Sampling

    made = Engine(EngineSettings(model_path=str(args.model), dtype=args.dtype, platform=args.platform, **_limits(args)))
    made.start()
    try:
        seconds, count = 0.0, 0
        for rounds in range(2):  # the first for what is slow the first time
            for slot, tokens in enumerate(_requests(args)):
                sampling = Sampling(temperature=1.0, max_tokens=args.length)
                made.submit(slot, Prompt(slot, np.array(tokens, np.int32), "", {}), range(8), sampling)
            before, began = made.tokens_generated, time.perf_counter()
            while made.pending:
                made.step()
            seconds, count = time.perf_counter() - began, made.tokens_generated - before
            say(f"round {rounds}: {count} tokens in {seconds:.1f} s")
        rows = _engine_memory(args, made)
    finally:
        made.close()
    return [*rows, {"what": f"engine, {args.requests} x 8 completions, tokens/s", "figure": f"{count / seconds:,.0f}"}]


def _engine_memory(args: argparse.Namespace, made: Any) -> Rows:
    """Measure the GPU memory of all processes, with the engine awake and asleep; nothing on a CPU."""
    if args.platform == "cpu":
        return []
    import torch

    config = settings(args, {"rollout": {"engine": _limits(args)["engine_args"]}})
    parts = planned(args, config)["generation"]
    awake = sum(size for part, size in parts.items() if part not in ("cuda_and_nccl",))
    rows: Rows = []
    for name, size in (("awake", awake), ("asleep", parts["engine_asleep"])):
        if name == "asleep":
            made.sleep(level=1)
        free, total = torch.cuda.mem_get_info()
        figure = f"{(total - free) / 2**30:.2f}, planned {size / 2**30:.2f} and this process's context"
        rows.append({"what": f"engine {name}: taken of the GPU, GiB", "figure": figure})
    return rows


def bare(args: argparse.Namespace) -> Rows:
    """vllm.LLM by itself, with the same requests."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    limits = _limits(args)
    options: dict[str, Any] = {"enforce_eager": True, "block_size": 32} if args.platform == "cpu" else {}
    if args.platform == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        options["kv_cache_memory_bytes"] = int(limits["kv_cache_gb"] * 2**30)
    options |= limits.get("engine_args", {})
    llm = LLM(model=str(args.model), dtype=args.dtype, max_model_len=limits["max_model_len"], **options)
    prompts = [tokens_input(tokens) for tokens in _requests(args)]
    params = SamplingParams(temperature=1.0, max_tokens=args.length, n=8, seed=0, logprobs=0, detokenize=False)
    seconds, count = 0.0, 0
    for _ in range(2):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        count = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return [{"what": "vllm.LLM alone, the same requests, tokens/s", "figure": f"{count / seconds:,.0f}"}]


def sync(args: argparse.Namespace) -> Rows:
    """Take turns as a run does: the engine sleeps during updates, the trainer is offloaded during generation."""
    from trainer import make_policy

    from gspo_hpc.engine.engine import Engine, EngineSettings
    from gspo_hpc.training import probe as probing
    from gspo_hpc.training import sync as syncing
    from gspo_hpc.training.telemetry.accelerator import Accelerator

    config = settings(args, {"memory": {"offload_trainer": True}})
    policy = make_policy(args.model, config)
    device = Accelerator(policy.ranks.device)
    size = sum(p.nbytes for p in policy.parameters())
    made = Engine(EngineSettings(model_path=str(args.model), dtype=args.dtype, platform=args.platform, **_limits(args)))
    made.start()
    probe = [tokens[:24] for tokens in _requests(args)[:4]]
    rows: Rows = []
    try:
        for number in range(3):
            made.sleep(level=2)
            policy.restore()
            device.reset_peak()
            began = time.perf_counter()
            synced, death = syncing.synchronize(policy, made, probe)
            seconds = time.perf_counter() - began
            assert death is None, death
            say(f"sync {number}: {seconds:.2f} s")
        limit = probing.probe_limits(config)[0]
        figure = f"{size / seconds / 1e9:.2f} GB/s, {seconds:.2f} s"
        rows.append({"what": f"sync of {size / 2**30:.2f} GiB, with wake-up and probe", "figure": figure})
        parts = planned(args, config)["sync"]
        own = {part: parts[part] for part in ("weights", "buckets")}  # of this process; all is at home when it begins
        own |= {part: planned(args, config)["save"][part] for part in ("gradients", "optimizer")}
        figure = f"{device.peak_memory() / 2**30:.2f}, planned {sum(own.values()) / 2**30:.2f}"
        rows.append({"what": "sync: the trainer's memory at the peak, GiB", "figure": figure})
        gap = f"{synced.gap_max:.1e}, mean {synced.gap_mean:.1e}"
        rows.append({"what": "probe: largest difference of log-probs", "figure": gap, "good": synced.gap_max < limit})
    finally:
        made.close()
    return rows


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    limits: dict[str, Any] = {"max_model_len": args.prompt + args.length, "kv_cache_gb": 1.0}
    if args.platform == "cuda":
        limits["engine_args"] = {"gpu_memory_utilization": 0.5}
    return limits


def child(part: str, more: list[str], args: argparse.Namespace) -> Rows:
    """Return what a part has found in a process of its own."""
    sizes = [
        word for name in ("tokens", "prompt", "length", "requests") for word in (f"--{name}", str(getattr(args, name)))
    ]
    with tempfile.NamedTemporaryFile(prefix="gpu-", suffix=".json") as file:
        command = [sys.executable, __file__, *sizes, "--part", part, "--result", file.name, *more]
        done = subprocess.run(command, stdout=sys.stderr, timeout=1800, check=False)
        if done.returncode:
            raise RuntimeError(f"{part} ended with {done.returncode}")
        found: Rows = json.loads(Path(file.name).read_text() or "[]")
        return found


def main() -> int:
    """Run all parts, and print Markdown; 1 if one of them failed or is not as it should be."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="prompts for the engines (default: %(default)s)")
    for name in ("--part", "--layers", "--out", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        rows = globals()[args.part](args)
        Path(args.result).write_text(json.dumps(rows))
        return 0
    print(f"{_device(args)}, {args.model.name}, {args.dtype}\n\n| what | figure | |\n|---|---|---|")
    bad = 0
    for part in args.parts:
        say(part)
        try:
            rows = child(part, ["--model", str(args.model), "--platform", args.platform, "--dtype", args.dtype], args)
        except Exception as error:
            traceback.print_exc()
            rows = [{"what": part, "figure": str(error), "good": False}]
        for row in rows:
            verdict = {True: "good", False: "**bad**", None: ""}[row.get("good")]
            bad += row.get("good") is False
            print(f"| {row['what']} | {row['figure']} | {verdict} |", flush=True)
    return 1 if bad else 0


def _device(args: argparse.Namespace) -> str:
    import torch

    versions = f"torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}" if args.platform == "cuda" else f"a CPU, {versions}"


if __name__ == "__main__":
    sys.exit(main())
