"""What ``gspo-hpc plan`` prints: the page, or the same as JSON. docs/plan.md describes both.

Floor 6.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gspo_hpc import rank_grid, rank_page
from gspo_hpc.config import Config
from gspo_hpc.mends import Mend, written
from gspo_hpc.plan import Plan

_MEANING = {
    "world_size": "GPUs that train",
    "dp_size": "world_size / (TP x PP x CP)",
    "expert_dp_size": "the same for expert layers: world_size / (ETP x EP x PP)",
    "micro_batch_size": "completions per micro-batch and DP rank",
    "micro_batch_tokens": "tokens per micro-batch, filled by packing",
    "global_batch_size": "completions per optimizer step",
    "steps_per_generation": "optimizer steps per rollout and pass over it",
    "generation_batch_size": "completions per rollout",
    "num_generations": "completions per prompt",
    "num_iterations": "passes over one rollout",
    "gradient_accumulation_steps": "micro-batches per optimizer step and DP rank",
    "per_device_generation_batch_size": "completions per rollout and GPU",
    "num_rollout_prompts": "prompts per rollout",
    "num_train_prompts": "prompts per optimizer step",
    "num_rollout_prompts_per_dp_group": "prompts per rollout and DP group",
    "num_prompts_per_dp_group": "prompts per optimizer step and DP group",
    "num_iters_per_step": "num_rollout_prompts_per_dp_group / micro_batch_size",
    "num_rows": "prompts in the training data",
    "steps_per_epoch": "optimizer steps per pass over the data",
    "max_steps": "optimizer steps of the run",
    "num_rollouts": "rollouts of the run",
    "num_completions": "completions of the run",
    "num_epochs": "passes over the data",
}


def content(plan: Plan, mends: Sequence[Mend] = (), *, ranks: bool = False) -> dict[str, Any]:
    """The plan as plain values; with `ranks` where each of them sits, None where they cannot be placed."""
    found = plan.to_json() | {"mends": [mend.to_json() for mend in mends]}
    if ranks:
        try:
            found["ranks"] = [vars(seat) for seat in rank_grid.seats(plan.layout)]
        except ValueError:
            found["ranks"] = None
    return found


def page_width() -> int:
    """Columns of a page: the terminal's, from 60 to 120; 120 into a pipe or a file."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, _NARROWEST), 120)


def fitted(lines: Iterable[str], *, continued: str = "") -> Iterator[str]:
    """Lines that are no longer than a page is wide: what is too much goes on below the last column that has room for
    its words. `continued` ends a line that goes on; a no-break space is a space at which no line ends."""
    width = page_width()
    for line in lines:
        rest = line.rstrip()
        if _length(rest) > width:
            chunks, below = re.findall(r" *[^ ]+", rest), " " * _column(rest, width - len(continued))
            rest = chunks[0]
            for number, chunk in enumerate(chunks[1:], 2):
                if _length(rest + chunk + continued * (number < len(chunks))) > width:
                    yield rest.replace("\xa0", " ") + continued
                    rest = below + chunk.lstrip()
                else:
                    rest += chunk
        yield rest.replace("\xa0", " ")


def _column(line: str, width: int) -> int:
    """Where a line that is too long goes on: the last column behind which every word fits."""
    at, begins, words = 0, [0], []
    for chunk in re.findall(r" *[^ ]+", line):
        spaces = len(chunk) - len(chunk.lstrip(" "))
        begins += [at + spaces] if spaces > 1 else []
        words.append((at + spaces, _length(chunk) - spaces))
        at += _length(chunk)
    return max(begin for begin in begins if begin == 0 or begin + max(n for x, n in words if x >= begin) <= width)


_NARROWEST = 60


def _length(text: str) -> int:
    """Columns of a text, colours left out."""
    return len(re.sub(r"\033\[\d*m", "", text))


def page(name: str, config: Config, plan: Plan, mends: Sequence[Mend] = (), *, ranks: bool = False) -> Iterator[str]:
    """The lines of the plan page; `mends` are those of a plan that is refused. `ranks`: a row for each of them."""
    yield from fitted(_page(name, config, plan, mends, ranks))


