"""Put the machines of a run of ms-swift, and where its engines run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers import prompt_texts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.placement import servers
from gspo_hpc.importers.report import plain
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command
from gspo_hpc.importers.texts.uses.hosts import server
from gspo_hpc.importers.versions import swift as versions

# What torchrun, accelerate and deepspeed call them, behind ms-swift's own variables.
_NODES, _EACH = ("NNODES", "nnodes", "num_machines", "num_nodes"), ("NPROC_PER_NODE", "nproc_per_node", "num_gpus")
# Arguments of a server's command of which its template makes the prompts that engines complete.
_TEMPLATE = (
    "system template template_backend use_chat_template enable_thinking add_non_thinking_prefix response_prefix "
    "agent_template max_pixels chat_template preserve_thinking"
).split()
_BOUNDS = ("max_length", "truncation_strategy")
_NUMBERS = (
    "torch_dtype vllm_quantization quant_method quant_bits vllm_engine_kwargs vllm_enable_lora vllm_max_lora_rank "
    "adapters vllm_speculative_config"
).split()
_SAMPLING = (
    "max_new_tokens temperature top_k top_p repetition_penalty num_beams stop_words seed presence_penalty "
    "frequency_penalty"
).split()
_UNSET = "the run gets neither NPROC_PER_NODE nor CUDA_VISIBLE_DEVICES"


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
    named = ("NPROC_PER_NODE", "nproc_per_node", "CUDA_VISIBLE_DEVICES")
    unknown = [name for name in named if is_unset(env.get(name)) or parts.is_of_machine(env.get(name, ""))]
    told = f"how many GPUs train is not known ({', '.join(unknown)})" if unknown else _UNSET
    if not unknown and (why := draft.unknown.get("*")):
        told = f"how many GPUs train is not known (NPROC_PER_NODE {why})"
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
    listed = [name for group in groups if isinstance(group, list) for name in group] if isinstance(groups, list) else []
    if strange := [str(name) for name in listed if name not in ("train", "rollout", "teacher")]:
        draft.wrong("colocate_groups", f"ms-swift has the groups train, rollout and teacher, and no {strange[0]}")
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


def served(draft: Draft) -> None:
    """Tell which arguments of the command of a server decide how long completions are and how they are sampled."""
    if not draft.served:
        return
    name = "swift rollout"
    servers.window(draft, name)
    held = {key: value for key, value in draft.served.items() if not is_null(value)}
    apart = [key for key in held if not _same(held[key], draft.values.get(key))]
    if found := _labels(held, [key for key in apart if key in _TEMPLATE]):
        draft.assumed.append(
            f"{found} of {name}: engines complete prompts that its template makes so there, and updates have those "
            "that the trainer's arguments make; here both have the trainer's"
        )
    if found := _labels(held, [key for key in held if key in _BOUNDS]):
        most = draft.settings.get("rollout.max_prompt_length", (0, ""))[0]
        draft.assumed.append(f"{found} of {name}: it bounds the prompts of engines there; here that is {most} tokens")
    if found := _labels(held, [key for key in held if key in _NUMBERS]):
        draft.assumed.append(f"{found} of {name}: it decides how engines compute there, and is not read")
    if found := _labels(held, [key for key in held if key in _SAMPLING]):
        draft.differs.append(f"{found} of {name}: requests of the trainer have values of their own, which count")


def _same(one: object, other: object) -> bool:
    """Tell whether two arguments are written alike."""
    return str(one).lower() == str(other).lower()


def _labels(held: Mapping[str, Any], names: list[str]) -> str:
    """Return options of a server as they are given."""
    shown = (f"--{name}" if held[name] is True else f"--{name} {_text(held[name])[:60]}" for name in names)
    return ", ".join(map(plain, shown))


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
