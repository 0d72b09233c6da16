"""gspo-hpc plan beyond the arithmetic: the batch script on request, and JSON keys that docs/plan.md describes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader, paths
from gspo_hpc.launch.slurm import submit
from gspo_hpc.models import catalog

PARTIAL = """
cluster: {nodes: 2, gpus_per_node: 8}
parallel: {tensor_model_parallel_size: 2}
batch: {micro_batch_size: 1, global_batch_size: 32, steps_per_generation: 2, num_generations: 4}
"""


@pytest.fixture
def preset() -> str:
    return str(paths.PRESETS / "qwen2.5_32b_tp4_pp4.yaml")


def test_the_batch_script_comes_after_the_page(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = submit.dry_run(loader.load(preset, ["slurm.partition=gpu"]))
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --partition=gpu\n" in script
    assert main(["plan", preset, "slurm.partition=gpu"]) == 3
    page = capsys.readouterr().out
    assert main(["plan", preset, "slurm.partition=gpu", "--sbatch"]) == 3
    assert capsys.readouterr().out == f"{page}\n{script}"
    assert main(["plan", preset, "slurm.partition=gpu", "--sbatch", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["sbatch"] == script
    assert main(["plan", preset, "--json"]) == 3
    assert "sbatch" not in json.loads(capsys.readouterr().out)


def test_epochs_are_a_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page asked for run.max_epochs where it was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 64)
    presets, epochs = ("tiny_cpu", "qwen2.5_7b_tp2"), ("run.max_steps=null", "run.max_epochs=2")
    for preset, what in zip(presets, ("length", "hours"), strict=True):
        main(["plan", preset, *epochs, "data.train=absent.jsonl", "data.eval=null"])
        assert f"2 epochs; the files of data.train have to be here to know its {what}" in capsys.readouterr().out
        main(["plan", preset, "run.max_steps=null", "run.max_epochs=null"])
        assert f"give run.max_steps or run.max_epochs for its {what}" in capsys.readouterr().out
    main(["plan", "tiny_cpu", *epochs, "data.train=rows.jsonl", "data.eval=null"])
    assert "16 steps" in capsys.readouterr().out  # 64 rows twice, with 8 completions each, 64 in a step


def test_the_batch_script_needs_no_slurm(preset: str, tmp_path: Path) -> None:
    """Nor anything else on PATH; and nothing is written."""
    command = [sys.executable, "-m", "gspo_hpc", "plan", preset, "--sbatch"]
    environment = os.environ | {"PATH": "", "PYTHONPATH": str(Path(preset).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 3 and "#SBATCH --nodes=4\n" in done.stdout and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_no_script_of_a_run_that_would_be_refused(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", preset, "--sbatch", "batch.global_batch_size=250"]) == 2
    output = capsys.readouterr()
    assert "Broken rules" in output.out and "#SBATCH" not in output.out
    assert "no batch script: rule " in output.err
    assert main(["plan", preset, "--sbatch", "--json", "batch.global_batch_size=250"]) == 2
    assert json.loads(capsys.readouterr().out)["sbatch"] is None
    partial = tmp_path / "partial.yaml"
    partial.write_text(PARTIAL)
    assert main(["plan", str(partial)]) == 3
    capsys.readouterr()
    assert main(["plan", str(partial), "--sbatch"]) == 2  # a plan, but not of a run
    assert (
        "no batch script: to train, give also: run.max_steps or run.max_epochs, model.path" in capsys.readouterr().err
    )


def test_the_name_of_a_preset_is_enough(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From anywhere; a file of that name that is there goes before it."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", preset]) == 3
    page = capsys.readouterr().out
    for name in ("qwen2.5_32b_tp4_pp4", "qwen2.5_32b_tp4_pp4.yaml"):
        assert main(["plan", name]) == 3
        assert capsys.readouterr().out == page
    for folder, shown in ((Path("configs"), "configs/"), (Path(), "")):
        folder.mkdir(exist_ok=True)
        (folder / "qwen2.5_32b_tp4_pp4.yaml").write_text(PARTIAL)
        assert main(["plan", "qwen2.5_32b_tp4_pp4"]) == 3
        assert capsys.readouterr().out.startswith(f"plan of {shown}qwen2.5_32b_tp4_pp4.yaml: what is given is valid; ")


@pytest.mark.parametrize(
    "given", ["qwen2.5-32b-tp4-pp4", "configs/qwen2.5-32b_tp4_pp4.yaml", "/no/such/folder/qwen2.5_32b_tp4_pp4.yaml"]
)
def test_the_nearest_preset_is_named(
    given: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "suggest", "doctor", "train"):
        assert main([command, given]) == 2
        output = capsys.readouterr()
        assert output.err == f"error: {given}: no such config file; nearest: {Path(preset).stem}\n" and output.out == ""
    assert main(["plan", "xyzzy"]) == 2
    assert capsys.readouterr().err == "error: xyzzy: no such config file\n"


def test_every_rank_has_a_row_with_ranks(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*words: str) -> list[list[str]]:
        assert main(["plan", preset, *words]) == 3
        lines = capsys.readouterr().out.split("\nRanks\n")[1].split("\n\n")[1].splitlines()
        return [line.split() for line in lines[1:]]

    assert len(rows("cluster.nodes=8")) == 8
    assert [row[0] for row in rows("cluster.nodes=8", "--ranks")] == [str(rank) for rank in range(64)]


def test_a_single_group_is_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny_cpu", "cluster.gpus_per_node=4"]) in (0, 3)  # 3 where nobody has made its model
    text = " ".join(capsys.readouterr().out.split())
    assert "DP 1 group of 4 ranks" in text and " 1 groups" not in text


def test_data_that_is_not_there_is_noted(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", preset, "data.train=/no/rows.jsonl", "data.eval=/no/eval.parquet", "--json"]) == 3
    *absent, by_ranks, always = json.loads(capsys.readouterr().out)["not_checked"]
    assert "data.train /no/rows.jsonl is not there: its prompts are not counted. A run needs the file." in absent
    assert "data.eval /no/eval.parquet is not there. A run needs the file." in absent
    assert "gspo-hpc doctor CONFIG looks at them" in always and "ranks find these before the first step" in by_ranks
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": 1}\n' * 500)
    assert main(["plan", preset, f"data.train={rows}", f"data.eval={rows}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_checked"] == [by_ranks, always]


def test_a_response_longer_than_the_longest_is_told(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    longest = loader.load(preset).rollout.max_response_length
    told = f"--response-tokens 1,000,000,000 is cut to rollout.max_response_length ({longest:,})."
    assert main(["plan", preset, "--response-tokens", "1e9", "--json"]) == 3
    assert told in json.loads(capsys.readouterr().out)["notes"]
    assert main(["suggest", preset, "--response-tokens", "1e9", "--limit", "1"]) == 0
    assert capsys.readouterr().err == f"warning: {told}\n"
    assert main(["plan", preset, "--response-tokens", str(longest), "--json"]) == 3
    assert not any("--response-tokens" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert main(["plan", preset, "--price", "2", "cluster.gpu=null", "--json"]) == 3
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "--price and --response-tokens change nothing: time is not estimated." in notes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--response-tokens", "nan"], "--response-tokens nan must be more than 0"),
        (["--response-tokens", "-1"], "--response-tokens -1 must be more than 0"),
        (["--response-tokens", "inf"], "--response-tokens inf must be finite"),
        (
            ["--keep", "parallel.tensor_model_parallel_siz"],
            "no such setting; nearest: parallel.tensor_model_parallel_size",
        ),
        (["--keep", "batch.num_generations"], "suggest never changes it, so it stays as it is; leave it out"),
        (["--keep", "xyzzy"], "what suggest chooses: parallel.tensor_model_parallel_size, "),
        (["model.path=null"], "model.path must be given"),
    ],
)
def test_suggest_refuses_what_means_nothing(
    words: list[str], expected: str, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["suggest", preset, *words]) == 2
    output = capsys.readouterr()
    assert expected in output.err and len(output.err.splitlines()) <= 2 and output.out == ""


def keys_of(value: object) -> set[str]:
    """Every key of nested JSON."""
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return {key for item in value for key in keys_of(item)} if isinstance(value, list) else set()


def test_every_key_of_the_json_is_in_the_documentation(
    preset: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And every quantity and layout key that is documented can be had."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": 1}\n' * 200)
    partial = tmp_path / "partial.yaml"
    partial.write_text(PARTIAL)
    uneven = [f"parallel.num_layers_in_{end}_pipeline_stage=1" for end in ("first", "last")]
    server = ["rollout.mode=server", "rollout.engines_per_node=1", "parallel.tensor_model_parallel_size=1"]
    nodes = ["cluster.nodes=2", "cluster.generation_nodes=1"]
    plans = []
    for words in (
        [preset, "--sbatch", "--ranks", f"data.train={rows}"],
        [str(partial), "--ranks", "batch.global_batch_size=16", f"data.train={rows}", "run.max_steps=3"],
        [str(partial), *server],
        [str(partial), *uneven, "cluster.nodes=2", "rollout.tensor_parallel_size=16"],
        [str(partial), *server[:1], *nodes, "cluster.generation_gpus_per_node=4"],
        [str(partial), *server[:1], *nodes, "reward.models=[{name: a, path: Qwen2.5-7B, placement: apart}]"],
    ):
        main(["plan", *words, "--json"])
        plans.append(json.loads(capsys.readouterr().out))
    page = (project / "docs" / "plan.md").read_text(encoding="utf-8")
    settings = (project / "docs" / "algorithms.md").read_text(encoding="utf-8")  # plan.md refers to it
    documented = {name for text in re.findall(r"`([^`\n]+)`", page) for name in text.split()}
    documented |= set(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE))
    found = {key for plan in plans for key in keys_of(plan)}
    assert {"valid", "fixes", "rule", "engine", "sbatch", "gpus_set_apart_per_node", "num_epochs"} <= found
    assert found <= documented, f"docs/plan.md does not name {sorted(found - documented)}"
    for part in ("quantities", "layout", "ranks"):
        section = page.split(f"\n### {part}\n")[1].split("\n### ")[0]
        first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
        had = {key for plan in plans for key in keys_of([plan.get(part) or {}])}
        assert named == had, part


def test_the_known_models_are_in_the_documentation(project: Path) -> None:
    page = (project / "docs" / "plan.md").read_text(encoding="utf-8")
    known = page.split("\nThe package knows ")[1].split(" For any other")[0]
    listed = []
    for family in " ".join(known.split()).rstrip(".").split("; "):
        first, *others = re.split(r", | and ", family)
        prefix = re.match(r"(.*-)(?=\d)", first)
        listed += [first, *(f"{prefix[1] if prefix else ''}{other}" for other in others)]
    assert sorted(listed) == sorted(catalog.names())


BATCH = ["model.path=Qwen3-8B", "cluster.gpu=H100"]


@pytest.mark.parametrize("engine", ["max_num_seqs=0", "max_num_seqs=null", "max_num_batched_tokens=null", "dtype=null"])
def test_settings_of_an_engine_that_are_null_or_absurd(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "partial.yaml"
    partial.write_text(PARTIAL)
    assert main(["plan", str(partial), *BATCH, f"rollout.engine.{engine}"]) == (2 if engine.endswith("0") else 3)
    page = capsys.readouterr().out
    assert ("\nTime\n" in page) is not engine.endswith("0")
    assert ("rollout.engine.max_num_seqs (0) must be a whole number" in " ".join(page.split())) is engine.endswith("0")


def test_server_mode_shows_both_kinds_of_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = tmp_path / "partial.yaml"
    partial.write_text(PARTIAL)
    server = ["rollout.mode=server", "rollout.engines_per_node=2", "parallel.tensor_model_parallel_size=1"]
    words = ["plan", str(partial), *BATCH, *server, "batch.global_batch_size=48", "memory.recompute_granularity=full"]
    words += ["optimizer.distributed=true"]
    assert main(words) == 3
    page = capsys.readouterr().out
    training, generating = page.split("one of the GPUs that train, 6 of a node's 8:")[1].split(
        "one of the GPUs that generate, 2 of a node's 8:"
    )
    assert "generation" not in training and "engine asleep" not in training and "update  " in training
    assert "KV cache" in generating and "of its GPUs' (12) peak" in page
    assert main([*words, "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] and told["missing"] and not told["not_run"]


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(
    columns: int, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars, tables and suggestions included; into a pipe it is 120."""
    monkeypatch.chdir(project)  # the path of a checkout, which is one long word, may be wider than a terminal
    presets = [f"configs/{name}.yaml" for name in ("qwen3_30b_a3b_tp2_ep4_etp2", "tiny_cpu")]
    if columns != 120:
        monkeypatch.setenv("COLUMNS", str(columns))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    more = [["plan", preset, "--ranks", "batch.num_generations=7"] for preset in presets]
    for words in [*(["plan", preset] for preset in presets), *more, ["suggest", presets[0], "--limit", "2"]]:
        main(words)
        page = capsys.readouterr().out
        wide = [line for line in page.splitlines() if len(line) > columns]
        assert page and not wide, (words, wide[:3])


