"""Refusals say where the settings that they speak of are set: catches a place that is wrong or absent.

Takes three seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import load, load_with_places
from gspo_hpc.config.reading.places import together
from gspo_hpc.planning import installed, mentions
from gspo_hpc.planning.plan import make_plan

TEXT = """\
cluster:
  nodes: 2
  gpus_per_node: 4
parallel:
  tensor_model_parallel_size: 1
batch: {global_batch_size: 32, num_generations: 4}
rollout:
  engine:
    max_num_seqs: 8
    enforce_eagre: true
reward:
  functions:
  - function: number_match
  - weight: 2
    function: number_mach
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT.replace("number_mach", "graders.py:own").replace("eagre", "eager"))
    return str(file)


@pytest.mark.parametrize(
    ("overrides", "lines", "on_command_line"),
    [
        (["batch.micro_batch_size=3"], [2, 3, 5, 6], True),  # global_batch_size against micro_batch_size x dp_size
        (["parallel.tensor_model_parallel_size=3"], [2, 3], True),
        (["rollout.engine.max_num_batched_tokens=4"], [9], True),
        (["rollout.engine.max_num_seqs=0"], [], True),  # the line of the file has no part in it any more
        (["model.fp8=hybrid", "model.dtype=float16"], [], True),
        (["memory.recompute_modules=[core]"], [], True),
        (["optimizer.distributed=false", "parallel.overlap_param_gather=true"], [], True),
        (["model.path=Qwen3-235B-A22B", "cluster.gpu=H100", "model.layers=torch"], [], True),
        (["model.path=Qwen3-8B", "rollout.tensor_parallel_size=3"], [3], True),
    ],
)
def test_broken_rules_name_files_and_lines(
    path: str, overrides: list[str], lines: list[int], on_command_line: bool
) -> None:
    config, places = load_with_places(path, overrides)
    broken = make_plan(config).broken
    assert broken
    found = [set(mentions.given(item, places).values()) for item in broken]
    assert all(found), [item.message for item, places in zip(broken, found, strict=True) if not places]
    expected = {f"{path}:{line}" for line in lines} | ({"command line"} if on_command_line else set())
    assert expected <= set().union(*found)
    assert (f"{path}:9" in set().union(*found)) is (9 in lines)


def test_a_default_has_no_place() -> None:
    config, places = load_with_places(None, ["batch.num_generations=1"])
    (item,) = make_plan(config).broken
    assert mentions.given(item, places) == {"batch.num_generations": "command line"}
    config, places = load_with_places(None, ["batch.micro_batch_tokens=512"])
    (item,) = make_plan(config).broken  # it speaks of lengths, too, which have their defaults
    assert mentions.given(item, places) == {"batch.micro_batch_tokens": "command line"}


def test_plan_train_and_submit_tell_the_places(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [path, "batch.micro_batch_size=3", "cluster.nodes=1"]
    told = f"set by {path}:3, :5, :6, command line"
    assert main(["plan", *words]) == 2
    assert f"\n    set by {told.rpartition('/')[2]}\n" in capsys.readouterr().out
    assert main(["plan", *words, "--json"]) == 2
    broken = json.loads(capsys.readouterr().out)["broken"]
    (broken,) = [item for item in broken if item["rule"] == "update_fills_micro_batches"]
    assert {"key": "cluster.gpus_per_node", "place": f"{path}:3"} in broken["settings"]
    assert {"key": "batch.micro_batch_size", "place": "command line"} in broken["settings"]
    for command in ("train", "submit"):
        assert main([command, *words, "run.max_steps=1", "model.path=m", "data.train=d"]) == 2
        assert f" ({told})\n" in capsys.readouterr().err


def test_a_misspelt_argument_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no rule checks the value of, too; a name that is like none is a warning, since versions differ.

    It is refused where a vLLM is installed that does not have it: train would be refused by that.
    """
    monkeypatch.setattr(installed, "vllm", lambda: None)
    path = tmp_path / "run.yaml"
    path.write_text(TEXT.replace("number_mach", "number_match"))
    assert main(["plan", str(path), "rollout.engine.some_day=1", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    (broken,) = found["broken"]
    assert broken["message"] == "rollout.engine.enforce_eagre is no argument of vLLM; nearest: enforce_eager"
    assert broken["settings"] == [{"key": "rollout.engine.enforce_eagre", "place": f"{path}:10"}]
    assert any("rollout.engine.some_day is no argument of vLLM" in text for text in found["warnings"])
    monkeypatch.setattr(installed, "vllm", lambda: ("0.99", frozenset({"some_day", "enforce_eager"})))
    here = make_plan(load(path, ["rollout.engine={some_day: 1, seed_of_day: 2, max_num_seqs: 8}"]))
    (item,) = here.broken
    assert item.message == "rollout.engine.seed_of_day is no argument of vLLM 0.99, which is installed here"
    assert not any("some_day" in text and "installed" in text for text in here.warnings)


@pytest.mark.parametrize("version", ["older", "newer"])
def test_no_argument_is_named_that_the_vllm_here_refuses(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of the listed version, nor one of some versions alone; one that only a newer vLLM has may be."""
    known = {"newer": {"enable_chunked_decode"}, "older": {"max_num_partial_prefills", "swap_space"}}[version]
    monkeypatch.setattr(installed, "vllm", lambda: ("0.99", frozenset(known)))
    near = {
        "max_long_partial_prefills": {"older": "max_num_partial_prefills"},
        "swap_spce": {"older": "swap_space"},
        "enforce_eagre": {},  # an argument of the listed version
        "enable_chunked_decod": {"newer": "enable_chunked_decode"},
        "gpu_memory_utilisation": dict.fromkeys(("older", "newer"), "gpu_memory_utilization"),
    }
    for name, found in near.items():
        (item,) = make_plan(load(None, [f"rollout.engine={{{name}: 1}}"])).broken
        assert item.message.partition("nearest: ")[2] == found.get(version, ""), name


def test_an_unknown_reward_function_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the line of that function, not of the first; a file need not be there to plan."""
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    line = f"{path}:15: reward.functions[1].function: number_mach: there is no such reward function"
    assert main(["plan", str(path)]) == 2
    assert "number_mach: there is no such reward function" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(path), "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error.startswith(line)
    assert main(["plan", "tiny_cpu", "reward.functions=[{function: no/such.py:file}]"]) in (0, 3)  # 3 without a model


def test_places_in_one_text() -> None:
    assert together(["a.yaml:12", "command line", "a.yaml:7", "a.yaml:12", "b.yaml:1"]) == (
        "a.yaml:7, :12, b.yaml:1, command line"
    )
