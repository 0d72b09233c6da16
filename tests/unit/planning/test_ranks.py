"""Which rank sits where: the table stays short and true, engines sit where ranks lead them; Megatron's own count of
groups is held against it in tests/torch/policy/test_rank_groups.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gspo_hpc.cli.main import main
from gspo_hpc.cli.pages import ranks as rank_page
from gspo_hpc.cli.pages import render
from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.ranks import Seat, dimensions, engine_gpus, ranges, seats


def layout(nodes: int = 1, gpus: int = 8, rollout: dict[str, Any] | None = None, **parallel: int) -> dict[str, int]:
    sizes = {f"{name}_parallel_size": size for name, size in parallel.items()}
    raw = {"cluster": {"nodes": nodes, "gpus_per_node": gpus}, "parallel": sizes, "rollout": rollout or {}}
    return make_plan(from_dict(raw)).layout


def test_a_small_layout_by_hand() -> None:
    found = seats(layout(2, 4, tensor_model=2, pipeline_model=2, expert_model=2, expert_tensor=1))
    assert found[0] == Seat(rank=0, node=0, gpu=0, tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, expert_dp=0, engine=0)
    assert found[3] == Seat(rank=3, node=0, gpu=3, tp=1, cp=0, dp=1, pp=0, etp=0, ep=1, expert_dp=1, engine=3)
    assert found[6] == Seat(rank=6, node=1, gpu=2, tp=0, cp=0, dp=1, pp=1, etp=0, ep=0, expert_dp=1, engine=6)


@pytest.mark.parametrize(
    ("gpus", "rollout", "expected"),
    [
        (8, {"tensor_parallel_size": 2}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, {"tensor_parallel_size": 2, "engines_per_node": 2}, [(0, 1), (4, 5)]),  # as ranks lead them (jobs.py)
        (8, {"tensor_parallel_size": 8}, [tuple(range(8))]),
        (2, {"engines_per_node": 1}, [(0,)]),
        (8, {"mode": "server", "engines_per_node": 2, "tensor_parallel_size": 2}, [(4, 5), (6, 7)]),
    ],
)
def test_which_gpus_of_a_node_form_which_engine(
    gpus: int, rollout: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    given_layout = layout(3, gpus, rollout)
    assert engine_gpus(given_layout) == expected
    apart = rollout.get("mode") == "server"
    for seat in seats(given_layout):
        mine = [number for number, own in enumerate(expected) if seat.gpu in own]
        assert seat.engine == (None if apart or not mine else seat.node * len(expected) + mine[0])
    ranks = seats(given_layout)
    training = gpus - apart * sum(map(len, expected))
    assert [(seat.node, seat.gpu) for seat in ranks] == [(node, gpu) for node in range(3) for gpu in range(training)]


@pytest.mark.parametrize(("apart", "gpus"), [(0, "GPUs 4-5 | 6-7"), (1, "GPUs 0-1 | 2-3")])
def test_engines_on_gpus_of_their_own_lie_side_by_side(apart: int, gpus: str) -> None:
    """On a node that only generates they begin with its first GPU; where ranks train as well, they are the last."""
    raw: dict[str, Any] = {
        "cluster": {"nodes": 3, "gpus_per_node": 8, "generation_nodes": apart},
        "rollout": {"mode": "server", "engines_per_node": 2, "tensor_parallel_size": 2},
    }
    found = make_plan(from_dict(raw)).layout
    (line,) = [" ".join(one.split()) for one in render.lines(rank_page.page(found)) if one.split()[:1] == ["engines"]]
    assert line.endswith(gpus) and ("on the nodes that only generate" in line) == bool(apart)


@pytest.mark.parametrize(("size", "engines"), [(8, 4), (16, 2), (32, 1)])
def test_engines_over_nodes_have_all_of_their_gpus(size: int, engines: int) -> None:
    found = layout(4, 8, {"tensor_parallel_size": size})
    assert found["num_engines"] == engines and engine_gpus(found) == [tuple(range(8))]
    for seat in seats(found):
        assert seat.engine == seat.node * 8 // size


def test_what_cannot_be_placed_is_refused() -> None:
    for broken in (
        layout(1, 6, tensor_model=4),
        layout(1, 6, expert_model=4),
        layout(1, 4, {"tensor_parallel_size": 8}),  # over more nodes than there are
        layout(3, 4, {"tensor_parallel_size": 8}),
        layout(3, 4, {"tensor_parallel_size": 6}),
        layout(1, 4, {"engines_per_node": 3, "tensor_parallel_size": 2}),
        layout(1, 4, {"mode": "server"}),
    ):
        with pytest.raises(ValueError, match="ranks cannot be placed"):
            seats(broken)


@given(st.lists(st.integers(0, 60)))
def test_ranges_unfold_to_what_was_folded(numbers: list[int]) -> None:
    unfolded = []
    for part in filter(None, ranges(numbers).split(",")):
        first, _, last = part.partition("-")
        unfolded += range(int(first), int(last or first) + 1)
    assert unfolded == sorted(set(numbers))
    assert ranges([0, 1, 2, 3]) == "0-3" and ranges([7, 0, 1]) == "0-1,7" and ranges([5]) == "5"


def unfold(text: str) -> set[int]:
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


sizes = st.sampled_from([1, 1, 2, 3, 4, 8])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.sampled_from([1, 2, 4, 6, 8]), sizes, sizes, sizes, sizes)
def test_the_table_has_every_rank_once_and_what_is_true_of_it(
    nodes: int, gpus: int, tp: int, pp: int, cp: int, ep: int
) -> None:
    found = layout(nodes, gpus, tensor_model=tp, pipeline_model=pp, context=cp, expert_model=ep)
    assume({"data_parallel_size", "expert_data_parallel_size"} <= found.keys())  # both grids tile the world
    placed = seats(found)
    lines = list(render.lines(rank_page.page(found)))
    rows = [re.split(r"  +", line.strip()) for line in lines[lines.index("") + 1 :]]
    head, body = rows[0], rows[1:]
    assert len(body) <= 40
    fields = {"GPU": "gpu", "TP": "tp", "CP": "cp", "DP": "dp", "PP": "pp", "ETP": "etp", "EP": "ep"}
    fields |= {"EDP": "expert_dp", "ranks": "rank"}
    seen: list[int] = []
    for row in body:
        ranks = unfold(row[0])
        seen += sorted(ranks)
        for name, text in zip(head, row, strict=True):
            assert unfold(text) == {getattr(placed[rank], fields.get(name, name)) for rank in ranks}
    assert seen == list(range(len(placed)))
    for item in dimensions(found):  # every group, rank by rank
        groups: dict[int, list[Seat]] = {}
        for seat in placed:
            groups.setdefault(seat.rank - getattr(seat, item.name) * item.apart, []).append(seat)
        assert all([getattr(seat, item.name) for seat in group] == [*range(item.size)] for group in groups.values())
        assert item.nodes == max(len({seat.node for seat in group}) for group in groups.values())


def test_sixteen_thousand_gpus_are_a_short_table() -> None:
    found = layout(2048, 8, {"tensor_parallel_size": 8}, tensor_model=8, pipeline_model=16)
    lines = list(render.lines(rank_page.page(found)))
    assert len(lines) < 45 and max(map(len, lines)) < 100
    table = [" ".join(line.split()) for line in lines]
    assert "order rank = TP + 8 x DP + 1024 x PP" in table
    assert "TP 2,048 groups of 8 ranks, 1 apart, inside a node" in table
    assert "PP 1,024 groups of 16 ranks, 1,024 apart, over 16 nodes" in table
    assert "engines on every node: GPUs 0-7" in table
    assert "0-511 0-63 0-7 0-7 0-63 0 0-63" in table


def test_millions_of_ranks_are_counted_not_dealt() -> None:
    found = layout(100_000, 256, {"tensor_parallel_size": 8}, tensor_model=8, pipeline_model=16)
    lines = list(render.lines(rank_page.page(found)))  # 25,600,000 seats would take minutes
    assert len(lines) < 45
    assert "  PP       1,600,000 groups of 16 ranks, 1,600,000 apart, over 16 nodes" in lines
    assert lines[-1].split()[0] == "24800000-25599999"


def test_plan_shows_ranks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(project / "configs" / "qwen3_30b_a3b_tp2_ep4_etp2.yaml")
    assert main(["plan", preset]) == 3
    text = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "experts rank = ETP + 2 x EP + 8 x EDP" in text
    assert "EP 4 groups of 4 ranks, 2 apart, inside a node" in text
    assert "ranks node GPU TP DP ETP EP EDP engine" in text and "11 1 3 1 5 1 1 1 5" in text
    assert main(["plan", preset, "--ranks", "--json"]) == 3
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [row["rank"] for row in ranks] == [*range(16)]
    assert ranks[11] == {"rank": 11, "node": 1, "gpu": 3, "tp": 1, "cp": 0, "dp": 5, "pp": 0} | {
        "etp": 1,
        "ep": 1,
        "expert_dp": 1,
        "engine": 5,
    }
    assert main(["plan", preset, "--json"]) == 3
    assert "ranks" not in json.loads(capsys.readouterr().out)
    assert main(["plan", preset, "cluster.gpus_per_node=7"]) == 2
    assert "ranks cannot be placed: a rule of the grid or of the engines is broken" in capsys.readouterr().out
    assert main(["plan", preset, "--ranks", "--json", "cluster.gpus_per_node=7"]) == 2
    assert json.loads(capsys.readouterr().out)["ranks"] is None
