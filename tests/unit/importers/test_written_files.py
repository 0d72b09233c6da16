"""Files that a script writes, files that are not at hand, and the command in a file's docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.importers.scripts.shell import follow

TRL = "num_generations: 8\nper_device_train_batch_size: 8\nmax_completion_length: 64\nlearning_rate: 2e-6\n"


@pytest.mark.parametrize(
    "write",
    [
        "cat > conf/run.yaml <<EOF\n{}seed: $SEED\nEOF\n",
        "cat <<-EOF >conf/run.yaml\n{}seed: ${{SEED:-1}}\n\tEOF\n",
        "cat <<EOF | tee ./conf/run.yaml > /dev/null\n{}seed: $((SEED + 0))\nEOF\n",
        "cat > $PWD/conf/run.yaml <<'EOF'\n{}EOF\ntee -a conf/run.yaml <<EOF\nseed: $SEED\nEOF\n",
    ],
)
def test_a_yaml_that_a_script_writes_is_read_where_it_uses_it(write: str) -> None:
    script = (
        f"SEED=7\nmkdir -p conf\n{write.format(TRL)}accelerate launch --num_processes 2 grpo.py --config conf/run.yaml"
    )
    config = convert(script).config
    assert (config.run.seed, config.batch.num_generations, config.optimizer.lr) == (7, 8, 2e-6)


def test_quotes_around_the_last_word_keep_the_variables_of_a_here_document() -> None:
    files = follow('N=4\ncat > a <<\'E\'\n$N "x"\nE\ncat > b <<E\n$N "x" \\$N $UNSET\nE\ntee c <<E\n1\nE\nrun').commands
    assert files[-1].files == {"a": '$N "x"\n', "b": '4 "x" $N $UNSET\n', "c": "1\n"}


def test_what_only_running_the_script_would_tell_is_open_in_a_file_that_it_writes_too() -> None:
    script = f"cat > c.yaml <<EOF\n{TRL}beta: $BETA\nEOF\ntrl grpo --config c.yaml"
    assert convert(script, gpus=1).open == ("beta=$BETA",)
    either = (
        f"if [ -f /x ]; then cat > c.yaml <<E\n{TRL}E\nelse cat > c.yaml <<E\nbeta: 1\nE\nfi\ntrl grpo --config c.yaml"
    )
    with pytest.raises(ValueError, match=r"c.yaml is changed by the script in a way that is not followed"):
        convert(either)


def test_a_script_that_a_script_writes_is_followed() -> None:
    run = "megatron rlhf --rlhf_type grpo --train_iters 5 --num_generations 8 --global_batch_size $B"
    assert convert(f"cat > env.sh <<E\nB=32\nE\ncat > run.sh <<'E'\n. ./env.sh\n{run}\nE\nbash run.sh",
                   gpus=4).config.batch.global_batch_size == 32  # fmt: skip


def test_a_placeholder_that_takes_an_option_away_is_refused() -> None:
    script = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo \\\n  --dataset <DATA_PATH> \\\n  --max_length 2048"
    with pytest.raises(
        ValueError, match=r"^line 2: <DATA_PATH> is a placeholder, and to a shell it takes --max_length"
    ):
        convert(script)
    assert follow("a < in > out --x 1").commands[0].words == ("a", "--x", "1")


def test_accelerates_file_may_be_missing_where_the_command_gives_the_processes() -> None:
    options = "--num_generations 4 --max_completion_length 64 --per_device_train_batch_size 4 --learning_rate 1e-6"
    found = convert(f"accelerate launch --config_file far/zero3.yaml --num_processes 4 grpo.py {options}")
    assert found.config.cluster.gpus_per_node == 4 and not any("--gpus" in line for line in found.assumed)
    assert {item.given: item.why for item in found.left}["--config_file far/zero3.yaml"] == "it is not at hand"
    found = convert(f"accelerate launch --config_file far/zero3.yaml grpo.py {options}")
    assert any(
        line.startswith("far/zero3.yaml is not at hand, and may say how many processes") for line in found.assumed
    )


DOCSTRING = '''
# /// script
# ///
"""
Train it.

accelerate launch \\
    --num_processes 4 examples/gspo.py \\
    --num_generations 8 --per_device_train_batch_size 8 \\
    --learning_rate 3e-6 --beta 0
{more}
"""
from trl import GRPOConfig, GRPOTrainer, TrlParser

if __name__ == "__main__":
    parser = TrlParser((GRPOConfig,))
    args = parser.parse_args_and_config()
'''


def test_the_command_in_the_docstring_of_a_script_that_parses_its_arguments_is_read() -> None:
    found = convert(DOCSTRING.format(more="python other.py --num_generations 2"), name="gspo.py")
    assert found.config.optimizer.lr == 3e-6 and found.config.cluster.gpus_per_node == 4
    assert "the command in the docstring is read: the file takes its GRPOConfig from the command line" in found.assumed
    assert not any("gspo.py is not at hand" in line for line in found.assumed)
    with pytest.raises(ValueError, match="it starts 2 runs: leave one in the file"):
        convert(DOCSTRING.format(more="\npython gspo.py --num_generations 2"), name="gspo.py")
    with pytest.raises(ValueError, match="it takes its GRPOConfig from the command line: give that command"):
        convert(DOCSTRING.format(more=""), name="another.py")


def test_a_trainer_of_trl_is_known_by_its_arguments_and_not_by_its_name_alone(tmp_path: Path) -> None:
    options = "--num_generations 4 --max_completion_length 64 --per_device_train_batch_size 4 --learning_rate 1e-6"
    found = convert(f"accelerate launch --num_processes 2 ./main/main_grpo_tool.py {options}")
    assert found.project == "TRL" and found.config.cluster.gpus_per_node == 2
    assert any(
        line.startswith("./main/main_grpo_tool.py is not at hand: its arguments are taken") for line in found.assumed
    )
    patched = (
        "python3 scripts/patch_verl_grpo_gate.py --trainer x.py\npython3 -m verl.experimental.fully_async.main_ppo"
    )
    with pytest.raises(ValueError, match=r"^verl\.experimental\.fully_async\.main_ppo generates and trains"):
        convert(patched)
    with pytest.raises(ValueError, match=r"^scripts/grpo\.py is started without an argument of TRL"):
        convert("python3 scripts/grpo.py --verbose")


def test_arguments_that_stand_apart_belong_to_the_run_that_the_script_starts() -> None:
    found = convert(
        "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo \\\n  --num_generations 4\n--beta 0.5 \\\n--max_turns 2"
    )
    assert found.config.algorithm.kl_beta == 0.5 and any(
        "stand apart from the command" in line for line in found.assumed
    )
    torchrun = "torchrun --nproc_per_node=2 grpo.py --num_generations 4 --max_completion_length 64 --learning_rate 1e-6"
    assert not any("command of its own" in line for line in convert(torchrun).assumed)
