"""The page of plan. Takes milliseconds; catches a row that hides what a fix replaces or costs, or has a wrong size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.cli.pages.plan import page
from gspo_hpc.cli.pages.render import lines
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.reading.places import Places
from gspo_hpc.planning.fixes.change import Change, Fix
from gspo_hpc.planning.plan import make_plan


def test_a_fix_is_shown_with_what_it_replaces_and_the_warnings_that_it_adds() -> None:
    config = from_dict({"batch": {"global_batch_size": 6, "num_generations": 4}})
    fixes = [
        Fix((Change("batch.num_generations", 4, 3),)),
        Fix((Change("batch.micro_batch_size", None, 2), Change("parallel.sequence_parallel", False, True)), warnings=1),
        Fix((Change("cluster.gpu", "H100", None),), warnings=2),
    ]
    shown = [" ".join(line.split()) for line in lines(page("x", config, make_plan(config), Places(), fixes))]
    at = shown.index("Fixes (add one to the command, or write it into the file)")
    assert shown[at + 1 : at + 5] == [
        "batch.num_generations=3 now 4",
        "batch.micro_batch_size=2 parallel.sequence_parallel=true now batch.micro_batch_size not given,",
        "parallel.sequence_parallel=false; 1 more warning",
        "cluster.gpu=null now H100; 2 more warnings",
    ]


def test_experts_divide_the_ranks_in_their_own_way() -> None:
    parallel = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    config = from_dict({"cluster": {"gpus_per_node": 8}, "parallel": parallel})
    shown = [" ".join(line.split()) for line in lines(page("x", config, make_plan(config), Places()))]
    assert "ranks TP 2 x PP 1 x CP 1 x DP 4 = 8" in shown
    assert "experts ETP 1 x EP 4 x PP 1 x DP 2 = 8" in shown


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    main(["plan", *words])
    return capsys.readouterr().out.splitlines()


def test_the_answer_comes_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits how well, how long a step and the run take, and what the run costs: the figures of the sections below."""
    preset = str(project / "configs" / "qwen3_30b_a3b_ep8.yaml")
    page = printed(capsys, preset, "--price", "2.5")
    assert page[0].endswith(": valid, but not all that it names is on this machine")
    fits, time, run = page[1:4]
    assert re.match(
        r"  fits    comfortable: [\d.]+ of the 139\.8 GiB of each H200-141GB \(update\); \d\d% are left", fits
    )
    assert re.match(r"  time    \d+ s a step \(\d+ to \d+\); \d+ s a rollout, of which generation takes \d+", time)
    assert re.match(r"  run     [\d.]+ hours for 400 steps, \d+ GPU-hours; \d+ at 2\.5 a GPU-hour", run)
    whole = "\n".join(page)
    update, step = re.search(r"update +\|[^|]+\| +([\d.]+)", whole), re.search(r": ([\d.]+) s a step", whole)
    assert update is not None and f" {update[1]} of the " in fits
    assert step is not None and f" {float(step[1]):.0f} s a step" in time
    assert page.index("Not checked") < page.index("Layout") < page.index("Memory")
    no_steps = printed(capsys, preset, "run.max_steps=null")
    assert "give run.max_steps or run.max_epochs" in no_steps[3]
    unnamed = printed(capsys, preset, "cluster.gpu=null", "cluster.gpu_memory_gb=141")
    assert unnamed[1].startswith("  fits    ") and "Time" not in unnamed
    assert unnamed[2] == "  time    not estimated: cluster.gpu does not name the GPU"
    no_card = printed(capsys, preset, "cluster.gpu=null")  # as converted configs begin: the model is known
    assert no_card[1] == "  fits    not estimated: give cluster.gpu, such as cluster.gpu=H100, or cluster.gpu_memory_gb"
    no_model = printed(capsys, preset, "model.path=acme/none")
    assert no_model[1] == "  fits    not estimated: the model's sizes are not known"
    small = printed(capsys, preset, "cluster.gpu=A100-40GB")
    assert "broken rule" in small[0] and small[2] == "Broken rules" and not any("  fits" in line for line in small)
    words = ("cluster.platform=cpu", "cluster.gpu=null", "model.dtype=float32", "cluster.gpus_per_node=8")
    cpu = printed(capsys, preset, *words)
    assert cpu[1] == "  fits    not estimated: cluster.platform is cpu, and estimates are for GPUs"
    assert cpu[2].startswith("  time    not estimated; ") and cpu[3] == "  run     400 steps"
    assert cpu[5] == "Not checked" and "ranks find these before the first step" in " ".join(cpu[6:9])


def test_what_is_missing_for_a_time_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was always the name of the GPU, also where that was given and batch sizes were not."""
    preset = str(project / "configs" / "qwen2.5_7b_tp2.yaml")
    page = printed(capsys, preset, "batch.global_batch_size=null", "batch.steps_per_generation=null")
    assert page[2].startswith("  time    not estimated: batch.global_batch_size is not given")
    page = printed(capsys, preset, "batch.global_batch_size=null", "batch.generation_batch_size=512")
    assert re.match(r"  time    \d+ s a step", page[2])


def test_a_part_has_one_mark_in_all_bars(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for preset in ("qwen3_30b_a3b_ep8", "qwen3_8b_tp2_cp4_32k", "llama3.1_70b_tp8_pp8"):
        page = "\n".join(printed(capsys, str(project / "configs" / f"{preset}.yaml")))
        memory = page.split("\nMemory\n")[1].split("\n  a node")[0]
        marks: dict[str, set[str]] = {}
        parts: dict[str, set[str]] = {}
        for mark, part in re.findall(r"(?<=  )([^\w\s|.]|[a-z]) ([A-Za-z][A-Za-z -]+?) [\d.]+(?=  |\n|$)", memory):
            marks.setdefault(part, set()).add(mark)
            parts.setdefault(mark, set()).add(part)
        assert len(marks) >= 8, memory
        assert all(len(found) == 1 for found in (*marks.values(), *parts.values())), marks
