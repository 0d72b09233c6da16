"""Start-up of torch.distributed and of Megatron's process groups, and the few collectives that the loop needs.

A rank reads its place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which the process that starts it
(the local launcher, srun, a test) sets. Objects travel as bytes, never as pickles.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from gspo_hpc.config.derived import deterministic_kernels, role_of
from gspo_hpc.config.schema import Config
from gspo_hpc.exchange.exchange import Exchange, Replicas
from gspo_hpc.exchange.generator_starts import own_keys
from gspo_hpc.exchange.transport import Transport, gather_unordered
from gspo_hpc.ops.weight_parts import Fingerprint
from gspo_hpc.policy import compat
from gspo_hpc.policy.platform import deterministic_collectives
from gspo_hpc.system import malloc
from gspo_hpc.system.environment import STORE, node_name
from gspo_hpc.system.progress import mark, waiting

# How long a rank waits for others in a collective. In a job that is watched, faults.heartbeat_timeout and
# faults.hang_timeout end it if a rank hangs. A rank that works may take as long as it needs: rank 0, while it tokenizes
# large data, or one that reads weights from a slow disk. So this limit is longer than any of that.
WATCHED_MINUTES = 7 * 24 * 60.0
UNWATCHED_MINUTES = 45.0  # longer than an engine may take to start, for which the other ranks wait

_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it torch refuses deterministic matrix products
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
    # What is not added in the order of ranks (see deterministic_collectives) is at least added alike on the same nodes.
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}


class Meeting(Protocol):
    """A means by which ranks learn where the job's store listens: the connection to who watches them, or a folder."""

    rank: int

    @property
    def host(self) -> str:
        """The address of this rank's node."""

    def publish_store(self, port: int, secret: str) -> None:
        """Tell the others, as rank 0, on which port the store listens, and with what the keys of this job begin."""

    def wait_for_store(self, timeout: float) -> tuple[str, int, str]:
        """Return host and port of the store, and with what the keys of this job begin."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process in the job. Sizes and ranks are those of Megatron's groups."""

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
    timeout: datetime.timedelta = datetime.timedelta(minutes=UNWATCHED_MINUTES)  # of every collective
    exchange: Exchange = field(default_factory=Exchange)  # with the ranks that hold or compute the same samples
    job_store: dist.Store | None = None  # of the ranks that train and those that generate, in server mode

    @property
    def is_last_stage(self) -> bool:
        """True on ranks that hold the output layer."""
        return self.pp_rank == self.pp_size - 1


def start(config: Config, timeout_minutes: float = UNWATCHED_MINUTES, control: Meeting | None = None) -> Ranks:
    """Join the job: set this rank's device, make the default process group and Megatron's, and return its place.

    With `control` the ranks meet at a free port that rank 0 finds, else at MASTER_ADDR and MASTER_PORT. A rank waits
    for others in a collective of any group for `timeout_minutes` at most. Raises ValueError if it has no GPU and needs
    one.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    cpu = config.cluster.platform == "cpu"
    if cpu:
        from gspo_hpc.policy.platform import megatron_on_cpu as cpu_platform

        cpu_platform.install()
        cpu_platform.share_groups = not config.parallel.overlap_grad_reduce
        malloc.keep_freed_memory()
        device = torch.device("cpu")
    else:
        if deterministic_kernels(config):
            deterministic_collectives.install()
        device = _take_gpu(config, local_rank)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    job_store = _join(config, control, timeout, "gloo" if cpu else "nccl", None if cpu else device)
    # No dropout, and every weight is loaded: the model draws no random numbers, so Megatron need not keep their states.
    initialize_rng_tracker(inference_rng_tracker=True)
    place = _Place(local_rank, device, timeout, job_store)
    ranks = _divided(config, place)
    in_world = cpu or ranks.world_size == 1
    transport = Transport(dist.group.WORLD if in_world else dist.new_group(backend="gloo", timeout=timeout))
    return replace(ranks, exchange=_exchange(ranks, transport))


class _Place(NamedTuple):
    """The place of a rank, as far as the layout has no part in it."""

    local_rank: int
    device: torch.device
    timeout: datetime.timedelta
    job_store: dist.Store | None


def _divided(config: Config, place: _Place) -> Ranks:
    """Make Megatron's groups for the layout of a config, and return this rank's place in it. Collective."""
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=int(place.timeout.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=place.local_rank,
        device=place.device,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        timeout=place.timeout,
        job_store=place.job_store,
    )


class SecondLayout:
    """Another layout of the same ranks, for a model that takes turns with the trainer's."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Make its groups beside those of the trainer, which stay Megatron's. Collective."""
        first = compat.change_layout(None)
        try:
            own = _divided(config, _Place(ranks.local_rank, ranks.device, ranks.timeout, ranks.job_store))
        finally:
            self._groups = compat.change_layout(first)
        self.ranks = replace(own, exchange=_exchange(own, ranks.exchange.transport))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Have Megatron compute in this layout inside the block."""
        first = compat.change_layout(self._groups)
        try:
            yield
        finally:
            self._groups = compat.change_layout(first)


