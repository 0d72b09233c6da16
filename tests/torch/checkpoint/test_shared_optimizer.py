"""Who holds and who owns the parameters of a distributed optimizer, and how its state comes together and goes back.

Ranks are threads here, or one after the other; on gloo the state travels in tests/gloo.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gspo_hpc.checkpoint import compat, optimizer_state, shared_optimizer
from gspo_hpc.checkpoint.shared_optimizer import Share, shares
from tests.torch.checkpoint.mail import Mail, as_ranks

ALIGNMENT = 64  # elements: parameters begin at multiples of it, as in Megatron's buffers


@st.composite
def parts(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """An optimizer with one or two buffers of buckets, and for each rank the buffers as it sees them."""
    size = draw(st.integers(1, 6))
    group = SimpleNamespace(size=lambda: size)
    buffers = []
    for _ in range(draw(st.integers(1, 2))):
        index_map, buckets, at = {}, [], 0
        for number in range(draw(st.integers(1, 4))):
            offset = at
            for _ in range(draw(st.integers(1, 5))):
                elements = draw(st.integers(1, 900))
                index_map[torch.empty(elements, device="meta")] = (at, at + elements, number)
                at += -(-elements // ALIGNMENT) * ALIGNMENT
            at = offset + -(-(at - offset) // (size * 2)) * size * 2  # every rank has as much of a bucket
            buckets.append(SimpleNamespace(offset=offset, grad_data=torch.empty(at - offset, device="meta")))
        buffers.append(SimpleNamespace(param_index_map=index_map, buckets=buckets, data_parallel_group=group))
    return SimpleNamespace(data_parallel_group=group, buffers=buffers), buffers


def ranges(buffer: Any, rank: int) -> dict[int, tuple[int, int]]:
    """Return what a rank holds by Megatron's own map: begin and end of its piece, by the id of the parameter."""
    buffer.data_parallel_group.rank = lambda: rank
    found = {}
    for number in range(len(buffer.buckets)):
        mine = DistributedOptimizer._build_model_gbuf_range(buffer, number)["param_map"]
        found |= {id(parameter): (one["param"].start, one["param"].end) for parameter, one in mine.items()}
    return found


@given(parts())
def test_pieces_are_those_of_megatron_and_owners_are_even(made: tuple[Any, list[Any]]) -> None:
    """Catches a border that is off by one element, and a rank that owns everything."""
    part, buffers = made
    every, size = shares(part), part.data_parallel_group.size()
    parameters = [parameter for buffer in buffers for parameter in buffer.param_index_map]
    assert [share.index for share in every] == list(range(len(parameters)))
    assert all(share.parameter is parameter for share, parameter in zip(every, parameters, strict=True))
    for rank in range(size):
        theirs: dict[int, tuple[int, int]] = {}
        for buffer in buffers:
            theirs |= ranges(buffer, rank)
        ours = {id(share.parameter): piece for share in every if (piece := share.of(rank)) is not None}
        assert {key: (piece.begin, piece.end) for key, piece in ours.items()} == theirs
    for share in every:
        assert share.of(share.owner) is not None
        assert sum(piece.end - piece.begin for piece in share.pieces) == share.parameter.numel()


