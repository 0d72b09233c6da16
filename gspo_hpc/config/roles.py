"""The part of a rank in its job: it trains or, in server mode, generates on GPUs that are set apart."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.config.schema import Config


@dataclass(frozen=True)
class Role:
    """The role of a rank, and its place among the ranks that have the same."""

    generates: bool
    index: int  # among all of them
    count: int  # of all of them
    local_index: int  # among those of its node
    per_node: int  # of a node that has any
    nodes: int  # that have any


def role_of(config: Config, rank: int) -> Role:
    """Return the role of a rank of the job.

    Where whole nodes generate, they are the last ones; where some GPUs of every node do, the last ones of the node. So
    rank 0 always trains.
    """
    gpus = config.cluster.gpus_per_node
    node, local = divmod(rank, gpus)
    training = config.training_gpus_per_node
    if (apart := config.cluster.nodes - config.training_nodes) and node >= config.training_nodes:
        node -= config.training_nodes
        return Role(True, node * gpus + local, apart * gpus, local, gpus, apart)
    nodes = config.training_nodes
    if local >= training:
        each, place = gpus - training, local - training
        return Role(True, node * each + place, nodes * each, place, each, nodes)
    return Role(False, node * training + local, nodes * training, local, training, nodes)
