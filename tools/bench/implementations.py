"""Implementations that micro.py measures, ours and the peers', each run in an environment of its own.

An implementation takes the inputs of its comparison (numpy arrays) and returns a function without arguments: one run of
what is timed. Modules are imported inside, because no environment has them all.

    implementations.py serve                     requests on stdin, answers on stdout, one JSON object a line
    implementations.py peak NAME INPUT SMALL     prints the memory that one run adds to this fresh process, in MiB

Shapes: R tokens, H hidden size, V vocabulary, B sequences, L padded length, T packed tokens of all sequences.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Run = Callable[[], Mapping[str, Any]]  # results: tensors or arrays

CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
EMPTY = (0, 5)  # shape of `segments` without attention
PIECE = 32 << 20  # bytes that are written at once, as a tensor of a checkpoint is


# ---- log-probs of `targets` [R] from `hidden` [R, H] and `weight` [V, H], and back from `upstream` [R] ----


def _logprobs(data: Arrays, forward: Callable[[Any, Any, Any], Any]) -> Run:
    """One run: forward and backward; new gradients each time."""
    import torch

    hidden, weight = (torch.from_numpy(data[name]).requires_grad_() for name in ("hidden", "weight"))
    targets, upstream = torch.from_numpy(data["targets"]), torch.from_numpy(data["upstream"])

    def run() -> Mapping[str, Any]:
        hidden.grad = weight.grad = None
        values = forward(hidden, weight, targets)
        values.backward(upstream)
        return {"logprobs": values.detach(), "grad_hidden": hidden.grad, "grad_weight": weight.grad}

    return run


def ours_logprobs(data: Arrays, with_entropy: bool = False) -> Run:
    """gspo_hpc: vocabulary blocks with their own backward."""
    from gspo_hpc.ops.logprobs import token_logprobs

    return _logprobs(data, lambda h, w, t: token_logprobs(h, w, t, with_entropy=with_entropy)[0])


def ours_logprobs_entropy(data: Arrays) -> Run:
    """The same with the entropy, as the trainer calls it."""
    return ours_logprobs(data, with_entropy=True)


def trl_logits(data: Arrays) -> Run:
    """TRL's selective_log_softmax on whole logits."""
    from trl.trainer.utils import selective_log_softmax

    return _logprobs(data, lambda h, w, t: selective_log_softmax(h @ w.t(), t))


def trl_chunked(data: Arrays) -> Run:
    """TRL's chunked head with entropy, as its GRPOTrainer calls it."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk

    def forward(hidden: Any, weight: Any, targets: Any) -> Any:
        result = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, ("entropy",))
        return result[0]

    return _logprobs(data, forward)


def verl_logits(data: Arrays) -> Run:
    """Verl's logprobs_from_logits on whole logits."""
    from verl.utils.torch_functional import logprobs_from_logits

    return _logprobs(data, lambda h, w, t: logprobs_from_logits(h @ w.t(), t))


