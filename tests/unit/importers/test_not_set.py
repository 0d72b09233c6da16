"""Settings that a script decides by a variable or an argument that nobody gives it here are told, in any form (2 s).

The readers know some forms in which a script demands a variable, and count on its absence in all others. No form may
decide a setting in silence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

RUN = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 "
    "--learning_rate $LR\n"
)
END = "the original run may have had other values"


def told(text: str) -> list[str]:
    return [line for line in convert(text).assumed if line.endswith(END)]


@pytest.mark.parametrize(
    "script",
    [
        'if [ "$M" = a ]; then LR=1e-5; fi\n',
        'case "$M" in a) LR=1e-5;; esac\n',
        'N=$M\n[[ "$N" =~ ^a$ ]] || exit 1\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        '(( M > 0 )) || exit 1\nif [ "$M" = 3 ]; then LR=1e-5; fi\n',
        'expr "$M" : a || exit 1\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        'f() { [ -n "$M" ] || return 1 || exit 1; }\nf || exit 1\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        "LR=1e-6${M:+1}\n",
        'M=${M:-}\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        'M=${M:-""}\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        'if [ -n "${M+x}" ]; then LR=1e-5; fi\n',
        "if [[ -v M ]]; then LR=1e-5; fi\n",
        "for x in $M; do LR=$x; done\n",
        "A=($M)\nif [ ${#A[@]} -gt 0 ]; then LR=1e-5; fi\n",
        "LR=${M:+1e-5}\nLR=${LR:-1e-6}\n",
        'declare -n N=M\nif [ -n "$N" ]; then LR=1e-5; fi\n',
        'eval "$M"\n',
        '[ -n "$M" ] && source "$M"\n',
        "set -- $M\nLR=${1:-1e-6}\n",
        'while [ -n "$M" ]; do LR=1e-5; break; done\n',
        'longer() { [ -z "$M" ] && return; LR=1e-5; }\nlonger\n',
    ],
)
def test_a_variable_that_is_not_set_decides_nothing_in_silence(script: str) -> None:
    (line,) = told(f"LR=1e-6\n{script}{RUN}")
    assert line.startswith("$M (line ") and " is not set here, and may decide --learning_rate: " in line


@pytest.mark.parametrize(
    "script",
    [
        '[[ "$1" =~ ^a$ ]] || exit 1\nif [ "$1" = a ]; then LR=1e-5; fi\n',
        "if [ $# -gt 0 ]; then LR=$1; fi\n",
        "if (( $# )); then LR=$1; fi\n",
        "while [ $# -gt 0 ]; do case $1 in --lr) LR=$2; shift 2;; *) shift;; esac; done\n",
        'while getopts "l:" o; do case $o in l) LR=$OPTARG;; esac; done\n',
        'for x in "$@"; do LR=${x#lr=}; done\n',
        "for x; do LR=${x#lr=}; done\n",
        'f() { if [ "$1" = a ]; then LR=1e-5; fi; }\nf "${1:-}"\n',
        'if [ -n "$*" ]; then LR=1e-5; fi\n',
        'if [ "${@:-none}" != none ]; then LR=1e-5; fi\n',
        "LR=1e-6${1:+1}\n",
        'eval "$@"\n',
        'for pair in "$@"; do export "$pair"; done\n',
    ],
)
def test_arguments_that_are_not_given_decide_nothing_in_silence(script: str) -> None:
    (line,) = told(f"LR=1e-6\n{script}{RUN}")
    assert (
        line.startswith("the script's arguments (line ") and " are not set here, and may decide --learning_rate" in line
    )


@pytest.mark.parametrize(
    "script",
    [
        "",
        'if [ -n "$DEBUG" ]; then set -x; fi\n',  # of no consequence for the run
        'if [ "${M:-b}" = a ]; then LR=1e-5; fi\n',  # a default of the script's own
        "LR=${1:-1e-6}\n",
        'M=\nif [ "$M" = a ]; then LR=1e-5; fi\n',  # the script sets it
        'if [ -n "$M" ]; then LR=1e-6; fi\n',  # the same either way
        'f() { if [ -n "$1" ]; then LR=1e-5; fi; }\nf\n',  # the function's arguments, not the script's
        'unset M\nif [ "$M" = a ]; then LR=1e-5; fi\n',
        "M=$M\nD=$M/data\n",  # known neither way
        # a default of the script's own in two steps
        "M=${M:-}\nLR=${M:-1e-6}\n",
        'M="${M:-}"\nN=$M\nLR=${N:-1e-6}\n',
        "export M=${M-}\n: ${M:=1e-6}\nLR=$M\n",
        "LR=$1\nLR=${LR:-1e-6}\n",
        'f() { local lr="${1}"; LR=${lr:-1e-6}; }\nf $M\n',
        '[ -z "$M" ] && M=1e-6\nLR=$M\n',
        "[[ -n ${M:-} ]] || export M=1e-6\nLR=$M\n",
        'if [ ! "$M" ]; then\n  # the usual\n  M=1e-6\nfi\nLR=$M\n',
        'M=$1\nif [ "$M" = "" ]; then M=1e-6; fi\nLR=$M\n',
    ],
)
def test_what_makes_no_difference_is_not_told(script: str) -> None:
    assert told(f"LR=1e-6\n{script}{RUN}") == []


@pytest.mark.parametrize("script", ["", '[ -n "$M" ] && set -x\n', '[ -n "$M" ] && LR=1e-5\n'])
def test_an_argument_that_is_open_in_any_case_is_not_one_that_the_variable_decides(script: str) -> None:
    """The seed of a job's number is a setting to be given, whatever $M is."""
    found = convert(f"LR=1e-6\n{script}{RUN[:-1]} --seed $SLURM_JOB_ID\n")
    assert found.open == ("--seed $SLURM_JOB_ID",)
    notes = [line for line in found.assumed if line.endswith(END)]
    assert notes == ([f"$M (line 2) is not set here, and may decide --learning_rate: {END}"] if "LR" in script else [])


