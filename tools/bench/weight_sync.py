"""Measure the weight sync of this checkout against that of another one, side by side in one run.

    git worktree add /tmp/before COMMIT
    .venv/bin/python tools/bench/weight_sync.py --other /tmp/before > table.md          # progress goes to stderr

For each case both sides have their trainer ranks and their engine at the same time, and sync in turns: gather, fill the
engine, reload, fingerprint (`WeightSync.push` of gspo_hpc/training/sync.py). The first two syncs of each are not
counted. At the end both engines must give the same log-probs bit for bit. Without `--other` only this checkout is
measured. Ratios are of neighbouring syncs; processor time is that of all ranks and processes of the engine, and depends
little on what else the machine does.

With `--adapters` both sides are this checkout, whose trainer has LoRA adapters of rank 16 on all linear layers of the
dense model: the first keeps them beside the engine's weights, so that they alone travel, and the other merges them into
all weights. Their engines' log-probs must then be equal to 1e-3, and MB are those of either side.

- dense is a random Qwen3 of about 490 MB in float32, in 91 tensors.
- mixture is a random Qwen3-MoE of about 640 MB: 6 layers of 128 experts, in 2,361 tensors. Its experts are small, so
  that calls weigh as much against bytes as on GPUs, which move bytes some hundred times faster; wide has 16 experts a
  layer of 4 MB a tensor, and shows the other end.
- "1 → 1" is one trainer rank and an engine of one worker; "2 → 1" are two ranks (tensor-parallel, of the mixtures
  expert-parallel) and an engine of one worker; "2 → 2" the same ranks and one engine of two tensor-parallel workers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

REPO = Path(__file__).resolve().parents[2]
DENSE = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 16384}
MIXTURE = {"num_hidden_layers": 6, "hidden_size": 512, "vocab_size": 4096, "num_experts": 128}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "dense": ("Qwen3", DENSE),
    "mixture": ("Qwen3Moe", MIXTURE | {"moe_intermediate_size": 128}),
    "wide": ("Qwen3Moe", MIXTURE | {"num_hidden_layers": 3, "num_experts": 16, "moe_intermediate_size": 2048}),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256}
LAYOUTS = {"1 → 1": (1, 1), "2 → 1": (2, 1), "2 → 2": (2, 2)}  # trainer ranks, workers of the engine
UNCOUNTED = 2
ADAPTER_RANK = 16


def say(text: str) -> None:
    """Print a line of progress; stdout is for the tables."""
    print(f"weight_sync.py: {text}", file=sys.stderr, flush=True)


def make_model(folder: Path, kind: str) -> Path:
    """Write a random model; return its folder."""
    import torch
    import transformers

    sys.path.insert(0, str(REPO / "tools"))
    from make_random_model import make_tokenizer

    transformers.utils.logging.disable_progress_bar()
    family, sizes = MODELS[kind]
    torch.manual_seed(0)
    mixture = {"num_experts_per_tok": 8, "norm_topk_prob": True} if "Moe" in family else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **HEADS, **mixture, tie_word_embeddings=False)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)
    return folder


def rank(model: Path, ranks: int, workers: int, way: str) -> None:
    """Be one trainer rank of one side: a line of input is a sync, which rank 0 answers with its seconds.

    `way`: that of adapters into the engine, or "none" where the whole model is trained.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' chatter
    import torch

    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.engine.engine import Engine, EngineSettings
    from gspo_hpc.models import architecture
    from gspo_hpc.policy import weight_stream
    from gspo_hpc.policy.policy import Policy
    from gspo_hpc.policy.process_groups import barrier, start
    from gspo_hpc.training import sync

    arch = architecture.read(model)
    size = "tensor_model_parallel_size" if arch.experts is None else "expert_model_parallel_size"
    adapter = {} if way == "none" else {"adapter": {"type": "lora", "rank": ADAPTER_RANK, "engine": way}}
    config = from_dict(
        {
            **adapter,
            "cluster": {"platform": "cpu", "gpus_per_node": ranks},
            "model": {"path": str(model), "dtype": "float32"},
            "parallel": {size: ranks},
            "rollout": {"tensor_parallel_size": workers},
            "run": {"max_steps": 1},
        }
    )
    place = start(config)
    torch.set_num_threads(1)
    policy = Policy(arch, config, place)
    beside: dict[str, Any] = {}
    if way == "none":
        weight_stream.load(policy.chunks, arch, model)
    else:
        beside = load_adapted(policy, model)
    engine = None
    if place.rank == 0:
        settings = EngineSettings(
            model_path=str(model), tensor_parallel_size=workers, max_model_len=128, kv_cache_gb=0.1, threads=1, **beside
        )
        engine = Engine(settings)
        engine.start()
    if hasattr(sync, "WeightSync"):
        push = sync.WeightSync(policy, []).push
    else:  # another checkout, from before November 2026
        push = functools.partial(sync._push, policy)  # type: ignore[attr-defined]
    barrier(place.device)
    answers.write("ready\n")
    for line in sys.stdin:
        if line == "logprobs\n":
            found = (
                engine.prompt_logprobs([[(7 * i + j) % 1000 for j in range(24)] for i in range(4)]) if engine else []
            )
            answers.write(f"{json.dumps([one.tolist() for one in found])}\n")
            continue
        barrier(place.device)
        began = time.perf_counter()
        _, death = push(engine, None)
        assert death is None, death
        answers.write(f"{time.perf_counter() - began}\n")
    if engine is not None:
        engine.close()
    os._exit(0)


