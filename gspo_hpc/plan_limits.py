"""What libraries refuse only when they run, as rules of the plan: minutes into a job, and after the queue.

Floor 1: plain Python. Read in the sources of Megatron-Core 0.16.1, DeepEP 1.2.1 and vLLM 0.32, not asked of them. The
numbers of the rules are those of plan_rules.py.
"""

from __future__ import annotations

from gspo_hpc import model_config
from gspo_hpc.plan_rules import Book

# Groups of ranks for which DeepEP has kernels, and how many of them it takes for those of one node.
_DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128, 144, 160)
_DEEPEP_NODE = 8
_DEEPEP_TOP_K = 32  # places that a token may go to: its experts, on each rank that has a part of them


def apply_limits(book: Book) -> None:
    """Checks every rule of this file; what is found goes into `book`."""
    _flex(book)


def _flex(book: Book) -> None:
    """Rule 11: what moe.token_dispatcher=flex needs, where the model has experts or nobody knows."""
    config, who = book.config, "moe.token_dispatcher: flex"
    if config.moe.token_dispatcher != "flex":
        return
    arch = model_config.find(config)
    if arch is not None and arch.experts is None:
        return
    text = f"{who} is DeepEP's kernels, which need GPUs (cluster.platform: cuda); alltoall runs everywhere"
    book.check(11, config.cluster.platform == "cuda", text)
    text = f"{who}: DeepEP brings tokens back in bfloat16 only, and model.dtype is {config.model.dtype}"
    book.check(11, config.model.dtype == "bfloat16", text)
    given = config.moe.router_dtype
    text = f"{who}: DeepEP carries the weights of experts in float32, and moe.router_dtype is {given or 'not given'}"
    book.check(11, given == "float32", text)
    parallel, gpus = config.parallel, config.cluster.gpus_per_node
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ranks = etp * parallel.expert_model_parallel_size
    made = f"expert tensor ({etp}) x expert ({parallel.expert_model_parallel_size}) parallel size = {ranks}"
    if ranks == 1:
        book.check(11, False, f"{who} needs {made} above 1: there is nobody to send tokens to")
    elif ranks not in _DEEPEP_RANKS:
        known = ", ".join(map(str, _DEEPEP_RANKS))
        book.check(11, False, f"{who}: {made} must be one of {known}: for others DeepEP has no kernels")
    else:
        unit = min(ranks, _DEEPEP_NODE)
        text = f"{who}: gpus_per_node ({gpus}) must be divisible by {unit} of the {made} ranks: DeepEP wants so many "
        text += "of a group on each node"
        book.check(11, gpus % unit == 0, text)
    top_k = arch.experts.top_k if arch is not None and arch.experts is not None else 1
    made = f"expert_tensor_parallel_size ({etp}) x the model's experts of a token ({top_k}) = {etp * top_k}"
    text = f"{who}: {made} must be at most {_DEEPEP_TOP_K}, to as many places DeepEP sends a token"
    book.check(11, etp * top_k <= _DEEPEP_TOP_K, text)