def start_generating(config: Config, timeout_minutes: float, control: Meeting | None) -> Ranks:
    """Join the job as a rank that only generates: return its place among those that do, as :func:`start` does.

    These ranks talk from CPU to CPU, and know nothing of Megatron. The device is that of their collectives.
    """
    if config.cluster.platform == "cuda":
        _take_gpu(config, int(os.environ["LOCAL_RANK"]))
    else:
        malloc.keep_freed_memory()
    timeout = datetime.timedelta(minutes=timeout_minutes)
    job_store = _join(config, control, timeout, "gloo", None)
    role = role_of(config, int(os.environ["RANK"]))
    device = torch.device("cpu")
    sizes = (role.index, role.count, *(0, 1) * 3, 1)  # a data-parallel rank of its own
    ranks = Ranks(role.index, role.count, role.local_index, device, *sizes, timeout=timeout, job_store=job_store)
    transport = Transport(dist.group.WORLD if role.count > 1 else None)
    return replace(ranks, exchange=Exchange(transport))


def _take_gpu(config: Config, local_rank: int) -> torch.device:
    """Set the variables of CUDA and NCCL, and this rank's device. Raises ValueError if there is no GPU for it."""
    for name, value in cuda_environment(config).items():
        os.environ.setdefault(name, value)  # before CUDA reads it
    # Groups in host memory connect a rank to those that it talks to, not to all.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if (seen := torch.cuda.device_count()) <= local_rank:
        raise ValueError(
            f"cluster.platform is cuda, but torch {torch.__version__} sees {seen} GPUs on {node_name()}, and this rank "
            f"needs GPU {local_rank}: check the driver, CUDA_VISIBLE_DEVICES, and that torch is built for CUDA, or set "
            "cluster.platform=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _join(
    config: Config, control: Meeting | None, timeout: datetime.timedelta, backend: str, device: torch.device | None
) -> dist.Store | None:
    """Make the default process group: in server mode that of the ranks with this one's role.

    Return the store in which ranks of both roles find each other; None where all ranks have one role.
    """
    server = config.rollout.mode == "server"
    job_store = None
    if not dist.is_initialized():
        with waiting():  # for ranks that start later, or import from a slower disk
            joined = _rendezvous(control, timeout, always=server)
            if server:
                role, job_store = role_of(config, joined["rank"]), own_keys(joined["store"])
                store = dist.PrefixStore("generate" if role.generates else "train", job_store)
                joined = {"store": store, "rank": role.index, "world_size": role.count}
            dist.init_process_group(backend=backend, **joined, timeout=timeout, device_id=device)
    mark("joined")
    return job_store


def _exchange(ranks: Ranks, transport: Transport) -> Exchange:
    """Return the exchange of samples between all ranks, which takes place in host memory. Collective."""
    if ranks.world_size == 1:
        return Exchange()
    leads = ranks.tp_rank == ranks.pp_rank == ranks.cp_rank == 0
    mine = json.dumps([ranks.rank, ranks.dp_rank, leads]).encode()
    places = sorted(json.loads(one) for one in gather_unordered(transport, mine))
    leaders = {slice_: rank for rank, slice_, first in places if first}
    members = [rank for rank, slice_, _ in places if slice_ == ranks.dp_rank and rank != leaders[slice_]]
    own = Replicas(tuple(leaders[n] for n in range(ranks.dp_size)), ranks.dp_rank, (leaders[ranks.dp_rank], *members))
    return Exchange(transport, own)


def cuda_environment(config: Config) -> dict[str, str]:
    """Return the environment of CUDA for this layout; variables that the user has set are kept.

    NCCL keeps its defaults: engines have groups of their own, so nothing here has to agree with vLLM's, and without
    its cuMem allocations NCCL uses neither NVLink SHARP nor the NVLinks between the nodes of a GB200.
    """
    layouts = {config.parallel, config.parallel.of_teacher()}
    splits_layers = any(one.tensor_model_parallel_size > 1 or one.context_parallel_size > 1 for one in layouts)
    # With one queue, a layer's collectives start before the matrix products that they overlap with.
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if splits_layers else {}
    return found | (_DETERMINISTIC if deterministic_kernels(config) else {})


