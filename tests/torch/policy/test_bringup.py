"""The groups that a job of many ranks makes on GPUs: each rank's calls, recorded without anybody to talk to.

A group of NCCL is made by all ranks together, so a rank that makes them in another order, with other members or with
another limit of time hangs the job, or is not noticed where gloo, which the CPU uses, forgives it. NCCL reads its
settings from the environment when the first group is made: what is set later, or left out, says nothing.

Costs the import of torch. Catches groups in another order, a limit of time that is not passed on, NVLink SHARP turned
off without reason or left on where sums must have an order, and settings of a user that are overwritten.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.policy import compat, process_groups
from gspo_hpc.policy.platform import deterministic_collectives, megatron_on_cpu

MINUTES = 7.0  # unlike every default


@dataclass(frozen=True)
class Group:
    """One call that makes a group."""

    ranks: tuple[int, ...]
    timeout: datetime.timedelta | None
    backend: str | None
    local: bool  # made by its members only
    options: Any = None  # of NCCL


@dataclass
class Joined:
    """One rank's calls."""

    options: dict[str, Any]  # of the default group
    device: int | None  # that was set before it
    groups: list[Group]
    place: process_groups.Ranks
    members: dict[str, list[int]]  # of the groups that this rank uses, by their names
    settings: list[dict[str, str]]  # of CUDA and NCCL in the environment: when the first group is made, and at the end
    ordered: bool  # sums of torch.distributed were in the order of the ranks by then


def joined(patch: pytest.MonkeyPatch, config: Config, rank: int, world: int, gpus: int) -> Joined:
    """Start one rank as on GPUs, with a backend that moves nothing; what it changes in this process is put back."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % gpus, "MASTER_ADDR": "none", "MASTER_PORT": 1}
    devices: list[int] = []
    options: dict[str, Any] = {}
    groups: list[Group] = []
    seen: list[dict[str, str]] = []
    init, new = dist.init_process_group, dist.new_group

    def init_process_group(**given: Any) -> None:
        options.update(given, set_before=list(devices), ordered=dist.all_reduce is deterministic_collectives.all_reduce)
        seen.append(settings())
        init("fake", store=FakeStore(), rank=rank, world_size=world)

    def new_group(ranks: list[int] | None = None, timeout: Any = None, backend: Any = None, **others: Any) -> Any:
        members = list(range(world)) if ranks is None else ranks
        local = others.get("use_local_synchronization", False)
        groups.append(Group(tuple(members), timeout, backend, local, others.get("pg_options")))
        return new(members, backend="fake", group_desc=others.get("group_desc"))

    def gathered(transport: Any, mine: bytes) -> list[bytes]:  # as if every rank led a slice
        return [*(json.dumps([number, number, True]).encode() for number in range(world)), mine]

    with patch.context() as inside, mock.patch.dict(os.environ):
        os.environ.update({name: str(value) for name, value in variables.items()})
        for place, name in SUMS:
            inside.setattr(place, name, getattr(place, name))
        inside.setattr(torch.cuda, "device_count", lambda: gpus)
        inside.setattr(torch.cuda, "set_device", devices.append)
        inside.setattr(dist, "init_process_group", init_process_group)
        inside.setattr(dist, "new_group", new_group)
        inside.setattr(process_groups, "gather_unordered", gathered)
        inside.setattr(megatron_on_cpu, "share_groups", False)  # where another test has installed it
        joined_as = process_groups.start(config, MINUTES)
        seen.append(settings())
        used = {name: getattr(parallel_state, f"get_{name}_group")() for name in NAMES}
        members = {name: dist.get_process_group_ranks(group) for name, group in used.items()}
        process_groups.stop()
    return Joined(options, options["set_before"][-1], groups, joined_as, members, seen, options["ordered"])


def settings() -> dict[str, str]:
    """The environment's settings of CUDA and its libraries."""
    libraries = ("CUDA_", "CUBLAS_", "NCCL_", "NVTE_")
    return {name: value for name, value in os.environ.items() if name.startswith(libraries)}


