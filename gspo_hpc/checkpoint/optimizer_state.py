"""The optimizer's state by the names of parameters, so that what one layout has saved loads in any other.

Megatron-Core's optimizers save themselves in a form that depends on how many there are (experts on ranks of
their own have another) and on whether data-parallel ranks share the state. Here all of them give the same: the moments
of every parameter, sharded like the parameter itself; its fp32 master where it has one; and the number of steps.
Rates and decay are not saved with it: they come from the configuration and its schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gspo_hpc.checkpoint import shared_optimizer
from gspo_hpc.checkpoint.assembly import Assembly

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "fp32_param"

State = dict[str, Any]


def sharded(optimizer: Any, model: State, assembly: Assembly | None = None) -> State:
    """Return the state to save, or to load into, for the sharded state `model` of all weights.

    To save it, an `assembly` puts together what data-parallel ranks share. Without one there is a tensor for
    everything, to load into.
    """
    tensors = {}
    for number, part in enumerate(optimizer.chained_optimizers):
        _begin(part)
        if isinstance(part, DistributedOptimizer):
            tensors[str(number)] = _owned(part, model, assembly)
        else:
            tensors[str(number)] = {
                str(index): {
                    key: make_sharded_optimizer_tensor(weight, tensor, f"optimizer.state.{key}")
                    for key, tensor in _tensors(part, weight.data).items()
                }
                for index, weight in enumerate(_weights(part, model))
            }
    scalers = [part.grad_scaler for part in optimizer.chained_optimizers if getattr(part, "grad_scaler", None)]
    return {
        "step": max(_steps(part) for part in optimizer.chained_optimizers),
        "scaler": scalers[0].state_dict() if scalers else None,
        "tensors": tensors,
    }


@torch.no_grad()
def load(optimizer: Any, model: State, state: State) -> None:
    """Take over what was loaded into the state of :func:`sharded`, after the weights."""
    for number, part in enumerate(optimizer.chained_optimizers):
        entries = state["tensors"].get(str(number), {})  # nothing where this rank owns nothing
        if isinstance(part, DistributedOptimizer):
            _load_distributed(part, {int(index): dict(tensors) for index, tensors in entries.items()})
        else:
            for index, weight in enumerate(_weights(part, model)):
                for key, tensor in _tensors(part, weight.data).items():
                    tensor.copy_(entries[str(index)][key])
        _set_steps(part, int(state["step"]))
        if getattr(part, "grad_scaler", None) and state["scaler"]:
            part.grad_scaler.load_state_dict(state["scaler"])


def _owned(part: Any, model: State, assembly: Assembly | None) -> dict[str, dict[str, ShardedBase]]:
    """Return the entries of the parameters that this rank owns, by index and key."""
    weights = {id(base.data): base for base in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    every, rank = shared_optimizer.shares(part), part.data_parallel_group.rank()
    for share in every:  # before anybody waits for anybody
        weight = weights[id(share.parameter)]
        if weight.replica_id[-1] != rank:
            raise RuntimeError(f"{weight.key} is replica {weight.replica_id} on data-parallel rank {rank}")
    values: dict[int, dict[str, torch.Tensor]] = {}
    if assembly is not None:
        # Copies of a parameter on other ranks than those of this group, of which one is saved.
        every = [share for share in every if not any(weights[id(share.parameter)].replica_id[:-1])]
        values = assembly.add(part, _keys(part), every)
    owned: dict[str, dict[str, ShardedBase]] = {}
    for share in every:
        if share.owner != rank:
            continue
        weight = weights[id(share.parameter)]
        entries = owned[str(share.index)] = {}
        for key in _keys(part):
            flat = torch.empty(share.parameter.numel()) if assembly is None else values[share.index][key]
            name = _MASTER if key == "param" else key
            # The only one of its data-parallel group that has the entry.
            first = replace(weight, replica_id=(*weight.replica_id[:-1], 0))
            entries[name] = make_sharded_optimizer_tensor(
                first, flat.view(share.parameter.shape), f"optimizer.state.{name}"
            )
    return owned


def _keys(part: Any) -> tuple[str, ...]:
    """Return the tensors of a parameter under Megatron's names: a 16-bit weight has a master in fp32."""
    return ("param", *MOMENTS) if part.config.bf16 or part.config.fp16 else MOMENTS


def _load_distributed(part: Any, entries: dict[int, dict[str, torch.Tensor]]) -> None:
    whole = {
        index: {"param" if name == _MASTER else name: tensor for name, tensor in tensors.items()}
        for index, tensors in entries.items()
    }
    shared_optimizer.scatter(part, _keys(part), whole)


def _weights(part: Any, model: State) -> Iterator[ShardedBase]:
    """Yield the sharded weights that this optimizer has, each once."""
    masters = {id(parameter) for group in part.optimizer.param_groups for parameter in group["params"]}
    seen: set[int] = set()
    for weight in nested_values(extract_sharded_tensors_and_factories(model)[0]):
        if id(_master(weight.data)) in masters and id(weight.data) not in seen:
            seen.add(id(weight.data))
            yield weight


def _master(weight: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master that the optimizer moves for a 16-bit weight, or the weight itself."""
    master = getattr(weight, "main_param", None)
    return weight if master is None else master


def _tensors(part: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    master = _master(weight)
    found = {key: part.optimizer.state[master][key] for key in MOMENTS}
    return found if master is weight else {_MASTER: master.detach(), **found}


def _begin(part: Any) -> None:
    """Give every parameter the state that it has before the first step, where it has none yet."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if not part.optimizer.state[parameter]:
                if hasattr(part.optimizer, "initialize_state"):  # Transformer Engine's and Apex's Adam
                    part.optimizer.initialize_state(parameter, False)
                    continue
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
                part.optimizer.state[parameter] = {"step": step, **moments}


def _steps(part: Any) -> int:
    counts = {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
    counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    return max(counts, default=0)


def _set_steps(part: Any, count: int) -> None:
    for state in part.optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)
    for group in part.optimizer.param_groups:
        if not any("step" in part.optimizer.state[parameter] for parameter in group["params"]):
            group["step"] = count
