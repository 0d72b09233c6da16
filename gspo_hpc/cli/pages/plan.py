"""The page of ``gspo-hpc plan``. docs/plan.md describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from gspo_hpc.algorithms import combinations
from gspo_hpc.cli.pages.render import grid, item, text
from gspo_hpc.config.derived import has_own_layout, older_weights_sample
from gspo_hpc.config.reading.places import Places, together
from gspo_hpc.config.schema import Config
from gspo_hpc.config.section import written
from gspo_hpc.planning import exactness
from gspo_hpc.planning.exactness import Exactness
from gspo_hpc.planning.plan import Plan
from gspo_hpc.planning.quantities import quantity_text
from gspo_hpc.system.text import rounded

if TYPE_CHECKING:
    from gspo_hpc.planning.fixes.change import Change, Fix

_MEANING = {
    "world_size": "ranks that train",
    "dp_size": "world_size / (TP x PP x CP)",
    "expert_dp_size": "the same for expert layers: world_size / (ETP x EP x PP)",
    "micro_batch_size": "completions per micro-batch and DP rank",
    "micro_batch_tokens": "tokens per micro-batch, filled by packing",
    "global_batch_size": "completions per optimizer step",
    "steps_per_generation": "optimizer steps in one pass over a rollout",
    "generation_batch_size": "completions per rollout",
    "num_generations": "completions per prompt",
    "num_iterations": "passes over one rollout",
    "gradient_accumulation_steps": "micro-batches per optimizer step and DP rank",
    "per_device_generation_batch_size": "completions per rollout and rank",
    "num_rollout_prompts": "prompts per rollout",
    "num_train_prompts": "prompts per optimizer step",
    "num_rollout_prompts_per_dp_group": "prompts per rollout and DP group",
    "num_prompts_per_dp_group": "prompts per optimizer step and DP group",
    "num_iters_per_step": "num_rollout_prompts_per_dp_group / micro_batch_size",
    "num_rows": "prompts that are trained on",
    "steps_per_epoch": "optimizer steps per pass over the data",
    "max_steps": "optimizer steps of the run",
    "num_rollouts": "rollouts of the run",
    "num_completions": "completions of the run",
    "num_epochs": "passes over the data",
}


def title(name: str) -> Iterator[RenderableType]:
    """Yield an empty line and the title of a section."""
    yield ""
    yield text((name, "bold"))


def no_answer(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the three rows of the answer where nothing is estimated, with the reason."""
    lacking = "the model's sizes are not known"
    if config.cluster.platform == "cpu":
        lacking = "cluster.platform is cpu, and estimates are for GPUs"
    elif config.cluster.gpu is None and config.cluster.gpu_memory_gb is None:
        lacking = "give cluster.gpu, such as cluster.gpu=H100, or cluster.gpu_memory_gb"
    yield "fits", f"not estimated: {lacking}"
    yield "time", "not estimated; the console shows it from the second step on, with the time that is left"
    steps = config.run.max_steps
    yield "run", length_needs(config, "length") if steps is None else f"{steps:,} steps"


def length_needs(config: Config, what: str) -> str:
    """Return what a config has to say for a run's length, hours or the like to be known."""
    if config.run.max_epochs is None:
        return f"give run.max_steps or run.max_epochs for its {what}"
    given = "data.sources" if config.data.sources else "data.train"
    return f"{config.run.max_epochs:g} epochs; the files of {given} have to be here to know its {what}"


