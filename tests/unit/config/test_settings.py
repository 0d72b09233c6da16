"""The list of all settings, and the search in it."""

from __future__ import annotations

import json

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.plugins import algorithms
from gspo_hpc.config.reading.peer_names import PEER_NAMES
from gspo_hpc.config.reference.settings import search, settings
from gspo_hpc.config.schema import keys

CLIP_LOW = (
    "0.0003 (gspo, gspo_token), 1.0 (cispo), 0.2 (dapo, dppo, dr_grpo, grpo, maxrl, reinforce_plus_plus, rloo, sapo), "
    "0.4 (gmpo)"
)
AGGREGATION = (
    "sequence (gspo, gmpo, grpo, gspo_token, rloo, sapo), token (cispo, dapo, dppo, maxrl, reinforce_plus_plus), "
    "fixed_length (dr_grpo)"
)


def test_every_key_is_there_with_its_meaning() -> None:
    found = settings()
    assert set(keys()) <= set(found) and all(one.meaning and one.values and one.default for one in found.values())
    assert [key.split(".")[0] for key in keys()] == [key.split(".")[0] for key in found]


@pytest.mark.parametrize(
    ("key", "values", "default"),
    [
        ("batch.num_generations", "whole number, at least 1, or null", "null"),
        ("rollout.top_p", "number, above 0, at most 1", "1.0"),
        ("cluster.platform", "cuda, cpu", "cuda"),
        ("memory.offload_trainer", "true or false or null", "null"),
        ("algorithm.clip_low", "number, above 0, below 1, or null", CLIP_LOW),
        ("algorithm.aggregation", "sequence, token, prompt, fixed_length, null", AGGREGATION),
        ("algorithm.name", f"{', '.join(algorithms())}, or path/to/file.py:Class", "gspo"),
        ("memory.offload_parts", "list", "[weights,gradients,optimizer]"),
        (
            "reward.functions",
            "list of mappings with function, weight, clip_range, args, only_named, timeout, retries",
            "[]",
        ),
        ("slurm.time_minutes", "whole number, at least 1, or text", "60"),
        ("rollout.engine", "mapping", "{}"),
        ("run.seed", "whole number, at least 0, below 2**63", "42"),
    ],
)
def test_what_a_setting_may_be(key: str, values: str, default: str) -> None:
    assert (settings()[key].values, settings()[key].default) == (values, default)


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("batch.num_generations", "batch.num_generations"),
        ("lr", "optimizer.lr"),
        ("learning rate", "optimizer.lr"),
        ("epsilon_high", "algorithm.clip_high"),
        ("ppo_mini_batch_size", "batch.global_batch_size"),
        ("num_generatoins", "batch.num_generations"),
        ("batch.mirco_batch_size", "batch.micro_batch_size"),
    ],
)
def test_the_first_that_is_found(word: str, first: str) -> None:
    assert search(word)[0].key == first


def test_names_of_other_projects_lead_to_settings() -> None:
    for name, text in PEER_NAMES.items():
        if "." in text.split(",")[0] and "rollout.engine." not in text:
            assert any(one.key in text for one in search(name)), name


@pytest.mark.parametrize("word", ["", " ", "zzzzzz"])
def test_nothing_is_found(word: str) -> None:
    assert search(word) == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "epsilon"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("epsilon is algorithm.clip_low and algorithm.clip_high\n\nalgorithm.clip_low  number")
    assert main(["keys", "--json"]) == 0
    assert [one["key"] for one in json.loads(capsys.readouterr().out)] == list(settings())
    assert main(["keys", "zzzzzz"]) == 2
    assert "zzzzzz: no setting has this word" in capsys.readouterr().err
