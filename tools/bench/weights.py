"""Measure sending weights out of the trainer: streaming compared with mbridge, a live engine with a new one.

    .venv/bin/python tools/bench/weights.py > table.md          # progress goes to stderr

- Stream uses a random Qwen3 of about 270 MiB on two tensor-parallel ranks over gloo. Ours and mbridge's export run over
  the same parameters in turns; every tensor is read (its first element), none is copied. mbridge expects the norms of
  Transformer Engine's layers; the script gives it the names that ours have. Both must give the same tensors bit for
  bit.
- Memory is the additional memory of the process at its peak, in one pass of each.
- Sync sends SmolLM2-135M-Instruct from one rank to a live engine, with the probe that compares log-probs afterwards.
  This is compared with writing the weights into a folder and starting a new engine from it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gspo_hpc.system.text import MIB

REPO = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("GSPO_HPC_PEERS_VENV", REPO / ".venv-peers"))
SIZES: dict[str, Any] = {
    "hidden": 1024,
    "layers": 5,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 3072,
    "vocab": 4096,
}


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"weights.py: {text}", file=sys.stderr, flush=True)


def rank(work: Path, rounds: int) -> None:
    """One of two tensor-parallel ranks; rank 0 writes what was measured."""
    from gspo_hpc.models import architecture
    from gspo_hpc.policy import weight_stream
    from gspo_hpc.policy.policy import Policy
    from gspo_hpc.policy.process_groups import barrier, start, stop
    from gspo_hpc.training.telemetry.accelerator import Accelerator

    config = _config(work / "model", 2)
    ranks = start(config)
    arch = architecture.read(work / "model")
    policy = Policy(arch, config, ranks)
    weight_stream.load(policy.chunks, arch, work / "model")
    sides: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        "ours": policy.stream,
        "mbridge": _mbridge(policy, work),
    }
    kept = [{name: tensor.clone() for name, tensor in side()} for side in sides.values()]
    assert kept[0].keys() == kept[1].keys()
    assert all(bool((kept[0][name] == kept[1][name]).all()) for name in kept[0]), "the two do not give the same tensors"
    total = sum(tensor.nbytes for tensor in kept[0].values())
    del kept
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, int] = {}
    device = Accelerator(ranks.device)
    malloc_trim = ctypes.CDLL("libc.so.6").malloc_trim
    for number in range(rounds + 1):
        for name, side in sorted(sides.items(), reverse=bool(number % 2)):
            malloc_trim(0)  # what was freed before must be found anew
            device.reset_peak()
            before = device.peak_memory()
            barrier(ranks.device)
            began = time.perf_counter()
            for _, tensor in side():
                tensor.view(-1)[0].item()
            barrier(ranks.device)
            if number:  # the first makes connections
                seconds[name].append(time.perf_counter() - began)
                memory[name] = max(memory.get(name, 0), device.peak_memory() - before)
    if ranks.rank == 0:
        found = {"bytes": total, "seconds": seconds, "memory": memory}
        (work / "stream.json").write_text(json.dumps(found))
    stop()


def _mbridge(policy: Any, work: Path) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Mbridge's export of the same model."""
    (site,) = (PEERS / "lib").glob("python3*/site-packages")
    sys.path.append(str(site))  # behind our own packages: only mbridge is to be found there
    import mbridge
    from transformers import AutoConfig

    bridge = mbridge.AutoBridge.from_config(AutoConfig.from_pretrained(work / "model"))
    norms = {"input_layernorm.weight": "input", "pre_mlp_layernorm.weight": "post_attention"}
    name_of = bridge._weight_name_mapping_mcore_to_hf

    def named(name: str) -> list[str]:
        for ours, theirs in norms.items():
            if name.endswith(ours):
                return [f"model.layers.{name.split('.')[2]}.{theirs}_layernorm.weight"]
        return list(name_of(name))

    bridge._weight_name_mapping_mcore_to_hf = named
    return lambda: bridge.export_weights(policy.chunks)