def page(
    name: str,
    config: Config,
    plan: Plan,
    places: Places,
    fixes: Sequence[Fix] = (),
    *,
    answer: Sequence[tuple[str, str]] = (),
    unchecked: Sequence[str] = (),
    ranks: bool = False,
) -> Iterator[RenderableType]:
    """Yield the parts of the page: the answer first, then what it follows from.

    `places` says where settings stand; `fixes` are those of a refused plan, `answer` the lines on memory, time and
    cost of one that holds, `unchecked` what a plan does not look at. `ranks` asks for a row for each rank.
    """
    verdict = _verdict(plan)
    head = item("", f"plan of {name}: {verdict}")
    head.stylize("bold", 0, len("plan"))
    colour = "red" if plan.broken or plan.not_run or plan.errors else "green" if plan.runnable else "yellow"
    head.stylize(colour, -len(verdict))
    yield head
    if answer:
        yield grid(answer, first=6)
    if plan.broken:
        yield from _broken(name, plan, places, fixes)
    if plan.errors:
        yield from title("Refused by train and submit")
        yield from (item(text("  ", ("x", "red"), "  "), line) for line in plan.errors)
    if plan.not_run:
        yield from title("Can be planned, but not run by this version")
        yield from (item(text("  ", ("x", "red"), "  "), one.reason) for one in plan.not_run)
    if plan.warnings:
        yield from title("Warnings")
        yield from (item(text("  ", ("!", "yellow"), "  "), warning) for warning in plan.warnings)
    if unchecked:
        yield from title("Not checked")
        yield from (item("  -  ", one) for one in unchecked)
    yield from title("Layout")
    yield grid(_layout(plan, config))
    yield from title("Quantities")
    yield grid(
        ((key, quantity_text(value), _MEANING.get(key, "")) for key, value in plan.quantities.items()),
        "lrl",
    )
    if plan.sources:
        yield from title("Sources")
        yield grid(_sources(plan), "lrrrrr")
    yield from title("Passes")
    yield grid(_passes(plan, config))
    yield from title("Algorithm")
    yield item("  ", f"{config.algorithm.name}: {config.algorithm.paper}")
    fields = type(config.algorithm).model_fields
    idle = combinations.inert(config.algorithm)
    yield grid(
        (key, written(v), f"no effect with {idle[key]}" if key in idle else fields[key].description or "")
        for key, v in config.algorithm
        if key != "name"
    )
    if plan.exactness is not None:
        yield from title("Exactness")
        yield from _exactness(plan.exactness)
    if ranks or plan.quantities.get("world_size", 0) != 1:
        yield from title("Ranks")
        yield from _ranks(plan, ranks)
    notes = [*plan.notes]
    if plan.missing:
        notes.append(f"A run also needs: {', '.join(plan.missing)}.")
    if notes:
        yield from title("Notes")
        yield from (item("  -  ", note) for note in notes)