def test_large_parameters_that_all_ranks_hold_go_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four buckets of one parameter each over four ranks: each rank owns one of them."""
    group = SimpleNamespace(size=lambda: 4)
    index_map = {torch.empty(400, device="meta"): (400 * n, 400 * (n + 1), n) for n in range(4)}
    buckets = [SimpleNamespace(offset=400 * n, grad_data=torch.empty(400, device="meta")) for n in range(4)]
    part = SimpleNamespace(
        data_parallel_group=group, buffers=[SimpleNamespace(param_index_map=index_map, buckets=buckets)]
    )
    every = shares(part)
    assert sorted(share.owner for share in every) == [0, 1, 2, 3]
    monkeypatch.setattr(shared_optimizer, "SAVE_TRANSIT_BYTES", 4 * 300)  # what each of them sends and receives
    (batch,) = shared_optimizer._batches(every, ["exp_avg"])
    assert len(batch) == 12, "all receive at the same time"


@given(parts(), st.integers(1, 500))
def test_moves_bring_every_element_once_and_few_at_a_time(made: tuple[Any, list[Any]], limit: int) -> None:
    every, keys = shares(made[0]), ("exp_avg", "exp_avg_sq")
    before, shared_optimizer.SAVE_TRANSIT_BYTES = shared_optimizer.SAVE_TRANSIT_BYTES, 4 * limit
    try:
        batches = list(shared_optimizer._batches(every, keys))
    finally:
        shared_optimizer.SAVE_TRANSIT_BYTES = before
    for batch in batches:
        coming, going = Counter[int](), Counter[int]()
        for move in batch:
            coming[move.share.owner] += move.elements
            going[move.holder] += move.elements
        assert max(*coming.values(), *going.values()) <= limit
    moves = [move for batch in batches for move in batch]
    come = [(move.share.index, move.key, at) for move in moves for at in range(move.begin, move.end)]

    def others(share: Share) -> list[int]:
        pieces = [piece for piece in share.pieces if piece.rank != share.owner]
        return [at for piece in pieces for at in range(piece.begin, piece.end)]

    assert sorted(come) == sorted((share.index, key, at) for share in every for key in keys for at in others(share))
    for move in moves:
        piece = move.share.of(move.holder)
        assert piece is not None and move.begin - piece.begin == move.offset


@given(parts(), st.integers(5, 500), st.integers(1, 900), st.booleans(), st.data())
def test_owners_get_every_element_as_they_write_and_keep_few(
    made: tuple[Any, list[Any]], limit: int, span: int, copied: bool, data: st.DataObject
) -> None:
    """Each rank asks at its own pace for its tensors, a few elements at a time, or stops early as with a full disk.

    Catches an element that goes astray, ranks that wait for each other for ever, and one that keeps what it has got.
    """
    every, keys, mail = shares(made[0]), ("exp_avg", "exp_avg_sq"), Mail()
    size = made[0].data_parallel_group.size()
    truth = {(share.index, key): torch.rand(share.parameter.numel()) for share in every for key in keys}
    stops = data.draw(st.lists(st.integers(0, 40) | st.none(), min_size=size, max_size=size), label="stops after")

    def rank(me: int) -> None:
        group = SimpleNamespace(size=lambda: size, rank=lambda: me)

        def held(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            share = next(one for one in every if one.parameter is parameter)
            piece = share.of(me)
            assert piece is not None
            return {key: truth[share.index, key][piece.begin : piece.end] for key in keys}

        part = SimpleNamespace(data_parallel_group=group, _get_main_param_and_optimizer_states=held)
        there: Any = group
        gathering = shared_optimizer.Gathering(
            part, keys, every, there, (lambda name, elements: torch.empty(elements)) if copied else None
        )
        for target, source in gathering.copies:
            target.copy_(source)
        asked = 0
        for share in gathering.owned:
            for key in keys:
                for begin in range(0, share.parameter.numel(), span):
                    if stops[me] is not None and asked >= stops[me]:
                        return gathering.rest()
                    end = min(begin + span, share.parameter.numel())
                    found = gathering.elements(share.index, key, begin, end)
                    assert torch.equal(found, truth[share.index, key][begin:end])
                    landed = [one for pieces in gathering._landed.values() for _, one in pieces]
                    assert sum(map(torch.numel, landed)) <= limit
                    asked += 1
        assert not gathering._landed
        return gathering.rest()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shared_optimizer, "dist", mail)
        monkeypatch.setattr(shared_optimizer, "SAVE_TRANSIT_BYTES", 4 * limit)
        # Parameters are on "meta" here, as if they were on a GPU; what is held of them is not.
        monkeypatch.setattr(
            shared_optimizer, "_values", lambda part, parameter, key: compat.optimizer_tensors(part, parameter)[key]
        )
        as_ranks(size, rank)


def test_what_arrives_goes_into_the_optimizer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a load that keeps a parameter beside the optimizer until all of it is there: an embedding may be large.

    Both ranks of a group exchange in turn: the owner sends, the other takes, a few elements at a time.
    """
    elements, keys = 400, ("param", "exp_avg", "exp_avg_sq")
    parameter = torch.zeros(elements, dtype=torch.bfloat16)
    bucket = SimpleNamespace(offset=0, grad_data=torch.empty(elements, device="meta"))
    buffer = SimpleNamespace(param_index_map={parameter: (0, elements, 0)}, buckets=[bucket])
    whole = {0: {key: torch.randn(elements) for key in keys}}
    posts: list[torch.Tensor] = []
    most = 0

    class Memory:
        """torch, which notes the largest tensor that is asked for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *size: int, **options: Any) -> torch.Tensor:
            nonlocal most
            most = max(most, *size)
            return torch.empty(*size, **options)

    def operation(kind: Any, tensor: torch.Tensor, **options: Any) -> None:
        if kind is isend:
            posts.append(tensor.clone())
        else:
            tensor.copy_(posts.pop(0))

    isend, irecv = object(), object()
    fake = SimpleNamespace(isend=isend, irecv=irecv, P2POp=operation, batch_isend_irecv=lambda operations: [])
    monkeypatch.setattr(shared_optimizer, "dist", fake)
    monkeypatch.setattr(shared_optimizer, "torch", Memory())
    monkeypatch.setattr(shared_optimizer, "SAVE_TRANSIT_BYTES", 4 * 30)
    for rank in (0, 1):
        held = {key: torch.zeros(elements // 2) for key in keys}
        part = SimpleNamespace(
            data_parallel_group=SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank),
            buffers=[buffer],
            optimizer=None,
            _get_main_param_and_optimizer_states=lambda parameter, held=held: held,
        )
        assert shares(part)[0].owner == 0
        shared_optimizer.scatter(part, keys, whole if rank == 0 else {})
        for key in keys:
            assert torch.equal(held[key], whole[0][key][200 * rank : 200 * (rank + 1)])
    assert most == 30 and not posts


def test_every_optimizer_gets_the_step_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have one of their own: begun at step 0 again, it would correct its moments as at a start."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    chained = [SimpleNamespace(optimizer=torch.optim.Adam([weight]), grad_scaler=None) for weight in weights]
    for part in chained:
        part.optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        part.optimizer.step()
    monkeypatch.setattr(optimizer_state, "_weights", lambda part, model: [])
    state: dict[str, Any] = {"tensors": {}, "step": torch.tensor(7), "scaler": None}
    optimizer_state.load(SimpleNamespace(chained_optimizers=chained), {}, state)
    assert [optimizer_state._steps(part) for part in chained] == [7, 7]
