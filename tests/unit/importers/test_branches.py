"""Effects of conditions, exits and further files on the arguments of a run: known, or open by name, never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import follow, read_script

RUN = "megatron rlhf --rlhf_type grpo --train_iters 5 --num_generations 8 --global_batch_size 32"


def open_of(script: str) -> set[str]:
    return {text.split()[0] for text in convert(script, gpus=4).open}


def test_arguments_that_a_condition_may_add_are_open_and_the_others_known() -> None:
    script = f'A=(--lr 1e-6 --seed 7)\nif [ -f x ]; then A+=(--lr 2e-6 --beta 0.5); fi\n{RUN} "${{A[@]}}"'
    found = convert(script, gpus=4)
    assert found.config.run.seed == 7 and found.config.optimizer.lr == 1e-5  # the default, and the line says so
    why = {item.name: item.why for item in found.left}
    assert "depends on a condition in line 2" in why["lr"] and "depends on a condition in line 2" in why["beta"]
    assert open_of(script) == {"--lr", "--beta", "${A}"}
    text = f'A="--seed 7"\nif [ -f x ]; then A="$A --beta 0.5"; fi\n{RUN} $A'
    assert convert(text, gpus=4).config.run.seed == 7 and open_of(text) == {"--beta", "${A}"}
    overrides = (
        "A=(data.train_batch_size=64 actor_rollout_ref.rollout.n=8)\nif [ -f x ]; then A+=(data.seed=3); fi\n"
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 ${A[@]}"
    )
    found = convert(overrides)
    assert found.config.batch.global_batch_size == 256 and "data.seed=${A}" in found.open


def test_a_list_of_which_nothing_is_certain_is_open_with_what_it_may_hold() -> None:
    script = f"if [ -f x ]; then A='--lr 1e-6'; else A='--lr 2e-6 --beta 1'; fi\n{RUN} $A"
    assert open_of(script) == {"--lr", "--beta", "$A"}


def test_a_branch_that_ends_the_script_does_not_count() -> None:
    script = f"LR=1e-6\nif ! nvidia-smi; then LR=9; echo no; exit 1; fi\n{RUN} --lr $LR"
    assert convert(script, gpus=4).config.optimizer.lr == 1e-6
    script = f"case $(hostname) in\n a*) LR=1e-6 ;;\n *) echo no; exit 1 ;;\nesac\n{RUN} --lr ${{LR:-5}}"
    assert convert(script, gpus=4).config.optimizer.lr == 1e-6 or open_of(script) == {"--lr"}
    function = f"f() {{ LR=1e-6; if nvidia-smi; then return; fi; LR=2e-6; }}\nf\n{RUN} --lr $LR"
    found = convert(function, gpus=4)
    assert "$LR depends on where f returns" in {item.name: item.why for item in found.left}["lr"]


def test_a_run_after_a_check_of_the_scripts_arguments_is_read_with_a_note() -> None:
    found = convert(f'if [ "$#" -lt 1 ]; then echo usage; exit 1; fi\nLR=$1\n{RUN} --lr $LR --beta 0.5', gpus=4)
    assert found.config.algorithm.kl_beta == 0.5 and "--lr $1" in found.open
    assert any("started without arguments, the script ends in line 1" in line for line in found.assumed)
    assert [item.words[0] for item in read_script("a\nexit\nb")] == ["a", "exit"]


def test_a_function_that_depends_on_a_condition_makes_what_it_may_set_unknown() -> None:
    script = f"LR=1e-6\nif [ -f x ]; then f() {{ LR=2e-6; }}; else f() {{ :; }}; fi\nf\n{RUN} --lr $LR"
    why = {item.name: item.why for item in convert(script, gpus=4).left}["lr"]
    assert "may be set by f, a function that depends on a condition" in why


def test_files_beside_the_script_are_followed(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "common.sh").write_text(
        'LR=2e-6\nargs() { echo; }\nif [ -n "$OFF" ]; then return; fi\nSEED=9\n'
    )
    (tmp_path / "env" / "inner.sh").write_text(f'{RUN} --lr "$1" --seed ${{SEED:-1}}\n')
    for source in ("source env/common.sh", '. "$(dirname "$0")/env/common.sh"', "source ${PWD}/env/common.sh",
                   'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource $D/env/common.sh'):  # fmt: skip
        found = convert(f"LR=1\n{source}\n{RUN} --lr $LR --seed $SEED", gpus=4, folder=tmp_path, name="run.sh")
        assert (found.config.optimizer.lr, found.config.run.seed) == (2e-6, 9), source
    (tmp_path / ".git").mkdir()
    (tmp_path / "examples").mkdir()  # a path from the root of the repository
    found = convert(f"source env/common.sh\n{RUN} --lr $LR", gpus=4, folder=tmp_path / "examples", name="run.sh")
    assert found.config.optimizer.lr == 2e-6
    found = convert("SEED=3\nexport LR=4\nbash env/inner.sh 5e-6", gpus=4, folder=tmp_path, name="run.sh")
    assert (found.config.optimizer.lr, found.config.run.seed) == (5e-6, 1)  # SEED is not exported
    text = f"export SEED=3\nbash -c '{RUN} --lr 5e-6 --seed $SEED'"
    assert convert(text, gpus=4).config.run.seed == 3
    script = follow("source env/common.sh\nbash env/inner.sh 1", tmp_path, "run.sh")
    assert script.read == ("env/common.sh", "env/inner.sh")


def test_whether_a_file_lies_beside_the_script_is_looked_up(tmp_path: Path) -> None:
    script = f'D="$(cd "$(dirname "$0")" && pwd)"\nLR=1e-6\n[ -f "$D/env.sh" ] && source "$D/env.sh"\n{RUN} --lr $LR'
    assert convert(script, gpus=4, folder=tmp_path, name="run.sh").config.optimizer.lr == 1e-6
    (tmp_path / "env.sh").write_text("LR=3e-6\n")
    assert convert(script, gpus=4, folder=tmp_path, name="run.sh").config.optimizer.lr == 3e-6
    assert "$LR depends on a condition" in {item.name: item.why for item in convert(script, gpus=4).left}["lr"]


def test_a_sourced_file_that_is_no_script_makes_everything_unknown(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("if broken")
    found = convert(f"LR=1\nsource env.sh\n{RUN} --lr $LR", gpus=4, folder=tmp_path, name="run.sh")
    assert "$LR may be set by env.sh" in {item.name: item.why for item in found.left}["lr"]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("data.files={a..c}.parquet", "$({a..c})"),
        ("~/models/x", "$HOME/models/x"),
        ("'~/x' \"{a,b}\"", "~/x"),
        ("x={$B,3}", "x=$({${B},3})"),
        ('x={"$B",3}', 'x=$({"$B",3})'),
        ('"{$B,3}"', "{2,3}"),
        ("q{${B}}", "q{2}"),
    ],
)
def test_what_a_shell_would_expand_further_is_marked(words: str, given: str) -> None:
    assert given in " ".join(read_script(f"B=2\na {words}")[-1].words)


def test_nothing_of_a_text_given_to_eval_is_guessed() -> None:
    found = convert(f'LR=1e-6\neval "$(./settings)"\n{RUN} --lr $LR', gpus=4)
    assert "$LR may be set by eval" in {item.name: item.why for item in found.left}["lr"]
    known = convert(f'LR=1e-6\neval "$(conda shell.bash hook)"\n{RUN} --lr $LR', gpus=4)
    assert known.config.optimizer.lr == 1e-6


VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
STRATEGY = "actor_rollout_ref.actor.strategy"


@pytest.mark.parametrize(
    ("before", "added", "accepted"),
    [
        ("", "fsdp2", True),  # not given: fsdp
        ("", "fsdp", True),
        (f"{STRATEGY}=fsdp", "fsdp2", True),
        ("model_engine=megatron", "megatron", True),
        ("", "megatron", False),
        ("", "torchtitan", False),
        (f"{STRATEGY}=megatron", "fsdp2", False),
        ("model_engine=megatron", "fsdp2", False),
    ],
)
def test_an_engine_that_a_condition_chooses_is_taken_if_it_means_the_same(
    before: str, added: str, accepted: bool
) -> None:
    script = f'A=({before})\nif $(probe); then A+=({STRATEGY}={added}); fi\n{VERL} "${{A[@]}}"'
    if accepted:
        found = convert(script)
        assert "means the same here" in {item.name: item.why for item in found.left}[STRATEGY]
        plain = convert(f"{VERL} {before}").config
        assert found.config.optimizer == plain.optimizer and found.config.memory == plain.memory
    else:
        with pytest.raises(ValueError, match="depends on a condition in line 2"):
            convert(script)


def test_a_refusal_for_a_condition_names_the_way_out_and_that_works() -> None:
    script = "if [ $(probe) = npu ]; then S=sdpo; else S=gspo; fi\n{}"
    run = f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=$S"
    with pytest.raises(ValueError, match=r"put a line that decides it \(NAME=value\) before the condition"):
        convert(script.format(run))
    asked = 'D=${D:-$(probe)}\nif [ "$D" = npu ]; then S=sdpo; else S=gspo; fi\n'
    with pytest.raises(ValueError, match="put a line that decides it"):
        convert(f"{asked}{run}")
    assert convert(f"D=gpu\n{asked}{run}").config.algorithm.name == "gspo"