def _sources(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield "", "prompts", "share", "most in a rollout", "draws", "epochs"
    for one in plan.sources:
        most, draws = ("?" if count is None else f"{count:,}" for count in (one.most, one.draws))
        epochs = "?" if one.epochs is None else rounded(one.epochs)
        yield one.name, f"{one.prompts:,}", f"{one.share:.1%}", most, draws, epochs


def _broken(name: str, plan: Plan, places: Places, fixes: Sequence[Fix]) -> Iterator[RenderableType]:
    from gspo_hpc.planning import mentions

    yield from title("Broken rules")
    for broken in plan.broken:
        yield text("  ", (broken.rule, "red"))
        yield item("    ", broken.message)
        if given := mentions.given(broken, places):  # the head of the page has the file's folder
            yield item("    ", f"set by {together(given.values())}".replace(f" {name}:", f" {Path(name).name}:"))
    yield from title("Fixes (add one to the command, or write it into the file)")
    yield _fixes(fixes)


def _exactness(found: Exactness) -> Iterator[RenderableType]:
    yield item("  ", f"{found.grade}: {found.meaning}")
    yield from (item("  -  ", reason) for reason in found.reasons)
    if found.settings:
        yield item("  ", f"{exactness.TO_RAISE}: {' '.join(found.settings)}")
    if found.cost:
        yield item("  ", found.cost)


def _verdict(plan: Plan) -> str:
    if plan.broken:
        return f"{len(plan.broken)} broken rule{'s' * (len(plan.broken) > 1)}"
    if plan.errors:
        return "refused: train and submit would not start it"
    if plan.not_run:
        return "valid, but not run by this version"
    if plan.missing:
        return "what is given is valid; a run needs more"
    if plan.unknown_model is not None:
        return "what could be checked is valid; nothing is known of the model"
    return "valid, but not all that it names is on this machine" if plan.absent else "valid as far as checked"


def _ranks(plan: Plan, every: bool) -> Iterator[RenderableType]:
    from gspo_hpc.cli.pages import ranks as rank_page  # only here: most plans on one GPU have no such table

    try:
        yield from rank_page.page(plan.layout, every)
    except ValueError as error:
        yield item("  ", str(error))


def _teacher(key: str, config: Config) -> str:
    """Return which model the pass of the reference is of, where that is a teacher."""
    if key != "reference" or not config.algorithm.has_teacher:
        return ""
    of, at = f", of the teacher {config.algorithm.teacher}", config.parallel.of_teacher()
    if has_own_layout(config):
        of += f" with TP {at.tensor_model_parallel_size}, PP {at.pipeline_model_parallel_size}, CP "
        of += f"{at.context_parallel_size}, EP {at.expert_model_parallel_size}"
    return of


def _passes(plan: Plan, config: Config) -> Iterator[tuple[str, str]]:
    old = "one update per rollout"
    if older_weights_sample(config):
        why = "generation is ahead" if config.rollout.max_staleness else "several weights sample a rollout"
        old = f"{why}, so those of the engines are taken"
    old = "algorithm.correction bypass takes those of the engines" if config.algorithm.correction == "bypass" else old
    for key, size in plan.passes.items():
        if not size.needed:
            yield key, f"not needed: {old if key == 'old_logprobs' else 'kl_beta is 0'}"
        elif size.micro_batch_tokens:
            yield key, f"micro_batch_tokens {size.micro_batch_tokens:,}{_teacher(key, config)}"
        else:
            yield key, f"micro_batch_size {size.micro_batch_size or 'not given'}{_teacher(key, config)}"


def _fixes(fixes: Sequence[Fix]) -> RenderableType:
    if not fixes:
        return item("  ", "no change that was tried leaves fewer rules broken")
    rows = []
    for fix in fixes:
        several = len(fix.changes) > 1  # then each value has its name
        now = f"now {', '.join(_before(change, named=several) for change in fix.changes)}"
        more = f"; {fix.warnings} more warning{'s' * (fix.warnings > 1)}" if fix.warnings else ""
        left = f"; still broken then: {', '.join(fix.left)}" if fix.left else ""
        rows.append((str(fix), now + more + left))
    return grid(rows, wrapped=2)


def _before(change: Change, *, named: bool) -> str:
    """Return the present value of a setting that a fix changes, with its name where that is asked for."""
    if change.before is None:
        return f"{change.key} not given" if named else "not given"
    return f"{change.key}={written(change.before)}" if named else written(change.before)


def _layout(plan: Plan, config: Config) -> Iterator[tuple[str, str]]:
    at, q = plan.layout, plan.quantities
    apart = at.get("gpus_set_apart_per_node", 0)
    kind = "ranks on the CPU" if config.cluster.platform == "cpu" else "GPUs"
    machines = f"{at['nodes']} x {at['gpus_per_node']} {kind}" + f", {apart} of each for generation" * bool(apart)
    if nodes := at.get("generation_nodes"):
        machines += f", {nodes} of the nodes for generation"
        if (gpus := at.get("generation_gpus_per_node")) is not None:
            machines = f"{at['nodes'] - nodes} x {at['gpus_per_node']} {kind}, and {nodes} x {gpus} for generation"
    yield "machines", machines
    grid = [("TP", "tensor_model"), ("PP", "pipeline_model"), ("CP", "context"), ("DP", "data")]
    experts = [("ETP", "expert_tensor"), ("EP", "expert_model"), ("PP", "pipeline_model"), ("DP", "expert_data")]
    for head, parts in (("ranks", grid), ("experts", experts)):
        cut = " x ".join(f"{short} {at.get(f'{long}_parallel_size', '?')}" for short, long in parts)
        yield head, f"{cut} = {q.get('world_size', '?')}"
    ends = {end: at.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")}
    if uneven := ", ".join(f"{layers} in the {end} stage" for end, layers in ends.items() if layers is not None):
        yield "layers", f"{uneven}; the others share the rest evenly"
    if "num_engines" in at:
        over = at.get("nodes_per_engine", 1)
        where = f"{at['engines_per_node']} per node" if over == 1 else f"each over {over} nodes"
        more = at.get("reward_model_gpus_per_engine", 0)
        behind = f", and {more} GPU{'s' * (more > 1)} of reward models behind each" if more else ""
        yield "engines", f"{at['num_engines']} ({where}), TP {at['rollout_tensor_parallel_size']} each{behind}"
