"""Bring-up of torch.distributed and Megatron's process groups, and the few collectives that the loop needs.

Floor 3. A rank learns who it is from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; whoever starts it (the
local launcher, srun, a test) sets them. Objects travel as bytes, never as pickles.
"""

from __future__ import annotations

import datetime
import gc
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from gspo_hpc import heap
from gspo_hpc.config import Config
from gspo_hpc.control import Client, mark

_MEETING_SECONDS = 60.0  # that ranks which are up wait for rank 0 to say where to meet


@dataclass(frozen=True)
class Ranks:
    """Where this process sits. Sizes and ranks are those of Megatron's groups."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    ep_size: int

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp_rank == self.pp_size - 1


def start(config: Config, timeout_minutes: float = 30.0, control: Client | None = None) -> Ranks:
    """Join the job: default process group, Megatron's groups, the device of this rank.

    With `control` the ranks meet where rank 0 found a free port, else at MASTER_ADDR and MASTER_PORT.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    cpu = config.cluster.platform == "cpu"
    if cpu:
        from gspo_hpc import cpu as cpu_platform

        cpu_platform.install()
        cpu_platform.share_groups = not config.parallel.overlap_grad_reduce
        heap.keep_freed_memory()
        device = torch.device("cpu")
    else:
        for name, value in cuda_environment(config).items():
            os.environ.setdefault(name, value)  # before CUDA reads it
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            backend="gloo" if cpu else "nccl",
            **_meeting(control),
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=None if cpu else device,
        )
    mark("joined")
    # No dropout, and every weight is loaded: nothing in the model draws numbers, and Megatron need keep no states.
    initialize_rng_tracker(inference_rng_tracker=True)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=int(timeout_minutes),
        create_gloo_process_groups=False,
    )
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def cuda_environment(config: Config) -> dict[str, str]:
    """What CUDA and NCCL are told for this layout; what the user has set goes before it."""
    parallel = config.parallel
    splits_layers = parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1
    return {
        # With one queue, collectives between the products of a layer begin before the products that they run beside.
        **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if splits_layers else {}),
        # Memory that engines put to sleep must not be held by NCCL; vLLM tells its own processes the same.
        "NCCL_CUMEM_ENABLE": "0",
    }


def _meeting(control: Client | None) -> dict[str, Any]:
    """Where ranks meet: a store on a port that the kernel gave to rank 0 and that nobody else can take meanwhile."""
    if control is None:
        return {}
    world_size, listener = int(os.environ["WORLD_SIZE"]), None
    if control.rank == 0:
        with socket.create_server((control.host, 0), backlog=min(world_size, 4096)) as free:
            host, port, listener = control.host, free.getsockname()[1], free.detach()
        control.publish_store(port)
    else:
        host, port = control.wait_for_store(_MEETING_SECONDS)
    # The store owns the listener from here on.
    store = dist.TCPStore(
        host, port, world_size, listener is not None, wait_for_workers=False, master_listen_fd=listener
    )
    return {"store": store, "rank": control.rank, "world_size": world_size}


def drop_layout() -> None:
    """Give up all groups but the default one; another :func:`start` may build others in the same job."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):  # Megatron only forgets them: their threads would go on
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def stop() -> None:
    """Leave the job."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def store() -> dist.Store:
    """The key-value store of the default group: counters and flags that all ranks see."""
    return dist.distributed_c10d._get_default_store()


def gather_bytes(payload: bytes, device: torch.device) -> list[bytes]:
    """Every rank's payload, on every rank, in rank order."""
    world = dist.get_world_size()
    if world == 1:
        return [payload]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    lengths = [int(size.item()) for size in sizes]
    longest = max(lengths)
    if longest == 0:
        return [b""] * world
    mine = torch.zeros(longest, dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(received, mine.to(device))
    return [received[rank][: lengths[rank]].cpu().numpy().tobytes() if lengths[rank] else b"" for rank in range(world)]


def broadcast_bytes(payload: bytes, device: torch.device, source: int = 0) -> bytes:
    """The payload of rank `source`, on every rank; the others' argument is ignored."""
    if dist.get_world_size() == 1:
        return payload
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    buffer = torch.zeros(max(1, int(size.item())), dtype=torch.uint8, device=device)
    if dist.get_rank() == source and payload:
        buffer[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, source)
    return buffer[: int(size.item())].cpu().numpy().tobytes()


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is up on at least one rank: how all ranks agree to stop."""
    if dist.get_world_size() == 1:
        return flag
    value = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def barrier(device: torch.device) -> None:
    """All ranks have come this far."""
    any_rank(False, device)