def load_adapted(policy: Any, model: Path) -> dict[str, Any]:
    """Load a model and adapters that add something to it; return what makes places for them in an engine."""
    from gspo_hpc.engine.settings import EngineAdapters
    from gspo_hpc.models import adapter_table
    from gspo_hpc.policy.adapters import matrices

    policy.load(model)
    drawn, adapter = matrices.first_values(0), policy.config.adapter
    matrices.fill(policy.chunks, lambda name, shape: 0.1 * drawn(name.replace("lora_B", "lora_A"), shape))
    if adapter.engine == "merged":
        return {}
    shapes = adapter_table.shapes(policy.arch, adapter.rank, adapter.targets)
    return {"adapters": EngineAdapters(adapter.rank, adapter.alpha, shapes)}


class Taken(NamedTuple):
    """The time of a sync."""

    seconds: float
    processor: float  # seconds, of ranks and engine together


def _tree(pid: int) -> list[psutil.Process]:
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


class Side:
    """The processes of one checkout."""

    def __init__(self, checkout: Path, way: str, model: Path, ranks: int, workers: int, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-P", __file__, "--rank", str(model), str(ranks), str(workers), way]
        self._log = log.open("wb")
        self._processes = [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": str(i), "LOCAL_RANK": str(i)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                bufsize=1,
            )
            for i in range(ranks)
        ]

    def ask(self, line: str) -> str:
        """Give a line to all ranks, and return the answer of rank 0, once all have answered."""
        for process in self._processes:
            assert process.stdin is not None
            if line:
                process.stdin.write(f"{line}\n")
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise RuntimeError(f"a rank ended; see {self._log.name}")
        return answers[0].strip()

    def processor_seconds(self) -> float:
        """Return the processor time of ranks and engine so far."""
        every = {one for process in self._processes for one in _tree(process.pid)}
        times = [one.cpu_times() for one in every]
        return sum(one.user + one.system for one in times)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(compared: list[tuple[Path, str]], model: Path, layout: str, rounds: int, work: Path) -> list[list[Taken]]:
    """Return for each checkout, with a way of adapters, what its syncs took, which took turns."""
    ranks, workers = LAYOUTS[layout]
    sides = []
    try:
        for number, (checkout, way) in enumerate(compared):
            log, began = work / f"side-{number}.log", time.perf_counter()
            say(f"starts trainer ranks ({ranks}) and an engine (workers: {workers}) of {checkout}; they write to {log}")
            sides.append(Side(checkout, way, model, ranks, workers, log))
            sides[-1].ask("")
            say(f"they are ready after {time.perf_counter() - began:.0f} s")
        found: list[list[Taken]] = [[] for _ in sides]
        for number in range(UNCOUNTED + rounds):
            order = list(range(len(sides)))
            taken = [Taken(0.0, 0.0)] * len(sides)
            for place in order if number % 2 else reversed(order):
                before = sides[place].processor_seconds()
                seconds = float(sides[place].ask("sync"))
                taken[place] = Taken(seconds, sides[place].processor_seconds() - before)
                if number >= UNCOUNTED:
                    found[place].append(taken[place])
            times = ", ".join(f"{one.seconds:.2f} s ({one.processor:.2f} s of processors)" for one in taken)
            say(f"sync {number + 1} of {UNCOUNTED + rounds}{'' if number >= UNCOUNTED else ', not counted'}: {times}")
        here, *others = (np.array(json.loads(side.ask("logprobs"))) for side in sides)
        allowed = 0.0 if compared[0][1] == "none" else 1e-3
        if any(np.abs(here - other).max() > allowed for other in others):
            raise RuntimeError("the engines of the two sides do not have the same weights")
        say("log-probs of the engines are " + ("equal bit for bit" if not allowed else f"equal to {allowed:g}"))
        return found
    finally:
        for side in sides:
            side.close()