def _rendezvous(control: Meeting | None, timeout: datetime.timedelta, *, always: bool = False) -> dict[str, Any]:
    """Return where ranks meet: a store on a port that the kernel gives to rank 0 and that nobody can take meanwhile.

    How long a rank may take to come is up to those who watch them all; `timeout` is for a job that nobody watches. All
    keys begin with a random text that ranks learn from `control`: a process of another job that finds the port, because
    it was its own before, meets none of ours. This keeps nobody out who asks the store for its keys.
    """
    if control is None and not always and not os.environ.get("MASTER_ADDR", "").startswith("127."):
        return {}
    world_size, listener = int(os.environ["WORLD_SIZE"]), None
    if control is None:  # torch's own store would listen on every address of this machine
        rank, secret = int(os.environ["RANK"]), ""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0 and (inherited := os.environ.pop(STORE, None)) is not None:
            listener = int(inherited)
            os.set_inheritable(listener, False)
        elif rank == 0:
            port, listener = _listen(host, port, world_size)
    elif (rank := control.rank) == 0:
        host, secret = control.host, secrets.token_hex(16)
        port, listener = _listen(host, 0, world_size)
        control.publish_store(port, secret)
    else:
        host, port, secret = control.wait_for_store(timeout.total_seconds())
    store = dist.TCPStore(  # which owns the listener from here on
        host, port, world_size, listener is not None, timeout, wait_for_workers=False, master_listen_fd=listener
    )
    return {"store": dist.PrefixStore(secret, store), "rank": rank, "world_size": world_size}


def _listen(host: str, port: int, world_size: int) -> tuple[int, int]:
    """Listen on one address only; return the port, which the kernel chooses for 0, and the socket's descriptor."""
    with socket.create_server((host, port), backlog=min(world_size, 4096)) as listener:
        return listener.getsockname()[1], listener.detach()


def use_groups(ranks: Ranks) -> None:
    """Sum over every group of this rank: backends connect only then. Collective; RuntimeError for a wrong sum."""
    groups = {
        "world": dist.group.WORLD,
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert tensor": parallel_state.get_expert_tensor_parallel_group(),
        "expert data": parallel_state.get_expert_data_parallel_group(),
    }
    for name, group in groups.items():
        total = torch.ones(1, device=ranks.device)
        dist.all_reduce(total, group=group)
        if int(total.item()) != dist.get_world_size(group):
            raise RuntimeError(f"a sum of ones over {dist.get_world_size(group)} ranks of {name} is {total.item():g}")


def expert_place() -> dict[str, int]:
    """Return this rank's place among those that share expert layers: in EP, ETP and the data parallelism of experts."""
    return {
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_dp": parallel_state.get_expert_data_parallel_rank(),
    }


def drop_layout() -> None:
    """Destroy all groups but the default one; another :func:`start` may build new ones in the same job."""
    parallel_state.destroy_model_parallel()
    for group in compat.process_groups():  # Megatron only forgets them: their threads would go on
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def stop() -> None:
    """Leave the job: destroy all process groups."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def store() -> dist.Store:
    """Return the key-value store of the default group: counters and flags that all ranks see."""
    return compat.default_store()


def broadcast_bytes(payload: bytes, device: torch.device, source: int = 0) -> bytes:
    """Return the payload of rank `source` on every rank; the others' argument is ignored. Collective."""
    if dist.get_world_size() == 1:
        return payload
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    buffer = torch.zeros(max(1, int(size.item())), dtype=torch.uint8, device=device)
    if dist.get_rank() == source and payload:
        buffer[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, source)
    return buffer[: int(size.item())].cpu().numpy().tobytes()


def shared_fingerprint(found: Fingerprint, ranks: Ranks) -> str:
    """Return, on every rank, the text of a fingerprint to which all ranks have added the same parts. Collective."""
    values = found.values()
    if ranks.world_size > 1:
        dist.reduce(values, 0)
    text = found.text(values) if ranks.rank == 0 else ""
    return broadcast_bytes(text.encode(), ranks.device).decode()


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return True on all ranks if `flag` is set on at least one: how all ranks agree to stop. Collective."""
    if dist.get_world_size() == 1:
        return flag
    value = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each of these values over all ranks. Collective."""
    if dist.get_world_size() == 1:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    result: list[float] = found.tolist()
    return result


def barrier(device: torch.device) -> None:
    """Wait until all ranks have called it."""
    any_rank(False, device)
