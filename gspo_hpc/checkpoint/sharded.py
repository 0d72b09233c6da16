"""Save and load all that a resumed run needs: sharded by Megatron-Core, committed by ``gspo_hpc.runs.commit``.

A checkpoint directory holds ``megatron/`` (shards of model and optimizer, independent of the layout that wrote them,
with their index; where adapters are trained, of these alone, and the fingerprint of the model's own weights),
``rng-RANK.json`` (states of random generators), ``cursor.json`` (the position of the run), ``baseline.json`` (the gaps
of the first sync and update, which later ones are judged against) and ``rollout.jsonl`` (the groups of the rollout in
use, with what its later updates need). Nothing of it is unpickled but tensors, by a reader that admits nothing else.
All ranks call :func:`prepare` and :func:`load`;
``gspo_hpc.checkpoint.saver`` lets a thread write what was prepared.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.api import CheckpointException

from gspo_hpc.checkpoint import adapters, compat, optimizer_state
from gspo_hpc.checkpoint.assembly import Assembly, Planner
from gspo_hpc.ops.host_memory import HostMemory
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks, barrier
from gspo_hpc.system.files import Entry, plain_disk_full, read_json
from gspo_hpc.system.text import MALFORMED

REFERENCE = "reference."  # what the keys of a reference model's weights begin with


class Copies:
    """Host memory that holds a copy of what this rank saves, so that training can go on while it is written.

    It is kept from save to save, because allocating it takes longer than copying. On CUDA it is page-locked.
    """

    def __init__(self, *, background: bool = True) -> None:
        """Take `background`: whether training goes on meanwhile. Else nothing is copied."""
        self.background = background
        self._tensors: dict[tuple[str, tuple[int, ...], str], torch.Tensor] = {}
        self._host = HostMemory()
        self._locked = False

    def on(self, device: torch.device) -> None:
        """Begin a copy of a state that is on this device."""
        self._locked = device.type == "cuda"

    def place(self, name: str, elements: int) -> torch.Tensor:
        """Return memory [elements], float32, for a copy that the caller makes."""
        return self._memory((name, (0,), ""), torch.Size([elements]), torch.float32)

    def take(self, state: dict[str, list[ShardedBase]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Replace the data in `state`, Megatron's sharded state by key, by memory for copies of it.

        Returns pairs (copy, source) of tensors that are still to be copied. All other data is copied. What an assembly
        puts together has no data.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not self.background:
            return pairs
        for key, parts in state.items():
            for part in parts:
                if isinstance(part, ShardedTensor) and part.data.is_meta:
                    continue
                if isinstance(part, ShardedTensor):
                    name = (key, tuple(part.global_offset), str(part.flattened_range))
                    pairs.append((self._memory(name, part.data.shape, part.data.dtype), part.data))
                    part.data = pairs[-1][0]
                else:
                    part.data = copy.deepcopy(part.data)
        return pairs

    def _memory(self, name: tuple[str, tuple[int, ...], str], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        found = self._tensors.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = self._tensors[name] = self._host.empty(shape, dtype, locked=self._locked)
        return found


def _state(
    policy: Policy, reference: Sequence[torch.Tensor] | None = None, assembly: Assembly | None = None
) -> dict[str, Any]:
    model = _model_state(policy)
    optimizer = optimizer_state.sharded(policy.optimizer, model, assembly)
    state = {"model": model, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict(), "base": policy.base}
    state |= {"first_adapters": policy.first_adapters, "alpha": policy.config.adapter.alpha}  # of adapters
    return state if reference is None else state | {"reference": _reference_state(policy, reference)}


def prepare(
    policy: Policy,
    staging: Path,
    group: dist.ProcessGroup,
    copies: Copies,
    *,
    check: bool = True,
    reference: Sequence[torch.Tensor] | None = None,
) -> Callable[[], dict[str, Entry]]:
    """Begin a copy of this rank's part of the state, and return a function that writes it into the folder `staging`.

    The folder exists. Nothing is waited for: a GPU copies in a stream of its own, and in host memory the function does.
    Until then the policy lets nothing change its state: a step of the optimizer, for one, helps to copy, or its stream
    waits. Ranks that share an optimizer send each other its pieces, from the copies, while they write.
    All ranks call this and then the function, which returns what is in this rank's shards. The function may run in a
    thread beside training: its collectives are those of `group`, a gloo group of all ranks, and once it has returned on
    rank 0, all ranks have written. `check` verifies that all ranks together hold every piece of every parameter exactly
    once, which costs a gather and need not be done twice. `reference` are the weights of a reference model that does
    not stay that of the start, one for each of the policy's trained parameters and under the same rule as its state.
    Both raise OSError where the disk fails.
    """
    assembly = Assembly(group, copies.place if copies.background else None)

    def copy_state(state: dict[str, list[ShardedBase]]) -> None:
        assembly.find(state)
        policy.copy_state([*copies.take(state), *assembly.copies()])

    policy.restore()
    policy.settle()
    shards = staging / "megatron"
    written: dict[str, Entry] = {}
    if policy.ranks.rank == 0:
        shards.mkdir(mode=0o700, exist_ok=True)
    barrier(policy.ranks.device)
    with plain_disk_full(staging):
        copies.on(policy.ranks.device)
        write_shards = compat.prepare(
            _state(policy, reference, assembly),
            shards,
            group,
            written,
            copy=copy_state,
            planner=Planner(assembly),
            afterwards=assembly.rest,
            check=check,
        )
        state_copy = policy.state_copy
        (staging / f"rng-{policy.ranks.rank}.json").write_text(json.dumps(_rng_state(policy.ranks)), "utf-8")

    def write() -> dict[str, Entry]:
        state_copy.finish()
        with plain_disk_full(staging):
            try:
                write_shards()
            except CheckpointException as error:  # one error for all ranks, which holds the error of each
                raise next(
                    (cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), error
                ) from None
        return written

    return write


def load(policy: Policy, path: Path, reference: Sequence[torch.Tensor] | None = None) -> None:
    """Set model, optimizer, schedule and this rank's random generators to the state in the checkpoint `path`.

    `reference` is given where the checkpoint has the weights of a reference model, which are written into it. Where
    adapters are trained, the policy has its base, and the adapters that the run began with; ValueError if they are not
    those of the checkpoint's run.
    """
    loaded = compat.load(_state(policy, reference), path / "megatron")
    _load_model(policy, loaded["model"])
    adapters.refuse_other_base(loaded.get("base"), policy.base, str(policy.config.model.path))
    if "first_adapters" in loaded:  # not in a checkpoint of an earlier version
        adapters.refuse_other_start(loaded["first_adapters"], policy.first_adapters, str(policy.config.adapter.path))
    if reference is not None:
        with _swapped_in(policy, reference):
            _load_model(policy, loaded["reference"])
    optimizer_state.load(policy.optimizer, _model_state(policy), loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    mine = path / f"rng-{policy.ranks.rank}.json"
    if mine.exists():  # not where more ranks load than have saved
        try:
            _set_rng_state(read_json(mine), policy.ranks)
        except (RuntimeError, *MALFORMED) as error:  # torch's for a state of another length
            raise ValueError(f"{mine} cannot be read: {type(error).__name__}: {error}") from None


def load_weights(policy: Policy, path: Path) -> None:
    """Load only what is trained of the model, for export and evaluation; see :func:`load`."""
    loaded = compat.load({"model": _model_state(policy)}, path / "megatron")
    _load_model(policy, loaded["model"])
    adapters.refuse_other_base(loaded.get("base"), policy.base, str(policy.config.model.path))


def _model_state(policy: Policy) -> dict[str, Any]:
    if policy.has_adapters:
        return adapters.state(policy.chunks)
    return {str(number): chunk.sharded_state_dict() for number, chunk in enumerate(policy.chunks)}


@contextmanager
def _swapped_in(policy: Policy, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the policy's trained parameters be these tensors meanwhile, wherever they are."""
    parameters = list(policy.trained_parameters())
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
        yield
    finally:
        for parameter, mine in zip(parameters, own, strict=True):
            parameter.data = mine


def _reference_state(policy: Policy, weights: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return Megatron's sharded state of the model with other weights, under keys of its own."""
    with _swapped_in(policy, weights):
        state = _model_state(policy)
        for part in nested_values(state):
            if isinstance(part, ShardedBase) and isinstance(part.data, torch.nn.Parameter):
                part.data = part.data.detach()  # the parameter itself gets its own weights back
    add_prefix_for_sharding(state, REFERENCE)
    return state


def _load_model(policy: Policy, state: dict[str, Any]) -> None:
    if policy.has_adapters:
        adapters.load(policy.chunks, state)
        return
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(state[str(number)])


def _rng_state(ranks: Ranks) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if ranks.device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(ranks.device))
    return state


def _set_rng_state(state: dict[str, Any], ranks: Ranks) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if ranks.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), ranks.device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