def stream(work: Path, rounds: int) -> dict[str, Any]:
    """Run the two ranks and return what they measured."""
    sys.path.insert(0, str(REPO / "tools"))
    from make_random_model import make_random_model

    make_random_model(work / "model", "qwen3", **SIZES, tied=False, std=0.02)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--rank", str(work), "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(i), "LOCAL_RANK": str(i)}, stdout=sys.stderr)
        for i in range(2)
    ]
    try:
        codes = [process.wait(900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise RuntimeError(f"a rank ended with {codes}")
    found: dict[str, Any] = json.loads((work / "stream.json").read_text())
    return found


def sync(model: Path, rounds: int, work: Path) -> dict[str, Any]:
    """Seconds of syncs into a live engine and of starting it anew, and the bytes that go."""
    from gspo_hpc.engine.engine import Engine, EngineSettings
    from gspo_hpc.models import architecture
    from gspo_hpc.ops import hf_folder
    from gspo_hpc.policy import weight_stream
    from gspo_hpc.policy.policy import Policy
    from gspo_hpc.policy.process_groups import start, stop
    from gspo_hpc.training.sync import WeightSync

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    config = _config(model, 1)
    ranks = start(config)
    arch = architecture.read(model)
    policy = Policy(arch, config, ranks)
    weight_stream.load(policy.chunks, arch, model)
    saved = work / "saved"

    def write() -> None:
        shapes = [(name, tuple(tensor.shape)) for name, tensor in policy.stream()]
        hf_folder.write(saved, model, shapes, next(policy.parameters()).dtype, policy.stream())

    write()
    settings = EngineSettings(model_path=str(saved), max_model_len=256, kv_cache_gb=0.25, log_path=work / "engine.log")
    engine = Engine(settings)
    probe = [[(7 * i + j) % 1000 for j in range(24)] for i in range(4)]
    seconds: dict[str, list[float]] = {"push": [], "sync": [], "write": [], "start": []}
    weight_sync = WeightSync(policy, probe)
    push = weight_sync.push

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = push(*arguments)
        seconds["push"].append(time.perf_counter() - began)
        return result

    weight_sync.push = timed  # type: ignore[assignment, method-assign]
    engine.start()
    try:
        for number in range(rounds + 1):
            shutil.rmtree(saved)
            began = time.perf_counter()
            write()
            written = time.perf_counter()
            engine.restart()
            started = time.perf_counter()
            _, death = weight_sync.run(engine)  # with all that a restart makes slow the first time
            assert death is None
            warm = time.perf_counter()
            weight_sync.run(engine)
            seconds["sync"].append(time.perf_counter() - warm)
            seconds["write"].append(written - began)
            seconds["start"].append(started - written)
            say(f"engine {number} of {rounds}: a folder in {written - began:.1f} s, new in {started - written:.1f} s")
    finally:
        engine.close()
        stop()
    seconds["push"] = seconds["push"][1::2]
    measured = {name: values[1:] for name, values in seconds.items()}  # the first round fills caches
    return {"bytes": sum(p.nbytes for p in policy.parameters()), "seconds": measured}


def _config(model: Path, ranks: int) -> Any:
    from gspo_hpc.config.loader import from_dict

    return from_dict(
        {
            "cluster": {"platform": "cpu", "gpus_per_node": ranks},
            "model": {"path": str(model), "dtype": "float32"},
            "parallel": {"tensor_model_parallel_size": ranks},
            "run": {"max_steps": 1},
        }
    )


def tables(streamed: dict[str, Any], synced: dict[str, Any]) -> None:
    """Markdown."""
    ours, theirs = (streamed["seconds"][name] for name in ("ours", "mbridge"))
    size = streamed["bytes"] / MIB
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(f"Streaming {size:.0f} MiB of float32 from 2 tensor-parallel ranks over gloo, {len(ours)} rounds in turns.\n")
    print("| | MiB/s, median | range | MiB more at the peak |\n|---|---|---|---|")
    for name, values in (("gspo_hpc", ours), ("mbridge", theirs)):
        speeds = sorted(size / value for value in values)
        extra = streamed["memory"]["ours" if name == "gspo_hpc" else name] / MIB
        print(f"| {name} | {statistics.median(speeds):.0f} | {speeds[0]:.0f} to {speeds[-1]:.0f} | {extra:.0f} |")
    print(f"\nOurs over mbridge, pair by pair: **{statistics.median(ratios):.2f}** ", end="")
    print(f"({min(ratios):.2f} to {max(ratios):.2f}).\n")
    rows = {
        "push": "into the live engine",
        "sync": "the same and the probe, as in a run",
        "write": "into a folder",
        "start": "a new engine from that",
    }
    print(f"{synced['bytes'] / MIB:.0f} MiB of float32 into an engine, {len(synced['seconds']['sync'])} times each.\n")
    print("| | s, median | range |\n|---|---|---|")
    for key, name in rows.items():
        values = synced["seconds"][key]
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    every = zip(*(synced["seconds"][key] for key in rows), strict=True)
    ratios = [((write + start) / push, (write + start) / sync) for push, sync, write, start in every]
    for place, name in enumerate(("live sync", "live sync with the probe")):
        values = [pair[place] for pair in ratios]
        print(f"\nFolder and new engine over a {name}: **{statistics.median(values):.1f}** ", end="")
        print(f"({min(values):.1f} to {max(values):.1f}).")


def main() -> int:
    """Measure, and print Markdown."""
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="100000")  # as a rank has it: threads share the cores
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="weights.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=25, help="rounds of both exports (default: %(default)s)")
    parser.add_argument(
        "--engines", type=int, default=5, help="number of engines that are started (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct", help="the model of the sync"
    )
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.rounds)
        return 0
    if not (args.model / "config.json").exists():
        parser.error(f"no model in {args.model}: python tools/prepare_smollm2.py --out {args.model}")
    terminal = os.dup(1)
    os.dup2(2, 1)  # libraries' chatter must not mix with the tables
    with tempfile.TemporaryDirectory(prefix="weights-") as name:
        say("streaming")
        streamed = stream(Path(name), args.rounds)
        say("syncing")
        synced = sync(args.model, args.engines, Path(name))
    sys.stdout.flush()
    os.dup2(terminal, 1)
    tables(streamed, synced)
    return 0


if __name__ == "__main__":
    sys.exit(main())
