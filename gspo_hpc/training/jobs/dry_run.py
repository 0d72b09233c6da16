"""The job that only joins the process groups of a run: it shows every rank's place, and loads nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo_hpc.config import loader
from gspo_hpc.config.derived import role_of
from gspo_hpc.config.schema import Config
from gspo_hpc.exchange.transport import gather_unordered
from gspo_hpc.exchange.weight_broadcast import WeightBroadcast
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.policy.process_groups import (
    UNWATCHED_MINUTES,
    Ranks,
    expert_place,
    start,
    start_generating,
    stop,
    use_groups,
)
from gspo_hpc.system import environment
from gspo_hpc.system.files import read_json, write_json
from gspo_hpc.training.serving.connection import weight_broadcast

PLACES = "ranks.json"
_BYTES = 64  # that are sent in the group of weights


class FolderMeeting:
    """A folder that all ranks see, in which rank 0 writes where the store listens."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "store.json"
        self.rank, self.host = int(os.environ["RANK"]), _own_address()

    def publish_store(self, port: int, secret: str) -> None:
        """See policy.process_groups.Meeting."""
        write_json(self._path, {"host": self.host, "port": port, "secret": secret})

    def wait_for_store(self, timeout: float) -> tuple[str, int, str]:
        """See policy.process_groups.Meeting. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self._path.name not in os.listdir(self._path.parent):  # NFS caches that a file did not exist
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not write {self._path} within {timeout:.0f} s")
            time.sleep(0.1)
        found = read_json(self._path)
        return str(found["host"]), int(found["port"]), str(found["secret"])


def _own_address() -> str:
    """Return an address at which other nodes reach this one: Debian's own name of a machine is at 127.0.1.1."""
    found = ["127.0.0.1"]
    for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()):
        with contextlib.suppress(OSError):
            found += [str(one[4][0]) for one in socket.getaddrinfo(name, None, socket.AF_INET)] if name else []
    return next((address for address in found if not address.startswith("127.")), found[-1])


def dry_run(folder: Path) -> None:
    """Join the groups of `folder`/config.yaml, use each of them once, and write all places as `folder`/ranks.json."""
    config = loader.load(folder / "config.yaml")
    meeting = None if "MASTER_ADDR" in os.environ else FolderMeeting(folder)
    if role_of(config, int(os.environ["RANK"])).generates:
        _generator(config, start_generating(config, UNWATCHED_MINUTES, meeting))
        return
    ranks = start(config, control=meeting)
    use_groups(ranks)
    weights = None if ranks.job_store is None or ranks.rank else _weights_group(config, ranks, 0)
    found = gather_unordered(ranks.exchange.transport, json.dumps(_place(config, ranks)).encode())
    if ranks.rank == 0:
        found += [] if ranks.job_store is None else _generators(config, ranks.job_store)
        places = sorted((json.loads(one) for one in found), key=lambda place: place["rank"])
        write_json(folder / PLACES, places)
    del weights  # which would break off what the others still receive
    stop()  # but not after an error: it could wait for ever


def _weights_group(config: Config, ranks: Ranks, member: int) -> WeightBroadcast:
    """Return the group in which weights travel from training rank 0, which has sent a few bytes in it. Collective."""
    members = 1 + role_of(config, config.num_ranks - 1).count
    group = weight_broadcast(config, ranks, member, members)
    place = torch.full([_BYTES], int(member == 0), dtype=torch.uint8, device=config.cluster.platform)
    group.broadcast(place)
    if int(place.sum()) != _BYTES:
        raise RuntimeError(f"rank {os.environ['RANK']} has other bytes of weights than training rank 0 sent")
    return group


def _generator(config: Config, ranks: Ranks) -> None:
    """Join the group of weights, and tell rank 0 the place: it is in no group of the ranks that train."""
    assert ranks.job_store is not None
    weights = _weights_group(config, ranks, ranks.rank + 1)
    number = os.environ["RANK"]
    place = {
        "rank": int(number),
        "node": environment.node_name(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        **dict.fromkeys(("tp", "pp", "cp", "dp", "ep", "etp", "expert_dp", "parameters")),
    }
    ranks.job_store.set(f"dry_run/place/{number}", json.dumps(place))
    ranks.job_store.wait(["dry_run/read"])
    del weights
    ranks.job_store.add("dry_run/left", 1)
    stop()


def _generators(config: Config, job_store: dist.Store) -> list[bytes]:
    """Return the places of the ranks that only generate; on return they no longer need the store of this rank."""
    numbers = [number for number in range(config.num_ranks) if role_of(config, number).generates]
    found = [job_store.get(f"dry_run/place/{number}") for number in numbers]
    job_store.set("dry_run/read", "")
    while job_store.add("dry_run/left", 0) < len(numbers):
        time.sleep(0.01)
    return found


def _place(config: Config, ranks: Ranks) -> dict[str, Any]:
    arch = architecture.find(config)
    held = None if arch is None else parameters.of_rank(arch, config, ranks.pp_rank)
    return {
        "rank": ranks.rank,
        "node": environment.node_name(),
        "local_rank": ranks.local_rank,
        "tp": ranks.tp_rank,
        "pp": ranks.pp_rank,
        "cp": ranks.cp_rank,
        "dp": ranks.dp_rank,
        **expert_place(),
        "parameters": None if held is None else held.dense + held.experts,
    }