@pytest.mark.parametrize(
    "script",
    [
        'M=${M:-}\n[ -n "$M" ] && LR=1e-5\n',  # more than a default
        "M=${M:-}\nLR=${M:+1e-5}\nLR=${LR:-1e-6}\n",
        "M=${M:-}\nLR=1e-6${M:-}\n",
        'if [ -z "$M" ]; then M=1e-6; LR=1e-6; else LR=1e-5; fi\n',
        'if [ -z "$M" ]; then M=1e-6; N=1; fi\nLR=${N:+1e-6}\nLR=${LR:-1e-5}\n',
        '[ -n "$M" ] && M=1e-5\nLR=${M:-1e-6}\n',
    ],
)
def test_what_is_more_than_a_default_in_two_steps_is_told(script: str) -> None:
    (line,) = told(f"LR=1e-6\n{script}{RUN}")
    assert line.startswith("$M (line ") and " is not set here, and may decide --learning_rate: " in line


@pytest.mark.parametrize(
    "script",
    ["LR=$M\n", 'LR="${1}"\n', "A=$M\nLR=$A\n", "f() { local n=$M; LR=$n; }\nf\n", "LR=$M\n[ -z $LR ] && LR=\n"],
)
def test_a_copy_of_what_is_not_set_is_empty_as_in_bash(script: str) -> None:
    found = convert(f"{script}{RUN.replace('$LR', '${LR:-3e-6}')}")
    assert found.config.optimizer.lr == 3e-6 and not found.open


