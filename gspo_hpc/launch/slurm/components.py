"""The components of a Slurm job: one, or in a heterogeneous job one for each kind of node."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.config.schema import Config, Slurm, replace

# Options of slurm.generation_sbatch for which the section has keys of its own.
_KEYS = ("account", "qos", "reservation", "exclude", "nodelist", "mem")


@dataclass(frozen=True)
class Component:
    """Nodes of a job that Slurm is asked for alike."""

    nodes: int
    gpus: int  # of each, which are as many as its ranks
    slurm: Slurm


def is_heterogeneous(config: Config) -> bool:
    """Return True if the nodes that only generate are asked for in another way than those that train."""
    cluster, slurm = config.cluster, config.slurm
    other = (slurm.generation_partition, slurm.generation_constraint, slurm.generation_gres, slurm.generation_sbatch)
    apart = cluster.nodes > config.training_nodes > 0
    return apart and (cluster.generation_gpus_per_node is not None or any(other))


def components(config: Config) -> tuple[Component, ...]:
    """Return the components of the job, in the order of its ranks: those that train first."""
    cluster, slurm = config.cluster, config.slurm
    if not is_heterogeneous(config):
        return (Component(cluster.nodes, cluster.gpus_per_node, slurm),)
    apart = cluster.nodes - config.training_nodes
    return (
        Component(config.training_nodes, cluster.gpus_per_node, slurm),
        Component(apart, config.gpus_per_engine_node, _of_generation(slurm)),
    )


def _of_generation(slurm: Slurm) -> Slurm:
    """Return what is asked for nodes that only generate. Mail comes once, for the job."""
    own = {name.replace("-", "_"): value for name, value in slurm.generation_sbatch.items()}
    keys = {name: value for name, value in own.items() if name in _KEYS}
    return replace(
        slurm,
        partition=slurm.generation_partition or slurm.partition,
        constraint=slurm.generation_constraint or slurm.constraint,
        gres=slurm.generation_gres or slurm.gres,
        mail_user=None,
        mail_type=None,
        sbatch={**slurm.sbatch, **{name: value for name, value in own.items() if name not in _KEYS}},
        **{"nodelist": None, **keys},
    )