def _page(name: str, config: Config, plan: Plan, mends: Sequence[Mend], ranks: bool) -> Iterator[str]:
    width = page_width()

    def title(text: str) -> str:
        return "\n" + paint(text, "1", sys.stdout)

    def items(texts: Sequence[tuple[str, str]], code: str) -> Iterator[str]:
        for head, text in texts:
            lines = textwrap.wrap(text, max(40, width - len(head) - 4), break_long_words=False, break_on_hyphens=False)
            yield f"  {paint(head, code, sys.stdout)}  {lines[0]}"
            yield from (" " * (len(head) + 4) + line for line in lines[1:])

    count = len(plan.broken)
    verdict = paint("valid", "32", sys.stdout) if plan.valid else paint(f"{count} broken", "31", sys.stdout)
    yield f"{paint('plan', '1', sys.stdout)} of {name}: {verdict}"
    yield title("Layout")
    yield from (f"  {head:<9} {text}" for head, text in _layout(plan))
    yield title("Quantities")
    columns = max(map(len, plan.quantities))
    values = {key: f"{v:,}" if isinstance(v, int) else f"{v:,.6g}" for key, v in plan.quantities.items()}
    digits = max(map(len, values.values()))
    yield from (
        f"  {key:<{columns}}  {text:>{digits}}  {_MEANING.get(key, '')}".rstrip() for key, text in values.items()
    )
    yield title("Passes")
    for key, size in plan.passes.items():
        if not size.needed:
            why = "one update per rollout" if key == "old_logprobs" else "kl_beta is 0"
            yield f"  {key:<12} not needed: {why}"
        elif size.micro_batch_tokens:
            yield f"  {key:<12} micro_batch_tokens {size.micro_batch_tokens:,}"
        else:
            yield f"  {key:<12} micro_batch_size {size.micro_batch_size or 'not given'}"
    if ranks or plan.quantities.get("world_size", 0) != 1:
        yield title("Ranks")
        yield from _ranks(plan, ranks)
    if plan.broken:
        yield title("Broken rules")
        yield from items([(f"rule {item.rule:>2}", item.message) for item in plan.broken], "31")
    if plan.broken:
        yield title("Mends (each makes every rule hold; put it behind the command, or into the file)")
        yield from _mends(mends)
    if plan.warnings:
        yield title("Warnings")
        yield from items([("!", text) for text in plan.warnings], "33")
    notes = [*plan.notes]
    if missing := config.missing():
        notes.append(f"A run also needs: {', '.join(missing)}.")
    if notes:
        yield title("Notes")
        yield from items([("-", text) for text in notes], "0")


def batch_script(config: Config) -> str | None:
    """What submit would hand in; None, and why on stderr, if it would refuse."""
    from gspo_hpc import submit  # submitit comes with it, which a plan can do without

    try:
        return submit.dry_run(config)
    except ValueError as error:
        print(f"{paint('no batch script:', '33', sys.stderr)} {error}", file=sys.stderr)
        return None


def _ranks(plan: Plan, every: bool) -> Iterator[str]:
    try:
        yield from rank_page.lines(plan.layout, every)
    except ValueError as error:
        yield f"  {error}"


def _mends(mends: Sequence[Mend]) -> Iterator[str]:
    if not mends:
        yield "  no change of one or two settings makes every rule hold"
    width = max((len(str(mend)) for mend in mends), default=0)
    for mend in mends:
        now = ", ".join(f"now {'not given' if c.before is None else written(c.before)}" for c in mend.changes)
        more = f"; {mend.warnings} more warning{'s' * (mend.warnings > 1)}" if mend.warnings else ""
        yield f"  {mend!s:<{width}}  {now}{more}"


def _layout(plan: Plan) -> Iterator[tuple[str, str]]:
    at, q = plan.layout, plan.quantities
    apart = at.get("gpus_set_apart_per_node", 0)
    yield (
        "machines",
        f"{at['nodes']} x {at['gpus_per_node']} GPUs" + (f", {apart} of each for generation" * bool(apart)),
    )
    grid = [("TP", "tensor_model"), ("PP", "pipeline_model"), ("CP", "context"), ("DP", "data")]
    experts = [("ETP", "expert_tensor"), ("EP", "expert_model"), ("PP", "pipeline_model"), ("DP", "expert_data")]
    for head, parts in (("ranks", grid), ("experts", experts)):
        cut = " x ".join(f"{short} {at.get(f'{long}_parallel_size', '?')}" for short, long in parts)
        yield head, f"{cut} = {q.get('world_size', '?')}"
    if "num_engines" in at:
        yield (
            "engines",
            f"{at['num_engines']} ({at['engines_per_node']} per node), TP {at['rollout_tensor_parallel_size']} each",
        )


def paint(text: str, code: str, stream: object) -> str:
    """`text` in a colour, where `stream` is a terminal."""
    coloured = getattr(stream, "isatty", lambda: False)() and not os.environ.get("NO_COLOR")
    return f"\033[{code}m{text}\033[0m" if coloured else text