def verl_fused(data: Arrays) -> Run:
    """Verl's FusedLinearForPPO, which always computes the entropy too."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    head = FusedLinearForPPO()
    return _logprobs(data, lambda h, w, t: head(h, w, t)[0])


# ---- loss of B sequences: `logprobs`, `old`, `rollout` [T] packed; `lengths`, `advantages` [B]; `padded` () = L ----


# Objectives that verl has too: our settings, its mode of the loss, its mean, and its settings. GMPO's and SAPO's means
# are fixed there, vanilla always has a dual clip, and its gspo is our gspo_token. The losses of rloo, maxrl and
# reinforce_plus_plus are those of grpo and dapo.
OBJECTIVES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "gspo": (
        {"name": "gspo"},
        "gspo",
        "seq-mean-token-mean",
        {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH},
    ),
    "gspo_token": (
        {"name": "gspo_token"},
        "gspo",
        "seq-mean-token-mean",
        {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH},
    ),
    "grpo": (
        {"name": "grpo", "clip_low": 0.001, "clip_high": 0.002, "dual_clip": 1.003},
        "vanilla",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.001, "clip_ratio_high": 0.002, "clip_ratio_c": 1.003},
    ),
    "dapo": (
        {"name": "dapo", "clip_low": 0.001, "clip_high": 0.002},
        "vanilla",
        "token-mean",
        {"clip_ratio_low": 0.001, "clip_ratio_high": 0.002},
    ),
    "dr_grpo": (
        {"name": "dr_grpo", "clip_low": 0.001, "clip_high": 0.002},
        "vanilla",
        "seq-mean-token-sum-norm",
        {"clip_ratio_low": 0.001, "clip_ratio_high": 0.002},
    ),
    "dppo": (
        {"name": "dppo", "clip_low": 0.0005, "clip_high": 0.0004},
        "dppo_tv",
        "token-mean",
        {"clip_ratio_low": 0.0005, "clip_ratio_high": 0.0004, "clip_ratio_c": 20.0},
    ),
    "cispo": (
        {"name": "cispo", "clip_low": 0.002, "clip_high": 0.001},
        "cispo",
        "token-mean",
        {"clip_ratio_low": 0.002, "clip_ratio_high": 0.001},
    ),
    "sapo": ({"name": "sapo"}, "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": (
        {"name": "gmpo", "clip_low": 0.001, "clip_high": 0.002},
        "geo_mean",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.001, "clip_ratio_high": 0.002},
    ),
}
BY_A_CONSTANT = ("cispo", "dppo")  # their values here have log r where verl's have log pi


def packed_loss(data: Arrays, settings: Mapping[str, Any]) -> Run:
    """gspo_hpc's loss of an algorithm with these settings on packed tokens, and its gradient in the log-probs.

    `reference` [T] in the data are the log-probs of the KL term, if there is one, `selected` [T] the tokens that have a
    policy term, and `entropies` [T] those of a bonus, whose gradient in the log-probs counts as 1.
    """
    import torch

    from gspo_hpc.algorithms.loss import policy_loss
    from gspo_hpc.algorithms.objective import BatchSize, resolve
    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.ops.batch import PackedBatch

    lengths = data["lengths"]
    count, total = len(lengths), int(lengths.sum())
    logprobs = torch.from_numpy(data["logprobs"]).requires_grad_()
    nothing = torch.zeros(total, dtype=torch.int64)  # the loss does not look at what the tokens are
    places = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    batch = PackedBatch(
        tokens=nothing,
        positions=torch.from_numpy(places),
        segments=torch.zeros(EMPTY, dtype=torch.int32),
        head_index=torch.arange(total),
        targets=nothing,
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        seq_ids=torch.from_numpy(np.repeat(np.arange(count), lengths)),
        loss_mask=torch.ones(total, dtype=torch.bool),
        advantages=torch.from_numpy(data["advantages"]),
        rollout_logprobs=torch.from_numpy(data["rollout"]),
        old_logprobs=torch.from_numpy(data["old"]),
        reference_logprobs=torch.from_numpy(data["reference"]) if "reference" in data else None,
        selected=torch.from_numpy(data["selected"]) if "selected" in data else None,
        keys=tuple((row, 0) for row in range(count)),
    )
    objective = resolve(from_dict({"algorithm": dict(settings)}).algorithm)
    denominator = float(objective.denominator(BatchSize(count, total, count, int(data["padded"]))))
    entropies = torch.from_numpy(data["entropies"]) if "entropies" in data else None

    def run() -> Mapping[str, Any]:
        logprobs.grad = None
        entropy = None if entropies is None else entropies + logprobs - logprobs.detach()
        loss = policy_loss(logprobs, batch, objective, denominator=denominator, entropy=entropy).loss
        loss.backward()
        return {"loss": loss.detach(), "grad": logprobs.grad}

    return run


def ours_loss(data: Arrays, name: str = "gspo") -> Run:
    """gspo_hpc, on packed tokens."""
    run = packed_loss(data, OBJECTIVES[name][0])
    return lambda: {key: value for key, value in run().items() if key == "grad" or name not in BY_A_CONSTANT}


def verl_loss(data: Arrays, name: str = "gspo") -> Run:
    """Verl's function of the policy loss, on tensors padded to [B, L]."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    _, mode, mean, settings = OBJECTIVES[name]
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **settings)
    function = get_policy_loss_fn(mode)
    mask = np.arange(int(data["padded"]))[None, :] < data["lengths"][:, None]
    logprobs, old = np.zeros((2, *mask.shape), np.float32)
    logprobs[mask], old[mask] = data["logprobs"], data["old"]
    current, before = torch.from_numpy(logprobs).requires_grad_(), torch.from_numpy(old)
    where = torch.from_numpy(mask)
    response_mask = where.to(torch.int64)
    advantages = (torch.from_numpy(data["advantages"]).unsqueeze(-1) * response_mask).contiguous()

    def run() -> Mapping[str, Any]:
        current.grad = None
        loss, _ = function(before, current, advantages, response_mask, mean, config)
        loss.backward()
        assert current.grad is not None
        return {"loss": loss.detach(), "grad": current.grad}

    def packed() -> Mapping[str, Any]:
        result = run()
        return ({} if name in BY_A_CONSTANT else {"loss": result["loss"]}) | {
            "grad": _Later(lambda: result["grad"][where])
        }

    return packed


