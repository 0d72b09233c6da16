"""Fixes that take settings of the command line back (8 s).

It would catch a plan with several settings that do not suit its file, for which only machines that nobody has are
offered, and one that takes more back than it must.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import load
from gspo_hpc.planning.fixes import distances, repair, undone
from gspo_hpc.planning.fixes.search import Search
from gspo_hpc.planning.plan import make_plan

CONFIGS = Path(__file__).parents[3] / "configs"
LARGE = CONFIGS / "llama3.1_70b_tp8_pp8.yaml"
THREE = ["rollout.max_response_length=100000", "parallel.context_parallel_size=3", "cluster.gpus_per_node=2"]
BACK = "parallel.context_parallel_size=1 rollout.max_response_length=15360 cluster.gpus_per_node=8"


def test_three_faults_of_a_large_layout_are_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    """The longest response that the budget holds is nearer than the file's; other machines are twelve times as many."""
    assert main(["plan", str(LARGE), *THREE, "--json"]) == 2
    first, *_ = json.loads(capsys.readouterr().out)["fixes"]
    assert " ".join(f"{one['key']}={one['value']}" for one in first) == BACK


def test_what_has_no_part_stays() -> None:
    more = ["rollout.temperature=0.9", "batch.num_generations=4", "rollout.engine.max_num_seqs=512"]
    config = load(LARGE, [*more, *THREE])
    found = undone.find(Search(config, None, make_plan(config)), load(LARGE))
    assert str(found) == BACK


def test_nothing_is_taken_back_where_one_setting_is_enough() -> None:
    config, file = load(LARGE, ["parallel.context_parallel_size=3"]), load(LARGE)
    fixes = repair.offered(config, None, file)
    assert any(len(fix.changes) == 1 for fix in fixes) and fixes == repair.offered(config)


def test_a_file_that_is_refused_itself_is_no_help() -> None:
    file = load(LARGE, ["parallel.tensor_model_parallel_size=3"])
    config = load(LARGE, ["parallel.tensor_model_parallel_size=3", *THREE])
    assert undone.find(Search(config, None, make_plan(config)), file) is None


@pytest.mark.parametrize("words", ["slurm.sbatch={nodes: 3}", 'slurm.environment={my-var: "1"}'])
def test_mappings_are_taken_back(words: str) -> None:
    config, file = load(LARGE, [words]), load(LARGE)
    found = undone.find(Search(config, None, make_plan(config)), file)
    assert found is not None and str(found) == f"{words.partition('=')[0]}={{}}"


def test_a_card_by_its_short_name_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LARGE.read_text().replace("gpu: H100-80GB", "gpu: A100"))
    assert "gpu: A100" in path.read_text()
    found = repair.offered(load(path, ["cluster.gpu=H100", *THREE]), None, load(path))
    assert found


def test_cards_are_as_far_as_their_memories_and_then_their_names() -> None:
    def apart(before: str, value: str) -> float:
        return distances.between("cluster.gpu", before, value)

    assert apart("A100-40", "A100") > distances.weight("cluster.gpu") > 1 > apart("A100", "A800") > 0
    assert apart("H-1000", "H100") < 1, "a typing error"


def test_a_mapping_is_printed_as_a_shell_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{LARGE.read_text()}\nslurm:\n  environment: " + r'{A: "b c\u2028 \U0001F600\U000E0001"}' + "\n")
    config, file = load(path, ['slurm.environment={my-var: "1"}']), load(path)
    found = undone.find(Search(config, None, make_plan(config)), file)
    (word,) = shlex.split(str(found))
    assert load(path, ["slurm.environment={}", word]).slurm.environment == {"A": "b c\u2028 \U0001f600\U000e0001"}


def test_arguments_of_the_engine_are_taken_back() -> None:
    file = load(LARGE, ["rollout.engine.max_num_seqs=512"])
    config = load(LARGE, ["rollout.engine={max_num_seqs: many, max_num_batched_tokens: 16}"])
    found = undone.find(Search(config, None, make_plan(config)), file)
    assert found is not None and make_plan(file).valid
    assert {change.key for change in found.changes} == {
        "rollout.engine.max_num_seqs",
        *([] if len(found.changes) == 1 else ["rollout.engine.max_num_batched_tokens"]),
    }


SMALL = CONFIGS / "qwen3_0.6b_1gpu.yaml"


@pytest.mark.parametrize(("prompt", "response", "key"), [(2000, 7000, "prompt"), (5000, 4000, "response")])
def test_of_two_settings_the_one_that_is_nearer_is_taken_back(prompt: int, response: int, key: str) -> None:
    """Either is enough: both together are longer than the budget of 8,192 tokens."""
    config = load(SMALL, [f"rollout.max_prompt_length={prompt}", f"rollout.max_response_length={response}"])
    found = undone.find(Search(config, None, make_plan(config)), load(SMALL))
    assert found is not None and [change.key for change in found.changes] == [f"rollout.max_{key}_length"]


def test_two_settings_are_not_taken_back_where_another_one_is_enough() -> None:
    config = load(SMALL, ["batch.global_batch_size=60", "batch.num_generations=7"])
    back = undone.find(Search(config, None, make_plan(config)), load(SMALL))
    fixes = repair.offered(config, None, load(SMALL))
    assert any(len(fix.changes) == 1 for fix in fixes)
    assert back is not None and len(back.changes) == 2 and back not in fixes
