"""The rules between the keys of a config, and the quantities they speak of.

All counts are completions unless a name says prompts. ``dp_size = world_size / (TP x PP x CP)``; expert layers cut the
same ranks another way, ``expert_dp_size = world_size / (ETP x EP x PP)``. The rules, by number:

1.  world_size is divisible by TP x PP x CP, and by ETP x EP x PP
2.  generation_batch_size is divisible by num_generations, and num_rollout_prompts by dp_size
3.  num_rollout_prompts / dp_size >= 1
4.  (num_rollout_prompts / dp_size) is divisible by micro_batch_size
5.  num_prompts_per_dp_group >= 1, and divisible by micro_batch_size
6.  generation_batch_size is divisible by global_batch_size
7.  num_generations >= 2
8.  generation_batch_size / world_size >= 1
9.  global_batch_size is divisible by micro_batch_size x dp_size (with a token budget: at least dp_size)
10. generation_batch_size and steps_per_generation, both given, agree
11. the data set fills a rollout; model, sequence length and nodes divide by the parallel sizes that cut them
12. each pass has a size or a token budget, not both, and a budget holds the longest sequence
13. engines fit on their node, and GPUs set apart leave some to train
14. the objective does not contradict itself
15. global_batch_size is divisible by num_generations: an update is made of whole groups
16. what every phase takes of a GPU fits on it, where cluster.gpu says which (memory_estimate.py)
17. what rollout.engine gives is what vLLM takes, and contradicts no setting beside it (plan_limits.py)

With a token budget packing decides the micro-batches: 4 and 5 do not apply. With GPUs set apart for generation (server
mode) prompts belong to no DP group: 3, 4, 5 and the second half of 2 do not apply. Rules are evaluated as they stand,
with exact fractions: half a prompt per device breaks 2, 3 and 4.
"""

from __future__ import annotations

from fractions import Fraction

from gspo_hpc import algorithms, model_rules
from gspo_hpc.plan_book import Book, show


def apply_rules(book: Book) -> None:
    """Checks every rule whose numbers are there; what is found goes into `book`."""
    _engines(book)
    _grid(book)
    _batch(book)
    model_rules.apply_rules(book)
    _objective(book)