# ---- packing samples of `lengths` [B] tokens under a budget of `budget` () tokens ----


def ours_packing(data: Arrays) -> Run:
    """gspo_hpc, without shared prompts: every sample computes exactly its length."""
    from gspo_hpc.data.packing import Sample, pack

    samples = [Sample(group, 0, 1, int(length)) for group, length in enumerate(data["lengths"])]
    budget = int(data["budget"])

    def run() -> Mapping[str, Any]:
        found = pack(samples, dp_size=1, rank=0, micro_batch_size=None, micro_batch_tokens=budget, share_prompts=False)
        batches = found.batches
        return _Later.bins([[sample.slot for sample in batch] for batch in batches], data["lengths"])

    return run


def verl_packing(data: Arrays) -> Run:
    """Verl's rearrange_micro_batches on nested token ids, as its engines call it."""
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    rows = [torch.zeros(int(length), dtype=torch.int64) for length in data["lengths"]]
    batch = TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[len(rows)])
    budget = int(data["budget"])

    def run() -> Mapping[str, Any]:
        _, indices = rearrange_micro_batches(batch, budget)
        return _Later.bins(indices, data["lengths"])

    return run


# ---- what the room `system` does by hand: a file of `bytes` [N] is written; an update of `x` [T, H] ----


class _Medians(dict[str, list[float]]):
    """Costs of a run, by kind."""

    def add(self, **costs: float) -> dict[str, float]:
        """Add the costs of one run; the medians over all runs."""
        for name, cost in costs.items():
            self.setdefault(name, []).append(cost)
        return {name: statistics.median(values) for name, values in self.items()}


def _file(data: Arrays, write: Callable[[Path, memoryview], str]) -> Run:
    """One run: a file written, hashed and synced. Its hash; medians of CPU seconds and of MiB left in the cache."""
    content, costs = data["bytes"].data, _Medians()

    def run() -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory(dir=os.environ.get("GSPO_HPC_BENCH_DISK")) as folder:
            path, began = Path(folder) / "file", time.process_time()
            digest = write(path, content)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            cpu = time.process_time() - began
            cached = _cached_bytes(descriptor, len(content)) / 2**20
            os.close(descriptor)
        return {"sha256": np.frombuffer(bytes.fromhex(digest), np.uint8)} | costs.add(cpu=cpu, cached=cached)

    return run


