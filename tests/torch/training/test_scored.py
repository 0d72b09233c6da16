"""Groups that an attempt left without scores are read by ranks that have engines to score them."""

from __future__ import annotations

import pytest

from gspo_hpc.config import loader
from gspo_hpc.exchange.peers import engine_place
from gspo_hpc.training.sampling.colocated import _read_by_owners


@pytest.mark.parametrize(("gpus", "nodes", "tp"), [(1, 1, 1), (4, 1, 2), (4, 2, 4), (8, 1, 1)])
def test_files_are_read_by_owners_of_engines_in_their_order(gpus: int, nodes: int, tp: int) -> None:
    config = loader.load(
        None,
        [f"cluster.gpus_per_node={gpus}", f"cluster.nodes={nodes}", f"rollout.tensor_parallel_size={tp}"],
    )
    names = [f"rank-{number:04d}.scored" for number in range(3)] + ["rank-0000.journal"]
    placed = _read_by_owners(names, config)
    assert [name for name in placed if name] == names
    readers = {number % config.world_size for number, name in enumerate(placed) if name}
    assert all(engine_place(config, rank % gpus) == 0 for rank in readers)
    assert len(readers) == min(len(names), config.world_size // tp)