@pytest.mark.parametrize("option", ["set -u", "set -euo pipefail", "set -o nounset", "[ -f x ] && set -u"])
def test_a_script_that_ends_where_a_variable_is_not_set_leaves_open_what_it_decides(option: str) -> None:
    found = convert(f"{option}\nLR=$M\n{RUN.replace('$LR', '${LR:-3e-6}')}")
    assert found.open == ("--learning_rate ${LR:-3e-6}",)
    assert told(f"{option}\nM=${{M:-}}\n{RUN.replace('$LR', '${M:-3e-6}')}") == []


def test_variables_that_matter_only_together_are_both_named() -> None:
    (line,) = told('LR=1e-6\n[ -n "$C" ] && set -x\nif [[ $A = 1 && $B = 2 ]]; then LR=1e-5; fi\n' + RUN)
    assert line.startswith("$A (line 3) and $B (line 3) are not set here, and may decide --learning_rate: ")


def test_only_those_that_matter_are_named_and_no_more_than_six_arguments() -> None:
    added = " ".join(
        f"--{name} 1" for name in ("lora_rank", "lora_alpha", "max_length", "beta", "top_p", "top_k", "seed")
    )
    (line,) = told(
        f'[ -n "$A" ] && set -x\nif [ -n "$B" ]; then MORE="{added}"; fi\n{RUN[:-1]} $MORE\n'.replace("$LR", "1")
    )
    assert line.startswith("$B (line 2) is not set here, and may decide ") and " and 1 more: " in line


OTHER = RUN.replace("=8 swift", "=8 megatron")


@pytest.mark.parametrize(
    ("other", "decided"),
    [
        (RUN.replace("--rlhf_type grpo", "--rlhf_type ppo"), "--rlhf_type"),
        (RUN.replace("--rlhf_type grpo", "--rlhf_type grpo --beta 1"), "--beta"),
        (RUN.replace("=8", "=4"), "NPROC_PER_NODE"),
        (f"{RUN}{RUN.replace('--model q', '--model r')}", "--model"),
        (OTHER, "whether a run of Megatron-SWIFT is started"),
        (RUN, "what is started"),
    ],
)
def test_of_a_run_that_a_variable_chooses_what_differs_is_told(other: str, decided: str) -> None:
    (line,) = told(f'LR=1e-6\nif [ -n "$B" ]; then\n{other}exit\nfi\n{RUN}')
    assert line.startswith(f"$B (line 2) is not set here, and may decide {decided}: ")


@pytest.mark.parametrize(
    ("script", "decided"),
    [
        ('[ -z "$B" ] && ' + RUN, "whether the run is started at all"),
        ("case $B in a) echo;; *) " + RUN[:-1] + ";; esac\n", "whether the run is started at all"),
        ('[ -n "$B" ] && LR=2e-6 && ' + RUN + '[ -z "$B" ] && ' + RUN, "--learning_rate"),  # two, of which one runs
        ('N=8; [ "$B" ] && N=7\n' + RUN.replace("generations 8", "generations $N"), "--num_generations"),  # refused
        ('T=grpo; [ "$B" ] && T=ppo\n' + RUN.replace("type grpo", "type $T"), "--rlhf_type"),
        (
            'A=; [ -n "$B" ] && A="--gradient_accumulation_steps x"\n' + RUN[:-1] + " $A\n",
            "--gradient_accumulation_steps",
        ),
    ],
)
def test_of_a_run_that_is_not_converted_with_a_variable_what_differs_is_told(script: str, decided: str) -> None:
    (line,) = told(f"LR=1e-6\n{script}")
    assert line.startswith("$B (line ") and f" is not set here, and may decide {decided}" in line


def test_why_a_script_is_refused_with_a_variable_is_told_where_no_run_is_read() -> None:
    other = "python -m openrlhf.cli.train_ppo_ray --pretrain x\n"
    (line,) = told(f'LR=1e-6\nif [ -n "$B" ]; then\n{other}exit\nfi\n{RUN}')
    assert " may decide what is started, which is refused with it (this is a run of OpenRLHF, which is not " in line