def _cached_bytes(descriptor: int, size: int) -> int:
    """Bytes of a file that are in the page cache, by mincore(2)."""
    pages = -(-size // mmap.PAGESIZE)
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        start, flags = ctypes.c_char.from_buffer(view), (ctypes.c_ubyte * pages)()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
        del start
    assert not failed
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def ours_direct(data: Arrays) -> Run:
    """gspo_hpc: O_DIRECT, hashed on the way."""
    from gspo_hpc.system import direct_io

    def write(path: Path, content: memoryview) -> str:
        with direct_io.Writer(path) as file:
            for start in range(0, len(content), PIECE):
                file.write(content[start : start + PIECE])
        assert file.entry is not None
        return file.entry["sha256"]

    return _file(data, write)


def ours_cached(data: Arrays) -> Run:
    """The same through the page cache."""

    def write(path: Path, content: memoryview) -> str:
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for start in range(0, len(content), PIECE):
                digest.update(content[start : start + PIECE])
                file.write(content[start : start + PIECE])
        return digest.hexdigest()

    return _file(data, write)


def ours_cached_read(data: Arrays) -> Run:
    """Through the page cache, and hashed from the file."""

    def write(path: Path, content: memoryview) -> str:
        with path.open("wb") as file:
            for start in range(0, len(content), PIECE):
                file.write(content[start : start + PIECE])
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return _file(data, write)


IMPLEMENTATIONS: dict[str, Callable[[Arrays], Run]] = {
    function.__name__: function
    for function in (
        ours_logprobs,
        ours_logprobs_entropy,
        trl_logits,
        trl_chunked,
        verl_logits,
        verl_fused,
        ours_packing,
        verl_packing,
        ours_direct,
        ours_cached,
        ours_cached_read,
    )
}
for _name in OBJECTIVES:
    IMPLEMENTATIONS |= {f"ours_loss_{_name}": partial(ours_loss, name=_name)}
    IMPLEMENTATIONS |= {f"verl_loss_{_name}": partial(verl_loss, name=_name)}


# ---- the measuring process ----


class _Later:
    """A result that still has to be put in order, outside of what is timed."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute

    @classmethod
    def bins(cls, bins: list[list[int]], lengths: npt.NDArray[Any]) -> Mapping[str, _Later]:
        """Tokens of every bin, and which samples are in any, in order."""
        return {
            "bins": cls(lambda: np.array([int(lengths[list(members)].sum()) for members in bins])),
            "samples": cls(lambda: np.sort(np.concatenate([np.array(members) for members in bins]))),
        }


def load(path: str) -> Arrays:
    """Every array of an .npz file; pickled ones are refused."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def save(path: str, results: Mapping[str, Any]) -> None:
    """The results of a run as an .npz file."""
    values = {name: value.compute() if isinstance(value, _Later) else value for name, value in results.items()}
    np.savez(path, allow_pickle=False, **{name: np.asarray(value) for name, value in values.items()})


def serve() -> None:
    """Answer {"name", "input", "small", "output", "processor"} with {"seconds"}, until stdin ends.

    The first request for a name also runs it on `small`, not timed; `output` (or null) is where the results go.
    `processor`: seconds of this process on the processor.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for answers; what libraries print goes to stderr
    ready: dict[tuple[str, str], Run] = {}
    for line in sys.stdin:
        request = json.loads(line)
        key = request["name"], request["input"]
        if key not in ready:
            IMPLEMENTATIONS[key[0]](load(request["small"]))()
            ready = {key: IMPLEMENTATIONS[key[0]](load(key[1]))} | {k: r for k, r in ready.items() if k[1] == key[1]}
        clock = time.process_time if request["processor"] else time.perf_counter
        began = clock()
        results = ready[key]()
        seconds = clock() - began
        if request["output"]:
            save(request["output"], results)
        del results
        answers.write(json.dumps({"seconds": seconds}) + "\n")
        answers.flush()


def peak(name: str, data: str, small: str) -> float:
    """MiB by which the resident memory of this process peaks above what it is before one run: the results count."""
    IMPLEMENTATIONS[name](load(small))()
    run = IMPLEMENTATIONS[name](load(data))
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    results = run()
    most = _resident("VmHWM")
    del results
    return most - before


def _resident(key: str) -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    assert found, key
    return int(found[1]) / 1024


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        command, *arguments = sys.argv[1:]
        assert command == "peak", sys.argv
        print(peak(*arguments))
