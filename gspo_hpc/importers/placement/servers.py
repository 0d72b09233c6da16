"""Put engines on GPUs of their own, beside those that train."""

from __future__ import annotations

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import options
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.shell import Command

SERVED = 0.9  # the share of a GPU's memory that trl vllm-serve and swift rollout take unless they are told


def server(draft: Draft, nodes: int, each: int, command: Command | None, name: str) -> None:
    """Put engines on GPUs of their own, beside the training ones.

    `command` starts the server, if the script has it, and `name` is what it is called.
    """
    tp = engines = 1
    share: str | None = None
    if command is None:
        draft.assumed.append(
            f"{name} is not in the script: one engine of 1 GPU a node is assumed, beside those that train"
        )
    else:
        if command.possible:
            draft.assumed.append(
                f"{name} stands behind a condition that is not known: it is taken for the server of this run"
            )
        given, _ = options(command.words)
        sizes = {key.removeprefix("vllm_"): value for key, value in given.items()}
        tp = parts.positive(draft, "tensor_parallel_size", sizes.get("tensor_parallel_size")) or 1
        count = parts.positive(draft, "data_parallel_size", sizes.get("data_parallel_size"))
        engines = count or max(1, (parts.visible(draft, command.variables) or tp) // tp)
        share = sizes.get("gpu_memory_utilization")
    _memory(draft, share, name)
    beside(draft, nodes, each, nodes if command is None else engines, tp, name)


def _memory(draft: Draft, share: str | None, name: str) -> None:
    """Put the share of a GPU's memory that the server `name` takes."""
    option = "gpu_memory_utilization"
    if share is not None and is_unset(share):
        parts.unknown(draft, option, share)
        share = None
    try:
        value = SERVED if share is None else float(share)
    except (ValueError, TypeError):
        value = 0.0
    if not 0 < value <= 1:
        draft.refuse(f"{option}={share}: must be above 0 and at most 1")
    draft.put("rollout.engine", {option: value}, comment=f"{'default ' if share is None else ''}of {name}")


def beside(draft: Draft, nodes: int, each: int, total: int, tp: int, name: str) -> None:
    """Put `total` engines on GPUs of their own, equally many on each node, beside `each` training ones."""
    engines = max(1, total // nodes)
    if engines * nodes != total:
        text = f"engines of {name}, each of {tp} GPUs: {total} in the original, and {engines * nodes} here"
        draft.differs.append(f"{text}, {engines} on each of {nodes} nodes")
    draft.put("rollout.mode", "server", of=("vllm_mode",))
    draft.put("rollout.tensor_parallel_size", tp)
    draft.put("rollout.engines_per_node", engines)
    text = f"{each} GPUs train and {engines * tp} generate, in one job"
    draft.put("cluster.gpus_per_node", each + engines * tp, comment=text)
    draft.differs.append(
        f"gpus_per_node {each + engines * tp}: {name} runs beside the trainer in the original; here the engines "
        "are part of the job, and gpus_per_node counts their GPUs too"
    )