@pytest.mark.parametrize("word", ['"$@"', "$@", '"${@:2}"', "${EXTRA:-}", "$*"])
def test_arguments_that_may_be_added_are_told(word: str) -> None:
    (line,) = told(RUN.replace("$LR", f"1e-6 {word}"))
    which = "$EXTRA (line 1) is" if "EXTRA" in word else "the script's arguments (line 1) are"
    assert line.startswith(f"{which} not set here, and may decide which arguments are added: ")


def test_options_read_by_getopts_and_taken_off_decide_what_they_set() -> None:
    loop = 'while getopts "l:h" o; do case $o in l) LR=$OPTARG;; h) exit 0;; esac; done\nshift $((OPTIND - 1))\n'
    (line,) = told(f"LR=1e-6\n{loop}{RUN}")
    assert line.startswith("the script's arguments (line 2) are not set here, and may decide --learning_rate: ")


def test_a_variable_that_is_set_on_another_way_is_not_called_one_that_the_script_never_sets() -> None:
    found = convert(f'if [ -n "$LORA" ]; then\n  MORE="--beta 1"\nfi\n{RUN[:-1]} $MORE\n'.replace("$LR", "1e-6"))
    (line,) = [line for line in found.assumed if line.startswith("$MORE: ")]
    assert line == "$MORE: $MORE is set in line 2, but not on the way that is followed; what it adds is not known"


def test_of_many_variables_the_one_that_decides_is_found() -> None:
    many = "".join(f'[ -n "$D{number}" ] && set -x\n' for number in range(70))
    (line,) = told(f'LR=1e-6\n{many}[ -n "$LAST" ] && LR=2e-6\n{RUN}')
    assert line.startswith("$LAST (line 72) is not set here, and may decide --learning_rate: ")


def test_what_engines_of_their_own_are_given_counts_too() -> None:
    server = "CUDA_VISIBLE_DEVICES=4,5,6,7 swift rollout --model q --vllm_tensor_parallel_size $TP &\n"
    run = RUN.replace("=8 swift", "=4 swift").replace("$LR\n", "1e-6 --use_vllm true --vllm_mode server ")
    run += "--vllm_server_host 127.0.0.1 --vllm_server_port 8000\n"
    (line,) = told(f'TP=1\n[ -n "$BIG" ] && TP=4\n{server}CUDA_VISIBLE_DEVICES=0,1,2,3 {run}')
    assert line.startswith("$BIG (line 2) is not set here, and may decide tensor_parallel_size: ")


@pytest.mark.parametrize(
    ("choice", "call"),
    [
        ('E="{}"\n[ -n "$BIG" ] && E="{}"\n', "$E"),
        ('E=({})\n[ -n "$BIG" ] && E=({})\n', '"${E[@]}"'),
        ('\nif [ "$BIG" = "" ]; then E="{}"; else E="uv run {}"; fi\n', "$E"),
    ],
)
def test_a_variable_that_chooses_the_program_decides_of_which_project_the_run_is(choice: str, call: str) -> None:
    for one, other, named in (("swift", "megatron", "Megatron-SWIFT"), ("megatron", "swift", "ms-swift")):
        head = choice.format(f"{one} rlhf", f"{other} rlhf")
        (line,) = told(head + RUN.replace("swift rlhf", call).replace("$LR", "${LR:-1}"))
        assert line == f"$BIG (line 2) is not set here, and may decide whether a run of {named} is started: {END}"


def test_a_variable_that_chooses_the_program_and_others_are_told_together() -> None:
    head = '[ -n "$R" ] && LR=2\nE="swift rlhf"\n[ -n "$BIG" ] && E="megatron rlhf"\n'
    (line,) = told(f"LR=1\n{head}" + RUN.replace("swift rlhf", "$E"))
    assert "$R (line 2) and $BIG (line 4) are not set here, and may decide whether a run of Megatron-SWIFT is " in line
    assert "is started and --learning_rate: " in line


