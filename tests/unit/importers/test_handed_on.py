"""Variables that a launcher or a declaration hands on, and runs of which one was lost (5 s).

It would catch GPUs that are counted by what the script has set and the launcher hands on otherwise, a declaration that
sees what it sets itself, and a run that vanishes beside another.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import follow

RUN = "swift rlhf --rlhf_type grpo --model q --dataset a.jsonl --num_generations 8"


@pytest.mark.parametrize(
    ("start", "gpus"),
    [
        ("srun env NPROC_PER_NODE=2", 2),
        ("srun -N1 /usr/bin/env NPROC_PER_NODE=2 NNODES=1", 2),
        ("nice -n 5 env NPROC_PER_NODE=2", 2),
        ("stdbuf -oL env -u X NPROC_PER_NODE=2", 2),
        ("env A=b nice env NPROC_PER_NODE=2", 2),
        ("uv run env NPROC_PER_NODE=2", 2),
        ("export NPROC_PER_NODE=4\nsrun --export=ALL,NPROC_PER_NODE=2", 2),
        ("export NPROC_PER_NODE=4\nsrun env -u NPROC_PER_NODE", 1),
        ("export NPROC_PER_NODE=4\nsrun env --unset=NPROC_PER_NODE", 1),
        ("export NPROC_PER_NODE=4\nsrun env NPROC_PER_NODE=2", 2),
        ("export NPROC_PER_NODE=4\nsrun --export=ALL", 4),
        ("export NPROC_PER_NODE=4\nsrun -u", 4),
        ("sudo -E NPROC_PER_NODE=2", 2),
        ("docker run -e NPROC_PER_NODE=2 -e A=b image", 2),
        ("docker run --env=NPROC_PER_NODE=2 image", 2),
        ("mpirun -np 1 -x NPROC_PER_NODE=2", 2),
        ("N=2\nsrun env NPROC_PER_NODE=$N", 2),
    ],
)
def test_a_program_sees_what_its_launcher_hands_on(start: str, gpus: int) -> None:
    found = convert(f"{start} {RUN}\n")
    assert found.config.cluster.gpus_per_node == gpus


def test_what_env_takes_away_and_sets_again_is_set(tmp_path: Path) -> None:
    (tmp_path / "i.sh").write_text(f"{RUN} --learning_rate ${{LR:-1e-6}}\n")
    start = "export LR=3e-6\nsrun env -u LR LR=2e-6 bash i.sh\n"
    assert convert(start, folder=tmp_path, name="run.sh").config.optimizer.lr == 2e-6


@pytest.mark.parametrize("start", ["env A=1 nice env -u B A=2", "nice env -u A B=3", "timeout 9 env --unset=B A=4"])
def test_env_behind_a_launcher_is_read_as_it_is_run(start: str, tmp_path: Path) -> None:
    told = subprocess.run(
        ["bash", "-c", f"export NPROC_PER_NODE=4 B=5; {start} printenv A"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    ).stdout.strip()
    found = convert(f"export NPROC_PER_NODE=4 B=5 A=8\n{start.replace('A=', 'NPROC_PER_NODE=')} {RUN}\n")
    assert found.config.cluster.gpus_per_node == int(told or 4)


def test_arguments_of_the_program_are_no_variables() -> None:
    """Within the arguments of the program itself, env has no meaning."""
    found = convert(f"export NPROC_PER_NODE=4\nsrun {RUN.replace('a.jsonl', 'env NPROC_PER_NODE=2')}\n")
    assert found.config.cluster.gpus_per_node == 4


@pytest.mark.parametrize(
    ("start", "rate"),
    [
        ("srun env LR=2e-6 bash i.sh", 2e-6),
        ("nice env LR=2e-6 ./i.sh", 2e-6),
        ("timeout 9 env -u LR bash i.sh", 1e-6),
        ("srun --export=ALL,LR=2e-6 bash i.sh", 2e-6),
        ("srun -u bash i.sh", 3e-6),
        ("docker run -e LR=2e-6 image bash i.sh", 2e-6),
    ],
)
def test_a_script_behind_a_launcher_sees_it_too(start: str, rate: float, tmp_path: Path) -> None:
    (tmp_path / "i.sh").write_text(f"{RUN} --learning_rate ${{LR:-1e-6}}\n")
    found = convert(f"export LR=3e-6\n{start}\n", folder=tmp_path, name="run.sh")
    assert (found.config.optimizer.lr, found.open) == (rate, ())


@pytest.mark.parametrize("condition", ["[[ -v m[a] ]]", "[[ -v m[b] ]]"])
def test_whether_an_element_of_an_array_is_set_is_not_known(condition: str) -> None:
    found = convert(f"declare -A m; m[a]=1; LR=2e-6; {condition} && LR=3e-6\n{RUN} --learning_rate $LR\n")
    assert found.open == ("--learning_rate $LR",)


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("batch: {global_batch_size: 4}\nmodel: {path: q}\n", True),
        ("data: {train: a.jsonl, prompt_keyy: b}\n", True),
        ("eval: {defaults: {n: 1}, datasets: []}\n", False),
        ("model: q\n", False),
    ],
)
def test_a_config_of_this_package_has_its_keys(text: str, ours: bool) -> None:
    with pytest.raises(ValueError) as error:
        convert(text)
    assert ("a config of gspo_hpc already" in str(error.value)) == ours


@pytest.mark.parametrize(
    "script",
    [
        "LR=1e-6; export LR=2e-6 Y=$LR",
        "export N=1; export N=2 Y=$((N*2))",
        "f() { local x=$1 y=$x; Y=${y:-3e-6}; }; f 2e-6",
        "x=5; f() { local x=$1 y=$x; Y=$y; }; f 2e-6",
        "A=1 B=0; declare A=2 B=$A Y=$B$A",
        "A=1; typeset -x A=2 Y=$A",
        "A=1; readonly A=2 Y=$A",
        "A=1 B=$A Y=$B",
        "A=7; export A=$A:2 Y=$A",
        "A=1; declare -i A=2+3 Y=A+1",
        "A=(1 2); declare -a A=(3) Y=${A[0]}",
        "Y=a; export Y+=b",
        "f() { local Y=1; local Y=$Y$Y Z=$Y; Y2=$Y$Z; }; f; Y=$Y2",
    ],
)
def test_a_declaration_expands_all_of_its_words_before_it_sets_one(script: str) -> None:
    told = subprocess.run(["bash", "-c", f'{script}; echo "$Y"'], capture_output=True, text=True, check=True).stdout
    (found,) = [one for one in follow(f"{script}\nswift $Y\n").commands if one.words[0] == "swift"]
    assert " ".join(found.words[1:]) == told.strip()


ONE, OTHER = f"{RUN} --beta 0.9", f"{RUN} --beta 0.2"


@pytest.mark.parametrize("test", ["nvidia-smi | grep -q A100", "command -v nvcc", "grep -q a b", "which x"])
def test_of_two_runs_one_does_not_vanish(test: str) -> None:
    with pytest.raises(ValueError, match="2 runs"):
        convert(f"{test} && {ONE} || {OTHER}\n")
    for end in ("exit 1", "true", "{ echo failed; exit 1; }", "echo no", ":"):
        found = convert(f"{test} && {ONE} || {end}\n")
        assert found.config.algorithm.kl_beta == 0.9 and not found.open


READS = "swift rlhf --rlhf_type grpo --model q --dataset d --num_generations 8 --report_to wandb"


@pytest.mark.parametrize(
    "start",
    [
        *("ssh host", "docker run img", "podman exec box", "kubectl exec pod --", "sudo", "srun --export=NONE"),
        *("apptainer exec --cleanenv i.sif", "singularity exec -C i.sif"),
    ],
)
def test_what_a_launcher_hands_on_only_when_it_is_told_to_is_not_known(start: str) -> None:
    found = convert(f"export NPROC_PER_NODE=2 WANDB_PROJECT=w\n{start} {READS}")
    assert found.open == ("NPROC_PER_NODE=$NPROC_PER_NODE", "WANDB_PROJECT=$WANDB_PROJECT")
    assert found.config.tracking.wandb_project == "gspo_hpc" and found.config.cluster.gpus_per_node == 1
    assert any(f"is perhaps not handed on by {start.split()[0]}" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("start", "gpus", "project"),
    [
        *((start, 2, "w") for start in ("srun", "sudo -E", "sudo --preserve-env", "apptainer exec --nv i.sif")),
        ("docker run -e NPROC_PER_NODE --env=WANDB_PROJECT img", 2, "w"),
        ("docker run -e NPROC_PER_NODE=4 --env WANDB_PROJECT=p img", 4, "p"),
        ("singularity exec --cleanenv --env NPROC_PER_NODE=4,WANDB_PROJECT=p i.sif", 4, "p"),
        ("APPTAINERENV_NPROC_PER_NODE=4 SINGULARITYENV_WANDB_PROJECT=p apptainer exec -e i.sif", 4, "p"),
    ],
)
def test_what_a_launcher_hands_on_counts(start: str, gpus: int, project: str) -> None:
    found = convert(f"export NPROC_PER_NODE=2 WANDB_PROJECT=w\n{start} {READS}")
    assert (found.config.cluster.gpus_per_node, found.config.tracking.wandb_project) == (gpus, project)
    assert not found.open
