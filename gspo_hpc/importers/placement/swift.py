"""Put the machines of a run of ms-swift, and where its engines run."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers import prompt_texts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.placement import servers
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.shell import Command
from gspo_hpc.importers.texts.commands import server
from gspo_hpc.importers.versions import swift as versions

# What torchrun, accelerate and deepspeed call them, behind ms-swift's own variables.
_NODES, _EACH = ("NNODES", "nnodes", "num_machines", "num_nodes"), ("NPROC_PER_NODE", "nproc_per_node", "num_gpus")
_UNSET = "neither NPROC_PER_NODE nor CUDA_VISIBLE_DEVICES is set"


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next(filter(None, map(variables.get, names)), None)


def machines(draft: Draft, gpus: int | None, placed: tuple[int, int] | None = None) -> tuple[int, int]:
    """Put the cluster; return (nodes, training GPUs of each). `placed`: the same, as Ray places the ranks."""
    env = draft.variables
    nodes = parts.positive(draft, "NNODES", _first(env, _NODES)) or draft.whole("nnodes")
    each = parts.positive(draft, "NPROC_PER_NODE", _first(env, _EACH))
    if each is None and (total := parts.positive(draft, "num_processes", env.get("num_processes"))) is not None:
        nodes, each = (nodes, total // nodes) if nodes else parts.split_nodes(total)
    if (trains := draft.whole("train.gpus")) is not None:  # of a YAML for Ray: all of its nodes together
        if nodes is None:
            nodes, each = parts.split_nodes(trains)
            if nodes > 1 and gpus is None:
                draft.assumed.append(f"{draft.label('train.gpus')}: taken for {nodes} nodes of {each}")
        elif trains % nodes:
            draft.wrong("train.gpus", f"must be divisible by the number of nodes ({nodes})")
        else:
            each = trains // nodes
    nodes, each = placed or (nodes, each)
    if gpus is not None:
        draft.drop("train.gpus", "--gpus takes precedence over it")
        draft.drop("nnodes", "--gpus takes precedence over it")
    draft.credit("cluster.nodes", "nnodes", "train.gpus")
    draft.credit("cluster.gpus_per_node", "train.gpus")
    each = each or versions.processes(draft, env)
    unknown = [name for name in ("NPROC_PER_NODE", "nproc_per_node", "CUDA_VISIBLE_DEVICES") if is_unset(env.get(name))]
    told = f"how many GPUs train is not known ({', '.join(unknown)})" if unknown else _UNSET
    return parts.machines(draft, nodes, each, gpus, told)


def hosting(draft: Draft, nodes: int, each: int, commands: list[Command]) -> None:
    """Put where the engines run: with the trainer, or on GPUs of their own."""
    tp = draft.whole("vllm_tensor_parallel_size", 1) or 1
    if tp > 1 and draft.source.project == "ms-swift" and not draft.switch("use_vllm"):
        draft.drop("vllm_tensor_parallel_size", "ms-swift makes it 1 without use_vllm")
        tp = 1
    apart = draft.whole("rollout.gpus")
    groups = draft.values.get("colocate_groups")
    together = isinstance(groups, list) and any({"train", "rollout"} <= {*group} for group in groups)
    draft.credit("rollout.mode", "colocate_groups", "rollout.gpus", "vllm_mode")
    if draft.source.project == "ms-swift" and draft.switch("async_generate") and versions.mode(draft) != "server":
        draft.drop("async_generate", "ms-swift refuses it without a server (vllm_mode server)")
    if apart is not None and not together:
        draft.credit("rollout.engines_per_node", "rollout.gpus")
        draft.put("rollout.tensor_parallel_size", tp, "vllm_tensor_parallel_size")
        if apart % tp:
            draft.wrong("rollout.gpus", f"must be divisible by vllm_tensor_parallel_size ({tp})")
        servers.beside(draft, nodes, each, max(1, apart // tp), tp, "the group rollout")
    elif versions.mode(draft) == "server":
        for verb in ("rollout", "deploy"):  # the latter up to 3.3
            if hosted := server(commands, "swift", verb, rf"swift[./]cli[./]{verb}"):
                break
        servers.server(draft, nodes, each, hosted, f"swift {verb if hosted else 'rollout'}")
        prompt_texts.turns_of(draft, hosted)
        if draft.switch("async_generate") and draft.source.project == "ms-swift":
            draft.put("rollout.max_staleness", 1, "async_generate", "the next rollout is generated meanwhile")
        elif draft.source.project == "ms-swift":
            draft.credit("rollout.max_staleness", "async_generate")
    elif count := versions.engines_apart(draft, each):
        draft.credit("rollout.engines_per_node", "num_infer_workers")
        servers.beside(draft, nodes, each, nodes * count, 1, "num_infer_workers")
        if versions.third(draft) != "tools_prompt":  # which is gone in 3.4
            draft.assumed.append(
                "num_infer_workers: so it is up to 3.4; 3.5 ignores it, and engines share the GPUs that train"
            )
    else:
        draft.put("rollout.tensor_parallel_size", tp, "vllm_tensor_parallel_size")
        if tp > 1 and not together:
            draft.differs.append(
                "engines of several GPUs have the same seeds in every rollout there, whatever --seed is; here seeds "
                "follow run.seed and the rollout"
            )
