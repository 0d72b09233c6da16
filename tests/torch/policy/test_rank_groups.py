"""The rank grid against the groups that Megatron-Core itself would make of the same sizes."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.ranks import Seat, seats

ORDER = "tp-cp-ep-dp-pp"  # what initialize_model_parallel has as its default, which process_groups.py leaves
size = st.sampled_from([1, 2, 3, 4])


def test_the_order_is_megatrons_default() -> None:
    import inspect

    from megatron.core import parallel_state

    signature = inspect.signature(parallel_state.initialize_model_parallel)
    assert signature.parameters["order"].default == ORDER


def groups(placed: list[Seat], varying: tuple[str, ...], grid: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ in `varying` only, of the places that make up a grid, in the order of ranks."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for seat in placed:
        found[tuple(getattr(seat, name) for name in grid if name not in varying)].append(seat.rank)
    return sorted(found.values())


@settings(max_examples=150, deadline=None)
@given(size, size, size, size, st.data())
def test_groups_are_megatrons(tp: int, cp: int, dp: int, pp: int, data: st.DataObject) -> None:
    in_stage = tp * cp * dp
    etp = data.draw(st.sampled_from([n for n in range(1, in_stage + 1) if in_stage % n == 0]), "etp")
    ep = data.draw(st.sampled_from([n for n in range(1, in_stage // etp + 1) if in_stage // etp % n == 0]), "ep")
    world = in_stage * pp
    gpus = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]), "gpus_per_node")
    config = from_dict(
        {
            "cluster": {"nodes": world // gpus, "gpus_per_node": gpus},
            "parallel": {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "expert_tensor_parallel_size": etp,
            },
        }
    )
    placed = seats(make_plan(config).layout)
    assert [(seat.rank, seat.node * gpus + seat.gpu) for seat in placed] == [(rank, rank) for rank in range(world)]
    attention = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    experts = RankGenerator(tp=etp, ep=ep, dp=in_stage // (etp * ep), pp=pp, cp=1, order=ORDER)
    for generator, names in (
        (attention, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (experts, {"tp": "etp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}),
    ):
        grid = tuple(names.values())
        for tokens in (*names, "dp-cp", "tp-pp", "tp-ep"):
            if not {*tokens.split("-")} <= names.keys():
                continue
            varying = tuple(names[token] for token in tokens.split("-"))
            theirs = generator.get_ranks(tokens)
            assert sorted(map(sorted, theirs)) == groups(placed, varying, grid)
            if len(varying) == 1:  # the place in a group is the place in Megatron's list
                for group in theirs:
                    assert [getattr(placed[rank], varying[0]) for rank in group] == [*range(len(group))]