SUMS = (
    *((dist, name) for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter")),
    *((module, "dist_reduce_scatter_func") for module in (layers, mappings, param_and_grad_buffer)),
)

NAMES = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "context_parallel",
    "data_parallel",
    "expert_model_parallel",
    "expert_tensor_parallel",
    "expert_data_parallel",
)
LAYOUTS = {
    "dp8": {},
    "tp2-pp2-cp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "tp2-ep4": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    "pp2-vpp2-ep2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ranks_make_the_same_groups_in_the_same_order(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, gpus = 8, 4
    config = from_dict(
        {
            "cluster": {"platform": "cuda", "nodes": world // gpus, "gpus_per_node": gpus},
            "parallel": layout,
        }
    )
    ranks = [joined(monkeypatch, config, rank, world, gpus) for rank in range(world)]
    limit = datetime.timedelta(minutes=MINUTES)
    first = ranks[0]
    for rank, one in enumerate(ranks):
        assert one.device == rank % gpus and one.options["device_id"] == torch.device("cuda", rank % gpus)
        assert (one.options["backend"], one.options["timeout"]) == ("nccl", limit)
        assert [group for group in one.groups if not group.local] == [g for g in first.groups if not g.local]
        assert all(group.timeout == limit for group in one.groups)
        assert {group.backend for group in one.groups} <= {None, "nccl", "gloo"}
        on_hosts = [group for group in one.groups if group.backend == "gloo"]  # not a second copy of each
        assert on_hosts == [Group(tuple(range(world)), limit, "gloo", local=False)], "samples travel in it"
        for name, members in one.members.items():
            assert rank in members and members == ranks[members[0]].members[name], name
        assert (one.place.rank, one.place.world_size, one.place.local_rank) == (rank, world, rank % gpus)
    for name in NAMES:  # every rank is in one group of each kind, and groups of one kind are of one size
        kinds = {tuple(one.members[name]) for one in ranks}
        assert sorted(sum(kinds, ())) == list(range(world)) and len({len(kind) for kind in kinds}) == 1, name
    for one in ranks:  # ranks that share tensors are neighbours on a node, where NVLink is
        assert len({rank // gpus for rank in one.members["tensor_model_parallel"]}) == 1
        assert len({rank // gpus for rank in one.members["expert_model_parallel"]}) == 1
    assert compat.process_groups() == []


ORDERED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}
QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("deterministic", "layout", "given", "expected"),
    [
        (False, {}, {}, {}),
        (False, LAYOUTS["tp2-pp2-cp2"], {}, QUEUE),
        (False, {}, {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_NVLS_ENABLE": "0"}),
        (True, {}, {}, ORDERED),
        (True, LAYOUTS["tp2-pp2-cp2"], {}, ORDERED | QUEUE),
        (True, {}, {"NCCL_ALGO": "Tree"}, ORDERED | {"NCCL_ALGO": "Tree"}),
    ],
    ids=["plain", "split", "plain-given", "deterministic", "deterministic-split", "deterministic-given"],
)
def test_nccl_is_told_what_the_config_asks_for_and_no_more(
    deterministic: bool,
    layout: dict[str, Any],
    given: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in {*settings(), *given}:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = from_dict(
        {
            "run": {"deterministic": deterministic},
            "cluster": {"platform": "cuda", "nodes": 2, "gpus_per_node": 4},
            "parallel": layout,
        }
    )
    before = dist.all_reduce
    for rank in (0, 5):
        one = joined(monkeypatch, config, rank, 8, 4)
        assert one.settings[0] == expected, "when the first group is made"
        # Megatron removes this one, so that only a group that asks for SHARP gets it; NCCL's default is without.
        later = {name: value for name, value in expected.items() if name != "NCCL_COLLNET_ENABLE"}
        assert one.settings[1] == later, "for groups that connect only when they are used"
        assert one.ordered == deterministic
        assert all(group.options is None for group in one.groups), "NCCL's own settings, in every group"
    assert settings() == given and dist.all_reduce is before, "this process is as it was"
