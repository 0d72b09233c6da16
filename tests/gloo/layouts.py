"""What is tried in which layout, and the cases that make it so: they run together, on ranks that are started once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.gloo import ranks

Arrays = dict[str, np.ndarray]
EXPERTS = ["mixtral-untied", "qwen2moe-tied", "qwen3moe-untied"]
DENSE = ["llama-tied", "llama-untied", "mistral-untied", "qwen2-tied", "qwen3-untied"]
FAMILIES = [*DENSE, *EXPERTS]
ROPES = ["llama-linear", "llama-llama3", "qwen3-yarn"]
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
SP = {"sequence_parallel": True}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}  # more than models have key-value heads
DISTRIBUTED = {"optimizer": {"distributed": True}}
LAYOUTS: dict[str, dict[str, Any]] = {  # on two ranks
    "dp2": {},
    "tp2": {"parallel": TP2},
    "tp2-sp": {"parallel": TP2 | SP},
    "pp2": {"parallel": PP2},
    "cp2": {"parallel": CP2},
    "dp2-distributed": DISTRIBUTED,
    "pp2-vpp2": {"parallel": PP2 | VPP2},
    "pp2-uneven": {"parallel": PP2 | {"num_layers_in_last_pipeline_stage": 1}},
    "dp2-overlapped": {"parallel": {"overlap_grad_reduce": True}},
    "dp2-distributed-overlapped": {
        "parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        **DISTRIBUTED,
    },
    "tp2-sp-recomputed": {"parallel": TP2 | SP, "memory": {"recompute_granularity": "full"}},
}
OBJECTIVES_IN = ("dp2", "tp2-sp", "pp2", "cp2")  # layouts in which every objective is computed
PRODUCTS: dict[str, dict[str, Any]] = {  # on four
    "tp2-dp2": {"parallel": TP2},
    "tp2-dp2-distributed": {"parallel": TP2, **DISTRIBUTED},
    "tp2-sp-pp2": {"parallel": TP2 | SP | PP2},
    "tp2-sp-cp2": {"parallel": TP2 | SP | CP2},
    "pp2-cp2": {"parallel": PP2 | CP2},
    "tp2-sp-pp2-vpp2": {"parallel": TP2 | SP | PP2 | VPP2},
    "cp4": {"parallel": {"context_parallel_size": 4}},
    "tp4": {"parallel": TP4},
    "tp4-sp": {"parallel": TP4 | SP},
}
# Layouts of a second model, whose embedding and head are two weights: wherever one of them has a place of its own.
UNTIED = (
    *("tp2", "pp2", "dp2-distributed", "pp2-vpp2", "pp2-uneven"),
    *("tp2-sp-pp2", "pp2-cp2", "tp2-sp-pp2-vpp2", "tp4-sp"),
)
RECORDED = {  # slots of which a step keeps the log-probs
    name: (0 if name == "one" else 4 if name in PRODUCTS else 2, LAYOUTS.get(name, {}) | PRODUCTS.get(name, {}))
    for name in ("one", "dp2", "tp2-sp", "cp2", "pp2", "pp2-vpp2", "tp2-sp-pp2", "pp2-cp2")
}
EP2 = {"expert_model_parallel_size": 2}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and what they share
    "ep2": (2, {"parallel": EP2}),
    "etp2": (2, {"parallel": TP2 | SP}),  # as many as split the rest, where nothing else is said
    "tp2-ep2-etp1": (2, {"parallel": TP2 | SP | EP2 | {"expert_tensor_parallel_size": 1}}),
    # Without expert parallelism, and still with other ranks than those that share the rest of the model.
    "tp2-etp1": (2, {"parallel": TP2 | SP | {"expert_tensor_parallel_size": 1}}),
    "tp1-etp2": (2, {"parallel": {"expert_tensor_parallel_size": 2}}),
    "tp2-etp1-distributed": (4, {"parallel": TP2 | SP | {"expert_tensor_parallel_size": 1}, **DISTRIBUTED}),
    "cp2-ep2": (2, {"parallel": CP2 | EP2}),
    "etp2-recomputed": (2, {"parallel": TP2 | SP, "memory": {"recompute_granularity": "full"}}),
    "ep2-distributed": (2, {"parallel": EP2, **DISTRIBUTED}),
    "tp2-ep2-etp2": (4, {"parallel": TP2 | SP | EP2}),
    "pp2-ep2": (4, {"parallel": PP2 | EP2}),
    "pp2-first3": (2, {"parallel": PP2 | {"num_layers_in_first_pipeline_stage": 3}}),
    "tp4-ep2": (4, {"parallel": TP4 | SP | EP2 | {"expert_tensor_parallel_size": 2}}),
    "ep2-twice": (4, {"parallel": EP2}),
}
# What is tried of them: each family where one is trained on two and on four ranks; where shared experts are split, or
# layers without experts are in a stage of their own, the family that has those; else one.
WITH_EXPERTS = [
    (name, family)
    for name in EXPERT_LAYOUTS
    for family in (
        EXPERTS
        if name in ("ep2", "tp2-ep2-etp2")
        else EXPERTS[1:]
        if name in ("etp2", "pp2-first3", "pp2-ep2")
        else EXPERTS[2:]
    )
]
REDUCED = {"overlap_grad_reduce": True}
BOTH = REDUCED | {"overlap_param_gather": True}
# Every kind of layout of the presets, with whatever overlaps: ranks, model, what they share, and what overlaps.
OVERLAPPED: dict[str, tuple[int, str, dict[str, Any], dict[str, bool]]] = {
    "dp2": (2, "llama-tied", DISTRIBUTED, REDUCED),
    "ep2-bfloat16": (2, EXPERTS[-1], {"model_dtype": "bfloat16", "parallel": EP2, **DISTRIBUTED}, REDUCED),
    "tp2-sp-dp2": (4, "llama-tied", {"parallel": TP2 | SP, **DISTRIBUTED}, BOTH),
    "cp2-dp2": (4, "llama-tied", {"parallel": CP2, **DISTRIBUTED}, REDUCED),
    "pp2-dp2": (4, "llama-tied", {"parallel": PP2, **DISTRIBUTED}, REDUCED),
    "etp2-dp2": (4, EXPERTS[-1], {"parallel": TP2 | SP, **DISTRIBUTED}, REDUCED),
    "pp2-vpp2-dp2": (4, "llama-tied", {"parallel": PP2 | VPP2, **DISTRIBUTED}, BOTH),
    "tp2-ep2-etp1": (4, EXPERTS[-1], {**EXPERT_LAYOUTS["tp2-ep2-etp1"][1], **DISTRIBUTED}, REDUCED),
}

SHAPED: dict[str, tuple[str, int, dict[str, Any]]] = {  # of models whose heads or layers fit no other way
    "single-tp2": ("qwen3-single", 2, LAYOUTS["tp2"]),
    "single-tp2-sp": ("qwen3-single", 2, LAYOUTS["tp2-sp"]),
    "single-tp4-sp": ("qwen3-single", 4, PRODUCTS["tp4-sp"]),
    "three-pp2": ("llama-three", 2, {"parallel": PP2 | {"num_layers_in_first_pipeline_stage": 1}}),
    "six-pp2-vpp2": ("llama-six", 2, {"parallel": PP2 | VPP2 | {"num_layers_in_first_pipeline_stage": 2}}),
    "six-pp4": (
        "llama-six",
        4,
        {
            "parallel": {
                "pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 1,
                "num_layers_in_last_pipeline_stage": 1,
            }
        },
    ),
}


HALF = {"model_dtype": "float16", "optimizer": {"initial_loss_scale": 1024.0, "loss_scale_window": 2}}
SAVED: dict[str, dict[str, Any]] = {  # and loaded again by the same layout
    "dp2-distributed": DISTRIBUTED,
    "dp2-bfloat16": {"model_dtype": "bfloat16"},
    "dp2-distributed-bfloat16": {"model_dtype": "bfloat16", **DISTRIBUTED},
    "tp2-float16": {"parallel": TP2, **HALF},
}
MOVES: list[tuple[str, str, int, dict[str, Any]]] = [  # of a checkpoint between one rank and these
    ("dp2-distributed", "llama-tied", 2, LAYOUTS["dp2-distributed"]),
    ("pp2-vpp2", "llama-tied", 2, LAYOUTS["pp2-vpp2"]),
    ("tp2-dp2-distributed", "llama-tied", 4, PRODUCTS["tp2-dp2-distributed"]),
    ("tp2-sp-pp2-vpp2", "qwen3-untied", 4, PRODUCTS["tp2-sp-pp2-vpp2"]),
    ("tp2-sp-cp2", "llama-tied", 4, PRODUCTS["tp2-sp-cp2"]),
    ("tp4-sp", "qwen3-untied", 4, PRODUCTS["tp4-sp"]),
    ("pp2-uneven", "llama-tied", 2, LAYOUTS["pp2-uneven"]),
    ("six-pp2-vpp2", "llama-six", 2, SHAPED["six-pp2-vpp2"][2]),
    *(
        (name, EXPERTS[-1], *EXPERT_LAYOUTS[name])
        for name in ("ep2-distributed", "etp2", "tp2-ep2-etp2", "pp2-ep2", "tp2-etp1-distributed")
    ),
]


ROUTED = ["ep2", "cp2-ep2", "etp2-recomputed", "tp2-ep2-etp2", "pp2-ep2"]  # with choices that are given

SHAKEN = ["ep2", "etp2", "tp2-etp1", "tp2-ep2-etp1", "cp2-ep2", "pp2-first3"]  # noise of the size of rounding
LENT: dict[str, dict[str, Any]] = {  # whose memory engines have for a while
    "one": {},
    "one-bfloat16": {"model_dtype": "bfloat16"},
    "dp2-distributed-bfloat16": {"model_dtype": "bfloat16", **DISTRIBUTED},
    "dp2-distributed-overlapped": LAYOUTS["dp2-distributed-overlapped"],
    "tp2-sp": LAYOUTS["tp2-sp"],
}
PROBED: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {  # an engine of each model, shared by its layouts
    2: {name: ("qwen3-untied", LAYOUTS[name]) for name in LAYOUTS}
    | {name: (EXPERTS[-1], sections) for name, (world, sections) in EXPERT_LAYOUTS.items() if world == 2},
    4: {name: ("qwen3-untied", PRODUCTS[name]) for name in PRODUCTS}
    | {name: (EXPERTS[-1], sections) for name, (world, sections) in EXPERT_LAYOUTS.items() if world == 4},
}
HELD: dict[str, tuple[int, str, dict[str, Any]]] = {  # whose memory is held against the plan's: ranks, model, layout
    "one": (1, "qwen2-tied", {}),
    "one-bfloat16": (1, "llama-untied", {"model_dtype": "bfloat16"}),
    "one-bfloat16-gradients": (
        1,
        "llama-tied",
        {"model_dtype": "bfloat16", "optimizer": {"grad_reduce_in_fp32": False}},
    ),
    "tp2-sp": (2, "qwen3-untied", LAYOUTS["tp2-sp"]),
    "pp2": (2, "llama-tied", LAYOUTS["pp2"]),
    "pp2-vpp2": (2, "qwen3-untied", LAYOUTS["pp2-vpp2"]),
    "pp2-uneven": (2, "llama-tied", LAYOUTS["pp2-uneven"]),
    "tp4-sp": (4, "qwen3-untied", PRODUCTS["tp4-sp"]),
    "dp2-distributed-bfloat16": (2, "llama-half", {"model_dtype": "bfloat16", **DISTRIBUTED}),
    "ep2-distributed": (2, EXPERTS[-1], EXPERT_LAYOUTS["ep2-distributed"][1]),
    "tp2-etp1-distributed": (4, EXPERTS[-1], EXPERT_LAYOUTS["tp2-etp1-distributed"][1]),
    "tp2-ep2-etp2": (4, "qwen2moe-tied", EXPERT_LAYOUTS["tp2-ep2-etp2"][1]),
    "pp2-ep2": (4, "mixtral-untied", EXPERT_LAYOUTS["pp2-ep2"][1]),
}
WHOLE, CUT = 40_000, 25_920  # bytes: an expert of EXPERTS[-1] has 36,864, two thirds of them are one parameter
BY_RANK, BY_PARAMETER = [1] * 8, [*([1] * 8), *([2] * 4)]
# Ranks and what they share, bytes of a half of the memory, how many experts of a layer of eight are gathered at once.
TAKEN: dict[str, tuple[int, dict[str, Any], int, list[int]]] = {
    f"{name}-{half}": (*EXPERT_LAYOUTS[name], half, counts)
    for name in ("ep2", "tp2-ep2-etp2", "pp2-ep2")
    for half, counts in ((WHOLE, BY_RANK), (CUT, BY_PARAMETER))
}
EP4 = {"parallel": {"expert_model_parallel_size": 4}}
TAKEN |= {"ep4-80000": (4, EP4, 2 * WHOLE, [2] * 4), "ep4-40000": (4, EP4, WHOLE, BY_RANK)}
KEPT: dict[str, tuple[int, str, dict[str, Any]]] = {  # whose activations are: ranks, model, layout
    "one": (1, "llama-untied", {}),
    "one-qk-norm": (1, "qwen3-untied", {}),
    "one-experts": (1, "qwen2moe-tied", {}),
    "one-selective": (
        1,
        "llama-untied",
        {"memory": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}},
    ),
    "one-full": (1, "qwen3-untied", {"memory": {"recompute_granularity": "full"}}),
    "tp2": (2, "llama-untied", LAYOUTS["tp2"]),
    "tp2-sp": (2, "qwen3-untied", LAYOUTS["tp2-sp"]),
    "pp2": (2, "llama-untied", LAYOUTS["pp2"]),
    "pp2-uneven": (2, "llama-untied", LAYOUTS["pp2-uneven"]),
    "tp4": (4, "llama-untied", PRODUCTS["tp4"]),
    "tp4-sp": (4, "qwen3-untied", PRODUCTS["tp4-sp"]),
    "tp2-ep2-etp2": (4, "qwen2moe-tied", EXPERT_LAYOUTS["tp2-ep2-etp2"][1]),
}
KEPT_FUSED = ("one", "one-qk-norm", "one-experts", "one-selective", "one-full", "tp2-sp")  # of KEPT, with SwiGLU fused
PROBED_BY_TWO = {"pp2": "qwen3-single", "ep2": EXPERTS[-1]}  # an engine of two tensor-parallel workers


LORA = {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}
SOME = {"adapter": {"type": "lora", "rank": 2, "alpha": 2, "targets": ["q_proj", "v_proj", "down_proj"]}}
EMBEDDED = {"adapter": {"type": "lora", "rank": 4, "alpha": 8, "targets": ["all-linear", "embed_tokens"]}}
# Adapters: ranks, model, what is given beside the layout, and the layout. Two ranks of the single key-value head share
# its rows, as do four of two heads, where there is also a second one to take. Every way in which ranks share an adapter
# is here once: more layouts of four ranks took a minute of two cores and found nothing more.
ADAPTED: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "llama-tied", LORA, {}),
    "one-some": (1, "qwen2-tied", SOME, {}),
    "one-single": (1, "qwen3-single", LORA, {}),
    "one-recomputed": (1, "llama-tied", LORA, {"memory": {"recompute_granularity": "full"}}),
    "one-bfloat16": (1, "llama-tied", LORA, {"model_dtype": "bfloat16"}),
    "tp2-float16": (2, "llama-tied", LORA, {"parallel": TP2, **HALF}),
    **{
        name: (2, "llama-tied", LORA, LAYOUTS[name])
        for name in ("tp2", "tp2-sp", "pp2-vpp2", "cp2", "dp2-distributed-overlapped", "tp2-sp-recomputed")
    },
    "tp2-some": (2, "qwen2-tied", SOME, LAYOUTS["tp2"]),
    **{f"{name}-single": (2, "qwen3-single", LORA, LAYOUTS[name]) for name in ("tp2", "tp2-sp")},
    **{
        name: (4, "llama-tied", LORA, PRODUCTS[name])
        for name in ("tp2-dp2-distributed", "tp2-sp-cp2", "tp2-sp-pp2-vpp2", "pp2-cp2", "cp4")
    },
    "tp4-sp-some": (4, "qwen2-tied", SOME, PRODUCTS["tp4-sp"]),
    # The embedding, too: the vocabulary of 101 tokens is filled up to equal parts of two and of four ranks.
    "one-embedded": (1, "qwen3-untied", EMBEDDED, {}),
    **{
        f"{name}-embedded": (2, "qwen3-untied", EMBEDDED, LAYOUTS[name])
        for name in ("tp2", "tp2-sp", "pp2-vpp2", "cp2", "tp2-sp-recomputed")
    },
    **{f"{name}-embedded": (4, "qwen3-untied", EMBEDDED, PRODUCTS[name]) for name in ("tp2-dp2-distributed", "tp4-sp")},
    # Experts: one rank of each family, and every way in which ranks have or share them.
    "one-mixtral": (1, "mixtral-untied", LORA, {}),
    "one-qwen2moe": (1, "qwen2moe-tied", LORA, {}),
    "one-qwen3moe": (1, "qwen3moe-untied", LORA, {}),
    "one-qwen3moe-recomputed": (1, "qwen3moe-untied", LORA, {"memory": {"recompute_granularity": "full"}}),
    "ep2-mixtral": (2, "mixtral-untied", LORA, EXPERT_LAYOUTS["ep2"][1]),
    "etp2-qwen2moe": (2, "qwen2moe-tied", LORA, EXPERT_LAYOUTS["etp2"][1]),
    "pp2-vpp2-qwen3moe": (2, "qwen3moe-untied", LORA, LAYOUTS["pp2-vpp2"]),
    "cp2-qwen3moe": (2, "qwen3moe-untied", LORA, LAYOUTS["cp2"]),
    "cp2-ep2-qwen3moe": (2, "qwen3moe-untied", LORA, EXPERT_LAYOUTS["cp2-ep2"][1]),
    "ep2-qwen3moe-bfloat16": (2, "qwen3moe-untied", LORA, {"model_dtype": "bfloat16", "parallel": EP2, **DISTRIBUTED}),
    "etp2-qwen3moe-float16": (2, "qwen3moe-untied", LORA, {"parallel": TP2 | SP, **HALF}),
    **{
        f"{name}-qwen3moe": (EXPERT_LAYOUTS[name][0], "qwen3moe-untied", LORA, EXPERT_LAYOUTS[name][1])
        for name in (
            *("ep2-distributed", "tp2-ep2-etp1", "tp2-etp1", "tp2-ep2-etp2", "pp2-ep2", "tp4-ep2", "ep2-twice"),
            *("tp1-etp2", "tp2-etp1-distributed", "etp2-recomputed", "pp2-first3"),
        )
    },
}
TAUGHT: dict[str, tuple[int, dict[str, Any]]] = {  # with a teacher: ranks, and layout
    "one": (1, {"batch": {"micro_batch_tokens": 400}}),
    **{name: (2, LAYOUTS[name]) for name in ("dp2", "tp2-sp", "pp2", "cp2")},
    "tp2-adapters": (2, LORA | LAYOUTS["tp2"]),
    # With a layout of the teacher's own, whose other sizes are the trainer's.
    "dp2-its-tp2": (2, {"parallel": {"teacher_tensor_model_parallel_size": 2}}),
    "dp2-its-pp2": (2, {"parallel": {"teacher_pipeline_model_parallel_size": 2}}),
    "dp2-its-cp2": (2, {"parallel": {"teacher_context_parallel_size": 2}}),
    "pp2-its-dp2": (2, {"parallel": PP2 | {"teacher_pipeline_model_parallel_size": 1}}),
    "tp2-its-pp2": (
        2,
        {"parallel": TP2 | SP | {f"teacher_{n}_model_parallel_size": i for n, i in (("tensor", 1), ("pipeline", 2))}},
    ),
}
ITS_EP = "teacher_expert_model_parallel_size"
TAUGHT_BY_EXPERTS: dict[str, tuple[int, str, dict[str, Any]]] = {  # with a mixture as teacher: ranks, pupil, layout
    "dense-one": (1, "llama-tied", {}),
    "dense-dp2-its-ep2": (2, "llama-tied", {"parallel": {ITS_EP: 2}}),
    "dense-tp2-its-ep2": (
        2,
        "llama-tied",
        {"parallel": TP2 | SP | {"teacher_tensor_model_parallel_size": 1, ITS_EP: 2}},
    ),
    "mixture-one": (1, "qwen2moe-tied", {}),
    "mixture-ep2-its-dp2": (2, "qwen2moe-tied", {"parallel": EP2 | {ITS_EP: 1}}),
}
# Checkpoints of adapters: ranks and layout, each saved, loaded by the same layout, and moved to one rank and back.
MOVING = {"algorithm": {"kl_beta": 0.04, "reference_interval": 2}}
ADAPTED_SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    **{name: (2, LAYOUTS[name]) for name in ("tp2-sp", "pp2-vpp2", "dp2-distributed")},
    "tp2-distributed-bfloat16": (2, {"model_dtype": "bfloat16", "parallel": TP2, **DISTRIBUTED}),
    "embedded-one": (1, {}),
    "tp2-dp2-distributed-embedded": (4, PRODUCTS["tp2-dp2-distributed"]),
    "tp4-embedded": (4, PRODUCTS["tp4"]),
    "experts-one": (1, {}),
    "ep2-distributed": (2, EXPERT_LAYOUTS["ep2-distributed"][1]),
    "tp2-ep2-etp2": (4, EXPERT_LAYOUTS["tp2-ep2-etp2"][1]),
    "pp2-ep2-distributed": (
        4,
        {"parallel": PP2 | EP2 | {"num_layers_in_first_pipeline_stage": 1}, **DISTRIBUTED},
    ),
}
ADAPTED_EXPERTS = ("experts-one", "ep2-distributed", "tp2-ep2-etp2", "pp2-ep2-distributed")  # of a model with experts
ADAPTED_EXPORTED = ("ep2-distributed", "tp2-ep2-etp2", "tp4-embedded")  # checkpoints of these that are converted


def saved_one(name: str) -> str:
    """The case of one rank whose checkpoint is moved to the layout of a case, and back."""
    if "embedded" in name:
        return "embedded-one"
    return "experts-one" if name in ADAPTED_EXPERTS else "one"


def saved_model(name: str) -> str:
    """The model of such a case."""
    return "qwen3moe-odd" if name in ADAPTED_EXPERTS else "qwen3-single"


def saved_adapters(name: str) -> dict[str, Any]:
    """The adapters of such a case."""
    return EMBEDDED if "embedded" in name else LORA


# Adapters whose memory is held against the plan's: ranks, model, adapters, and layout. Those of one rank and of four
# have base weights that no bit of the rest of the plan would notice if they had masters.
WIDE = {"adapter": {"type": "lora", "rank": 32, "targets": ["k_proj", "o_proj", "up_proj"]}}
NARROW = {"model_dtype": "bfloat16"}
ADAPTED_HELD: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "qwen2-tied", LORA, {}),
    "one-bfloat16": (1, "llama-untied", SOME, NARROW),
    "one-bfloat16-gradients": (1, "llama-tied", LORA, {**NARROW, "optimizer": {"grad_reduce_in_fp32": False}}),
    "tp2-sp": (2, "qwen3-untied", LORA, LAYOUTS["tp2-sp"]),
    "pp2-uneven-bfloat16": (2, "llama-tied", LORA, {**LAYOUTS["pp2-uneven"], **NARROW}),
    "dp2-distributed-bfloat16": (2, "llama-half", WIDE, {**NARROW, **DISTRIBUTED}),
    "tp2-moving": (2, "qwen3-single", WIDE, LAYOUTS["tp2"] | MOVING),
    "tp4-sp": (4, "qwen2-tied", LORA, PRODUCTS["tp4-sp"]),
    "tp2-dp2-distributed": (4, "llama-half", WIDE, {**NARROW, **PRODUCTS["tp2-dp2-distributed"]}),
    "tp2-sp-embedded": (2, "qwen3-broad", EMBEDDED, LAYOUTS["tp2-sp"]),
    "pp2-embedded-bfloat16": (2, "qwen3-broad", EMBEDDED, {**LAYOUTS["pp2"], **NARROW}),
    "dp2-distributed-embedded": (2, "qwen3-untied", EMBEDDED, DISTRIBUTED),
    "ep2-distributed": (2, "qwen3moe-untied", LORA, EXPERT_LAYOUTS["ep2-distributed"][1]),
    "tp2-ep2-etp2-experts": (4, "qwen2moe-tied", WIDE, EXPERT_LAYOUTS["tp2-ep2-etp2"][1]),
}
# And what autograd keeps of a micro-batch.
ADAPTED_KEPT: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "llama-untied", LORA, {}),
    "one-qk-norm": (1, "qwen3-untied", WIDE, {}),
    "one-some": (1, "llama-untied", SOME, {}),
    "one-selective": (1, "llama-untied", LORA, KEPT["one-selective"][2]),
    "one-full": (1, "qwen3-untied", LORA, KEPT["one-full"][2]),
    "one-embedded": (1, "llama-untied", EMBEDDED, {}),
    "one-embedded-alone": (1, "llama-untied", {"adapter": EMBEDDED["adapter"] | {"targets": ["embed_tokens"]}}, {}),
    "tp2-sp-embedded": (2, "qwen3-untied", EMBEDDED, LAYOUTS["tp2-sp"]),
    "tp2-sp": (2, "qwen3-untied", WIDE, LAYOUTS["tp2-sp"]),
    "pp2": (2, "llama-untied", SOME, LAYOUTS["pp2"]),
    "tp4": (4, "llama-untied", LORA, PRODUCTS["tp4"]),
    "one-experts": (1, "qwen2moe-tied", LORA, {}),
    "one-experts-some": (1, "qwen3moe-untied", SOME, {}),
    "etp2-experts": (2, "qwen2moe-tied", LORA, EXPERT_LAYOUTS["etp2"][1]),
    "ep2-experts": (2, "qwen2moe-tied", LORA, EXPERT_LAYOUTS["ep2"][1]),
}
# Adapters beside the weights of an engine: ranks, model, layout and dtype.
ADAPTED_BESIDE: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one-bfloat16": (1, "llama-untied", NARROW),
    "tp2-sp": (2, "qwen3-untied", LAYOUTS["tp2-sp"]),
}
# What a sync takes beside its buckets to merge adapters into weights.
ADAPTED_MERGED: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "llama-large", SOME, {}),
    "one-bfloat16": (1, "llama-large", WIDE, NARROW),
    "tp2": (2, "llama-large", LORA, LAYOUTS["tp2"]),
    "one-embedded": (1, "qwen3-broad", EMBEDDED, {}),
    "tp2-embedded-bfloat16": (2, "qwen3-broad", EMBEDDED, LAYOUTS["tp2"] | NARROW),
}


def run_all(models: dict[str, Path], folder: Path, wanted: Callable[[str], object]) -> dict[str, Arrays]:
    """The arrays of every case that is wanted, by its name: on one, two and four ranks, and on one again."""
    tied = str(models["llama-tied"])
    one: dict[str, ranks.Case] = {f"logprobs-{f}": ("logprobs", {"model": str(models[f])}) for f in [*FAMILIES, *ROPES]}
    one |= {f"exported-one-{f}": ("exported", {"model": str(models[f])}) for f in FAMILIES}
    one["unshared"] = ("logprobs", {"model": tied, "batch": {"share_prompts": False}})
    one["shared-prefix"] = ("logprobs", {"model": tied, "batch": {"micro_batch_tokens": 400}})  # all in one micro-batch
    one["steps-one"] = ("steps", {"model": tied})
    single = {"micro_batch_tokens": None, "micro_batch_size": 1}
    one["steps-single"] = ("steps", {"model": tied, "batch": single})
    one["steps-shared-prefix"] = ("steps", {"model": tied, "batch": {"micro_batch_tokens": 400}})
    two: dict[str, ranks.Case] = {
        f"steps-{name}": ("steps", {"model": tied, **sections}) for name, sections in LAYOUTS.items()
    }
    one["objectives-one"] = ("objectives", {"model": tied, "batch": {"micro_batch_tokens": 400}})
    two |= {f"objectives-{name}": ("objectives", {"model": tied, **LAYOUTS[name]}) for name in OBJECTIVES_IN}
    (folder / "full").mkdir()
    attention_again = {"memory": {"recompute_granularity": "selective"}}
    one["steps-attention-recomputed"] = ("steps", {"model": tied, **attention_again})
    one["full"] = ("full", {"model": tied, "folder": str(folder / "full")})
    for name in ("tp2", "pp2"):
        two[f"streamed-{name}"] = ("streamed", {"model": str(models["llama-large"]), **LAYOUTS[name]})
    wide = {"model": str(models["llama-wide"])}
    one["long"] = ("long", wide)
    one["long-recomputed"] = ("long", wide | {"memory": {"recompute_granularity": "full"}})
    for name, sections in LENT.items():
        work = one if name.startswith("one") else two
        work[f"lent-{name}"] = ("lent", {"model": tied, **sections})
        work[f"aside-{name}"] = ("lent", {"model": tied, "memory": {"offload_optimizer": True}, **sections})
        model_only = {"offload_parts": ["weights", "gradients"]}
        work[f"model-{name}"] = ("lent", {"model": tied, "memory": model_only, **sections})
        work[f"optimizer-{name}"] = ("lent", {"model": tied, "memory": {"offload_parts": ["optimizer"]}, **sections})
        work[f"kept-{name}"] = ("steps", {"model": tied, "count": 2, **sections})
    two |= {name: (name, {"model": tied}) for name in ("metered", "awaited")}
    two["verified"] = ("verified", {"model": tied, "folder": str(folder / "verified")})
    two |= {f"slept-{level}": ("slept", {"model": str(models["qwen3-untied"]), "level": level}) for level in (1, 2)}
    one["stopped-one"] = ("steps", {"model": tied, "stop_rank": 0})
    two |= {f"stopped-{name}": ("steps", {"model": tied, "stop_rank": 1, **LAYOUTS[name]}) for name in LAYOUTS}
    for name in ("tp2", "pp2", "pp2-vpp2"):
        two |= {f"exported-{name}-{f}": ("exported", {"model": str(models[f]), **LAYOUTS[name]}) for f in DENSE}
    two["nan"] = ("steps", {"model": str(models["llama-untied"]), "count": 1, "nan_rank": 1})
    one["scheduled"] = ("scheduled", {"model": tied})
    for dtype, scale in (("bfloat16", 1.0), ("float16", 2.0**14), ("float16", 2.0**60)):
        sections = {"model_dtype": dtype, "optimizer": {"initial_loss_scale": scale}}
        one[f"steps-{dtype}-{scale:.0e}"] = ("steps", {"model": tied, **sections})
    one["steps-bfloat16-gradients"] = (
        "steps",
        {"model": tied, "model_dtype": "bfloat16", "optimizer": {"grad_reduce_in_fp32": False}},
    )
    for name, work in (("one", one), ("dp2", two), *((name, two) for name in SAVED)):
        (folder / name).mkdir()
        sections = LAYOUTS.get(name, {}) | SAVED.get(name, {})
        work[f"roundtrip-{name}"] = ("roundtrip", {"model": tied, "folder": str(folder / name), **sections})
    four: dict[str, ranks.Case] = {f"steps-{n}": ("steps", {"model": tied, **s}) for n, s in PRODUCTS.items()}
    (folder / "ep2-dp2").mkdir()
    given = {"model": str(models["qwen3moe-odd"]), "folder": str(folder / "ep2-dp2")}
    four["roundtrip-ep2-dp2-distributed"] = ("roundtrip", {**given, "parallel": EP2, **DISTRIBUTED})
    back: dict[str, ranks.Case] = {}
    for name, (count, sections) in RECORDED.items():
        work = {0: one, 2: two, 4: four}[count]
        work[f"recorded-{name}"] = ("steps", {"model": tied, "recorded": (0, 2), **sections})
    for name, model in (
        ("first", "half"),
        ("half", "half"),
        ("large", "large"),
    ):  # the first time, libraries are loaded
        (folder / f"converted-{name}").mkdir()
        given = {"model": str(models[f"llama-{model}"]), "folder": str(folder / f"converted-{name}")}
        back[f"converted-{name}"] = ("converted", given)
    untied = str(models["qwen3-untied"])
    one["steps-one-untied"] = ("steps", {"model": untied})
    rounded = {"model": untied, "model_norms_in_fp32": False, **LAYOUTS["tp2-sp-recomputed"]}
    two["steps-rounded-untied"] = ("steps", rounded)
    for name in UNTIED:
        work, layouts = (two, LAYOUTS) if name in LAYOUTS else (four, PRODUCTS)
        work[f"steps-{name}-untied"] = ("steps", {"model": untied, **layouts[name]})
    one |= {f"steps-one-{f}": ("steps", {"model": str(models[f])}) for f in EXPERTS}
    for name, family in WITH_EXPERTS:
        world, sections = EXPERT_LAYOUTS[name]
        work, model = {2: two, 4: four}[world], str(models[family])
        work[f"steps-{name}-{family}"] = ("steps", {"model": model, **sections})
        work[f"exported-{name}-{family}"] = ("exported", {"model": model, **sections})
    for name, (model, world, sections) in SHAPED.items():
        work, given = {2: two, 4: four}[world], {"model": str(models[model]), **sections}
        one[f"steps-one-{model}"] = ("steps", {"model": str(models[model])})
        work |= {f"steps-{name}": ("steps", given), f"exported-{name}": ("exported", given)}
    for name, (world, model, sections, switches) in OVERLAPPED.items():
        work, path = {2: two, 4: four}[world], str(models[model])
        work[f"overlapping-{name}-off"] = ("steps", {"model": path, "uneven": True, **sections})
        parallel = {"parallel": sections.get("parallel", {}) | switches}
        work[f"overlapping-{name}-on"] = ("steps", {"model": path, "uneven": True, **sections, **parallel})
    four |= {f"exported-tp4-{f}": ("exported", {"model": str(models[f]), **PRODUCTS["tp4"]}) for f in DENSE}
    separate = {"batch": {"share_prompts": False}}
    worlds = {1: one, 2: two, 4: four}
    for name in ("one", *ROUTED):
        world, sections = EXPERT_LAYOUTS.get(name, (1, {}))
        for family in EXPERTS if name == "one" else EXPERTS[-1:]:
            worlds[world][f"routed-{name}-{family}"] = ("routed", {"model": str(models[family]), **sections})
        model = str(models[EXPERTS[-1]])
        worlds[world][f"given-{name}-{EXPERTS[-1]}"] = ("steps", {"model": model, "given": True, **sections})
    one["counted"] = ("steps", {"model": model, **separate})
    for name in ("ep2", "etp2"):
        two[f"counted-{name}"] = ("steps", {"model": model, "count": 1, **separate, **EXPERT_LAYOUTS[name][1]})
    fast = {"optimizer": {"lr": 0.02}}
    one[f"moved-{EXPERTS[-1]}"] = ("steps", {"model": model, **fast})
    repeat = {"moe": {"router_replay": "old_logprobs"}}
    one[f"repeated-{EXPERTS[-1]}"] = ("steps", {"model": model, **fast, **repeat})
    one["mismatched"] = ("mismatched", {"model": model})
    for name in ("one", *SHAKEN):
        world, sections = EXPERT_LAYOUTS.get(name, (1, {}))
        worlds[world][f"shaken-{name}"] = ("shaken", {"model": str(models[EXPERTS[-1]]), **sections})
    one["shaken-dense"] = ("shaken", {"model": str(models["llama-untied"])})
    for name in ("peaks", "short"):
        (folder / name).mkdir()
    large = {"model": str(models["llama-large"]), "folder": str(folder / "peaks")}
    four["short-of-disk"] = ("short_of_disk", {"model": tied, "folder": str(folder / "short"), **DISTRIBUTED})
    four["shared-peaks"] = ("shared_peaks", {**large, **DISTRIBUTED})
    four["ordered"] = ("ordered", {"model": tied})
    exact = {"run": {"deterministic": True}}
    one["steps-one-deterministic"] = ("steps", {"model": tied, **exact})
    for name in ("dp2-distributed", "tp2-sp"):
        two[f"steps-{name}-deterministic"] = ("steps", {"model": tied, **exact, **LAYOUTS[name]})
    for world, work in ((2, two), (4, four)):
        for name, (model, sections) in PROBED[world].items():
            work[f"probed-{name}"] = ("probed", {"model": str(models[model]), **sections})
    for name, (world, model, sections) in HELD.items():
        worlds[world][f"held-{name}"] = ("held", {"model": str(models[model]), **sections})
    for name, (world, sections, half, _) in TAKEN.items():
        worlds[world][f"taken-{name}"] = ("taken", {"model": str(models[EXPERTS[-1]]), "half": half, **sections})
    for name, (world, model, sections) in KEPT.items():
        worlds[world][f"kept-activations-{name}"] = ("kept", {"model": str(models[model]), **sections})
    for name in KEPT_FUSED:
        world, model, sections = KEPT[name]
        worlds[world][f"kept-fused-{name}"] = ("kept", {"model": str(models[model]), "fused": True, **sections})
    for name, model in PROBED_BY_TWO.items():
        sections = (LAYOUTS | {key: found for key, (_, found) in EXPERT_LAYOUTS.items()})[name]
        two[f"probed-{name}-by-two"] = ("probed", {"model": str(models[model]), "engine_ranks": 2, **sections})
    for name, model, world, sections in MOVES:
        folder_of = {"model": str(models[model]), "folder": str(folder / f"saved-{name}-{model}")}
        from_one = {**folder_of, "folder": str(folder / f"saved-one-{model}")}
        one[f"saved-one-{model}"] = ("saved", from_one)
        work = {2: two, 4: four}[world]
        work[f"from-one-{name}-{model}"] = ("loaded", {**from_one, **sections})
        work[f"saved-{name}-{model}"] = ("saved", {**folder_of, **sections})
        back[f"to-one-{name}-{model}"] = ("loaded", folder_of)
        back[f"folder-{name}-{model}"] = ("to_folder", {**folder_of, "out": str(folder / f"folder-{name}-{model}")})
    for name, (world, model, given, sections) in ADAPTED.items():
        worlds[world][f"adapted-{name}"] = ("adapted", {"model": str(models[model]), **given, **sections})
    for name, (world, model, given, sections) in ADAPTED_HELD.items():
        worlds[world][f"adapted-held-{name}"] = ("held", {"model": str(models[model]), **given, **sections})
    for name, (world, model, given, sections) in ADAPTED_KEPT.items():
        work, both = worlds[world], {"model": str(models[model]), **given, **sections}
        work |= {f"adapted-kept-{name}": ("kept", both), f"adapted-fused-{name}": ("kept", both | {"fused": True})}
    for name, (world, model, given, sections) in ADAPTED_MERGED.items():
        worlds[world][f"adapted-merged-{name}"] = (
            "adapters_merged",
            {"model": str(models[model]), **by_merging(given), **sections},
        )
    for name, (world, model, sections) in ADAPTED_BESIDE.items():
        beside: dict[str, Any] = {"adapter": LORA["adapter"] | {"engine": "adapters"}, "model": str(models[model])}
        worlds[world][f"adapted-beside-{name}"] = ("beside", beside | sections)
    for name, (world, sections) in ADAPTED_SAVED.items():
        adapted = {"model": str(models[saved_model(name)]), **saved_adapters(name)}
        of_one = {**adapted, **MOVING, "folder": str(folder / f"adapters-{saved_one(name)}")}
        of_this = of_one | {"folder": str(folder / f"adapters-{name}")}
        worlds[world][f"adapted-saved-{name}"] = ("adapters_saved", of_this | sections)
        worlds[world][f"adapted-again-{name}"] = ("adapters_loaded", of_this | sections)
        if not name.endswith("16"):
            worlds[world][f"adapted-from-one-{name}"] = ("adapters_loaded", of_one | sections)
            back[f"adapted-to-one-{name}"] = ("adapters_loaded", of_this)
    for name in ADAPTED_EXPORTED:
        adapted = {"model": str(models[saved_model(name)]), **saved_adapters(name)}
        given = {**adapted, "folder": str(folder / f"adapters-{name}")}
        back[f"adapted-exported-{name}"] = ("adapters_exported", {**given, "out": str(folder / f"exported-{name}")})
    for name, (world, sections) in TAUGHT.items():
        both = {"model": tied, "teacher": str(models["qwen3-teacher"]), **sections}
        worlds[world][f"taught-{name}"] = ("taught", both)
    for name, (world, pupil, sections) in TAUGHT_BY_EXPERTS.items():
        both = {"model": str(models[pupil]), "teacher": str(models["qwen3moe-untied"]), **sections}
        worlds[world][f"taught-{name}"] = ("taught", both)
    found: dict[str, Arrays] = {}
    for world, work in ((1, one), (2, two), (4, four), (1, back)):
        if chosen := {name: case for name, case in work.items() if wanted(name)}:
            found |= ranks.run(world, folder, chosen)
    return found


def by_merging(given: dict[str, Any]) -> dict[str, Any]:
    """Adapters that are merged into what engines get, whatever the dtype."""
    return given | {"adapter": given["adapter"] | {"engine": "merged"}}