def row(name: str, sizes: list[float], sides: list[list[Taken]]) -> str:
    """Return a line of the table; `sizes` are the bytes that travel."""
    cells = [name, " and ".join(f"{size / 1e6:.0f}" for size in sizes)]
    for kind in range(len(Taken._fields)):
        every = [[taken[kind] for taken in side] for side in sides]
        cells += [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in every]
        if len(sides) > 1:
            ratios = [there / here for here, there in zip(*every, strict=True)]
            cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


def adapter_elements(model: Path) -> int:
    """Return the elements of all adapters of a model."""
    sys.path.insert(0, str(REPO))
    from gspo_hpc.models import adapter_table, architecture

    shapes = adapter_table.shapes(architecture.read(model), ADAPTER_RANK, [adapter_table.ALL])
    return sum(rows * columns for rows, columns in shapes.values())


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, and whether files differ from it."""
    found = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=8"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Measure, and print Markdown."""
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="100000")  # as a rank has it
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="weight_sync.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--other", type=Path, help="another checkout of this package, with its own syncs")
    parser.add_argument("--rounds", type=int, default=10, help="syncs of each side in each case (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--adapters", action="store_true", help="compare two ways of LoRA adapters into an engine")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(Path(args.rank[0]), int(args.rank[1]), int(args.rank[2]), args.rank[3])
        return 0
    compared = [(REPO, "none"), *([(args.other.resolve(), "none")] if args.other else [])]
    if args.adapters:
        compared, args.models = [(REPO, "adapters"), (REPO, "merged")], ["dense"]
    here, there = ("beside", "merged") if args.adapters else ("this", "the other")
    two = len(compared) > 1
    for place, (checkout, way) in zip((here, there), compared, strict=False):
        print(f"- {place}: commit {commit_of(checkout)}{'' if way == 'none' else f', adapters {way}'}")
    print(
        f"\n{os.cpu_count()} cores; load average before: {os.getloadavg()[0]:.2f}. Medians of {args.rounds} syncs, "
        f"with the least and the most, after {UNCOUNTED} that are not counted. MB is what travels, s is wall time, and "
        "processor s is that of all trainer ranks and of the engine."
        + (f" A ratio above 1 says that {there} takes longer. Both engines end with equal log-probs.\n" * two or "\n")
    )
    names = []
    for kind in ("s", "processor s"):
        names += [f"{kind}, {here}", *([f"{kind}, {there}", f"{there} / {here}"] if two else [])]
    print("| | MB | " + " | ".join(names) + " |\n|---|---" + "|---" * len(names) + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        for kind in args.models:
            say(f"makes the model {kind}")
            model = make_model(Path(folder) / kind, kind)
            sizes = [float(sum(file.stat().st_size for file in model.glob("*.safetensors")))]
            if args.adapters:
                sizes.insert(0, 4.0 * adapter_elements(model))
            for layout in args.layouts:
                say(f"{kind} {layout}")
                found = measure(compared, model, layout, args.rounds, Path(folder))
                print(row(f"{kind}, {layout}", sizes, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
