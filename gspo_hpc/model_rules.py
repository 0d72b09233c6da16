"""Rules 11 and 12 on what a model is and what is put through it: sequences, what is computed again, sizes that are cut.

Floor 1: plain Python. The rules by number stand in plan_rules.py.
"""

from __future__ import annotations

import difflib

from gspo_hpc.plan_book import Book

# What Megatron-Core's selective recomputation names, of the parts that models here have.
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")


def apply_rules(book: Book) -> None:
    """Checks those whose numbers are there; what is found goes into `book`."""
    _sequence(book)
    _recompute(book)
    _model(book)


def _sequence(book: Book) -> None:
    """Rules 11 and 12: the longest sequence, cut by CP and put into token budgets."""
    config = book.config
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    longest, cp = prompt + response, config.parallel.context_parallel_size
    made = f"max_prompt_length ({prompt}) + max_response_length ({response}) = {longest}"
    book.check(
        11,
        cp == 1 or longest % (2 * cp) == 0,
        f"{made} must be divisible by 2 x context_parallel_size ({cp}) = {2 * cp}: each rank takes two pieces",
    )
    for prefix in ("", "logprob_", "reference_"):
        size = getattr(config.batch, f"{prefix}micro_batch_size")
        tokens = getattr(config.batch, f"{prefix}micro_batch_tokens")
        text = f"{prefix}micro_batch_size ({size}) and {prefix}micro_batch_tokens ({tokens}) exclude each other"
        book.check(12, not (size and tokens), f"{text}; give one")
        text = f"{prefix}micro_batch_tokens ({tokens}) must hold the longest sequence: {made} tokens"
        book.check(12, tokens is None or tokens >= longest, text)


def _recompute(book: Book) -> None:
    """Rule 11 on what is computed again, and when that is wanted."""
    memory, parallel = book.config.memory, book.config.parallel
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    for name in memory.recompute_modules:
        if name not in RECOMPUTED:
            nearest = difflib.get_close_matches(name, RECOMPUTED, n=1, cutoff=0.4)
            hint = f"; nearest: {nearest[0]}" if nearest else ""
            text = f"memory.recompute_modules: {name} is no part that can be computed again{hint}"
            book.check(11, False, f"{text}; known: {', '.join(RECOMPUTED)}")
    arch, model = book.models.find(book.config), book.config.model
    if memory.recompute_granularity == "selective":
        fused = book.config.cluster.platform == "cuda" and model.layers != "torch"
        text = "memory.recompute_modules: moe_act needs a model with experts, and layers of Transformer Engine on GPUs"
        mixed = arch is None or arch.experts is not None
        book.check(11, "moe_act" not in memory.recompute_modules or (fused and mixed), text)
        delayed = model.fp8 is not None and model.fp8_recipe == "delayed"
        text = "model.fp8_recipe: delayed does not go with moe_act or layernorm of memory.recompute_modules"
        book.check(11, not delayed or not {"moe_act", "layernorm"}.intersection(memory.recompute_modules), text)
    if arch is not None and arch.num_layers % (pp * chunks) == 0:
        each = arch.num_layers // (pp * chunks)
        text = (
            f"memory.recompute_num_layers ({memory.recompute_num_layers}) must be at most {each}: layers of the model "
        )
        text += f"({arch.num_layers}) / pipeline_model_parallel_size ({pp})"
        text += f" / virtual_pipeline_model_parallel_size ({chunks})" if chunks > 1 else ""
        book.check(11, memory.recompute_num_layers <= each, text)
    if pp > 4 and memory.recompute_granularity is None:
        book.warnings.append(
            f"pipeline_model_parallel_size ({pp}) is above 4, and the first stage keeps the activations of up to {pp} "
            f"micro-batches: set memory.recompute_granularity=full"
        )


def _model(book: Book) -> None:
    """Rule 11 on the model's config.json, its own or a shipped one: what TP, PP, EP and the engines cut."""
    config, p, engine_tp = book.config, book.config.parallel, book.config.rollout.tensor_parallel_size
    if config.model.path is None:
        return
    try:
        raw, note = book.models.planned(config.model.path)
    except ValueError as error:
        book.check(11, False, str(error))
        return
    book.notes += [note] if note else []
    if raw is None:
        return
    raw = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw

    def size(*names: str) -> int | None:
        return next((raw[name] for name in names if isinstance(raw.get(name), int)), None)

    heads, experts = size("num_attention_heads"), size("num_experts", "num_local_experts", "n_routed_experts")
    groups = size("num_key_value_heads") or heads
    tp, pp, ep = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.expert_model_parallel_size
    for name, value, cut, parts in (
        ("num_attention_heads", heads, "tensor_model_parallel_size", tp),
        ("num_key_value_heads", groups, "tensor_model_parallel_size", tp),
        ("intermediate_size", size("intermediate_size"), "tensor_model_parallel_size", tp),
        (
            "num_hidden_layers",
            size("num_hidden_layers"),
            "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size",
            pp * (p.virtual_pipeline_model_parallel_size or 1),
        ),
        (
            "moe_intermediate_size",
            size("moe_intermediate_size") if experts else None,
            "expert_tensor_parallel_size",
            p.expert_tensor_parallel_size or tp,
        ),
        ("num_experts", experts or 1, "expert_model_parallel_size", ep),
        ("num_attention_heads", heads, "rollout.tensor_parallel_size", engine_tp),
        ("num_key_value_heads", groups, "rollout.tensor_parallel_size", engine_tp),
    ):
        text = f"{name} ({value}) of the model must be divisible by {cut} ({parts})"
        book.check(11, value is None or value % parts == 0, text)
    vocabulary = size("vocab_size")
    if vocabulary is not None and vocabulary % tp:
        padded = -(-vocabulary // tp) * tp
        book.notes.append(
            f"vocab_size ({vocabulary}) is filled up to {padded} rows: tensor_model_parallel_size ({tp})."
        )
    text = (
        f"a model with experts needs parallel.sequence_parallel: true where tensor_model_parallel_size ({tp}) is not 1"
    )
    book.check(11, not experts or tp == 1 or p.sequence_parallel, text)
    text = "moe.router_replay: rollout needs GPUs: vLLM's CPU build does not tell which experts it chose; old_logprobs "
    text += "repeats the trainer's own choices"
    book.check(11, not experts or config.cluster.platform == "cuda" or config.moe.router_replay != "rollout", text)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    positions, scaling = size("max_position_embeddings"), raw.get("rope_scaling") or raw.get("rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
    book.check(
        11,
        positions is None or kind != "default" or longest <= positions,
        f"max_prompt_length + max_response_length = {longest} must fit max_position_embeddings ({positions}) of the "
        "model",
    )