def test_a_variable_with_which_the_script_would_end_decides_nothing() -> None:
    assert told(f'LR=1e-6\nif [ -n "$Q" ]; then exit 1; fi\nA=(--beta 0.1)\n{RUN[:-1]} "${{A[@]}}"\n') == []


def test_the_file_of_a_line_is_named_where_it_is_not_the_script(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text('LR=1e-6\nif [ -n "$BIG" ]; then LR=1e-5; fi\n')
    found = convert(f"source common.sh\n{RUN}", folder=tmp_path, name="run.sh")
    (line,) = [line for line in found.assumed if line.endswith(END)]
    assert line.startswith("$BIG (line 2 of common.sh) is not set here, ")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ('[ -n "$B" ] && export WANDB_PROJECT=x\n', "WANDB_PROJECT"),
        ('export WANDB_PROJECT=x\n[ -n "$B" ] && export WANDB_PROJECT=y\n', "WANDB_PROJECT"),
        ('export WANDB_PROJECT=x\n[ -n "$B" ] && unset WANDB_PROJECT\n', "WANDB_PROJECT"),
        ('WANDB_PROJECT=x\n[ -n "$B" ] && export WANDB_PROJECT\n', "WANDB_PROJECT"),
        ('export WANDB_PROJECT=x\n[ -n "$B" ] && export -n WANDB_PROJECT\n', "WANDB_PROJECT"),
        ('if [ -n "$B" ]; then set -a; fi\nWANDB_ENTITY=x\n', "WANDB_ENTITY"),
        ('[ -n "$B" ] && export WANDB_MODE=offline\n', "WANDB_MODE"),
        ('[ -n "$B" ] && export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1\n', "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        ('[ -n "$B" ] && export MAX_PIXELS=1003520\n', "MAX_PIXELS"),
        ('[ -n "$B" ] && export CUDA_VISIBLE_DEVICES=0,1\n', "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_of_the_environment_that_is_set_only_with_another_is_told(script: str, name: str) -> None:
    more = "--report_to wandb" + " --fp8_format e4m3 --fp8_recipe blockwise" * name.startswith("NVTE")
    run = f"{RUN[:-1]} {more}\n".replace("$LR", "1e-6").replace("NPROC_PER_NODE=8 ", "")
    run = run.replace("swift rlhf", "megatron rlhf") if name.startswith("NVTE") else run
    (line,) = told(f"{script}{run}")
    assert line.startswith("$B (line ") and f" is not set here, and may decide {name}: " in line


def test_a_variable_of_wandb_that_is_not_known_is_left_out_and_told() -> None:
    run = RUN.replace("$LR", "1e-6")
    found = convert(f"[ -f x ] && export WANDB_PROJECT=x\n{run}")
    assert found.open == ("WANDB_PROJECT=$WANDB_PROJECT",) and found.config.tracking.wandb_project == "gspo_hpc"
    (line,) = [line for line in found.assumed if line.startswith("WANDB_PROJECT=")]
    assert "$WANDB_PROJECT depends on a condition in line 1, " in line
    shown = convert(f"WANDB_PROJECT=x\n[ -f x ] && export WANDB_PROJECT\n{run}")
    assert shown.open == found.open and "depends on a condition" in " ".join(shown.assumed)


@pytest.mark.parametrize("project", ["p", "$(date)"])
def test_an_argument_goes_before_a_variable_of_wandb(project: str) -> None:
    words = "algorithm.adv_estimator=grpo data.train_batch_size=256 actor_rollout_ref.rollout.n=4 trainer.nnodes=1"
    run = f"python -m verl.trainer.main_ppo {words} trainer.n_gpus_per_node=8 trainer.project_name={project}\n"
    assert told(f'[ -n "$B" ] && export WANDB_PROJECT=x\n{run}') == []
    found = convert(f"export WANDB_PROJECT=x\n{run}")
    assert found.config.tracking.wandb_project == ("p" if project == "p" else "gspo_hpc")
