"""Groups that an attempt left without scores are read by ranks that have engines to score them."""

from __future__ import annotations

import pytest

from gspo_hpc.config import loader
from gspo_hpc.exchange.peers import engine_place
from gspo_hpc.training.sampling.scored import read_by_owners


@pytest.mark.parametrize(("gpus", "nodes", "tp"), [(1, 1, 1), (4, 1, 2), (4, 2, 4), (8, 1, 1)])
def test_files_are_read_by_owners_of_engines_in_their_order(gpus: int, nodes: int, tp: int) -> None:
    config = loader.load(
        None,
        [f"cluster.gpus_per_node={gpus}", f"cluster.nodes={nodes}", f"rollout.tensor_parallel_size={tp}"],
    )
    names = [f"rank-{number:04d}.scored" for number in range(3)] + ["rank-0000.journal"]
    placed = read_by_owners(names, config)
    assert [name for name in placed if name] == names
    readers = {number % config.world_size for number, name in enumerate(placed) if name}
    assert all(engine_place(config, rank % gpus) == 0 for rank in readers)
    assert len(readers) == min(len(names), config.world_size // tp)


@pytest.mark.parametrize(("nodes", "apart", "others"), [(2, 0, "null"), (3, 1, "null"), (4, 2, "5")])
def test_ranks_that_generate_read_them_where_the_engines_have_gpus_of_their_own(
    nodes: int, apart: int, others: str
) -> None:
    """Two engines of one GPU on a node, each with the GPU of a reward model behind it."""
    more = [f"cluster.nodes={nodes}", "cluster.gpus_per_node=6", f"cluster.generation_nodes={apart}"]
    more.append(f"cluster.generation_gpus_per_node={others}")
    model = "reward.models=[{name: a, path: a, placement: apart}]"
    config = loader.load(None, [*more, model, "rollout.mode=server", "rollout.engines_per_node=2"])
    placed = read_by_owners([f"rank-{number:04d}.journal" for number in range(5)], config)
    ranks, per_node = {0: (8, 4), 1: (6, 6), 2: (10, 5)}[apart]
    assert config.num_ranks - config.world_size == ranks
    read = [number % ranks for number, name in enumerate(placed) if name]
    assert read == {0: [0, 2, 4, 6, 0], 1: [0, 2, 0, 2, 0], 2: [0, 2, 5, 7, 0]}[apart]
    assert all(engine_place(config, rank % per_node) == 0 for rank in read)
