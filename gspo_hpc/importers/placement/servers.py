"""Put engines on GPUs of their own, beside those that train."""

from __future__ import annotations

from typing import Any

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null, options
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.scripts.script import Command

# vLLM's arguments that a server may have as we do, beside the share of memory, and the one that bounds lengths.
_ENGINE = {
    "enforce_eager": bool,
    "max_num_seqs": int,
    "enable_prefix_caching": bool,
    "disable_cascade_attn": bool,
}
_WINDOW = "max_model_len"
TRUE = ("true", "1", "yes", "y", "t")
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
        draft.served = given
        sizes = {key.removeprefix("vllm_"): value for key, value in given.items()}
        tp = parts.positive(draft, "tensor_parallel_size", sizes.get("tensor_parallel_size")) or 1
        count = parts.positive(draft, "data_parallel_size", sizes.get("data_parallel_size"))
        engines = count or max(1, (parts.visible(draft, command.variables) or tp) // tp)
        share = sizes.get("gpu_memory_utilization")
    _memory(draft, share, name)
    _engine(draft, name)
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


def _engine(draft: Draft, name: str) -> None:
    """Put the arguments of vLLM that the command of the server `name` has."""
    found: dict[str, Any] = {}
    for option, kind in _ENGINE.items():
        given, value = of_server(draft, option)
        if given and is_unset(value):
            parts.unknown(draft, given, str(value))
        elif given and kind is int:
            if (size := parts.positive(draft, given, str(value))) is not None:
                found[option] = size
        elif given:  # a bare option is true
            found[option] = str(value).lower() in TRUE
    held, comment = draft.settings["rollout.engine"]
    draft.settings["rollout.engine"] = ({**held, **found}, comment if found == {} else f"of {name}")


def of_server(draft: Draft, option: str) -> tuple[str, Any]:
    """Return the name by which the command of a server has one of vLLM's arguments, and its value; "" without it."""
    found = [name for name in (f"vllm_{option}", option) if not is_null(draft.served.get(name))]
    return (found[0], draft.served[found[0]]) if found else ("", None)


def window(draft: Draft, name: str) -> None:
    """Tell where engines of the server `name` stop, if that is before the longest prompt and completion end."""
    given, value = of_server(draft, _WINDOW)
    if not given:
        return
    if is_unset(value):
        parts.unknown(draft, given, str(value))
        return
    size = parts.positive(draft, given, str(value))
    at = [int(draft.settings.get(f"rollout.{key}", (0, ""))[0]) for key in ("max_prompt_length", "max_response_length")]
    if size is not None and size < sum(at):
        draft.assumed.append(
            f"--{given} {size} of {name}: an engine of {draft.source.project} stops there, and here at {sum(at)} "
            f"tokens, prompt and response together (rollout.max_prompt_length, rollout.max_response_length)"
        )


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