def test_a_suggestion_can_be_pasted_however_narrow(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    preset = str(project / "configs" / "qwen2.5_7b_tp2.yaml")
    assert main(["suggest", preset, "--limit", "1"]) == 0
    block = capsys.readouterr().out.split("\n1. ", 1)[1].split("\n\n")[0]
    lines = [line.strip() for line in block.splitlines() if re.match(r"     \w+\.\w+=", line)]
    assert len(lines) > 1 and all(line.endswith("\\") for line in lines[:-1])
    script = "printf '%s\\n' " + "\n".join(lines)
    words = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=10
    ).stdout.split()
    assert len(words) >= 2 and main(["plan", preset, *words]) == 3


def test_changes_that_are_ruled_out_are_not_offered_where_nothing_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(
        "cluster: {gpus_per_node: 4, gpu: H200}\nmodel: {path: Qwen3-32B}\n"
        "batch: {num_generations: 8, global_batch_size: 64, micro_batch_tokens: 8192}\n"
        "rollout: {max_prompt_length: 1024, max_response_length: 4096}\n"
    )

    def offered(*words: str) -> set[str]:
        assert main(["suggest", str(tmp_path / "c.yaml"), "--json", *words]) == 2
        return {key for one in json.loads(capsys.readouterr().out)["changes"] for key in one["changes"]}

    assert {"adapter.type", "model.path", "cluster.gpu"} <= offered()
    assert {"adapter.type", "model.path"}.isdisjoint(offered("--keep", "adapter.type", "--keep", "model.path"))