def _engines(book: Book) -> None:
    """Engines on every node, and the GPUs that server mode sets apart for them."""
    cluster, rollout = book.config.cluster, book.config.rollout
    gpus, tp, engines = cluster.gpus_per_node, rollout.tensor_parallel_size, rollout.engines_per_node
    book.layout |= {"nodes": cluster.nodes, "gpus_per_node": gpus}
    book.check(
        11,
        gpus % tp == 0,
        f"gpus_per_node ({gpus}) must be divisible by rollout.tensor_parallel_size ({tp}): an engine stays on one node",
    )
    if book.server and engines is None:
        book.world = None
        book.check(13, False, "rollout.mode server sets GPUs apart for generation: give rollout.engines_per_node")
        return
    engines = max(1, gpus // tp) if engines is None else engines
    if book.server:
        left = gpus - engines * tp
        book.world = cluster.nodes * left if left > 0 else None
        book.check(
            13,
            left > 0,
            f"engines_per_node ({engines}) x rollout.tensor_parallel_size ({tp}) = {engines * tp} GPUs set apart for "
            f"generation leave none of gpus_per_node ({gpus}) to train",
        )
        book.layout["gpus_set_apart_per_node"] = engines * tp
    else:
        book.check(
            13,
            gpus % engines == 0 and engines * tp <= gpus,
            f"gpus_per_node ({gpus}) must be divisible by engines_per_node ({engines}), and hold engines_per_node x "
            f"rollout.tensor_parallel_size ({tp}) = {engines * tp} GPUs",
        )
        if engines * tp < gpus and cluster.platform == "cuda":
            book.warnings.append(f"{gpus - engines * tp} of {gpus} GPUs of every node idle during generation")
    book.layout |= {
        "engines_per_node": engines,
        "num_engines": engines * cluster.nodes,
        "rollout_tensor_parallel_size": tp,
    }


def _grid(book: Book) -> None:
    """Rule 1: how the training GPUs are cut into ranks."""
    p = book.config.parallel
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size or tp
    book.layout |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    if tp > book.config.cluster.gpus_per_node:
        book.warnings.append(f"tensor_model_parallel_size ({tp}) reaches across nodes: keep it inside one")
    book.check(11, not p.sequence_parallel or tp > 1, "sequence_parallel needs tensor_model_parallel_size above 1")
    vpp = p.virtual_pipeline_model_parallel_size
    text = f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size ({pp}) above 1"
    book.check(11, vpp is None or (vpp > 0 and pp > 1), text)
    text = "overlap_param_gather needs optimizer.distributed: true and overlap_grad_reduce: true"
    book.check(11, not p.overlap_param_gather or (book.config.optimizer.distributed and p.overlap_grad_reduce), text)
    half = book.config.model.dtype == "float16"
    text = "model.dtype: float16 scales the loss of experts on ranks of their own by themselves: use bfloat16"
    book.check(11, not half or ep == 1, text)
    model, cuda = book.config.model, book.config.cluster.platform == "cuda"
    text = "model.layers: transformer_engine needs GPUs (cluster.platform: cuda); model.layers=torch runs everywhere"
    book.check(11, cuda or model.layers != "transformer_engine", text)
    text = (
        f"model.fp8: {model.fp8} needs GPUs, model.dtype bfloat16 and the layers of Transformer Engine (model.layers)"
    )
    book.check(11, not model.fp8 or (cuda and model.layers != "torch" and model.dtype == "bfloat16"), text)
    if model.provider == "mcore_bridge":
        _bridged(book)
    if (world := book.world) is None:
        return
    book.quantities["world_size"] = world
    if world % (tp * pp * cp) == 0:
        book.dp = world // (tp * pp * cp)
        book.quantities["dp_size"] = book.layout["data_parallel_size"] = book.dp
    else:
        book.check(
            1,
            False,
            f"world_size ({world}) must be divisible by tensor ({tp}) x pipeline ({pp}) x context ({cp}) parallel size "
            f"= {tp * pp * cp}: dp_size would be {show(Fraction(world, tp * pp * cp))}",
        )
    if world % (etp * ep * pp) == 0:
        expert_dp = world // (etp * ep * pp)
        book.quantities["expert_dp_size"] = book.layout["expert_data_parallel_size"] = expert_dp
    else:
        book.check(
            1,
            False,
            f"world_size ({world}) must be divisible by expert tensor ({etp}) x expert ({ep}) x pipeline ({pp}) "
            f"parallel size = {etp * ep * pp}: expert_dp_size would be {show(Fraction(world, etp * ep * pp))}",
        )


def _bridged(book: Book) -> None:
    """What models of mcore-bridge's cannot do here."""
    config, who = book.config, "model.provider: mcore_bridge"
    cuda = config.cluster.platform == "cuda" and config.model.layers != "torch"
    book.check(
        11, cuda, f"{who} needs GPUs (cluster.platform: cuda) and the layers of Transformer Engine (model.layers)"
    )
    cp = config.parallel.context_parallel_size
    book.check(11, cp == 1, f"{who} splits no samples: context_parallel_size ({cp}) must be 1")
    shared = config.batch.share_prompts
    book.check(11, not shared, f"{who} has attention that cannot share prompts: batch.share_prompts=false")
    replay = config.moe.router_replay
    book.check(11, replay == "off", f"{who} has routers of its own: moe.router_replay ({replay}) must be off")


def _batch(book: Book) -> None:
    """Rules 2 to 10, and the quantities they speak of."""
    batch, q, dp, world = book.config.batch, book.quantities, book.dp, book.world
    gbs, group, mbs = batch.global_batch_size, batch.num_generations, batch.micro_batch_size
    gen, spg = batch.generation_batch_size, batch.steps_per_generation
    if gbs and gen and spg:
        book.check(
            10,
            gen == gbs * spg,
            f"generation_batch_size ({gen}) and steps_per_generation ({spg}) disagree: global_batch_size ({gbs}) x "
            f"steps_per_generation ({spg}) = {gbs * spg}; give one of them",
        )
    steps = spg or (Fraction(gen, gbs) if gen and gbs else 1 if gen is None else None)
    gen = gen or (gbs * (spg or 1) if gbs else None)
    known = {
        "micro_batch_size": mbs,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "global_batch_size": gbs,
        "steps_per_generation": steps,
        "generation_batch_size": gen,
        "num_generations": group,
        "num_iterations": batch.num_iterations,
    }
    q |= {name: value for name, value in known.items() if value is not None}
    if gbs and mbs and dp:
        q["gradient_accumulation_steps"] = Fraction(gbs, mbs * dp)
        book.check(
            9,
            gbs % (mbs * dp) == 0,
            f"global_batch_size ({gbs}) must be divisible by micro_batch_size ({mbs}) x dp_size ({dp}) = {mbs * dp}",
        )
    elif gbs and dp and batch.micro_batch_tokens:
        text = f"global_batch_size ({gbs}) must be at least dp_size ({dp}): a DP rank would have nothing to learn from"
        book.check(9, gbs >= dp, text)
    if batch.micro_batch_tokens and not mbs:
        book.notes.append("Rules 4 and 5 do not apply: packing fills micro_batch_tokens and decides the micro-batches.")
    if gen and gbs:
        text = f"generation_batch_size ({gen}) must be divisible by global_batch_size ({gbs})"
        book.check(6, gen % gbs == 0, text)
    if gen and world:
        q["per_device_generation_batch_size"] = Fraction(gen, world)
        book.check(
            8,
            gen >= world,
            f"per_device_generation_batch_size ({show(Fraction(gen, world))}) = generation_batch_size ({gen}) / "
            f"world_size ({world}) must be at least 1",
        )
    if group:
        text = f"num_generations ({group}) must be at least 2: one completion has no group to compare with"
        book.check(7, group >= 2, text)
        if gen:
            _prompts(book, gen, group)


def _prompts(book: Book, gen: int, group: int) -> None:
    """Rules 2 to 5: prompts per rollout, per update and per DP group."""
    batch, q, dp = book.config.batch, book.quantities, book.dp
    gbs, mbs = batch.global_batch_size, batch.micro_batch_size
    prompts = q["num_rollout_prompts"] = Fraction(gen, group)
    if gbs:
        q["num_train_prompts"] = Fraction(gbs, group)
    made = f"generation_batch_size ({gen}) must be divisible by num_generations ({group})"
    book.check(2, gen % group == 0, made)
    if gbs:
        made = f"{dp} x {gbs // dp}" if dp and gbs % dp == 0 else f"{gbs}"
        book.check(
            15,
            gbs % group == 0,
            f"The global train batch size ({made}) must be evenly divisible by the number of generations per prompt "
            f"({group}): every update is made of whole groups",
        )
    if book.server:
        book.notes.append(
            "Rules 3, 4, 5 and the DP half of 2 do not apply: GPUs set apart generate, and no DP group owns prompts."
        )
        return
    if dp is None:
        return
    per_device = q["num_rollout_prompts_per_dp_group"] = prompts / dp
    made = f"num_rollout_prompt ({show(prompts)}) = generation_batch_size ({gen}) // num_generations ({group})"
    if gen % group == 0:
        book.check(2, gen // group % dp == 0, f"{made} must be divisible by dp_size ({dp})")
    book.check(
        3,
        per_device >= 1,
        f"per_device_num_rollout_prompt ({per_device.numerator // per_device.denominator}) must be at least 1: {made} "
        f"over dp_size ({dp})",
    )
    if mbs:
        q["num_iters_per_step"] = per_device / mbs
        text = f"Per-device rollout prompt count ({show(per_device)}) must be divisible by micro_batch_size ({mbs})"
        book.check(4, per_device % mbs == 0, text)
    if gbs:
        trained = q["num_prompts_per_dp_group"] = Fraction(gbs, group * dp)
        if mbs:
            must = "be at least 1" if trained < 1 else f"be divisible by micro_batch_size ({mbs})"
            book.check(
                5,
                trained >= 1 and trained % mbs == 0,
                f"num_prompts_per_dp_group ({show(trained)}) must {must}: global_batch_size ({gbs}) / num_generations "
                f"({group}) / dp_size ({dp}); steps_per_generation has no part in it, global_batch_size must be a "
                f"multiple of {group * dp * mbs}",
            )


def _objective(book: Book) -> None:
    """Rule 14, and the settings that defeat the objective."""
    try:
        book.warnings += algorithms.warnings(book.config)
    except ValueError as error:
        for line in str(error).splitlines():
            book.check(14, False, line)
