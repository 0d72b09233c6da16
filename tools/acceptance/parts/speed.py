"""The package's engine against ``vllm.LLM`` alone, with the same requests: with CUDA graphs, seeded and not.

``python -m tools.acceptance.parts.speed MODEL PLATFORM SEEDED OUT`` is ``vllm.LLM`` alone, a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gspo_hpc.engine.compat import IN_PROCESS_EXECUTOR
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.engine.settings import environment

from .. import REPO, engines, models
from ..environment import Environment
from ..rows import Platform, Recorder

SAMPLES = 8
LEAST = 0.9  # of the tokens a second of vllm.LLM with the same seeds
ROUNDS = 2  # the first for what is slow the first time


def run(env: Environment, record: Recorder) -> None:
    """Measure all three, one after the other: each has the GPU to itself."""
    model = models.dense(env)
    ours = _ours(env, model)
    seeded, unseeded = (_bare(env, model, seeds) for seeds in (True, False))
    what = f"{env.sizes.requests} x {SAMPLES} completions of {env.sizes.length} tokens"
    record.figure(f"vllm.LLM alone, with a seed for each completion, {what}", f"{seeded:,.0f} tokens/s")
    figure = f"{unseeded:,.0f} tokens/s, {unseeded / seeded:.2f} of that with seeds"
    record.figure(f"vllm.LLM alone, without seeds, {what}", figure)
    figure = f"{ours:,.0f} tokens/s, {ours / seeded:.2f} of vllm.LLM"
    bound = f"at least {LEAST:g} of vllm.LLM with seeds"
    record.check(f"the engine, with seeds, {what}", figure, bound, ours / seeded >= LEAST, gpu_only=True)


def _ours(env: Environment, model: Path) -> float:
    engine = engines.make(env, model, "speed")
    engine.start()
    try:
        prompts = engines.requests(env, model, env.sizes.requests)
        sampling = Sampling(temperature=1.0, max_tokens=env.sizes.length)
        rate = 0.0
        for _ in range(ROUNDS):
            before, began = engine.tokens_generated, time.perf_counter()
            engines.generate(engine, prompts, sampling, SAMPLES)
            rate = (engine.tokens_generated - before) / (time.perf_counter() - began)
        return rate
    finally:
        engine.close()


def _bare(env: Environment, model: Path, seeded: bool) -> float:
    out = env.work / "bare.json"
    words = [str(model), env.platform, str(int(seeded)), str(out)]
    command = [sys.executable, "-m", "tools.acceptance.parts.speed", *words]
    subprocess.run(command, cwd=REPO, check=True)
    return float(json.loads(out.read_text()))


def main(model: Path, env: Environment, seeded: bool, out: Path) -> None:
    """Write the tokens a second of ``vllm.LLM``."""
    if not env.cuda:  # what the package's engine has too: without it vLLM compiles, for a minute and longer
        os.environ.update(environment(engines.make(env, model, "bare").settings))
    # As the package's engine has it: it never samples a seeded completion, and where it lacks, vLLM stops for it.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    sizes = env.sizes
    options: dict[str, Any] = {"gpu_memory_utilization": engines.SHARE}
    if not env.cuda:
        options = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 28}
        options["distributed_executor_backend"] = IN_PROCESS_EXECUTOR
    llm = LLM(model=str(model), dtype=sizes.dtype, max_model_len=sizes.prompt + sizes.length, **options)
    common: dict[str, Any] = {"temperature": 1.0, "max_tokens": sizes.length, "logprobs": 0, "detokenize": False}
    prompts, params = [], []
    for tokens in engines.requests(env, model, sizes.requests):
        if seeded:
            prompts += [tokens_input(tokens)] * SAMPLES
            params += [SamplingParams(**common, seed=seed) for seed in range(SAMPLES)]
        else:
            prompts.append(tokens_input(tokens))
            params.append(SamplingParams(**common, n=SAMPLES))
    rate = 0.0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        count = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        rate = count / (time.perf_counter() - began)
    out.write_text(json.dumps(rate))


if __name__ == "__main__":
    where: Platform = "cuda" if sys.argv[2] == "cuda" else "cpu"
    main(Path(sys.argv[1]), Environment(where, Path(sys.argv[4]).parent), sys.argv[3] == "1", Path(sys.argv[4]))
