"""A file that a script changes is read as it is in the end, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

YAML = "rlhf_type: grpo\nnum_generations: 8\nglobal_batch_size: 64\nmicro_batch_size: 2\ntrain_iters: 9\nlr: 1.0e-6\n"
WRITE = f"cat > run.yaml <<E\n{YAML}E\n"
RUN = "NPROC_PER_NODE=8 megatron rlhf run.yaml\n"


def test_lines_that_are_added_count(tmp_path: Path) -> None:
    found = convert(f'{WRITE}B=0.1\necho "beta: $B" >> run.yaml\necho done\n{RUN}')
    assert found.config.algorithm.kl_beta == 0.1 and found.config.run.max_steps == 9
    (tmp_path / "run.yaml").write_text(YAML)
    for added in ("cat >> run.yaml <<E\nbeta: 0.1\nE\n", "echo beta: 0.1 >> run.yaml\n"):
        found = convert(f"{added}{RUN}", folder=tmp_path)
        assert found.config.algorithm.kl_beta == 0.1 and found.config.run.max_steps == 9
    found = convert(f"rm -f run.yaml\n{WRITE}echo\necho beta: 0.1 | tee other.yaml\n{RUN}", folder=tmp_path)
    assert found.config.run.max_steps == 9


@pytest.mark.parametrize(
    "change",
    [
        "sed -i 's/1.0e-6/5e-6/' run.yaml",
        "sed -ri.bak s/1/5/ ./run.yaml",
        "sed --in-place s/1/5/ run.yaml",
        "perl -pi -e s/1/5/ run.yaml",
        "yq -i '.lr = 5e-6' run.yaml",
        "echo -e 'lr: 5e-6\\n' >> run.yaml",
        "printf 'lr: 5e-6' >> run.yaml",
        "[ -d /x ] && echo beta: 0.1 >> run.yaml",
        "{ echo a; echo b; } >> run.yaml",
        "for i in 1 2; do echo beta: 0.1; done > run.yaml",
        "sed s/1/5/ a.yaml > run.yaml",
        "sed s/1/5/ a.yaml | tee run.yaml",
        "cp other.yaml run.yaml",
        "envsubst < a.yaml > run.yaml",
        'python -c \'import yaml; yaml.safe_dump({}, open("run.yaml", "w"))\'',
        "python - <<E\nopen('run.yaml', 'w').write(x)\nE",
        "python - 3 $X <<E\nopen('run.yaml', 'w').write(x)\nE",
        "curl -o run.yaml https://x",
        "dd if=a.yaml of=run.yaml",
        "patch run.yaml x.patch",
        "X=$(sed -i s/1/5/ run.yaml; echo 1)",
        "echo `cp a.yaml run.yaml`",
        "export X=$(sed s/1/5/ a.yaml | tee run.yaml)",
    ],
)
def test_a_file_that_is_changed_otherwise_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{WRITE}{change}\n{RUN}")
    assert "run.yaml is changed by the script in a way that is not followed" in str(refused.value)
    (tmp_path / "run.yaml").write_text(YAML)
    with pytest.raises(ValueError, match=r"run\.yaml is changed by the script"):
        convert(f"{change}\n{RUN}", folder=tmp_path)


def test_a_file_that_is_only_read_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    reads = "cat run.yaml\nsed -n 1p run.yaml\nX=$(sed s/1/5/ run.yaml)\ncp run.yaml kept.yaml > /dev/null\n"
    found = convert(f"{reads}{RUN.strip()} 2>&1 | tee log.txt\n", folder=tmp_path)
    assert found.config.run.max_steps == 9 and not any("may change it" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ("python make.py --out run.yaml", True),
        ("python make.py --out=./run.yaml", True),
        ("srun -N1 ./make run.yaml", True),
        ("./make.sh run.yaml", True),
        ("mkdir -p s; cd s; python make.py ../run.yaml; cd ..", True),
        ("patch -p0 < x.patch", True),
        ("patch -p1 -i run.patch", True),
        ("patch -p1 < other.patch", False),
        ("git apply run.patch", True),
        ("git apply other.patch", False),
        ("git checkout -- run.yaml", True),
        ("git checkout v1", True),
        ("git -C . stash", False),  # a form that is not followed
        ("git clone u v; cd v; git checkout v1; cd ..", False),
        ("python make.py other.yaml; git status; ls run.yaml", False),
        (f"python make.py run.yaml; {WRITE}", False),
    ],
)
def test_a_command_that_may_change_a_file_is_told_where_that_is_read(commands: str, told: bool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    for name in ("run", "other"):
        (tmp_path / f"{name}.patch").write_text(f"--- a/{name}.yaml\n+++ b/{name}.yaml\n@@ -1 +1 @@\n-a\n+b\n")
    for reading in (RUN, f"echo '{RUN.strip()}' > /dev/null; bash -c '{RUN.strip()}'\n"):
        found = convert(f"{commands}\n{reading}", folder=tmp_path, name="run.sh")
        assert any("run.yaml is read as it lies here: " in line for line in found.assumed) == told


def test_arguments_that_xargs_adds_are_not_known() -> None:
    run = "megatron rlhf --rlhf_type grpo --num_generations 8 --global_batch_size 64 --train_iters 5"
    for line in (f"xargs -a args.txt {run}", f"cat args.txt | xargs {run}"):
        found = convert(line, gpus=8)
        assert found.open == ("* (xargs)",) and found.config.run.max_steps == 5


def test_a_command_that_only_handles_a_file_is_no_run(tmp_path: Path) -> None:
    text = "from trl import GRPOConfig, TrlParser\nTrlParser((GRPOConfig,)).parse_args_and_config()\n"
    (tmp_path / "t.py").write_text(text)
    run = "accelerate launch --num_processes 2 t.py --num_generations 8 --learning_rate 1e-6\n"
    found = convert(f"chmod +x t.py\ngrep x t.py\ncp t.py u.py\n{run}", folder=tmp_path)
    assert found.config.optimizer.lr == 1e-6
    with pytest.raises(ValueError, match=r"t.py is changed by the script"):
        convert(f"sed -i s/a/b/ t.py\n{run}", folder=tmp_path)
    more = f"{run.strip()} --max_completion_length 9 --per_device_train_batch_size 8\n"
    found = convert(f"sed -i s/a/b/ t.py\n{more}", folder=tmp_path)
    assert any("t.py is not at hand" in line for line in found.assumed)
    assert convert(run.replace("t.py", "-m trl.scripts.grpo")).project == "TRL"


def test_a_file_is_looked_for_up_to_the_root_of_the_repository_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "outer.yaml").write_text(YAML)
    inner = tmp_path / "repository" / "scripts" / "runs"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "repository" / "root.yaml").write_text(YAML)
    started = "NPROC_PER_NODE=8 megatron rlhf {}\n"
    assert convert(started.format("root.yaml"), folder=inner, name="x.sh").config.run.max_steps == 9
    with pytest.raises(ValueError, match=r"outer.yaml, which the command reads, is not there"):
        convert(started.format("outer.yaml"), folder=inner, name="x.sh")
