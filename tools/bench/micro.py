"""Compare parts of a step with those of TRL and verl, and O_DIRECT with its absence.

    bash tools/bench/setup_peers.sh
    .venv/bin/python tools/bench/micro.py > table.md          # progress goes to stderr
    .venv/bin/python tools/bench/micro.py direct              # this one needs no peers

Our implementations run in this environment and those of the peers (TRL and verl) in theirs, each in a process that
works only on request. All get the same inputs and run in turns (ours, peer, peer, ours, peer, …), so that other load on
the machine affects all of them alike. A small run comes first and is not timed. Peak memory is what one run adds to a
fresh process that holds the inputs and has made a small run before. The results are compared too: a difference beyond
rounding ends the benchmark with exit code 1.

What to know when reading the figures:

- Log-probs are timed forward and backward, with gradients for hidden states and weight. "entropy" in a name means that
  it is computed, too. verl's fused head cannot leave it out; TRL's chunked head is what its GRPOTrainer calls, with
  entropy.
- With --processor-time both sides have one thread, and what is compared is its time on the processor: on a machine
  with other work wall times say little.
- Processes of both sides keep freed memory while they are timed, as our ranks do (system/malloc.py).
- The loss is timed forward and backward from log-probs on, with the metrics that each side computes along with it: ours
  measures the gap between engine and trainer, too. verl's needs tensors padded to the longest response, ours
  needs packed tokens; the time to bring the input into that form is counted for neither.
- Packing: fewer bins are fewer passes. The bound is the number of tokens over the budget, rounded up.
- direct writes, hashes and syncs a file, with O_DIRECT (system/direct_io.py) and through the page cache. CPU seconds
  are those of the process, medians over all runs; those of the kernel threads that write cached pages back are not
  included. Files go into the temporary folder, or the one in GSPO_HPC_BENCH_DISK: it should be on the file system of
  checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from implementations import OBJECTIVES
from step import BENCH, REPO, cpu_model, environment

Arrays = dict[str, npt.NDArray[Any]]
Results = dict[str, Arrays]  # of the last run, by implementation


@dataclass(frozen=True)
class Comparison:
    """One table. The first implementation is ours, and what the others are compared with."""

    title: str
    rows: Mapping[str, str]  # implementation → its name in the table; those of OWN run here, all others with the peers
    inputs: Callable[[bool], Arrays]  # True: small ones
    check: Callable[
        [Arrays, Arrays, Arrays], str
    ]  # (inputs, ours, other) → what the last column says, or AssertionError
    memory: bool = True


def logprob_inputs(tokens: int, hidden: int, vocabulary: int) -> Callable[[bool], Arrays]:
    """Hidden states [R, H], a head [V, H], targets [R] and a gradient of the log-probs [R]."""

    def make(small: bool) -> Arrays:
        rng = np.random.default_rng(1)
        rows = 8 if small else tokens
        return {
            "hidden": rng.standard_normal((rows, hidden), dtype=np.float32),
            "weight": rng.standard_normal((vocabulary, hidden), dtype=np.float32) / np.float32(np.sqrt(hidden)),
            "targets": rng.integers(0, vocabulary, rows),
            "upstream": rng.standard_normal(rows, dtype=np.float32),
        }

    return make


def loss_inputs(small: bool) -> Arrays:
    """Log-probs of 512 responses of up to 8,192 tokens, a quarter of them there, before and after a small update."""
    rng = np.random.default_rng(2)
    count, padded = (4, 64) if small else (512, 8192)
    lengths = rng.integers(1, padded // 2, count)
    old = -rng.exponential(1.0, int(lengths.sum())).astype(np.float32)
    # Means of sequences that move by about the clip range: some ratios are clipped, some are not.
    drift = np.repeat(rng.normal(0.0, 5e-4, count), lengths) + rng.normal(0.0, 2e-3, len(old))
    return {
        "old": old,
        "logprobs": old + drift.astype(np.float32),
        "lengths": lengths,
        "advantages": rng.standard_normal(count).astype(np.float32),
        "rollout": old + rng.normal(0.0, 1e-3, len(old)).astype(np.float32),  # as an engine in other rounding has them
        "padded": np.array(padded),
    }


def packing_inputs(small: bool) -> Arrays:
    """1,024 lengths, evenly spread up to half the budget."""
    return {
        "lengths": np.random.default_rng(3).integers(1, 4097, 16 if small else 1024),
        "budget": np.array(8192),
    }


def file_inputs(small: bool) -> Arrays:
    """512 MiB that no file system compresses."""
    return {"bytes": np.random.default_rng(4).integers(0, 256, 1 << 20 if small else 512 << 20, dtype=np.uint8)}


def same_file(_: Arrays, ours: Arrays, other: Arrays) -> str:
    """Both have the same hash; says CPU seconds and what stayed in the page cache."""
    assert np.array_equal(ours["sha256"], other["sha256"])
    return f"{float(other['cpu']):.2f} CPU s, {float(other['cached']):.0f} MiB cached"


def same_numbers(tolerance: float) -> Callable[[Arrays, Arrays, Arrays], str]:
    """The greatest difference of any result, as a share of the greatest value, is within `tolerance`."""

    def check(_: Arrays, ours: Arrays, other: Arrays) -> str:
        assert ours.keys() == other.keys()
        worst = 0.0
        for name in ours:
            assert ours[name].shape == other[name].shape and np.abs(ours[name]).max() > 0, name
            worst = max(worst, float(np.abs(ours[name] - other[name]).max() / np.abs(ours[name]).max()))
        assert worst <= tolerance, f"results differ by {worst:.1e}, allowed is {tolerance:.0e}"
        return f"{worst:.0e}"

    return check


def same_loss(_: Arrays, ours: Arrays, other: Arrays) -> str:
    """Loss and gradient agree, but for one token in 100,000: at the very bound of a clip range rounding decides."""
    assert ours.keys() == other.keys() and np.abs(ours["grad"]).max() > 0
    off = np.abs(ours["grad"] - other["grad"]) > 1e-4 * np.abs(ours["grad"]).max()
    assert off.mean() <= 1e-5, f"the gradient of {off.sum()} of {off.size} tokens differs"
    loss = float(abs(ours["loss"] - other["loss"]) / abs(ours["loss"])) if "loss" in ours else 0.0
    assert loss <= 1e-4, f"losses differ by {loss:.1e}"
    return f"{loss:.0e}, {off.sum()} tokens at a bound"


def same_packing(inputs: Arrays, ours: Arrays, other: Arrays) -> str:
    """Both packed every sample once, within the budget; says how many bins the other needed."""
    for result in (ours, other):
        assert np.array_equal(result["samples"], np.arange(len(inputs["lengths"])))
        assert result["bins"].max() <= inputs["budget"] and result["bins"].sum() == inputs["lengths"].sum()
    bound = -(-int(inputs["lengths"].sum()) // int(inputs["budget"]))
    return f"{len(other['bins'])} bins, bound {bound}"


LOGPROBS = {
    "ours_logprobs": "gspo_hpc",
    "ours_logprobs_entropy": "gspo_hpc, entropy",
    "trl_logits": "TRL selective_log_softmax, whole logits",
    "trl_chunked": "TRL chunked head, entropy",
    "verl_logits": "verl logprobs_from_logits, whole logits",
    "verl_fused": "verl FusedLinearForPPO, entropy",
}
COMPARISONS = {
    "logprobs": [
        Comparison(f"Log-probs, R {r} H {h} V {v}, float32", LOGPROBS, logprob_inputs(r, h, v), same_numbers(1e-4))
        for r, h, v in ((2048, 256, 32768), (800, 576, 49152))
    ],
    "loss": [
        Comparison(
            f"{name.upper()} loss, 512 responses of up to 8,192 tokens, a quarter full",
            {f"ours_loss_{name}": "gspo_hpc, packed", f"verl_loss_{name}": f"verl {mode}, padded"},
            loss_inputs,
            same_loss,
        )
        for name, (_, mode, _, _) in OBJECTIVES.items()
    ],
    "packing": [
        Comparison(
            "Packing 1,024 samples, budget 8,192 tokens",
            {"ours_packing": "gspo_hpc pack", "verl_packing": "verl rearrange_micro_batches"},
            packing_inputs,
            same_packing,
            memory=False,
        )
    ],
    "direct": [
        Comparison(
            "A file of 512 MiB, hashed and synced",
            {
                "ours_direct": "O_DIRECT, hashed on the way",
                "ours_cached": "page cache, hashed on the way",
                "ours_cached_read": "page cache, hashed from the file",
            },
            file_inputs,
            same_file,
            memory=False,
        )
    ],
}
# What system/malloc.py sets in our ranks: otherwise half of the time of a loss is the kernel's, which clears pages.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
OWN = "ours"  # prefix of implementations that run with this Python


class Process:
    """One side, waiting for requests."""

    def __init__(self, python: Path, log: IO[bytes], threads: int) -> None:
        self.python = python
        self.process = subprocess.Popen(
            [python, BENCH / "implementations.py", "serve"],
            cwd=REPO,
            env=environment(OMP_NUM_THREADS=str(threads), **KEEP_FREED_MEMORY),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def seconds(self, **request: Any) -> float:
        """Have one run made and timed. Raises RuntimeError if the process ends over it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{request['name']}: its process ended with {self.process.wait()}")
        return float(json.loads(answer)["seconds"])

    def peak(self, name: str, data: Path, small: Path, log: IO[bytes]) -> float:
        """MiB that one run adds, in a process of its own."""
        command: list[str | Path] = [self.python, BENCH / "implementations.py", "peak", name, data, small]
        env = environment(OMP_NUM_THREADS=str(cores()))
        done = subprocess.run(command, check=False, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: measuring its memory ended with {done.returncode}")
        return float(done.stdout.split()[-1])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def say(text: str) -> None:
    """A line of progress."""
    print(f"micro.py: {text}", file=sys.stderr, flush=True)


def measure(
    item: Comparison, sides: Mapping[str, Process], repeats: int, folder: Path, log: IO[bytes], processor: bool
) -> Iterator[str]:
    """Make all runs of one comparison, and yield the lines of its table.

    Files go into a new folder in `folder`: a process that has read the inputs of one comparison must not take them
    for those of another.
    """
    work = Path(tempfile.mkdtemp(dir=folder))
    data, small = work / "input.npz", work / "small.npz"
    inputs = item.inputs(False)
    np.savez(data, allow_pickle=False, **inputs)
    np.savez(small, allow_pickle=False, **item.inputs(True))
    times: dict[str, list[float]] = {name: [] for name in item.rows}
    for turn in range(repeats):
        for name in item.rows:
            output = str(work / f"{name}.npz") if turn == repeats - 1 else None
            request = {"name": name, "input": str(data), "small": str(small), "output": output, "processor": processor}
            times[name].append(side(sides, name).seconds(**request))
        say(f"{item.title}: turn {turn + 1} of {repeats}")
    results: Results = {}
    for name in item.rows:
        with np.load(work / f"{name}.npz", allow_pickle=False) as file:
            results[name] = {key: file[key] for key in file.files}
    ours = next(iter(item.rows))
    peaks = {name: side(sides, name).peak(name, data, small, log) for name in item.rows} if item.memory else {}

    yield f"**{item.title}**\n"
    what = "processor time" if processor else "time"
    yield f"| | {what}, ms: median (least – most) | × ours | " + "peak MiB | × ours | " * item.memory + "results |"
    yield "|---|---|---|" + "---|---|" * item.memory + "---|"
    for name, label in item.rows.items():
        try:
            verdict = item.check(inputs, results[ours], results[name])
        except AssertionError as error:
            raise RuntimeError(f"{item.title}: {name} against {ours}: {error}") from error
        middle = statistics.median(times[name])
        span = f"{middle * 1e3:,.0f} ({min(times[name]) * 1e3:,.0f} – {max(times[name]) * 1e3:,.0f})"
        cells = [label, span, f"{middle / statistics.median(times[ours]):.2f}"]
        if peaks:
            cells += [f"{peaks[name]:,.0f}", f"{peaks[name] / peaks[ours]:.2f}"]
        yield f"| {' | '.join([*cells, verdict if name != ours or not peaks else ''])} |"
    yield ""


def side(sides: Mapping[str, Process], name: str) -> Process:
    """The process that runs an implementation."""
    return sides[prefix(name)]


def prefix(name: str) -> str:
    """The side of an implementation: OWN, or the peers."""
    return OWN if name.partition("_")[0] == OWN else "peers"


@contextmanager
def all_sides(wanted: set[str], peers: Path, log: IO[bytes], threads: int) -> Iterator[dict[str, Process]]:
    """A process for each of the sides that are wanted."""
    with ExitStack() as stack:
        sides = {}
        for name in sorted(wanted):
            sides[name] = Process(Path(sys.executable) if name == OWN else peers / "bin" / "python", log, threads)
            stack.callback(sides[name].close)
        yield sides


def main() -> int:
    """Measure, and print Markdown; 0 when all results agreed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    peers = os.environ.get("GSPO_HPC_PEERS_VENV") or REPO / ".venv-peers"
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(COMPARISONS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each implementation (default: %(default)s)")
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread, and its time on the processor: beside other work"
    )
    parser.add_argument("--peers-venv", type=Path, default=Path(peers), help="made by setup_peers.sh")
    args = parser.parse_args()
    if unknown := set(args.what) - COMPARISONS.keys():
        parser.error(f"no comparison {', '.join(sorted(unknown))}; there are {', '.join(COMPARISONS)}")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    items = [item for name in args.what or COMPARISONS for item in COMPARISONS[name]]
    wanted = {prefix(name) for item in items for name in item.rows}
    if "peers" in wanted and not (args.peers_venv / "bin" / "python").exists():
        parser.error(f"no peers in {args.peers_venv}: bash tools/bench/setup_peers.sh")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended too
    print(f"{cores()} cores of {cpu_model()}; load average before the start: {os.getloadavg()[0]:.1f}.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="gspo_hpc.micro.") as folder, tempfile.TemporaryFile() as log:
        try:
            with all_sides(wanted, args.peers_venv, log, 1 if args.processor_time else cores()) as sides:
                for item in items:
                    table = measure(item, sides, args.repeats, Path(folder), log, args.processor_time)
                    print("\n".join(table), flush=True)
        except RuntimeError as error:
            log.seek(0)
            tail = b"\n".join(log.read().splitlines()[-15:]).decode("utf-8", "replace")
            say(f"{error}\n{tail}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
