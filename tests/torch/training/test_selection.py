"""The choice of tokens of a rollout on one rank: by update, without what has no part in the loss, and saved with it.

It would catch a threshold over the whole rollout instead of an update, completions that were left out and still count,
and a choice that is lost when a rollout is read back. Takes a second. tests/gloo/test_objectives.py has more ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.training import update

ENTROPIES = {  # of two updates of one group each: the second is more certain everywhere
    (0, 0): [4.0, 3.0, 2.5, 2.0],
    (0, 1): [9.0, 9.0],
    (1, 0): [0.1, 0.4],
    (1, 1): [0.2, 0.3],
}
OLD_LINE_HAS_NONE = '"selected":null,'


def group(slot: int) -> Group:
    lengths = [len(values) for (at, _), values in ENTROPIES.items() if at == slot]
    completions = tuple(
        Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "", "stop", 0, excluded=(slot, i) == (0, 1))
        for i, n in enumerate(lengths)
    )
    return Group(slot, Prompt(slot, np.zeros(2, np.int32), "", {}), completions)


def test_each_update_has_the_tokens_of_highest_entropy_among_those_that_count() -> None:
    exchange = Exchange()
    groups = exchange.gather_table([group(0), group(1)])
    sizes = {"global_batch_size": 2, "num_generations": 2, "steps_per_generation": 2}
    config = from_dict({"batch": sizes, "algorithm": {"name": "gspo_token", "top_entropy_quantile": 0.5}})
    entropies = {key: np.array(values, np.float32) for key, values in ENTROPIES.items()}
    found = update.with_selected_tokens(groups, entropies, config, exchange).own
    chosen = {(slot, i): c.selected for slot, one in found.items() for i, c in enumerate(one.completions)}
    assert chosen.pop((0, 1)) is None
    assert {key: values.tolist() for key, values in chosen.items() if values is not None} == {
        (0, 0): [1, 1, 0, 0],
        (1, 0): [0, 1],
        (1, 1): [0, 1],
    }
    for one in found.values():
        again = Group.from_json(one.to_json())
        for before, after in zip(one.completions, again.completions, strict=True):
            assert (before.selected is None) == (after.selected is None)
            assert before.selected is None or np.array_equal(before.selected, after.selected)


def test_rollouts_of_earlier_versions_choose_all_tokens() -> None:
    line = replace(group(1)).to_json()
    assert OLD_LINE_HAS_NONE in line
    again = Group.from_json(line.replace(OLD_LINE_HAS_NONE, ""))
    assert [c.selected for c in again.completions] == [None, None]
