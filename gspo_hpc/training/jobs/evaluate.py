"""The job that evaluates a checkpoint of a run, or a model, on unseen prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.data.sources import parts
from gspo_hpc.evaluation import evaluate as evaluation
from gspo_hpc.evaluation import kept, stored
from gspo_hpc.evaluation.scores import Scores
from gspo_hpc.models import hub
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.rules.data import DataRule
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import make_inner_dir
from gspo_hpc.system.text import first_line, printable
from gspo_hpc.training.bringup import read_prompts
from gspo_hpc.training.jobs import one_rank

# Of a plan, what concerns evaluations: the rest is about training, which this does not do.
_RULES = (
    DataRule.EVALUATION_PROMPTS_GIVEN_ONCE,
    DataRule.EVALUATION_REWARD_IS_GIVEN,
    DataRule.SOURCES_DIFFER_IN_NAME,
    DataRule.SOURCE_REWARDS_ARE_GIVEN,
    DataRule.ANSWERS_FIT_ENGINES,
)


def evaluate(
    target: Path,
    step: int | None,
    overrides: Sequence[str],
    as_json: bool,
    out: Path | None,
    remark: Callable[[str], None],
) -> str:
    """Return the scores of a run's checkpoint, or of the model a configuration names, as text or as JSON.

    The completions go into the file `out`, or into one of the run if it is None. `remark` gets lines for the user.
    """
    run = one_rank.run_of(target)
    config = _complete(one_rank.read_config(target, run, overrides))
    if (lack := one_rank.lack_of_memory(config)) is not None:
        remark(f"evaluation {lack}, or let the run evaluate (eval.interval, eval.after) on all of its GPUs")
    _, by_set = read_prompts(config)
    unseen, sizes = [one for own in by_set.values() for one in own], {name: len(own) for name, own in by_set.items()}
    checkpoint = one_rank.checkpoint_of(run, step, remark)
    reached = None if checkpoint is None else int(checkpoint.name)
    key = kept.fingerprint(config, checkpoint) if out is not None or run is not None else ""
    folder = _unfinished(run, reached, out, key)
    with one_rank.sampling_worker(config, checkpoint, unseen) as worker:
        source = one_rank.completions_of(worker)
        with kept.keeping(source, source.generate_into, folder, key, remark) as completions:
            found = evaluation.run(completions, unseen, sizes, config)
            rows = evaluation.rows(worker.ranks.exchange, found, config, reached)
            if out is not None:
                stored.write(out, rows)
            elif run is not None and reached is not None:
                try:
                    stored.write_into(run, reached, rows, by_command=True)
                except OSError as error:  # somebody else's run: its scores are of use all the same
                    remark(f"the completions are not kept, give --out FILE: {error.filename}: {error.strerror}")
    return shown(len(unseen), found.scores, stored.most_common_failure(rows), as_json)


def _unfinished(run: RunDir | None, reached: int | None, out: Path | None, key: str) -> Path | None:
    """Return the folder in which completions are kept while the evaluation goes on; None where no file is to be."""
    if out is not None:
        return Path(f"{out}.unfinished")
    if run is None or reached is None:
        return None
    with contextlib.suppress(OSError):  # that it cannot be made is told later
        for folder in (run.evaluations, run.evaluations / kept.UNFINISHED):
            make_inner_dir(folder)
    return run.evaluations / kept.UNFINISHED / f"{reached:06d}-{key[:16]}"


def _complete(config: Config) -> Config:
    """Return the configuration with its files in local folders; raise ValueError if it cannot evaluate."""
    if not parts.unseen(config.data) and not (parts.training(config.data) and config.data.train_ratio < 1):
        raise ValueError("data.eval is not set: give a file of unseen prompts with data.eval=FILE")
    if not config.reward.functions:
        raise ValueError(
            "reward.functions is not set: give a reward function, such as reward.functions=[{function: number_match}]"
        )
    wrong = [one.message for one in make_plan(config).broken if one.rule in _RULES]
    if wrong:
        raise ValueError("\n".join(wrong))
    return hub_data.with_files(hub.with_folder(config, teacher=False))


def shown(prompts: int, scores: Scores, failure: str, as_json: bool) -> str:
    """Return the scores as text or as JSON; `failure` is why answers were not graded, empty if all were."""
    if as_json:
        return json.dumps({"prompts": prompts, **scores} | ({"eval/failure": failure} if failure else {}))
    # A score that is not known has no bounds to show.
    known = {name: value for name, value in scores.items() if value is not None or not name.endswith(("_low", "_high"))}
    rows = [
        (name.removeprefix("eval/"), "not graded" if value is None else f"{value:.4f}") for name, value in known.items()
    ]
    if failure:
        rows.append(("failure", first_line(printable(failure))))
    width = max(18, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}} {text}" for name, text in rows)
